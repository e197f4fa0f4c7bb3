"""GRPO: group-relative policy optimisation of a causal LM with plain FSDP2 and an in-process vLLM.

One step, for P prompts of G sampled responses each (Shao et al. 2024, DeepSeekMath, arXiv 2402.03300):

1. rollout    G responses per prompt from the current weights, at temperature T
2. score      R_i, one number per response
3. batch      ragged responses -> right-padded [B, R] tensors
4. no-grad    old log-probs, if the batch is used for several optimizer steps or corrected; reference ones if KL is on
5. advantages A_i = (R_i - mean_g) / std_g over the group g of the same prompt (sec. 4.1.2)
6. update     maximise min(r A, clip(r, 1 - low, 1 + high) A) - beta KL per token (eq. 3), r = pi / pi_old
7. sync       the new weights into vLLM
8. log, evaluate, save

Departures from the paper:

1. The loss is the mean over all response tokens of the optimizer step, over all ranks; eq. 3 averages inside each
   response first, so that a token of a long response weighs less.
2. Two clip bounds (--clip-low, --clip-high; DAPO, arXiv 2503.14476, eq. 10); the paper has one.
3. The KL term is off by default (paper: beta 0.04), and then no reference model is loaded. Its value follows
   --kl-estimator (paper: k3, eq. 4); its gradient is that of the reverse KL whichever estimator is shown.
4. --no-scale-advantages leaves the group's std out (Dr. GRPO, arXiv 2503.20783, listing 1).

    python grpo_fsdp.py                                                   # embedded tiny model and task, CPU or GPU
    torchrun --nproc-per-node 8 grpo_fsdp.py --model Qwen/Qwen2.5-0.5B-Instruct \
        --train-files data/gsm8k/train.parquet --val-files data/gsm8k/test.parquet --reward gsm8k       # 8 GPUs
    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 grpo_fsdp.py ...  # 2 nodes

Shapes: P prompts on this rank, G responses per prompt, B = P * G responses (prompt-major), R longest response,
b responses of a micro-batch, N response tokens of a micro-batch. [i, t] speaks of the t-th sampled token of response i.
"""

import math
import time
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import tyro
from torch import Tensor

from hybrid_engine import HybridEngine, Sampling, check_engine
from utils import tiny
from utils.checkpoint import load_checkpoint, save_checkpoint
from utils.data import step_uids
from utils.dist import (
    asked_to_stop,
    broadcast,
    fail_together,
    finish_on_sigterm,
    init_distributed,
    one_line_errors,
    seed_for,
    stop,
    sum_over_ranks,
    world_mesh,
)  # fmt: skip
from utils.export import export_hf
from utils.forward import logprobs_of
from utils.guards import check_finite, crossed, log_event, mean_over_ranks, note, roll_back
from utils.memory import ledger, plan_memory
from utils.metrics import Metrics, Progress, mismatch, speed
from utils.model_files import end_of_sequence_ids
from utils.models import check_sibling, load_config, load_policy, load_tokenizer, positions_of
from utils.optim import begin_micro_batch, make_adamw, optimizer_step
from utils.packing import mask_from_lengths, pack, pad_rows, plan_together, to_device
from utils.preflight import check_divides, check_flags, check_guards, check_lengths, check_minibatch
from utils.prompts import load_prompts
from utils.replay import Replay, check_replay, check_replayed, cut_record, open_record, record_rollouts
from utils.run_folder import close_run, find_checkpoint, open_run
from utils.scoring import check_reward_models, check_scorers, open_scorers
from utils.watchdog import watch


