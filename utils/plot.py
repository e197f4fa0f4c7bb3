"""Curves from one or more run folders: python -m utils.plot runs/a runs/b --out curves.png"""

import math
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import tyro

from utils.jsonl import read_jsonl

PANELS = {  # key -> title; a panel is drawn where some run has the key
    "eval/score": "held-out score",
    "reward/score": "training score",
    "eval/accuracy": "held-out accuracy of the reward model",
    "rm/loss": "reward model loss (nats per pair)",
    "policy/ref_kl_response": "KL to the reference (nats per response)",
    "value/explained_var": "explained variance of the critic",
    "rollout/response_len": "response length (tokens)",
    "policy/entropy": "entropy (nats per token)",
    "rollout/logprob_diff_mean": "|engine - trainer| log-prob (nats)",
    "optim/grad_norm": "gradient norm",
}
FROM_ZERO = ("eval/score", "reward/score", "eval/accuracy")


def plot_runs(run_dirs: list[Path], out: Path) -> Path:
    """Draw the panels' metrics against the step, one line per run folder, and write `out` (PNG).

    A reward model gets one panel more: how often it is right, against how sure it is, at its last evaluation.
    Raises: ValueError when a folder has no metrics.jsonl.
    """
    short = [run.name for run in run_dirs]
    runs = {str(run) if short.count(run.name) > 1 else run.name: read_jsonl(run / "metrics.jsonl") for run in run_dirs}
    for run, rows in zip(run_dirs, runs.values(), strict=True):
        if not rows:
            raise ValueError(f"{run}: no metrics.jsonl with a step in it; a folder made by a training run works")
    panels = [key for key in PANELS if any(row.get(key) is not None for rows in runs.values() for row in rows)]
    calibrated = {name: last for name, rows in runs.items() if (last := _last_calibration(rows))}
    count = len(panels) + bool(calibrated)
    columns = min(3, count)
    figure, axes = plt.subplots(
        math.ceil(count / columns), columns, figsize=(4.3 * columns, 3.2 * math.ceil(count / columns)),
        layout="constrained", squeeze=False,
    )  # fmt: skip
    for axis, key in zip(axes.flat, panels, strict=False):
        for i, rows in enumerate(runs.values()):
            points = [(row["step"], row[key]) for row in rows if row.get(key) is not None]
            marker = "o" if key.startswith("eval") else None
            axis.plot(*zip(*points, strict=True) if points else ([], []), color=f"C{i}", marker=marker, markersize=3)
        axis.set_title(PANELS[key], fontsize=10)
        axis.set_xlabel("step", fontsize=8)
        if key in FROM_ZERO:
            axis.set_ylim(bottom=min(0.0, axis.get_ylim()[0]))
    if calibrated:
        axis = axes.flat[len(panels)]
        axis.plot([0.5, 1], [0.5, 1], color="gray", linestyle=":")
        for i, name in enumerate(runs):
            if name in calibrated:
                axis.plot(*zip(*calibrated[name], strict=True), color=f"C{i}", marker="o", markersize=4)
        axis.set_title("calibration: share right against predicted", fontsize=10)
        axis.set_xlabel("predicted probability", fontsize=8)
    for axis in axes.flat[:count]:
        axis.grid(alpha=0.3)
    for axis in axes.flat[count:]:
        axis.axis("off")
    handles = [plt.Line2D([], [], color=f"C{i}") for i in range(len(runs))]
    figure.legend(handles, list(runs), loc="outside upper left", ncols=len(runs), fontsize=9)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(out, dpi=110)
    except OSError as error:  # a full disk, after a run that is done
        print(f"{out}: NOT WRITTEN ({error}); python -m utils.plot draws it later", flush=True)
    plt.close(figure)
    return out


def _last_calibration(rows: list[dict]) -> list[tuple[float, float]]:
    """(mean predicted probability, share right) of each bucket that has pairs, at the last evaluation."""
    last = next((row for row in reversed(rows) if "eval/calib_error" in row), {})
    probs = {key.removeprefix("eval/calib_prob_"): v for key, v in last.items() if key.startswith("eval/calib_prob_")}
    return [(prob, last[f"eval/calib_acc_{bucket}"]) for bucket, prob in sorted(probs.items())]


def main(run_dirs: tyro.conf.Positional[list[Path]], out: Path = Path("curves.png")) -> None:
    """Draw the curves of one or more run folders into one picture."""
    try:
        print(plot_runs(run_dirs, out))
    except ValueError as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    tyro.cli(main)
