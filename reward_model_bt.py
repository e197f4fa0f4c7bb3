"""Bradley-Terry reward model: a scalar head on a causal LM's backbone, trained on chosen/rejected pairs with FSDP2.

One step, for B pairs on each rank (Ouyang et al. 2022, InstructGPT, arXiv 2203.02155, eq. 1):

3. batch      both responses of a pair -> one packed row of the same micro-batch
6. update     minimise -log sigmoid(r_chosen - r_rejected - margin) (+ a centring term); r is read at the last token
8. log, evaluate, save

The phases have the numbers they have in the policy scripts; 1, 2, 4, 5 and 7 need a policy.

Departures from the paper:

1. A plain mean over pairs; eq. 1 averages inside a prompt first. The two are one where a prompt has one pair.
2. Optional: a margin column (Llama 2, arXiv 2307.09288, eq. 2), a centring term (--centring-coef; Eisenstein et al.
   2023, arXiv 2312.09244, eq. 2: eta 0.01).
3. No bias is shifted in at the end: mean and std of the held-out scores go into the exported config.json, and
   ppo_fsdp.py --normalize-scores uses them.

    python reward_model_bt.py                                              # embedded tiny model and task, CPU or GPU
    torchrun --nproc-per-node 8 reward_model_bt.py --model Qwen/Qwen2.5-0.5B-Instruct \
        --train-files data/hh/train.parquet --val-files data/hh/test.parquet \
        --max-prompt-len 1024 --overlong drop                                                         # 8 GPUs
    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 reward_model_bt.py ...

Shapes: B pairs on this rank, b pairs of a micro-batch.
"""

import math
import time
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
import tyro

from utils import tiny
from utils.checkpoint import load_checkpoint, save_checkpoint
from utils.data import step_uids
from utils.dist import (
    all_gather,
    asked_to_stop,
    broadcast,
    fail_together,
    finish_on_sigterm,
    init_distributed,
    one_line_errors,
    stop,
    world_mesh,
)
from utils.export import export_hf, set_safe_pad
from utils.guards import check_finite, note
from utils.memory import plan_memory
from utils.metrics import Metrics, Progress, wilson
from utils.model_files import end_of_sequence_ids
from utils.models import load_config, load_scalar, load_tokenizer, positions_of
from utils.optim import begin_micro_batch, make_adamw, optimizer_step
from utils.packing import pack, plan_together, to_device
from utils.preferences import load_pairs
from utils.preflight import check_divides, check_flags, check_lengths
from utils.run_folder import close_run, find_checkpoint, open_run
from utils.tiny_pairs import ensure_pairs
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
    overlong: Literal["error", "drop"] = "error"
    """"drop": a pair with a longer prompt or response is left out and counted instead."""

    # ---- algorithm ----
    pairs_per_step: int = 64
    """Pairs per optimizer step, over all ranks."""
    centring_coef: float = 0.0
    """Weight of mean (r_chosen + r_rejected)^2 in the loss."""
    lr: float = 9e-6
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


DEFAULTS = {field.name: field.default for field in fields(Args)}
PARTS = ("reward_model",)  # what a checkpoint holds
TINY = {"num_steps": 700, "eval_every": 50, "save_every": 350, "centring_coef": 0.01}  # for --model tiny


# ---- the algorithm: pure functions, tensors in and out --------------------------------------------------------------


def preference_loss(chosen_b: torch.Tensor, rejected_b: torch.Tensor, margin_b: torch.Tensor, centring_coef: float):
    """-log sigmoid(r_chosen - r_rejected - margin), plus centring_coef (r_chosen + r_rejected)^2, of each pair.

    Shapes: all [b]. Paper: 2203.02155 eq. 1; margin 2307.09288 eq. 2; centring 2312.09244 eq. 2 (of the pair's sum).
    """
    loss_b = F.softplus(-(chosen_b - rejected_b - margin_b))
    return loss_b + centring_coef * (chosen_b + rejected_b).square()


def held_out_figures(chosen_B: np.ndarray, rejected_B: np.ndarray) -> dict[str, float]:
    """Accuracy with its interval, margin, loss, calibration by bucket, and the scores' mean and std.

    A pair's predicted probability is sigmoid(|difference|), from 0.5 to 1: how sure the model is of its own choice. In
    a calibrated model the share of right choices in a bucket (calib_acc) is the bucket's mean prediction (calib_prob).
    Shapes: [B] float64 each. Units: scores are log-odds.
    """
    margin_B = chosen_B - rejected_B
    # DETAIL: a right choice means r_chosen > r_rejected, whatever the row's margin; a tie counts as wrong,
    # because nothing was chosen.
    right_B = margin_B > 0
    low, high = wilson(int(right_B.sum()), len(right_B))
    both = np.concatenate([chosen_B, rejected_B])
    figures = {
        "eval/accuracy": right_B.mean(),
        "eval/accuracy_low": low,
        "eval/accuracy_high": high,
        "eval/loss": np.logaddexp(0, -margin_B).mean(),
        "eval/margin": margin_B.mean(),
        "eval/score_mean": both.mean(),
        # DETAIL: the scores' std is the population's, over chosen and rejected alike, because the policy's responses
        # will be of both kinds.
        "eval/score_std": both.std(),
    }
    prob_B = 1 / (1 + np.exp(-np.abs(margin_B)))
    bucket_B = np.minimum(((prob_B - 0.5) * 10).astype(int), 4)
    error = 0.0
    for k in range(5):
        inside_B = bucket_B == k
        name = f"{50 + 10 * k}_{60 + 10 * k}"
        figures[f"eval/calib_share_{name}"] = inside_B.mean()
        if inside_B.any():
            figures[f"eval/calib_prob_{name}"] = prob_B[inside_B].mean()
            figures[f"eval/calib_acc_{name}"] = right_B[inside_B].mean()
            error += inside_B.mean() * abs(prob_B[inside_B].mean() - right_B[inside_B].mean())
    figures["eval/calib_error"] = error
    return {key: float(value) for key, value in figures.items()}


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