@dataclass
class Args:
    # ---- run ----
    # [shared: run flags]
    run_dir: str = ""
    """Folder for metrics, checkpoints and curves; empty: runs/<script>_<time>. A used one needs --resume."""
    seed: int = 1
    """Seed of everything random: data order, samples, minibatches, new heads."""
    num_steps: int = 0
    """Training steps (one batch each); 0: as many as --num-epochs takes."""
    num_epochs: int = 1
    """Passes over the training rows, when --num-steps is 0."""
    resume: str = ""
    """"auto": the newest checkpoint of --run-dir, or the one it began from, or a fresh start; or the path of a
    checkpoints/step_N folder."""
    save_every: int = 50
    """Save a checkpoint every so many steps, at the end, and after the step in which SIGTERM comes; 0: never."""
    keep_checkpoints: int = 0
    """Newest checkpoints to keep; 0: all."""
    checksums: bool = False
    """Record checksums of a checkpoint's files beside their sizes, and compare them on resuming."""
    eval_every: int = 10
    """Evaluate every so many steps, at step 0 and at the end; 0: never."""
    export_hf: Literal["last", "every", "off"] = "last"
    """Hugging Face folders: run_dir/hf at the end; every: one inside each checkpoint too; off: none."""
    # [/shared]

    # ---- model ----
    # [shared: model flags]
    model: str = "tiny"
    """Hugging Face name or folder; "tiny": a model and task made on the spot, with its own defaults for other flags."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of forward, backward and rollouts; auto: bfloat16 on CUDA, float32 on CPU. Master weights are float32."""
    # [/shared]
    ref_model: str = ""
    """Reference of the KL term; empty: the starting model. Loaded only with --kl-coef above 0."""

    # ---- data ----
    # [shared: data flags]
    train_files: str = ""
    """Parquet of training rows: a path, a glob, or several with commas; needed unless --model tiny."""
    val_files: str = ""
    """Held-out rows; empty: no evaluation."""
    max_prompt_len: int = 512
    """Longest prompt, in tokens; a longer one is an error before anything loads."""
    max_response_len: int = 512
    """Longest response, in tokens, its end-of-sequence token included."""
    # [/shared]

    # ---- rollout ----
    prompts_per_step: int = 64
    """Prompts per step, over all ranks."""
    group_size: int = 8
    """Responses per prompt."""
    # [shared: rollout flags]
    temperature: float = 1.0
    """Of sampling in training, and of every log-prob; evaluation is greedy.
    There is no top_p, top_k or min_p: they would make the ratio wrong by the mass that they cut off."""
    tensor_parallel_size: int = 1
    """Ranks that hold one vLLM replica together."""
    kv_cache_gib: float = 0.0
    """vLLM's KV cache per rank, in GiB; 0: room for all responses that are generated at the same time."""
    max_num_seqs: int = 512
    """Responses that one vLLM replica generates at the same time."""
    reward: str = ""
    """gsm8k, tiny, path/to/file.py:function, model:path/to/reward_model; or several: gsm8k:1.0,format.py:f:0.2.
    Needed unless --model tiny."""
    eval_reward: str = ""
    """What held-out responses are scored by; empty: --reward."""
    reward_timeout_s: float = 10.0
    """Seconds a reward call may take; a slower one is killed and counted, and its response has no score."""
    reward_workers: int = 2
    """Reward worker processes per rank."""
    record: str = ""
    """Folder to write each step's rollouts and scores to, as parquet."""
    replay: str = ""
    """Folder of such files to train from, with no vLLM, no reward and no evaluation."""
    # [/shared]

    # ---- algorithm ----
    update_epochs: int = 1
    """Passes over each batch of responses."""
    minibatch_size: int = 0
    """Responses per optimizer step, over all ranks; 0: all of the step's."""
    lr: float = 1e-6
    """Peak learning rate of AdamW."""
    # [shared: optimizer flags]
    lr_schedule: Literal["constant", "cosine"] = "constant"
    """After the warm-up: constant, or a cosine that would reach 0 one step after the last."""
    warmup_steps: int = 0
    """Steps of linear warm-up."""
    weight_decay: float = 0.0
    """Decoupled weight decay."""
    max_grad_norm: float = 1.0
    """Clip the gradient to this global norm."""
    # [/shared]
    # [shared: correction flags]
    rollout_correction: Literal["none", "token-tis", "seq-mask"] = "none"
    """Importance weights, trainer over vLLM, where their log-probs differ. token-tis: each token's own, cut
    at --correction-cap; seq-mask: the product over the response, which is left out above the cap."""
    correction_cap: float = 2.0
    """Largest importance weight."""
    # [/shared]
    # [shared: guard flags]
    max_kl: float = 0.0
    """Bound on policy/approx_kl of an optimizer step, measured before it is applied; 0: none."""
    on_max_kl: Literal["stop-epoch", "lower-lr", "roll-back"] = "stop-epoch"
    """Over it: leave out this optimizer step and the batch's others, or make all later ones at lower learning rates,
    or go on with the next batch from the newest checkpoint."""
    kl_lr_decay: float = 0.1
    """Share by which --on-max-kl lower-lr lowers the learning rates, each time and for good."""
    max_reward_std: float = 0.0
    """Log an event when a step's reward/score_std is above this; 0: never."""
    grad_norm_bound: float = 0.0
    """Log an event when a step's optim/grad_norm, before clipping, is above this; 0: never."""
    min_entropy: float = 0.0
    """Log an event when a step's policy/entropy is below this; 0: never."""
    max_truncated_frac: float = 0.0
    """Log an event when a step's rollout/truncated_frac is above this; 0: never."""
    # [/shared]
    scale_advantages: bool = True
    """Divide advantages by the group's std."""
    clip_low: float = 0.2
    """The ratio's lower clip bound is 1 - this."""
    clip_high: float = 0.2
    """The ratio's upper clip bound is 1 + this."""
    kl_coef: float = 0.0
    """Weight of the KL to the reference in the loss; 0: no KL and no reference model."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """The KL that is logged: with d = log(policy / reference), k1 is d, k2 d^2 / 2, k3 exp(-d) - 1 + d. The gradient is
    the reverse KL's with each."""

    # ---- systems: never change the numbers ----
    # [shared: systems flags]
    max_tokens_per_gpu: int = 16384
    """Packed tokens (prompt + response) of one micro-batch."""
    activation_checkpointing: bool = False
    """Recompute each block's activations in the backward pass."""
    compile: bool = False
    """torch.compile each block."""
    offload: Literal["none", "optimizer", "all"] = "none"
    """What lives on the host: nothing; AdamW's moments; or master weights and gradients too, stepped there."""
    dry_run: bool = False
    """Print what the run comes to, its sizes and memory, and stop before a model loads."""
    hang_timeout_s: float = 45.0
    """End the run when a rank, or the launcher's host, shows no sign of life for so many seconds; 0: wait."""
    # [/shared]
    verify_sync: int = 0
    """Prove after every so many steps that vLLM holds the trainer's weights, and stop where it does not; 0: never."""
    sleep: Literal["auto", "none", "kv", "all"] = "auto"
    """What vLLM gives back during the update (CUDA): nothing, its KV cache, its weights too; auto: what is needed."""


