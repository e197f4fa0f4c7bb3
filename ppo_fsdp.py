"""PPO: proximal policy optimisation of a causal LM with a critic, on plain FSDP2 and an in-process vLLM.

One step, for P prompts of G sampled responses each (Schulman et al. 2017, PPO, arXiv 1707.06347; for language models
Ziegler et al. 2019, arXiv 1909.08593, and Ouyang et al. 2022, InstructGPT, arXiv 2203.02155):

1. rollout    G responses per prompt from the current weights, at temperature T
2. score      one number per response: rules, reward models, or both
3. batch      ragged responses -> right-padded [B, R] tensors
4. no-grad    reward-model scores, old and reference log-probs, values: none waits for another
5. advantages reward per token = -beta log(pi_old / pi_ref), plus the score at the last token; GAE (Schulman et al.
              2015, arXiv 1506.02438, eq. 16); whitened over all response tokens of all ranks
6. update     maximise min(r A, clip(r, 1 - low, 1 + high) A), r = pi / pi_old (1707.06347 eq. 7); the critic minimises
              its clipped squared error to the returns; several epochs and minibatches
7. sync       the new weights into vLLM
8. log, evaluate, save, next beta

Departures from the papers:

1. Losses are means over all response tokens of the optimizer step, over all ranks.
2. Policy and critic are two models with two optimizers; the PPO paper shares one network and adds the losses (eq. 9).
3. Two clip bounds (--clip-low, --clip-high; DAPO, arXiv 2503.14476, eq. 10). Optional: dual clip (arXiv 1912.09729,
   eq. 5), entropy bonus (eq. 9), KL in the loss instead of in the reward (--kl-in loss).
4. The value loss is clipped around the values of the rollout, by the larger of the two errors, with a factor 0.5; that
   is openai/lm-human-preferences' code and in none of the papers.
5. Rewards are not divided by their std before GAE (openai/lm-human-preferences does).
6. The state ends with the response: a truncated one too is worth nothing beyond it, unless --bootstrap-truncated.

    python ppo_fsdp.py                                                    # embedded tiny model and task, CPU or GPU
    torchrun --nproc-per-node 8 ppo_fsdp.py --model Qwen/Qwen2.5-0.5B-Instruct --critic-model runs/rm/hf \
        --train-files data/prompts.parquet --reward model:runs/rm/hf --kl-coef 0.05                     # 8 GPUs
    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 ppo_fsdp.py ...  # 2 nodes

Shapes: P prompts on this rank, G responses per prompt, B = P * G responses (prompt-major), R longest response,
b responses of a micro-batch, N response tokens of a micro-batch. [i, t] speaks of the t-th sampled token of response i.
"""