def check_args(args: Args, world_size: int, positions: int) -> None:
    """Refuse flags that cannot work, and flags that would have no effect.

    Raises: ValueError with flag, value, rule and a value that works.
    """
    check_flags(asdict(args), DEFAULTS, [])
    check_divides(asdict(args), "pairs_per_step", world_size)
    check_lengths(asdict(args), positions, sequences=2)


# ---- the run --------------------------------------------------------------------------------------------------------


def main(args: Args) -> None:
    began = time.perf_counter()
    device = init_distributed()
    mesh = world_mesh(device)
    watch(args.hang_timeout_s)
    rank, world = mesh.get_rank(), mesh.size()
    with one_line_errors():
        if args.model == "tiny":
            made = broadcast(ensure_pairs(Path("runs/.tiny"), args.seed) if rank == 0 else None)
            args = replace(args, **tiny.flags(asdict(args), DEFAULTS, made, TINY, show=rank == 0))
        with fail_together():
            config, tokenizer = load_config(args.model, head="any"), load_tokenizer(args.model)
            check_args(args, world, positions_of(config))
            pad_id = set_safe_pad(tokenizer, config, end_of_sequence_ids(args.model, config, tokenizer))
        lengths = args.max_prompt_len, args.max_response_len, args.overlong
        data = load_pairs(args.train_files, "--train-files", tokenizer, *lengths)
        val = load_pairs(args.val_files, "--val-files", tokenizer, *lengths) if args.val_files else []
        num_steps = args.num_steps or math.ceil(args.num_epochs * len(data) / args.pairs_per_step)
        auto = "bfloat16" if device.type == "cuda" else "float32"
        args = replace(args, dtype=auto if args.dtype == "auto" else args.dtype)
        run_dir = Path(args.run_dir or broadcast(f"runs/{Path(__file__).stem}_{time.strftime('%Y%m%d_%H%M%S')}"))
        _, memory = plan_memory(asdict(args), [config], [], world)

    B = args.pairs_per_step // world
    dtype = getattr(torch, args.dtype)
    dropped = sum(rows.num_dropped for rows in (data, val) if rows)
    if rank == 0:
        print(
            f"{run_dir}: {num_steps} steps of {args.pairs_per_step} pairs on {world} {device.type} rank(s), {B} each, "
            f"{len(data)} training and {len(val)} held-out pairs ({dropped} more dropped as too long), {dtype}"
        )
        if args.dry_run or device.type == "cuda":
            print(memory)
    if args.dry_run:
        torch.distributed.destroy_process_group()
        return
    with one_line_errors():
        record = asdict(args), {rows.flag.removeprefix("--"): rows.fingerprint() for rows in filter(len, (data, val))}
        checkpoint, done = find_checkpoint(run_dir, args.resume, num_steps, PARTS, *record)
        open_run(run_dir, checkpoint, done, asdict(args), __file__)

    with one_line_errors():
        model = load_scalar(
            args.model,
            mesh,
            flag="--model",
            # DETAIL: a new head is drawn with variance 1 / (H + 1), because scores then start near N(0, 1) on hidden
            # states of unit size (as Stiennon et al. 2020, arXiv 2009.01325).
            head_std=(config.hidden_size + 1) ** -0.5,
            seed=args.seed,
            master_dtype=torch.float32,
            compute_dtype=dtype,
            activation_checkpointing=args.activation_checkpointing,
            compile_blocks=args.compile,
            offload=args.offload == "all",
        )
    model.lm.config.pad_token_id = pad_id
    model.lm.config.score_mean = model.lm.config.score_std = None  # of the scores it gives now, or none: see evaluate
    optimizer = make_adamw(model, args.lr, args.weight_decay, args.offload)
    parts = {"reward_model": (model, optimizer)}
    if checkpoint:
        with one_line_errors():
            load_checkpoint(checkpoint, parts)
    progress = Progress(run_dir, done, num_steps, show=rank == 0)

    @torch.no_grad()
    def evaluate() -> dict[str, float]:
        """The figures over every held-out pair, each rank its share; their scores' scale goes into the export."""
        pairs = [val.pair(i) for i in range(rank, len(val), world)]
        sequences = [(pair.chosen, pair.rejected) for pair in pairs]
        scores_B2 = torch.zeros(len(pairs), 2, dtype=torch.float64, device=device)
        for part in plan_together(sequences, range(len(pairs)), args.max_tokens_per_gpu)[0]:
            packed = pack([sequence for i in part for sequence in sequences[i]], device)
            scores_B2[to_device(part, device)] = model(packed)[1].view(-1, 2).double()
        shares = all_gather(scores_B2.cpu().numpy())
        both = np.stack([shares[i % world][i // world] for i in range(len(val))])  # back in the order of the rows
        if not np.isfinite(both).all():
            stop("a held-out score is not finite; a smaller --lr may help")
        figures = held_out_figures(both[:, 0], both[:, 1])
        model.lm.config.score_mean, model.lm.config.score_std = figures["eval/score_mean"], figures["eval/score_std"]
        return figures

    if val and args.eval_every and done in (0, num_steps):  # at the end for the scores' scale, which is exported
        figures = evaluate()
        if done == 0:
            progress.log(0, figures)

    metrics, saved, last = Metrics(), None, True  # a run that is done already only exports once more
    finish_on_sigterm()
    for step in range(done + 1, num_steps + 1):
        metrics.start(step, device)

        # ---- 3 batch ----
        uids = step_uids(len(data), args.seed, step, args.pairs_per_step)[rank * B : (rank + 1) * B]
        pairs = [data.pair(uid % len(data)) for uid in uids]
        sequences = [(pair.chosen, pair.rejected) for pair in pairs]
        margin_B = torch.tensor([pair.margin for pair in pairs], device=device)
        metrics.lap("batch", device)

        # ---- 6 update ----
        lr = learning_rate(step, num_steps, args.lr, args.lr_schedule, args.warmup_steps)
        plan, _ = plan_together(sequences, range(B), args.max_tokens_per_gpu)
        seen = []
        for k, part in enumerate(plan):
            begin_micro_batch(model, k == len(plan) - 1)
            packed, rows_b = pack([s for i in part for s in sequences[i]], device), to_device(part, device)
            chosen_b, rejected_b = model(packed)[1].view(-1, 2).unbind(-1)
            loss_b = preference_loss(chosen_b, rejected_b, margin_B[rows_b], args.centring_coef)
            # DETAIL: the loss is divided by the pairs of the step over all ranks; times the world size, because
            # FSDP averages gradients over ranks.
            (loss_b.sum() / args.pairs_per_step * world).backward()
            note(seen, part, chosen=chosen_b, rejected=rejected_b, loss=loss_b)
            metrics.add("rm/loss", loss_b.sum(), len(part))
            metrics.add("rm/accuracy", (chosen_b > rejected_b).sum(), len(part))
            metrics.add("rm/margin", (chosen_b - rejected_b).sum(), len(part))
            metrics.add("rm/score", (chosen_b + rejected_b).sum(), 2 * len(part))
        rows = [
            SimpleNamespace(uid=data.uids[u % len(data)], pair=[*map(vars, s)])
            for u, s in zip(uids, sequences, strict=True)
        ]
        check = partial(check_finite, run_dir, step, rows, seen, {"margin": margin_B})
        norms = optimizer_step(parts, {"reward_model": lr}, args.max_grad_norm, check)
        metrics.lap("update", device)

        # ---- 8 log, evaluate, save ----
        last = step == num_steps
        stopping = asked_to_stop()
        saving = args.save_every > 0 and (step % args.save_every == 0 or last or stopping)
        tokens = sum(len(s.prompt_ids) + len(s.response_ids) for pair in sequences for s in pair)
        metrics.add("optim/grad_norm", norms["reward_model"])
        metrics.add("optim/lr", lr)
        metrics.lap("log", device)
        seconds = sum(metrics.seconds.values())
        metrics.add("perf/tokens_per_s_per_gpu", tokens / seconds)
        metrics.add("time/step_s", seconds)
        held_out = {}
        if val and args.eval_every and (step % args.eval_every == 0 or last or (saving and args.export_hf == "every")):
            with metrics.timed("eval", device):
                held_out = evaluate()
        progress.log(step, metrics.reduce() | held_out)
        metrics = Metrics()  # saving comes after the step is logged, so its time stands with the next step
        if saving:
            with metrics.timed("save", device):
                saved = save_checkpoint(run_dir, step, parts, *record)
                if args.export_hf == "every" and saved:
                    export_hf(saved / "hf", model, tokenizer)
        if stopping:
            break

    # ---- the end ----
    progress.close()
    if args.export_hf != "off" and last and not export_hf(run_dir / "hf", model, tokenizer):
        stop("the run is done and its export is not written; make room; --resume auto writes it, if --save-every saved")
    ended = num_steps if last else step, num_steps, saved
    close_run(run_dir, began, *ended, "eval/accuracy", "accuracy", f"{len(val)} held-out pairs")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__.splitlines()[0]))
