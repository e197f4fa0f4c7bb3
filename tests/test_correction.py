"""`--rollout-correction` in a whole step: rollouts whose engine log-probs are far off, some of them without a score."""

import json
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from conftest import ROOT, run, torchrun
from test_golden import GOLDEN
from test_runs import same_run
from transformers import AutoModelForCausalLM

from utils import tiny

CAP, LOW, HIGH = 1.3, 0.2, 0.2


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The recorded rollouts of a step, with the engine's log-probs moved by up to 0.4 nats a token."""
    folder = tmp_path_factory.mktemp("correction")
    tiny.make_model(folder / "model", seed=11, num_sft_steps=0)
    tiny.make_data(folder / "data")
    table, generator = pq.read_table(GOLDEN / "rollouts/step_1.parquet"), np.random.default_rng(0)
    rows = table.to_pylist()
    for i, row in enumerate(rows):
        shift = 0.1 * (i % 3 - 1) + generator.uniform(-0.3, 0.3, row["length"])
        row["logprobs"] = (np.array(row["logprobs"]) + shift).tolist()
        row["judged"], row["score"] = i not in (2, 9), generator.normal()
    (folder / "rollouts").mkdir()
    pq.write_table(pa.Table.from_pylist(rows, table.schema), folder / "rollouts/step_1.parquet")
    return folder


def command(folder, script, name, kind):
    return [
        ROOT / f"{script}.py", "--run-dir", folder / name, "--model", folder / "model",
        "--train-files", folder / "data/train.parquet", "--reward", "tiny", "--replay", folder / "rollouts",
        "--rollout-correction", kind, "--correction-cap", CAP, "--num-steps", 1, "--prompts-per-step", 4,
        "--group-size", 4, "--minibatch-size", 16, "--lr", 1e-4, "--max-prompt-len", 16, "--max-response-len", 12,
        "--kl-coef", 0.0, "--save-every", 0, "--clip-low", LOW, "--clip-high", HIGH, "--max-grad-norm", 1e6,
    ]  # fmt: skip


def reference(folder, script, kind):
    """The gradient norm of the step, from a plain loop; what is masked leaves the denominator too."""
    rows = pq.read_table(folder / "rollouts/step_1.parquet").to_pylist()
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    scores = torch.tensor([r["score"] for r in rows], dtype=torch.float64).view(4, 4)
    judged = torch.tensor([r["judged"] for r in rows])
    group = torch.stack([(s - s[j].mean()) / s[j].std() * j for s, j in zip(scores, judged.view(4, 4), strict=True)])
    terms, tokens, cut, seen = [], 0, 0, 0
    weights, advantages, kept = [], [], []
    for i, row in enumerate(rows):
        lp = torch.log_softmax(logits(model, row), -1).gather(-1, torch.tensor(row["response_ids"])[:, None])[:, 0]
        log_w = lp.detach() - torch.tensor(row["logprobs"])
        w = log_w.exp().clamp(max=CAP) if kind == "token-tis" else log_w.sum().exp().expand(len(lp))
        keep = kind == "token-tis" or w[0] <= CAP
        cut += len(lp) if not keep else (w == CAP).sum().item()
        seen += len(lp)
        # GRPO gives a response without a score advantage 0 and counts its tokens; PPO leaves it out
        kept.append(keep and (script == "grpo_fsdp" or bool(judged[i])))
        weights.append(w), terms.append(lp)
        advantage = group.flatten()[i].item() if script == "grpo_fsdp" else row["score"]
        advantages.append(torch.full_like(lp.detach(), advantage))
    assert (sum(kept) == 16) == (script == "grpo_fsdp" and kind == "token-tis")
    if script == "ppo_fsdp":  # a critic of zeros, lambda 1: the score, whitened over the tokens that are kept
        everything = torch.cat([a for a, k in zip(advantages, kept, strict=True) if k])
        advantages = [(a - everything.mean()) / everything.std(correction=0) for a in advantages]
    tokens = sum(len(lp) for lp, k in zip(terms, kept, strict=True) if k)
    loss = -sum(
        (w * a * (lp - lp.detach()).exp()).sum() / tokens
        for w, a, lp, k in zip(weights, advantages, terms, kept, strict=True)
        if k
    )
    loss.backward()
    return torch.nn.utils.clip_grad_norm_(model.parameters(), 1e6).item(), cut / seen


def logits(model, row):
    return model(torch.tensor([row["prompt_ids"] + row["response_ids"]])).logits[0, len(row["prompt_ids"]) - 1 : -1]


@pytest.mark.parametrize("script", ["grpo_fsdp", "ppo_fsdp"])
@pytest.mark.parametrize("kind", ["token-tis", "seq-mask"])
def test_a_corrected_step_is_the_plain_loop(folder, script, kind):
    name, more = f"{script}_{kind}", ["--gae-lambda", 1.0] if script == "ppo_fsdp" else []
    result = run([sys.executable, *command(folder, script, name, kind), *more])
    assert result.returncode == 0, result.stderr[-4000:]
    row = json.loads((folder / name / "metrics.jsonl").read_text())
    norm, cut = reference(folder, script, kind)
    assert row["optim/grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert row["rollout/corrected_frac"] == pytest.approx(cut) and 0 < cut < 1
    assert row["rollout/ess"] < 0.99 and row["reward/error_frac"] == 2 / 16


def test_two_ranks_correct_as_one(folder):
    torchrun(2, *command(folder, "ppo_fsdp", "two", "seq-mask"), "--gae-lambda", 1.0)
    same_run(folder / "two", folder / "ppo_fsdp_seq-mask")
