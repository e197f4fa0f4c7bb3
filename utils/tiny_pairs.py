"""Preference pairs on the tiny task: the right sum against a wrong one, judged by the task's own rule."""

import os
import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from utils import tiny
from utils.rewards import tiny as rule

PAIRS_PER_SUM = 4
PLACES = (0, 1, 2, 2, 2)


def wrong_answer(right: int, rng: random.Random) -> str:
    """A wrong answer of a kind that a half-taught model gives: a digit off, a near miss, a carry, a wrong length."""
    digits = list(str(right))
    kind = rng.random()
    if kind < 0.2:
        return str(right + rng.choice((-1, 1)) * rng.randrange(1, 10))
    if kind < 0.35:
        return str(right + rng.choice((-10, 10)))
    if kind < 0.92:
        place = rng.choice(PLACES)
        digits[place] = rng.choice([d for d in "0123456789" if d != digits[place]])
    elif kind < 0.96:
        place = rng.randrange(len(digits) + 1)
        digits[place:place] = [rng.choice("0123456789+=") for _ in range(rng.randrange(1, 3))]
    else:
        digits = digits[: rng.randrange(1, 3)]
    return "".join(digits)


def make_pairs(path: Path) -> tuple[Path, Path]:
    """Write `train_pairs.parquet` and `val_pairs.parquet` into folder `path`; no held-out sum is in the first."""
    path.mkdir(parents=True, exist_ok=True)
    rng = random.Random(0)
    for name, sums in zip(("train", "val"), tiny.splits(), strict=True):
        rows = []
        for a, b in sums * PAIRS_PER_SUM:
            chosen, rejected = str(a + b), wrong_answer(a + b, rng)
            row = {"reward_model": {"ground_truth": str(a + b)}}
            assert rule(chosen, row) > rule(rejected, row), (chosen, rejected)
            rows.append({"prompt": f"{a}+{b}=", "chosen": chosen, "rejected": rejected})
        aside = path / f".{name}_pairs.parquet"
        pq.write_table(pa.Table.from_pylist(rows), aside)
        os.replace(aside, path / f"{name}_pairs.parquet")
    return path / "train_pairs.parquet", path / "val_pairs.parquet"


def ensure_pairs(root: str | Path, seed: int) -> dict[str, str]:
    """The tiny model of `tiny.ensure`, and pairs in place of prompts: the three path flags of reward_model_bt.py."""
    made = tiny.ensure(root, seed)
    train, val = make_pairs(Path(made["train_files"]).parent)
    return {"model": made["model"], "train_files": str(train), "val_files": str(val)}