DEFAULTS = {field.name: field.default for field in fields(Args)}
PARTS = ("policy",)  # what a checkpoint holds
TINY = {"minibatch_size": 256, "clip_high": 0.28}  # over the values that all scripts share for --model tiny


# ---- the algorithm: pure functions, tensors in and out --------------------------------------------------------------


def group_advantages(scores_B: Tensor, judged_B: Tensor, group_size: int, scale: bool) -> Tensor:
    """Advantage of each response over its group: (R - mean_g) / std_g, or R - mean_g without `scale`.

    Shapes: [B] prompt-major -> [B] float32; judged_B: bool, whether there is a score at all.
    Paper: 2402.03300 sec. 4.1.2; without scale 2503.20783 listing 1.
    """
    scores_PG, judged_PG = scores_B.double().view(-1, group_size), judged_B.view(-1, group_size)
    # DETAIL: a response without a score is left out of its group's mean and std and gets advantage 0, because any
    # number in its place would be a reward for making the judge fail.
    count_P1 = judged_PG.sum(-1, keepdim=True)
    mean_P1 = (scores_PG * judged_PG).sum(-1, keepdim=True) / count_P1.clamp_min(1)
    centred_PG = (scores_PG - mean_P1) * judged_PG
    if scale:
        # DETAIL: the group's std is the sample's (n - 1), because the paper does not say and every code base compared
        # does; two-pass, in float64. DETAIL: the group's std is floored at 1e-3 instead of adding an epsilon, because a
        # group of nearly equal scores must not be blown up, and others should not be shrunk.
        std_P1 = (centred_PG.square().sum(-1, keepdim=True) / (count_P1 - 1).clamp_min(1)).sqrt()
        centred_PG = centred_PG / std_P1.clamp_min(1e-3)
    return centred_PG.flatten().float()