import math
import time
from collections.abc import Callable
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
from utils.forward import logprobs_of, values_of
from utils.guards import check_finite, crossed, log_event, mean_over_ranks, note, roll_back
from utils.memory import ledger, plan_memory
from utils.metrics import Metrics, Progress, explained_variance, mismatch, speed
from utils.model_files import end_of_sequence_ids
from utils.models import check_sibling, load_config, load_policy, load_scalar, load_tokenizer, positions_of
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
    critic_model: str = ""
    """Where the critic starts: a reward model with its head, or a causal LM, which gets a new one; empty: --model."""

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
    prompts_per_step: int = 256
    """Prompts per step, over all ranks."""
    group_size: int = 1
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
    normalize_scores: bool = False
    """Scores of reward models less their mean and over their std, as recorded in their config.json."""
    score_clip: float = 0.0
    """Clip the score of each response to plus or minus this; 0: do not."""
    missing_eos_penalty: float = 0.0
    """Taken off the score of a response that --max-response-len cut off."""

    # ---- algorithm ----
    update_epochs: int = 1
    """Passes over each batch of responses."""
    minibatch_size: int = 64
    """Responses per optimizer step, over all ranks; 0: all of the step's."""
    lr: float = 1e-6
    """Peak learning rate of the policy's AdamW."""
    critic_lr: float = 1e-5
    """Peak learning rate of the critic's."""
    critic_warmup_steps: int = 0
    """First steps in which only the critic is trained."""
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
    gamma: float = 1.0
    """Discount per token."""
    gae_lambda: float = 0.95
    """Of generalised advantage estimation: 1 is the return less the value, 0 one step ahead."""
    bootstrap_truncated: bool = False
    """A truncated response goes on from the critic's value after its last token, instead of from nothing."""
    whiten_advantages: bool = True
    """Shift and scale the advantages to mean 0 and std 1 over the step's response tokens."""
    clip_low: float = 0.2
    """The ratio's lower clip bound is 1 - this."""
    clip_high: float = 0.2
    """The ratio's upper clip bound is 1 + this."""
    dual_clip: float = 0.0
    """Where the advantage A is negative, a token's loss is at most this times |A|; above 1, such as 3; 0: no bound."""
    value_clip: float = 0.2
    """Clip a new value to within this of the rollout's, and take the larger error of the two; 0: do not."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""
    kl_in: Literal["reward", "loss"] = "reward"
    """Where the KL to the reference goes: into each token's reward (k1), or into the loss (--kl-estimator)."""
    kl_coef: float = 0.02
    """Weight of the KL to the reference; 0: no KL and no reference model."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k1"
    """With --kl-in loss, the KL in policy/kl_loss: with d = log(policy / reference), k1 is d, k2 d^2 / 2, k3
    exp(-d) - 1 + d. The gradient is the reverse KL's with each."""
    kl_controller: Literal["fixed", "adaptive", "horizon"] = "fixed"
    """Keep --kl-coef, or multiply it after each step by 1 + k e: e is KL / --kl-target - 1, cut to +-0.2,
    and k is 0.1 (adaptive) or the step's responses over --kl-horizon (horizon)."""
    kl_target: float = 6.0
    """Wanted KL to the reference, in nats per response (summed over its tokens)."""
    kl_horizon: int = 10000
    """Responses over which --kl-controller horizon applies e once: larger is slower."""

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
PARTS = ("policy", "critic")  # what a checkpoint holds
# over the values that all scripts share for --model tiny
TINY = {"minibatch_size": 256, "clip_high": 0.28, "critic_lr": 3e-4, "kl_coef": 0.0}


# ---- the algorithm: pure functions, tensors in and out --------------------------------------------------------------


def dual_clip_bound(advantages_BR: Tensor, bound: float) -> Tensor:
    """The most a token's loss may be: `bound` times its size where the advantage is negative, else infinity.

    Paper: 1912.09729 eq. 5, as a loss.
    """
    return torch.where(advantages_BR < 0, -bound * advantages_BR, torch.inf)


def token_rewards(scores_B: Tensor, lengths_B: Tensor, kl_BR: Tensor, kl_coef: float) -> Tensor:
    """-kl_coef k1 on every token, and the response's score on its last one.

    Shapes: scores, lengths [B]; kl_BR, log(pi_old / pi_ref), 0 on padding -> [B, R]. Paper: 1909.08593 sec. 2.2.
    """
    # DETAIL: the score stands on the last sampled token, the end-of-sequence token where there is one.
    last_BR = torch.arange(kl_BR.shape[1], device=kl_BR.device) == lengths_B[:, None] - 1
    return -kl_coef * kl_BR + torch.where(last_BR, scores_B[:, None].to(kl_BR.dtype), 0.0)


