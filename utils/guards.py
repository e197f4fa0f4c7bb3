"""Guard rails of a run: figures over their bounds, the events that say so, going back, and numbers that are not finite.

What a guard does to the training stands in the scripts.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from utils.checkpoint import damage_of, load_checkpoint, saved_in
from utils.dist import all_gather, broadcast, stop, sum_over_ranks
from utils.jsonl import append_jsonl
from utils.optim import Parts

Seen = list[tuple[list[int], dict[str, torch.Tensor]]]  # of micro-batches: indices of its rows, [b] or [b, R] of them
BOUNDS = {  # flag: the step's figure that it bounds; from below where it begins so
    "max_reward_std": "reward/score_std",
    "grad_norm_bound": "optim/grad_norm",
    "min_entropy": "policy/entropy",
    "max_truncated_frac": "rollout/truncated_frac",
}


def crossed(figures: dict[str, float], flags: dict) -> Iterator[tuple]:
    """What to log (see `log_event`) of each of a step's figures that is beyond its bound; a bound of 0 is none."""
    for name, key in BOUNDS.items():
        value, bound, below = figures.get(key), flags[name], name.startswith("min_")
        if bound and value is not None and (value < bound if below else value > bound):
            side, word = "below" if below else "above", name.replace("_", "-")
            yield name, key, value, bound, "none", f"{key} {value:.3g} is {side} --{word} {bound:g}"


def log_event(
    run_dir: Path, step: int, event: str, key: str, value: float, bound: float | None, action: str, reason: str
) -> None:
    """One line in run_dir/events.jsonl and one on the screen, by rank 0."""
    if dist.get_rank() == 0:
        line = {"step": step, "event": event, "key": key, "value": value, "bound": bound, "action": action}
        append_jsonl(run_dir / "events.jsonl", line | {"reason": reason})
        print(f"{run_dir.name}: step {step}: {event}: {reason}; {action}", flush=True)


def note(seen: Seen, part: list[int], **figures: torch.Tensor) -> None:
    """Keep figures of a micro-batch's rows, [b] or [b, R], on the device until the optimizer step is over."""
    seen.append((part, {name: figure.detach() for name, figure in figures.items()}))


def mean_over_ranks(seen: Seen, key: str, count: int) -> float:
    """The sum of a figure over the rows of all ranks, over `count`: the same number to the bit on each (collective)."""
    mine = [figures[key].sum().double() for _, figures in seen if key in figures]
    return sum(all_gather(float(torch.stack(mine).sum()) if mine else 0.0)) / count


def roll_back(run_dir: Path, resumed: Path | None, parts: Parts, step: int) -> dict:
    """Weights, optimizers and `state` of the run's newest whole checkpoint, or of the one it was resumed from.

    Collective. Ends the run where there is none.
    """
    newest = None
    if dist.get_rank() == 0:
        newest = next((p for p in reversed([resumed, *saved_in(run_dir)]) if p and not damage_of(p)), None)
    newest = broadcast(newest)
    if newest is None:
        stop(
            f"--on-max-kl roll-back: {run_dir} holds no whole checkpoint yet at step {step}; a smaller --save-every "
            "saves one earlier, --on-max-kl stop-epoch needs none"
        )
    return load_checkpoint(newest, parts)


def check_finite(
    run_dir: Path,
    step: int,
    rows: Sequence,
    seen: Seen,
    batch: dict[str, torch.Tensor],
    norms: dict[str, torch.Tensor],
) -> None:
    """End the run on every rank where a loss or a gradient norm of an optimizer step is not finite (collective).

    Each rank first writes the rows whose loss it is to run_dir/nonfinite_step<N>_rank<r>.jsonl; where no row's is, only
    the gradient: all rows of the optimizer step. Floats that are not finite are null there, and told by "nonfinite".
    One look at the device; nothing is copied from it while all is finite.
    Args: rows: of this rank's batch, what else to write of each; seen: its figures so far (those named *loss count),
        which a row need not have; batch: more figures of each row, [B] or [B, R].
    """
    device = next(iter(norms.values())).device  # the host's, with --offload all
    zero = torch.zeros((), dtype=torch.float64, device=device)
    losses = [t.sum().to(zero) for _, figures in seen for name, t in figures.items() if name.endswith("loss")]
    loss = sum_over_ranks(torch.stack([zero, *losses]).sum())
    if torch.stack([loss, *(norm.double() for norm in norms.values())]).isfinite().all():
        return
    dumped = _rows(rows, seen, batch)
    guilty = [row for row in dumped if any(name.endswith("loss") for name in row["nonfinite"])]
    counts = all_gather((len(guilty), len(dumped)))
    own = any(count for count, _ in counts)
    ranks = [rank for rank, count in enumerate(counts) if count[0 if own else 1]]
    rank, name = dist.get_rank(), f"nonfinite_step{step}_rank{{}}.jsonl"
    found = ", ".join([f"loss {loss.item():g}", *(f"{part} gradient norm {n.item():g}" for part, n in norms.items())])
    where = f"rank(s) {', '.join(map(str, ranks))}"
    source = f"from {where}" if own else f"of no single row's loss; all rows of {where} are dumped"
    first = run_dir / name.format(ranks[0])
    reason = f"not finite: {found}, {source}; see {first}{' and the others' * (len(ranks) > 1)}"
    if rank == 0:
        event = {"step": step, "event": "nonfinite", "key": "optim/grad_norm", "value": None, "bound": None}
        append_jsonl(run_dir / "events.jsonl", event | {"action": "stop", "reason": reason})
    if rank in ranks:  # no collective from here on: a disk that is full must not make the others wait
        run_dir.mkdir(parents=True, exist_ok=True)
        path = run_dir / name.format(rank)
        path.unlink(missing_ok=True)  # of a run that was resumed, and came to the same step
        append_jsonl(path, *(guilty if own else dumped))
    stop(f"step {step}: {reason}; nothing of it was saved")


def _rows(rows: Sequence, seen: Seen, batch: dict[str, torch.Tensor]) -> list[dict]:
    """Of each row seen: what it is, its figures up to its length, and which of them are not finite, with the value."""
    found: dict[int, dict] = {}
    for part, figures in seen:
        for j, i in enumerate(part):
            found.setdefault(i, {}).update({name: t[j] for name, t in figures.items()})
    out = []
    for i in sorted(found):
        figures = {name: t[i] for name, t in batch.items()} | found[i]
        values = {name: t[: len(rows[i].response_ids)] if t.dim() else t for name, t in figures.items()}
        what = {"engine_logprobs" if name == "logprobs" else name: value for name, value in vars(rows[i]).items()}
        bad = {name: str(t[~t.isfinite()][0].item()) for name, t in values.items() if not t.isfinite().all()}
        out.append(what | {name: t.tolist() for name, t in values.items()} | {"nonfinite": bad})
    return out
