"""Ten steps of each script on recorded rollouts, on a CPU in float32, against figures in the tree.

A change that moves them says why in its commit, and writes them anew: PYTHONPATH=. python tests/test_golden.py
"""

import json
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from conftest import ROOT, run

from utils import tiny
from utils.tiny_pairs import make_pairs

GOLDEN = Path(__file__).parent / "golden"
COMMON = ["--num-steps", 10, "--lr", 3e-4, "--max-prompt-len", 16, "--max-response-len", 12, "--save-every", 0]
COMMON += ["--export-hf", "off", "--dtype", "float32"]
ROLLOUTS = ["--prompts-per-step", 4, "--group-size", 4, "--minibatch-size", 8, "--update-epochs", 2]
ROLLOUTS += ["--reward", f"{ROOT}/tests/dense_reward.py:dense", "--kl-coef", 0.05]
SCRIPTS = {
    "grpo_fsdp": [*ROLLOUTS, "--kl-estimator", "k3"],
    "ppo_fsdp": [*ROLLOUTS, "--kl-controller", "adaptive", "--kl-target", 0.01, "--critic-lr", 3e-4],
    "reward_model_bt": ["--pairs-per-step", 16, "--centring-coef", 0.01],
}
LEFT_OUT = ("time/", "perf/", "eval/")  # and what is near 0, or the extreme of many
NOISY = ("policy/loss", "policy/approx_kl", "rollout/logprob_diff_max", "policy/ref_kl_k1", "rollout/ratio_k3")


def figures(script: str, folder: Path, *more) -> list[dict]:
    """The metrics of a run of `script` on the model of seed 11, which is random."""
    tiny.make_model(folder / "model", seed=11, num_sft_steps=0)
    tiny.make_data(folder / "data")
    make_pairs(folder / "data")
    data = "train_pairs" if script == "reward_model_bt" else "train"
    result = run([
        sys.executable, ROOT / f"{script}.py", "--run-dir", folder / "run", "--model", folder / "model",
        "--train-files", folder / f"data/{data}.parquet", *COMMON, *SCRIPTS[script], *more,
    ], OMP_NUM_THREADS="1")  # fmt: skip
    assert result.returncode == 0, result.stderr[-4000:]
    rows = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith(LEFT_OUT) and k not in NOISY} for row in rows]


@pytest.mark.skipif(torch.cuda.is_available(), reason="the figures are a CPU's")
@pytest.mark.parametrize("script", SCRIPTS)
def test_golden_trajectory(tmp_path, script):
    golden = [json.loads(line) for line in (GOLDEN / f"{script}.jsonl").read_text().splitlines()]
    more = [] if script == "reward_model_bt" else ["--replay", GOLDEN / "rollouts"]
    got = figures(script, tmp_path, *more)
    assert len(got) == len(golden) == 10
    for mine, expected in zip(got, golden, strict=True):
        assert mine == {k: pytest.approx(v, rel=2e-3, abs=2e-5) for k, v in expected.items()}, f"step {mine['step']}"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        if not (GOLDEN / "rollouts").exists():  # the engine's, once: another release of vLLM may sample others
            figures("grpo_fsdp", Path(folder) / "record", "--record", GOLDEN / "rollouts", "--kv-cache-gib", 0.125)
        for name in SCRIPTS:
            more = [] if name == "reward_model_bt" else ["--replay", GOLDEN / "rollouts"]
            rows = figures(name, Path(folder) / name, *more)
            (GOLDEN / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