# [shared: losses]
def policy_loss(
    logprobs_BR: Tensor, old_logprobs_BR: Tensor, advantages_BR: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Clipped surrogate loss of each token, its probability ratio, and whether the clip cut its gradient off.

    Shapes: all [B, R]; advantages may be [B, 1].
    Paper: 1707.06347 eq. 7 with the bounds of 2503.14476 eq. 10, as a loss.
    """
    ratio_BR = (logprobs_BR - old_logprobs_BR).exp()
    gain_BR = advantages_BR * ratio_BR
    clipped_BR = advantages_BR * ratio_BR.clamp(1 - clip_low, 1 + clip_high)
    return -torch.minimum(gain_BR, clipped_BR), ratio_BR, clipped_BR < gain_BR


def correction_weights(
    old_logprobs_BR: Tensor, rollout_logprobs_BR: Tensor, mask_BR: Tensor, kind: str, cap: float
) -> tuple[Tensor, Tensor]:
    """Importance weights of each token, pi_old of the trainer over that of the engine, and which responses to keep.

    token-tis: w_t = min(pi_old / pi_engine, cap) (truncated importance sampling; Yao et al. 2025, "Your efficient RL
    framework secretly brings you off-policy RL training"). seq-mask: w_t = W = prod_t pi_old / pi_engine on every token
    of a response, kept only where W <= cap (Liu, Li et al. 2025, "When speed kills stability"; also arXiv 2512.23075).
    Shapes: [B, R] -> weights [B, R], kept [B].
    """
    log_ratio_BR = (old_logprobs_BR - rollout_logprobs_BR) * mask_BR
    if kind == "token-tis":
        return log_ratio_BR.exp().clamp(max=cap), torch.ones_like(mask_BR[:, 0])
    weight_B = log_ratio_BR.sum(-1).exp()
    return weight_B[:, None].expand_as(log_ratio_BR), weight_B <= cap


def kl_loss(logprobs_BR: Tensor, old_logprobs_BR: Tensor, ref_logprobs_BR: Tensor, estimator: str) -> Tensor:
    """KL(policy || reference) of each sampled token: the estimator's value, the reverse KL's gradient.

    Shapes: all [B, R]. Units: nats per token.
    Paper: estimators from Schulman's note on approximating KL; gradients 2506.09477, 2510.01555.
    """
    d_BR = logprobs_BR - ref_logprobs_BR
    value_BR = {"k1": d_BR, "k2": d_BR.square() / 2, "k3": (-d_BR).exp() - 1 + d_BR}[estimator].detach()
    # DETAIL: the gradient is k2's times the detached ratio, because as losses k1 has none on average and k3 follows the
    # forward KL. The ratio corrects for tokens sampled from the old policy; it is not clipped, because a clipped one
    # would bias it. DETAIL: the KL is per token given its prefix: what a token does to the KL of later positions is
    # left out.
    ratio_BR = (logprobs_BR - old_logprobs_BR).detach().exp()
    path_BR = ratio_BR * d_BR.square() / 2
    return value_BR + path_BR - path_BR.detach()


# [/shared]


# [shared: learning rate]
def learning_rate(step: int, num_steps: int, peak: float, schedule: str, warmup_steps: int) -> float:
    """Learning rate of step 1..num_steps: linear warm-up that peaks at step `warmup_steps`, then the schedule."""
    # DETAIL: the rate follows the step, not the optimizer step, because several of those may share one batch.
    if step < warmup_steps:
        return peak * step / warmup_steps
    if schedule == "constant":
        return peak
    done = (step - warmup_steps) / max(1, num_steps + 1 - warmup_steps)
    return peak * 0.5 * (1 + math.cos(math.pi * done))


# [/shared]


# ---- preflight ------------------------------------------------------------------------------------------------------


def check_args(args: Args, world_size: int, config, tokenizer) -> tuple[list, list]:
    """Refuse flags that cannot work, and flags that would have no effect.

    Returns: the configs of the models that are trained, the policy first, and of those that are not.
    Raises: ValueError with flag, value, rule and a value that works.
    """
    flags = asdict(args)
    check_flags(flags, DEFAULTS, [("--kl-coef 0", args.kl_coef == 0, "ref_model kl_estimator")])
    if args.group_size < 2:
        raise ValueError(
            f"--group-size {args.group_size}: must be 2 or more, one response has no group to compare with; 8 works"
        )
    # [shared: checks]
    check_replay(args.replay)
    longest = args.max_prompt_len + args.max_response_len
    check_divides(flags, "prompts_per_step", world_size)
    check_minibatch(flags)
    check_guards(flags)
    check_lengths(flags, positions_of(config))
    check_engine(config, args.tensor_parallel_size, world_size, args.sleep in ("kv", "all"))
    frozen = [config] if args.kl_coef else []
    if args.ref_model:
        frozen = [check_sibling(args.ref_model, "--ref-model", tokenizer, longest)]
    # [/shared]
    frozen += check_reward_models(args.reward, tokenizer, longest)
    frozen += check_reward_models(args.eval_reward, tokenizer, longest, flag="--eval-reward")
    return [config], frozen


# ---- the run --------------------------------------------------------------------------------------------------------


def main(args: Args) -> None:
    # [shared: set-up]
    began = time.perf_counter()
    device = init_distributed()
    mesh = world_mesh(device)
    watch(args.hang_timeout_s)
    rank, world = mesh.get_rank(), mesh.size()
    with one_line_errors():
        if args.model == "tiny":
            made = broadcast(tiny.ensure(Path("runs/.tiny"), args.seed) if rank == 0 else None)
            args = replace(args, **tiny.flags(asdict(args), DEFAULTS, made, TINY, show=rank == 0))
        with fail_together():
            config, tokenizer = load_config(args.model), load_tokenizer(args.model)
            configs = check_args(args, world, config, tokenizer)
            eos_token_ids = end_of_sequence_ids(args.model, config, tokenizer)
        data = load_prompts(args.train_files, "--train-files", tokenizer, args.max_prompt_len)
        val = []
        if args.val_files and not args.replay:  # there is nothing to evaluate with
            val = load_prompts(args.val_files, "--val-files", tokenizer, args.max_prompt_len)
        num_steps = args.num_steps or math.ceil(args.num_epochs * len(data) / args.prompts_per_step)
        check_scorers(asdict(args), tokenizer, data, val)
        auto = "bfloat16" if device.type == "cuda" else "float32"
        args = replace(args, dtype=auto if args.dtype == "auto" else args.dtype)
        run_dir = Path(args.run_dir or broadcast(f"runs/{Path(__file__).stem}_{time.strftime('%Y%m%d_%H%M%S')}"))
        settled, memory = plan_memory(asdict(args), *configs, world, len(val))
        args = replace(args, **settled)
    # [/shared]

    # [shared: sizes]
    P, G = args.prompts_per_step // world, args.group_size
    B, num_responses = P * G, args.prompts_per_step * G
    minibatch_size = args.minibatch_size or num_responses
    one_update = args.update_epochs * num_responses == minibatch_size  # the batch is used for one optimizer step
    dtype = getattr(torch, args.dtype)
    if rank == 0:
        print(
            f"{run_dir}: {num_steps} steps of {args.prompts_per_step} prompts x {G} on {world} {device.type} rank(s), "
            f"{B} responses a rank, {args.update_epochs * num_responses // minibatch_size} optimizer step(s) of "
            f"{minibatch_size} responses, {len(data)} training and {len(val)} held-out prompts, {dtype}"
        )
        if args.dry_run or device.type == "cuda":
            print(memory)
    if args.dry_run:
        torch.distributed.destroy_process_group()
        return
    with one_line_errors():
        record = asdict(args), {rows.flag.removeprefix("--"): rows.fingerprint() for rows in filter(len, (data, val))}
        checkpoint, done = find_checkpoint(run_dir, args.resume, num_steps, PARTS, *record)
        with fail_together():
            check_replayed(args.replay, range(done + 1, num_steps + 1), args.temperature)
            open_record(args.record, run_dir)
            cut_record(args.record, done)
        open_run(run_dir, checkpoint, done, asdict(args), __file__)

    # vLLM first: it measures free memory, and reseeds the global generators. Its weights are dummies until the sync.
    engine = (
        Replay(args.replay, device)
        if args.replay
        else HybridEngine(
            args.model,
            seed=args.seed,
            max_model_len=args.max_prompt_len + args.max_response_len,
            eos_token_ids=eos_token_ids,
            tensor_parallel_size=args.tensor_parallel_size,
            max_num_seqs=args.max_num_seqs,
            kv_cache_gib=args.kv_cache_gib,
            dtype=dtype,
            sleep_mode=args.sleep != "none",
        )
    )
    reference = None
    training = {"master_dtype": torch.float32, "compute_dtype": dtype}
    training |= {"activation_checkpointing": args.activation_checkpointing, "compile_blocks": args.compile}
    training |= {"offload": args.offload == "all"}
    with one_line_errors():
        policy = load_policy(args.model, mesh, **training)
        if args.kl_coef:
            ref_model, flag = (args.ref_model, "--ref-model") if args.ref_model else (args.model, "--model")
            frozen = {"master_dtype": dtype, "compute_dtype": dtype, "trainable": False}
            reference = load_policy(ref_model, mesh, flag=flag, **frozen)
    optimizer = make_adamw(policy, args.lr, args.weight_decay, args.offload)
    parts = {"policy": (policy, optimizer)}
    # [/shared]
    learners, state = parts, {"lr_factor": 1.0}
    if checkpoint:
        with one_line_errors():
            state |= load_checkpoint(checkpoint, parts)
    # [shared: start]
    with one_line_errors():
        scorer, examiner = open_scorers(asdict(args), engine, tokenizer, mesh, dtype, evaluating=bool(val))
    greedy = Sampling(temperature=0.0, max_tokens=args.max_response_len, logprobs=False)
    samples = run_dir / "rollouts.jsonl"
    progress = Progress(run_dir, done, num_steps, show=rank == 0)

    metrics = Metrics()
    with metrics.timed("sync", device):
        engine.sync_weights(policy)
    if val and args.eval_every and done == 0:
        examiner.evaluate(val, 0, greedy, metrics, samples)
        progress.log(0, metrics.reduce())

    metrics, saved, last = Metrics(), None, True  # a run that is done already only exports once more
    finish_on_sigterm()
    # [/shared]
    for step in range(done + 1, num_steps + 1):
        # [shared: rollout and score]
        metrics.start(step, device)

        # ---- 1 rollout ----
        uids = step_uids(len(data), args.seed, step, args.prompts_per_step)[rank * P : (rank + 1) * P]
        rollouts = scorer.rollout(data, uids, G, step, Sampling(args.temperature, args.max_response_len))
        metrics.lap("rollout", device)
        if args.sleep != "none":
            metrics.asleep_gib = engine.sleep(args.sleep)
            metrics.lap("sleep", device)

        # ---- 2 score ----
        # rules have been at it since each response ended; models come in phase 4
        rule_scores_B = scorer.rule_scores(rollouts, f"step {step}")
        metrics.lap("score", device)

        # ---- 3 batch ----
        lengths_B = torch.tensor([len(r.response_ids) for r in rollouts], device=device)
        R = int(lengths_B.max())
        mask_BR = mask_from_lengths(lengths_B, R)
        rollout_logprobs_BR = pad_rows([r.logprobs for r in rollouts], torch.float32, R).to(device)
        truncated_B = torch.tensor([r.finish_reason == "length" for r in rollouts], device=device)
        metrics.lap("batch", device)
        # [/shared]

        # ---- 4 no-grad ----
        model_scores_B = scorer.model_scores(rollouts, data)
        forward = rollouts, R, args.temperature, args.max_tokens_per_gpu, device
        # With one optimizer step per batch the policy of the update is the old one: no extra forward.
        # DETAIL: old log-probs are packed over all responses, the update's over the minibatch, because the old ones
        # are needed once; in bfloat16 the first ratios are 1 only up to rounding.
        use_old = not one_update or args.rollout_correction != "none"
        old_logprobs_BR = logprobs_of(policy, *forward) if use_old else None
        ref_logprobs_BR = logprobs_of(reference, *forward) if reference else None
        metrics.lap("nograd", device)

        # ---- 5 advantages ----
        # [shared: scores]
        judged_B = (rule_scores_B + model_scores_B).isfinite()
        scores_B = torch.where(judged_B, rule_scores_B + model_scores_B, 0.0)
        num_judged = int(sum_over_ranks(judged_B.sum()))
        if num_judged == 0:
            stop(f"--reward {args.reward}: not one response of step {step} could be judged")
        if args.record:
            record_rollouts(args.record, run_dir, step, rollouts, scores_B, judged_B, args.temperature)
        kept_B = torch.ones_like(judged_B)  # by the correction
        if args.rollout_correction != "none":
            correction = args.rollout_correction, args.correction_cap
            weights_BR, kept_B = correction_weights(old_logprobs_BR, rollout_logprobs_BR, mask_BR, *correction)
            applied_BR = mask_BR & kept_B[:, None]
            cut_BR = mask_BR & ((weights_BR == args.correction_cap) | ~kept_B[:, None])
            metrics.add("rollout/corrected_frac", cut_BR.sum(), mask_BR.sum())
            metrics.add("rollout/correction_weight", torch.where(applied_BR, weights_BR, 0).sum(), applied_BR.sum())
        # [/shared]
        # DETAIL: a truncated response keeps its score and its tokens, because the paper masks nothing; one that the
        # correction masks keeps its part in the group's mean.
        advantages_B = group_advantages(scores_B, judged_B, G, args.scale_advantages)
        trained = kept_B.tolist()  # one without a score too: with advantage 0, and counted among the tokens
        first_logprobs_BR = old_logprobs_BR if use_old else torch.zeros_like(rollout_logprobs_BR)
        audited_BR = mask_BR
        batch = {"score": scores_B, "advantage": advantages_B, "old_logprobs": first_logprobs_BR}
        metrics.lap("advantages", device)

        # ---- 6 update ----
        rates = {"policy": learning_rate(step, num_steps, args.lr, args.lr_schedule, args.warmup_steps)}
        over, going_on, minibatches_done = False, True, 0
        for epoch in range(args.update_epochs):
            # A permutation of the global response indices, the same on every rank; each trains those it holds.
            order = np.random.default_rng(seed_for("minibatch", args.seed, step, epoch)).permutation(num_responses)
            for start in range(0, num_responses, minibatch_size):
                if not going_on:
                    break
                chosen = order[start : start + minibatch_size]
                mine = sorted(int(i) - rank * B for i in chosen if rank * B <= i < (rank + 1) * B)
                mine = [i for i in mine if trained[i]]
                plan, num_tokens = plan_together(rollouts, mine, args.max_tokens_per_gpu)
                if num_tokens == 0:  # not one of its responses, on any rank, is left
                    continue
                seen = []  # of this optimizer step
                for k, part in enumerate(plan):
                    begin_micro_batch(policy, k == len(plan) - 1)
                    packed, rows_b = pack([rollouts[i] for i in part], device), to_device(part, device)
                    logprobs_N, entropy_N = policy(packed, args.temperature)
                    tokens = len(packed.target_N)
                    logprobs_bR = packed.to_padded(logprobs_N, len(part), R)
                    old_logprobs_bR = old_logprobs_BR[rows_b] if use_old else logprobs_bR.detach()
                    mask_bR = mask_BR[rows_b]
                    loss_bR, ratio_bR, clipped_bR = policy_loss(
                        logprobs_bR, old_logprobs_bR, advantages_B[rows_b, None], args.clip_low, args.clip_high
                    )
                    if args.rollout_correction != "none":
                        loss_bR = loss_bR * weights_BR[rows_b]
                    total_bR = loss_bR
                    if reference:
                        kl_bR = kl_loss(logprobs_bR, old_logprobs_bR, ref_logprobs_BR[rows_b], args.kl_estimator)
                        total_bR = loss_bR + args.kl_coef * kl_bR
                        metrics.add(f"policy/ref_kl_{args.kl_estimator}", (kl_bR * mask_bR).sum(), tokens)
                    # DETAIL: the loss is divided by the token count of the whole optimizer step over all ranks,
                    # known before the first forward; times the world size, because FSDP averages gradients over
                    # ranks.
                    masked_bR = total_bR * mask_bR
                    (masked_bR.sum() / num_tokens * world).backward()

                    if tokens == 0:  # a filling micro-batch
                        continue
                    ratio_bR = ratio_bR.detach()  # 1 on padding
                    metrics.add("policy/loss", (loss_bR * mask_bR).sum(), tokens)
                    metrics.add("policy/clip_frac", (clipped_bR & mask_bR).sum(), tokens)
                    approx_kl_bR = ratio_bR - 1 - ratio_bR.log()
                    metrics.add("policy/approx_kl", approx_kl_bR.sum(), tokens)
                    metrics.add_max("policy/ratio_max", (ratio_bR * mask_bR).max())
                    metrics.add("policy/entropy", entropy_N.sum(), tokens)
                    note(seen, part, new_logprobs=logprobs_bR, loss=masked_bR, approx_kl=approx_kl_bR)
                    if not use_old:  # the one optimizer step is still to come: same weights on both sides
                        first_logprobs_BR[rows_b] = logprobs_bR.detach()
                # [shared: optimizer step]
                # DETAIL: --max-kl bounds how far the batch's optimizer steps before this one have moved the policy, at
                # this one's tokens; what a step itself does is seen by the next one of the batch alone.
                kl = mean_over_ranks(seen, "approx_kl", num_tokens) if args.max_kl else 0.0
                minibatches_done += 1
                over = args.max_kl > 0 and not kl <= args.max_kl  # nor is one that is not a number
                going_on = not over or args.on_max_kl == "lower-lr"
                # DETAIL: lower-lr lowers every rate, the critic's too, because then the ratio of the two stays.
                scaled = {name: rate * state["lr_factor"] for name, rate in rates.items()}
                check = partial(check_finite, run_dir, step, rollouts, seen, batch)
                for name, norm in optimizer_step(learners, scaled, args.max_grad_norm, check, going_on).items():
                    metrics.add({"policy": "optim/grad_norm", "critic": "optim/critic_grad_norm"}[name], norm)
                metrics.add("optim/num_tokens", num_tokens)
                for name, rate in scaled.items():
                    metrics.add({"policy": "optim/lr", "critic": "optim/critic_lr"}[name], rate)
                if over:
                    reason = f"KL {kl:.3g} is above --max-kl {args.max_kl:g} before optimizer step {minibatches_done}"
                    log_event(run_dir, step, "max_kl", "policy/approx_kl", kl, args.max_kl, args.on_max_kl, reason)
                if over and args.on_max_kl == "lower-lr":
                    state["lr_factor"] *= 1 - args.kl_lr_decay
                elif over and args.on_max_kl == "roll-back":
                    # DETAIL: after a roll-back the batch's other optimizer steps are left out, because the policy that
                    # it was sampled from is gone; the next batch is sampled from the restored weights.
                    state |= roll_back(run_dir, checkpoint, parts, step)
                # [/shared]
        metrics.lap("update", device)

        # ---- 7 weight sync ----
        # [shared: sync]
        if args.sleep != "none":
            engine.wake()
            metrics.asleep_gib = 0.0
        report = engine.sync_weights(policy)
        metrics.lap("sync", device)
        metrics.add("time/sync_reset_s", report.reset_seconds)
        if args.verify_sync and step % args.verify_sync == 0:
            engine.verify_sync(policy)
            metrics.lap("verify", device)
        # [/shared]

        # ---- 8 log, evaluate, save ----
        # of the responses that have a score; a group that has none counts as equal, and wrong
        judged_PG, centred_B = judged_B.view(P, G), group_advantages(scores_B, judged_B, G, scale=False)
        std_P = (centred_B.view(P, G).square().sum(-1) / (judged_PG.sum(-1) - 1).clamp_min(1)).sqrt()
        high_P = torch.where(judged_PG, scores_B.view(P, G), -torch.inf).amax(-1)
        low_P = torch.where(judged_PG, scores_B.view(P, G), torch.inf).amin(-1)
        equal_P, right_P = high_P <= low_P, high_P > 0
        metrics.add("reward/score_std", std_P.sum(), P)
        metrics.add("reward/zero_std_frac", equal_P.sum(), P)
        metrics.add("reward/all_right_frac", (equal_P & right_P).sum(), P)
        metrics.add("reward/all_wrong_frac", (equal_P & ~right_P).sum(), P)
        # [shared: log and evaluate]
        metrics.add_each(mismatch(first_logprobs_BR, rollout_logprobs_BR, audited_BR))
        metrics.add("reward/score", (scores_B * judged_B).sum(), judged_B.sum())
        metrics.add("reward/error_frac", (~judged_B).sum(), B)
        metrics.add("reward/timeout_frac", scorer.num_timeouts, B)
        metrics.add("rollout/response_len", lengths_B.sum(), B)
        metrics.add("rollout/truncated_frac", truncated_B.sum(), B)
        metrics.lap("log", device)
        pace = speed(learners, policy, rollouts, minibatches_done * minibatch_size / num_responses, metrics.seconds)
        metrics.add_each(pace | ledger(parts, engine, metrics.grown))
        last = step == num_steps
        if val and args.eval_every and (step % args.eval_every == 0 or last):
            with metrics.timed("eval", device):
                examiner.evaluate(val, step, greedy, metrics, samples)
        figures = metrics.reduce()
        progress.log(step, figures)
        for event in crossed(figures, asdict(args)):
            log_event(run_dir, step, *event)
        metrics = Metrics()  # saving comes after the step is logged, so its time stands with the next step
        stopping = asked_to_stop()
        # [/shared]
        if args.save_every and (step % args.save_every == 0 or last or stopping):
            with metrics.timed("save", device):
                saved = save_checkpoint(run_dir, step, parts, *record, state)
                if args.export_hf == "every" and saved:
                    export_hf(saved / "hf", policy, tokenizer)
        if stopping:
            break

    # ---- the end ----
    # [shared: end]
    progress.close()
    if args.export_hf != "off" and last and not export_hf(run_dir / "hf", policy, tokenizer):
        stop("the run is done and its export is not written; make room; --resume auto writes it, if --save-every saved")
    ended = num_steps if last else step, num_steps, saved
    word = "accuracy" if (args.eval_reward or args.reward) in ("tiny", "gsm8k") else "mean score"
    close_run(run_dir, began, *ended, "eval/score", word, f"{len(val)} held-out prompts")
    scorer.close()
    examiner.close()
    engine.close()
    # [/shared]


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__.splitlines()[0]))
