"""One step of ppo_fsdp.py against a plain loop over transformers: every flag of the losses at a value of its own."""

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
from test_reference_step import logprobs
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from utils import tiny
from utils.dist import seed_for

T, LR, CRITIC_LR, WD, LOW, HIGH, NORM = 0.7, 4e-3, 3e-3, 1.0, 0.1, 0.3, 1.0
FULL = {
    "minibatch_size": 8, "update_epochs": 2, "kl_in": "reward", "kl_coef": 0.5, "kl_controller": "adaptive",
    "kl_target": 0.001, "gamma": 0.9, "gae_lambda": 0.8, "bootstrap_truncated": True, "whiten_advantages": True,
    "dual_clip": 1.1, "value_clip": 0.05, "entropy_coef": 0.02, "score_clip": 0.4, "missing_eos_penalty": 0.3,
    "num_steps": 1,
}  # fmt: skip
PLAIN = {  # one optimizer step, rule and reward model added, KL in the loss
    "minibatch_size": 16, "update_epochs": 1, "kl_in": "loss", "kl_estimator": "k3", "kl_coef": 0.5, "gamma": 1.0,
    "gae_lambda": 0.95, "bootstrap_truncated": False, "whiten_advantages": False, "dual_clip": 0.0, "value_clip": 0.0,
    "entropy_coef": 0.0, "score_clip": 0.0, "missing_eos_penalty": 0.0, "num_steps": 1,
}  # fmt: skip
REINFORCE = PLAIN | {"gae_lambda": 1.0, "kl_coef": 0.0, "kl_in": "reward", "critic_lr": 0.0}
REINFORCE.pop("kl_estimator")


def scalars(model, r):
    """Of the state before each response token, and after the last one."""
    hidden = model.model(torch.tensor([r["prompt_ids"] + r["response_ids"]])).last_hidden_state[0]
    values = model.score(hidden)[len(r["prompt_ids"]) - 1 :, 0]
    return values[:-1], values[-1]


def save_scalar(folder, seed):
    """A random sequence classifier with one label and scores of about 0.3."""
    tiny.make_model(folder / "lm", seed=seed, num_sft_steps=0)
    torch.manual_seed(seed)
    model = AutoModelForSequenceClassification.from_pretrained(folder / "lm", num_labels=1)
    model.score.weight.data.normal_(0.0, 0.03)
    model.save_pretrained(folder)
    tiny.make_tokenizer().save_pretrained(folder)
    return folder


def flags(settings):
    for name, value in settings.items():
        word = name.replace("_", "-")
        yield from [f"--{'' if value else 'no-'}{word}"] if isinstance(value, bool) else [f"--{word}", value]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ppo")
    tiny.make_model(folder / "model", seed=3, num_sft_steps=0)
    file = folder / "model/generation_config.json"  # many ends, so that half of the random model's responses do end
    file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token_id": [256, *range(40, 60)]}))
    tiny.make_model(folder / "ref", seed=4, num_sft_steps=0)
    tiny.make_data(folder / "data")
    save_scalar(folder / "critic", 5), save_scalar(folder / "rm", 6)
    return folder


def train(folder, name, settings, *more):
    """Run the script; returns its training rollouts, its metrics row, and the command's settings with defaults."""
    rule = f"{ROOT}/tests/dense_reward.py:dense_by_row"
    reward = f"{rule}:2,model:{folder / 'rm'}:3" if name == "plain" else rule
    result = run([
        sys.executable, Path(__file__).parent / "workers/spied_run.py", "ppo_fsdp", folder / f"{name}.json",
        "--run-dir", folder / name, "--model", folder / "model", "--train-files", folder / "data/train.parquet",
        "--reward", reward, "--prompts-per-step", 4, "--group-size", 4, "--lr", LR, "--lr-schedule", "cosine",
        "--warmup-steps", 2, "--weight-decay", WD, "--temperature", T, "--clip-low", LOW, "--clip-high", HIGH,
        "--max-grad-norm", NORM, "--max-prompt-len", 16, "--max-response-len", 12, "--kv-cache-gib", 0.125,
        "--max-num-seqs", 64, "--save-every", 1, *flags(settings), *more,
    ])  # fmt: skip
    assert result.returncode == 0, result.stderr[-4000:]
    seen = json.loads((folder / f"{name}.json").read_text())
    assert [s["greedy"] for s in seen] == [False]
    return seen[0]["rollouts"], json.loads((folder / name / "metrics.jsonl").read_text().splitlines()[-1])