def gae(
    rewards_BR: Tensor, values_BR: Tensor, bootstrap_B: Tensor, lengths_B: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Advantages and returns of each token; both 0 on padding.

    Shapes: [B, R], bootstrap_B, the value after the last token (0 where the response ended), [B].
    Paper: 1506.02438 eq. 16 in the truncated form of 1707.06347 eq. 11-12.
    """
    t_R = torch.arange(values_BR.shape[1], device=values_BR.device)
    mask_BR = t_R < lengths_B[:, None]
    shifted_BR = torch.nn.functional.pad(values_BR[:, 1:], (0, 1))
    next_BR = torch.where(t_R == lengths_B[:, None] - 1, bootstrap_B[:, None], shifted_BR)
    delta_BR = (rewards_BR + gamma * next_BR - values_BR) * mask_BR
    advantage_B, advantages = torch.zeros_like(bootstrap_B), []
    for delta_B in delta_BR.unbind(1)[::-1]:
        advantage_B = delta_B + gamma * lam * advantage_B
        advantages.append(advantage_B)
    advantages_BR = torch.stack(advantages[::-1], 1)
    # DETAIL: returns are made of the advantages before whitening, because the critic learns the rewards' own scale.
    return advantages_BR, (advantages_BR + values_BR) * mask_BR


def whiten(x_BR: Tensor, mask_BR: Tensor, over_ranks: Callable) -> Tensor:
    """(x - mean) / sqrt(var + 1e-8) over the masked entries of all ranks; 0 elsewhere.

    Args: over_ranks: sums a tensor over the ranks.
    """
    # DETAIL: advantages are whitened by the population variance over the tokens of the whole step, as
    # openai/lm-human-preferences; in float64.
    count, total = over_ranks(torch.stack([mask_BR.sum().double(), (x_BR.double() * mask_BR).sum()]))
    centred_BR = (x_BR - total / count) * mask_BR
    variance = over_ranks(centred_BR.square().sum()) / count
    return (centred_BR / (variance + 1e-8).sqrt()).to(x_BR.dtype)


def value_loss(values_BR: Tensor, old_values_BR: Tensor, returns_BR: Tensor, clip: float) -> tuple[Tensor, Tensor]:
    """0.5 max((V - ret)^2, (V_old + clip(V - V_old) - ret)^2) of each token, and whether the clip cut its gradient off.

    Shapes: all [B, R]. Source: openai/lm-human-preferences, train_policy.py; without a clip half of 1707.06347 eq. 9's.
    """
    error_BR = (values_BR - returns_BR).square()
    if clip == 0:
        return 0.5 * error_BR, torch.zeros_like(error_BR, dtype=torch.bool)
    clipped_BR = (old_values_BR + (values_BR - old_values_BR).clamp(-clip, clip) - returns_BR).square()
    return 0.5 * torch.maximum(error_BR, clipped_BR), clipped_BR > error_BR


def next_kl_coef(coef: float, kl: float, target: float, responses: int, horizon: int, controller: str) -> float:
    """The KL coefficient of the next step.

    Args: controller: "fixed"; "adaptive", the paper's: a tenth of the error per step; "horizon", the code's of
        openai/lm-human-preferences: responses / horizon of it.
    Units: kl and target in nats per response (k1 summed over its tokens); responses and horizon in responses.
    Paper: 1909.08593 sec. 2.2.
    """
    error = min(max(kl / target - 1, -0.2), 0.2)
    return coef * (1 + {"fixed": 0.0, "adaptive": 0.1, "horizon": responses / horizon}[controller] * error)


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
    controller = f"--kl-controller {args.kl_controller}"
    idle = [
        ("--kl-coef 0", args.kl_coef == 0, "ref_model kl_in kl_controller"),
        ("--kl-in reward, which takes k1", args.kl_in == "reward", "kl_estimator"),
        (controller, args.kl_controller == "fixed", "kl_target"),
        (controller, args.kl_controller != "horizon", "kl_horizon"),
        ("no model: in --reward", "model:" not in args.reward + args.eval_reward, "normalize_scores"),
    ]
    check_flags(flags, DEFAULTS, idle)
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
    frozen += check_reward_models(args.reward, tokenizer, longest, args.normalize_scores)
    frozen += check_reward_models(args.eval_reward, tokenizer, longest, args.normalize_scores, flag="--eval-reward")
    critic = config
    if args.critic_model:
        critic = check_sibling(args.critic_model, "--critic-model", tokenizer, longest, head="any")
    return [config, critic], frozen


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
    with one_line_errors():
        if num_steps <= args.critic_warmup_steps:
            rule = f"must leave the policy some of the {num_steps} steps; {num_steps - 1} works"
            raise ValueError(f"--critic-warmup-steps {args.critic_warmup_steps}: {rule}")

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
    state = {"lr_factor": 1.0, "kl_coef": args.kl_coef}
    with one_line_errors():
        # DETAIL: a new value head is all zeros, because then the first values are no noise.
        critic_model, flag = (args.critic_model, "--critic-model") if args.critic_model else (args.model, "--model")
        critic = load_scalar(critic_model, mesh, flag=flag, head_std=0.0, **training)
    critic_optimizer = make_adamw(critic, args.critic_lr, args.weight_decay, args.offload)
    parts["critic"] = critic, critic_optimizer
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
        # With one optimizer step per batch, and no KL to measure, the old log-probs are the update's own.
        # DETAIL: old log-probs are packed over all responses, the update's over the minibatch, because the old ones
        # are needed once; in bfloat16 the first ratios are 1 only up to rounding.
        critic_only = step <= args.critic_warmup_steps
        use_old = reference is not None or not one_update or args.rollout_correction != "none" or critic_only
        old_logprobs_BR = logprobs_of(policy, *forward) if use_old else None
        ref_logprobs_BR = logprobs_of(reference, *forward) if reference else None
        values_BR, next_values_B = values_of(critic, rollouts, R, args.max_tokens_per_gpu, device)
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
        trained_B = kept_B & judged_B
        trained, num_trained = trained_B.tolist(), sum_over_ranks(trained_B.sum())
        first_logprobs_BR = old_logprobs_BR if use_old else torch.zeros_like(rollout_logprobs_BR)
        audited_BR = mask_BR if use_old else mask_BR & judged_B[:, None]
        # DETAIL: a response without a score is left out of advantages, losses and means, because any number in its
        # place would be a reward for making the judge fail.
        trained_BR = mask_BR & trained_B[:, None]
        paid_B = scores_B.clamp(-args.score_clip, args.score_clip) if args.score_clip else scores_B
        paid_B = paid_B - args.missing_eos_penalty * truncated_B
        kl_BR = old_logprobs_BR - ref_logprobs_BR if reference else torch.zeros_like(values_BR)  # k1
        kl_coef = state["kl_coef"]
        if reference:
            for name, estimate_BR in (("k1", kl_BR), ("k2", kl_BR.square() / 2), ("k3", (-kl_BR).exp() - 1 + kl_BR)):
                metrics.add(f"policy/ref_kl_{name}", (estimate_BR * trained_BR).sum(), trained_BR.sum())
        rewards_BR = token_rewards(paid_B, lengths_B, kl_BR, kl_coef if args.kl_in == "reward" else 0.0)
        # DETAIL: terminal states are worth 0, truncated ones too unless asked for, because a response cut off is over.
        bootstrap_B = next_values_B * (truncated_B & args.bootstrap_truncated)
        raw_advantages_BR, returns_BR = gae(rewards_BR, values_BR, bootstrap_B, lengths_B, args.gamma, args.gae_lambda)
        whitened = args.whiten_advantages
        advantages_BR = whiten(raw_advantages_BR, trained_BR, sum_over_ranks) if whitened else raw_advantages_BR
        # DETAIL: explained variance is of the rewards to come (lambda 1), because returns of a lower lambda are partly
        # the critic's own.
        _, outcomes_BR = gae(rewards_BR, values_BR, bootstrap_B, lengths_B, args.gamma, 1.0)
        metrics.add("value/explained_var", explained_variance(values_BR, outcomes_BR, trained_BR, sum_over_ranks))
        batch = {"score": scores_B, "advantage": advantages_BR, "return": returns_BR, "old_logprobs": first_logprobs_BR}
        metrics.add("value/mean", (values_BR * trained_BR).sum(), trained_BR.sum())
        metrics.add("reward/return", (rewards_BR * trained_BR).sum(), trained_B.sum())
        metrics.lap("advantages", device)

        # ---- 6 update ----
        schedule, frozen_steps = (args.lr_schedule, args.warmup_steps), args.critic_warmup_steps
        rates = {"critic": learning_rate(step, num_steps, args.critic_lr, *schedule), "policy": 0.0}
        if not critic_only:  # the policy's schedule begins when its training does
            rates["policy"] = learning_rate(step - frozen_steps, num_steps - frozen_steps, args.lr, *schedule)
        learners = {k: part for k, part in parts.items() if k == "critic" or not critic_only}
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
                    packed, rows_b = pack([rollouts[i] for i in part], device), to_device(part, device)
                    mask_bR, tokens = trained_BR[rows_b], len(packed.target_N)
                    # DETAIL: both losses are divided by the token count of the whole optimizer step over all ranks,
                    # known before the first forward; times the world size, because FSDP averages gradients.
                    share = world / num_tokens
                    if "policy" in learners:
                        begin_micro_batch(policy, k == len(plan) - 1)
                        logprobs_N, entropy_N = policy(packed, args.temperature, args.entropy_coef > 0)
                        logprobs_bR = packed.to_padded(logprobs_N, len(part), R)
                        old_logprobs_bR = old_logprobs_BR[rows_b] if use_old else logprobs_bR.detach()
                        loss_bR, ratio_bR, clipped_bR = policy_loss(
                            logprobs_bR, old_logprobs_bR, advantages_BR[rows_b], args.clip_low, args.clip_high
                        )
                        if args.dual_clip:
                            bound_bR = dual_clip_bound(advantages_BR[rows_b], args.dual_clip)
                            metrics.add("policy/dual_clip_frac", ((loss_bR > bound_bR) & mask_bR).sum(), tokens)
                            loss_bR = torch.minimum(loss_bR, bound_bR)
                        if args.rollout_correction != "none":
                            loss_bR = loss_bR * weights_BR[rows_b]
                        total_bR = loss_bR
                        if reference and args.kl_in == "loss":
                            kl_bR = kl_loss(logprobs_bR, old_logprobs_bR, ref_logprobs_BR[rows_b], args.kl_estimator)
                            total_bR = total_bR + kl_coef * kl_bR
                            metrics.add("policy/kl_loss", (kl_bR * mask_bR).sum(), tokens)
                        if args.entropy_coef:
                            total_bR = total_bR - args.entropy_coef * packed.to_padded(entropy_N, len(part), R)
                        masked_bR = total_bR * mask_bR
                        (masked_bR.sum() * share).backward()
                    begin_micro_batch(critic, k == len(plan) - 1)
                    new_values_bR = packed.to_padded(critic(packed)[0], len(part), R)
                    critic_loss_bR, value_clipped_bR = value_loss(
                        new_values_bR, values_BR[rows_b], returns_BR[rows_b], args.value_clip
                    )
                    value_loss_bR = critic_loss_bR * mask_bR
                    (value_loss_bR.sum() * share).backward()

                    if tokens == 0:  # a filling micro-batch
                        continue
                    metrics.add("value/loss", value_loss_bR.sum(), tokens)
                    note(seen, part, value=new_values_bR, value_loss=value_loss_bR)
                    metrics.add("value/clip_frac", (value_clipped_bR & mask_bR).sum(), tokens)
                    if "policy" not in learners:
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
        score_mean = sum_over_ranks(scores_B.sum()) / num_judged
        spread = sum_over_ranks(((scores_B - score_mean).square() * judged_B).sum())
        metrics.add("reward/score_std", (spread / num_judged).sqrt())
        if reference:
            kl = float(sum_over_ranks((kl_BR * trained_BR).sum()) / num_trained.clamp_min(1))
            metrics.add("policy/kl_coef", kl_coef)
            metrics.add("policy/ref_kl_response", kl)
            # DETAIL: after a roll-back the checkpoint's coefficient stays, because this KL is of the weights given up.
            if num_trained > 0 and not critic_only and not (over and args.on_max_kl == "roll-back"):
                controller = num_responses, args.kl_horizon, args.kl_controller
                state["kl_coef"] = next_kl_coef(kl_coef, kl, args.kl_target, *controller)
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
