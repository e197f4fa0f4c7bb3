"""Curves from one or more run folders: python -m utils.plot runs/a runs/b --out curves.png"""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import tyro

from utils.metrics import read_jsonl

PANELS = (
    ("eval/score", "held-out score"),
    ("reward/score", "training score"),
    ("rollout/response_len", "response length (tokens)"),
    ("policy/entropy", "entropy (nats per token)"),
    ("rollout/logprob_diff_mean", "|engine - trainer| log-prob (nats)"),
    ("optim/grad_norm", "gradient norm"),
)


def plot_runs(run_dirs: list[Path], out: Path) -> Path:
    """Draw the panels' metrics against the step, one line per run folder, and write `out` (PNG).

    Raises: ValueError when a folder has no metrics.jsonl.
    """
    figure, axes = plt.subplots(2, 3, figsize=(13, 6.5), layout="constrained")
    for run in run_dirs:
        rows = read_jsonl(run / "metrics.jsonl")
        if not rows:
            raise ValueError(f"{run}: no metrics.jsonl with a step in it; a folder made by a training run works")
        for axis, (key, _) in zip(axes.flat, PANELS, strict=True):
            points = [(row["step"], row[key]) for row in rows if row.get(key) is not None]
            if points:
                marker = "o" if key.startswith("eval") else None
                axis.plot(*zip(*points, strict=True), label=run.name, marker=marker, markersize=3, linewidth=1.3)
    for axis, (key, title) in zip(axes.flat, PANELS, strict=True):
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("step", fontsize=8)
        axis.grid(alpha=0.3)
        if "score" in key:
            axis.set_ylim(bottom=min(0.0, axis.get_ylim()[0]))
    if axes.flat[0].has_data():
        axes.flat[0].legend(fontsize=8)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=110)
    plt.close(figure)
    return out


def main(run_dirs: tyro.conf.Positional[list[Path]], out: Path = Path("curves.png")) -> None:
    """Draw the curves of one or more run folders into one picture."""
    try:
        print(plot_runs(run_dirs, out))
    except ValueError as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    tyro.cli(main)