def rule_scores(folder, rollouts):
    rows, tokenizer = pq.read_table(folder / "data/train.parquet").to_pylist(), tiny.make_tokenizer()
    texts = [tokenizer.decode(r["response_ids"], skip_special_tokens=True) for r in rollouts]
    return torch.tensor([dense_by_row(text, rows[r["uid"]]) for text, r in zip(texts, rollouts, strict=True)])


def same_weights(model, file, lr):
    weights = load_file(file)
    far = [(weights[n] - p.detach()).abs().mean().item() for n, p in model.named_parameters() if n in weights]
    assert far and max(far) < 0.002 * lr, max(far) / lr


@pytest.mark.parametrize("name, settings", [("full", FULL), ("plain", PLAIN)])
def test_one_step_is_the_plain_loop(folder, name, settings):
    s = settings
    rollouts, row = train(
        folder, name, settings, "--ref-model", folder / "ref", "--critic-model", folder / "critic",
        "--critic-lr", CRITIC_LR,
    )  # fmt: skip
    model, reference = (AutoModelForCausalLM.from_pretrained(folder / n, dtype=torch.float32) for n in ("model", "ref"))
    critic, rm = (AutoModelForSequenceClassification.from_pretrained(folder / n) for n in ("critic", "rm"))
    with torch.no_grad():
        old, ref = ([logprobs(m, r)[0] for r in rollouts] for m in (model, reference))
        old_values, last = zip(*(scalars(critic, r) for r in rollouts), strict=True)
        model_scores = torch.stack([scalars(rm, r)[1] for r in rollouts])
    truncated = torch.tensor([r["finish_reason"] == "length" for r in rollouts])
    assert truncated.any() and not truncated.all()
    scores = rule_scores(folder, rollouts)
    scores = 2 * scores + 3 * model_scores if name == "plain" else scores
    paid = scores.clamp(-s["score_clip"], s["score_clip"]) if s["score_clip"] else scores
    assert not s["score_clip"] or (scores > s["score_clip"]).any()
    paid = paid - s["missing_eos_penalty"] * truncated
    advantages, returns, outcomes = [], [], []
    for i, v in enumerate(old_values):
        rewards = -s["kl_coef"] * (old[i] - ref[i]) * (s["kl_in"] == "reward")
        rewards[-1] += paid[i]
        after = last[i] if s["bootstrap_truncated"] and truncated[i] else torch.tensor(0.0)
        deltas = rewards + s["gamma"] * torch.cat([v[1:], after[None]]) - v
        advantage = torch.zeros(len(v) + 1)
        for t in reversed(range(len(v))):
            advantage[t] = deltas[t] + s["gamma"] * s["gae_lambda"] * advantage[t + 1]
        advantages.append(advantage[:-1]), returns.append(advantage[:-1] + v)
        ahead = [after]
        for reward in rewards.flip(0):
            ahead.append(reward + s["gamma"] * ahead[-1])
        outcomes.append(torch.stack(ahead[:0:-1]))
    if s["whiten_advantages"]:
        tokens = torch.cat(advantages)
        advantages = [(a - tokens.mean()) / tokens.std(correction=0) for a in advantages]

    # step 1 of a warm-up of 2
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR / 2, weight_decay=WD)
    critic_optimizer = torch.optim.AdamW(critic.parameters(), lr=CRITIC_LR / 2, weight_decay=WD)
    norms, critic_norms, losses, seen, cut, bound, value_cut = [], [], 0.0, 0, 0, 0, 0
    for epoch in range(s["update_epochs"]):
        order = np.random.default_rng(seed_for("minibatch", 1, 1, epoch)).permutation(16)
        for chosen in order.reshape(-1, s["minibatch_size"]):
            tokens = sum(len(rollouts[i]["response_ids"]) for i in chosen)
            loss, critic_loss = 0.0, 0.0
            for i in chosen:
                lp, entropy = logprobs(model, rollouts[i])
                ratio, a, d = (lp - old[i]).exp(), advantages[i], lp - ref[i]
                clipped = torch.where(a > 0, ratio > 1 + HIGH, ratio < 1 - LOW)
                term = torch.where(clipped, (-a * ratio.clamp(1 - LOW, 1 + HIGH)).detach(), -a * ratio)
                if s["dual_clip"]:
                    over = (a < 0) & (term > -s["dual_clip"] * a)
                    term, bound = torch.where(over, -s["dual_clip"] * a, term), bound + over.sum().item()
                cut, seen = cut + clipped.sum().item(), seen + len(lp)
                extra = s["kl_coef"] * ratio.detach() * d**2 / 2 * (s["kl_in"] == "loss")
                loss = loss + (term + extra - s["entropy_coef"] * entropy).sum() / tokens
                v, before, target = scalars(critic, rollouts[i])[0], old_values[i], returns[i]
                errors = [(v - target) ** 2]
                if s["value_clip"]:
                    errors.append((before + (v - before).clamp(-s["value_clip"], s["value_clip"]) - target) ** 2)
                    value_cut += (errors[1] > errors[0]).sum().item()
                worst = torch.stack(errors).max(0).values
                critic_loss, losses = critic_loss + 0.5 * worst.sum() / tokens, losses + 0.5 * worst.sum().item()
            loss.backward(), critic_loss.backward()
            for m, o, n in ((model, optimizer, norms), (critic, critic_optimizer, critic_norms)):
                n.append(torch.nn.utils.clip_grad_norm_(m.parameters(), NORM).item())
                o.step(), o.zero_grad()
    k1 = [(o - f) for o, f in zip(old, ref, strict=True)]
    values, targets = torch.cat(old_values), torch.cat(outcomes)
    expected = {
        "optim/grad_norm": np.mean(norms), "optim/critic_grad_norm": np.mean(critic_norms),
        "policy/clip_frac": cut / seen, "value/clip_frac": value_cut / seen, "value/loss": losses / seen,
        "value/explained_var": (1 - (targets - values).var() / targets.var()).item(),
        "policy/ref_kl_k1": torch.cat(k1).mean().item(), "policy/ref_kl_k2": (torch.cat(k1) ** 2 / 2).mean().item(),
        "policy/ref_kl_k3": ((-torch.cat(k1)).exp() - 1 + torch.cat(k1)).mean().item(),
        "policy/ref_kl_response": np.mean([k.sum().item() for k in k1]), "policy/kl_coef": s["kl_coef"],
        "reward/score": scores.mean().item(), "reward/score_std": scores.std(correction=0).item(),
        "optim/lr": LR / 2, "optim/critic_lr": CRITIC_LR / 2,
    }  # fmt: skip
    if s["dual_clip"]:
        expected["policy/dual_clip_frac"] = bound / seen
        assert bound > 0 and cut > 0 and value_cut > 0
    assert {k: row[k] for k in expected} == pytest.approx(expected, rel=2e-3)
    same_weights(model, folder / name / "hf/model.safetensors", LR)
    state = json.loads((folder / name / "checkpoints/step_1/state.json").read_text())["state"]
    steered = s["kl_coef"] * (1 + 0.1 * 0.2) if s.get("kl_controller") else s["kl_coef"]  # far over its target
    assert state["kl_coef"] == pytest.approx(steered)


def test_lambda_1_value_zero_and_no_whitening_is_reinforce(folder):
    """The plain estimate: minus score times the log-prob of the response, over the tokens of the batch."""
    rollouts, row = train(folder, "reinforce", REINFORCE, "--no-whiten-advantages")
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    scores, tokens = rule_scores(folder, rollouts), sum(len(r["response_ids"]) for r in rollouts)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR / 2, weight_decay=WD)
    loss = -sum(score * logprobs(model, r)[0].sum() for score, r in zip(scores, rollouts, strict=True)) / tokens
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), NORM).item()
    optimizer.step()
    assert row["optim/grad_norm"] == pytest.approx(norm, rel=1e-4) and row["value/mean"] == 0
    same_weights(model, folder / "reinforce/hf/model.safetensors", LR)
