"""One step of grpo_fsdp.py against a plain loop over transformers: every flag of the loss at a value of its own."""

import json
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from conftest import ROOT, run
from dense_reward import dense_by_row
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from utils import tiny
from utils.dist import seed_for

T, LR, WD, LOW, HIGH, KL, NORM = 0.7, 4e-3, 1.0, 0.1, 0.3, 0.5, 1.0


def logprobs(model, r):
    ids = torch.tensor([r["prompt_ids"] + r["response_ids"]])
    logits = model(ids).logits[0, len(r["prompt_ids"]) - 1 : -1].float() / T
    dist = torch.distributions.Categorical(logits=logits)
    return dist.log_prob(torch.tensor(r["response_ids"])), dist.entropy()


@pytest.mark.parametrize("minibatch", [8, 16])
def test_one_step_is_the_plain_loop(tmp_path, minibatch):
    """Two epochs over each batch: of two minibatches, and of one."""
    tiny.make_model(tmp_path / "model", seed=3, num_sft_steps=0)
    tiny.make_model(tmp_path / "ref", seed=4, num_sft_steps=0)
    tiny.make_data(tmp_path / "data")
    result = run([
        sys.executable, Path(__file__).parent / "workers/spied_run.py", "grpo_fsdp", tmp_path / "seen.json",
        "--run-dir", tmp_path / "run", "--model", tmp_path / "model", "--ref-model", tmp_path / "ref",
        "--train-files", tmp_path / "data/train.parquet", "--val-files", tmp_path / "data/val.parquet",
        "--reward", f"{ROOT}/tests/dense_reward.py:dense_by_row",
        "--num-steps", 1, "--prompts-per-step", 4, "--group-size", 4, "--minibatch-size", minibatch,
        "--update-epochs", 2, "--lr", LR, "--lr-schedule", "cosine",
        "--warmup-steps", 2, "--weight-decay", WD, "--temperature", T,
        "--no-scale-advantages", "--clip-low", LOW, "--clip-high", HIGH, "--kl-coef", KL, "--max-grad-norm", NORM,
        "--max-prompt-len", 16, "--max-response-len", 12, "--kv-cache-gib", 0.125, "--max-num-seqs", 64,
        "--save-every", 0,
    ])  # fmt: skip
    assert result.returncode == 0, result.stderr[-4000:]
    first, training, last = json.loads((tmp_path / "seen.json").read_text())
    assert first["greedy"] and last["greedy"] and not training["greedy"]
    assert len(first["rollouts"]) == len(last["rollouts"]) == 200
    rollouts, rows = training["rollouts"], pq.read_table(tmp_path / "data/train.parquet").to_pylist()
    row = json.loads((tmp_path / "run/metrics.jsonl").read_text().splitlines()[-1])

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path / "ref", dtype=torch.float32)
    tokenizer = tiny.make_tokenizer()
    texts = [tokenizer.decode(r["response_ids"], skip_special_tokens=True) for r in rollouts]
    scores = torch.tensor([dense_by_row(text, rows[r["uid"]]) for text, r in zip(texts, rollouts, strict=True)])
    advantages = (scores.view(4, 4) - scores.view(4, 4).mean(-1, keepdim=True)).flatten()
    with torch.no_grad():
        old = [logprobs(model, r)[0] for r in rollouts]
        ref = [logprobs(reference, r)[0] for r in rollouts]
    assert max((torch.tensor(r["logprobs"]) - o).abs().max() for r, o in zip(rollouts, old, strict=True)) < 1e-4
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR / 2, weight_decay=WD)  # step 1 of a warm-up of 2
    norms, seen, clipped, entropy, k3 = [], 0, 0, 0.0, 0.0
    for epoch in range(2):
        order = np.random.default_rng(seed_for("minibatch", 1, 1, epoch)).permutation(16)
        for chosen in order.reshape(-1, minibatch):
            tokens, loss = sum(len(rollouts[i]["response_ids"]) for i in chosen), 0.0
            for i in chosen:
                lp, h = logprobs(model, rollouts[i])
                ratio, a, d = (lp - old[i]).exp(), advantages[i], lp - ref[i]
                cut = (ratio > 1 + HIGH) if a > 0 else (ratio < 1 - LOW)
                gain = torch.where(cut, (a * ratio).detach(), a * ratio)
                loss = loss + (-gain + KL * ratio.detach() * d**2 / 2).sum() / tokens
                seen, clipped, entropy = seen + len(lp), clipped + cut.sum().item(), entropy + h.sum().item()
                k3 += ((-d).exp() - 1 + d).sum().item()
            loss.backward()
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), NORM).item())
            optimizer.step()
            optimizer.zero_grad()
    assert clipped > 0
    expected = {
        "optim/grad_norm": np.mean(norms), "policy/clip_frac": clipped / seen, "policy/entropy": entropy / seen,
        "policy/ref_kl_k3": k3 / seen, "reward/score": scores.mean().item(), "optim/lr": LR / 2,
    }  # fmt: skip
    assert {k: row[k] for k in expected} == pytest.approx(expected, rel=2e-3)
    weights = load_file(tmp_path / "run/hf/model.safetensors")
    far = [(weights[n] - p.detach()).abs().mean().item() for n, p in model.named_parameters() if n in weights]
    assert far and max(far) < 0.002 * LR, max(far) / LR
