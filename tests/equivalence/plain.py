"""The three algorithms as plainly as they can be put: one device, no sharding, no packing, no code of the scripts.

The forward is transformers' own, over right-padded rows or over one row at a time; gradients are autograd's, the
optimizer is torch's AdamW. Per-token quantities are lists with one tensor per response.
"""

import copy
import hashlib
import math

import numpy as np
import torch
import torch.nn.functional as F


def seed_for(*parts) -> int:
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def hidden_states(backbone, rows, padded):
    """Of each row's last prompt token and of its response tokens: response length + 1 of them."""
    ids = [row["prompt_ids"] + row["response_ids"] for row in rows]
    if padded:
        longest = max(map(len, ids))
        mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in ids])
        batch = torch.tensor([row + [0] * (longest - len(row)) for row in ids])
        states = backbone(batch, attention_mask=mask).last_hidden_state
    else:
        states = [backbone(torch.tensor([row])).last_hidden_state[0] for row in ids]
    return [s[len(row["prompt_ids"]) - 1 : len(i)] for s, row, i in zip(states, rows, ids, strict=True)]


def logprobs(model, rows, temperature, padded=True):
    """Log-prob of each response token, and the entropy of the distribution it was drawn from."""
    out = []
    for states, row in zip(hidden_states(model.model, rows, padded), rows, strict=True):
        law = torch.distributions.Categorical(logits=model.lm_head(states[:-1]).float() / temperature)
        out.append((law.log_prob(torch.tensor(row["response_ids"])), law.entropy()))
    return [list(x) for x in zip(*out, strict=True)]


def scalars(model, rows, padded=True):
    """The head's output before each response token, and after the last one."""
    outputs = [model.score(states)[:, 0] for states in hidden_states(model.model, rows, padded)]
    return [o[:-1] for o in outputs], [o[-1] for o in outputs]


def learning_rate(step, num_steps, peak, s):
    if step < s["warmup_steps"]:
        return peak * step / s["warmup_steps"]
    done = (step - s["warmup_steps"]) / max(1, num_steps + 1 - s["warmup_steps"])
    return peak if s["lr_schedule"] == "constant" else peak * (1 + math.cos(math.pi * done)) / 2


def audit(old, rows):
    """How far the engine's log-probs are from the trainer's, before any correction."""
    log_w = np.concatenate([o.numpy() - np.array(r["logprobs"]) for o, r in zip(old, rows, strict=True)])
    w = np.exp(log_w)
    return {
        "rollout/logprob_diff_mean": np.abs(log_w).mean(), "rollout/logprob_diff_max": np.abs(log_w).max(),
        "rollout/ratio_p01": np.quantile(w, 0.01), "rollout/ratio_p99": np.quantile(w, 0.99),
        "rollout/ratio_k3": np.mean(w - 1 - log_w), "rollout/ess": w.sum() ** 2 / len(w) / (w**2).sum(),
    }  # fmt: skip


def correction(s, old, rows):
    """A weight for each token, which responses are kept, and the share of tokens that were cut."""
    if s["rollout_correction"] == "none":
        return [torch.ones_like(o) for o in old], [True] * len(rows), None
    cap, log_w = s["correction_cap"], [o - torch.tensor(r["logprobs"]) for o, r in zip(old, rows, strict=True)]
    tokens = sum(map(len, old))
    if s["rollout_correction"] == "token-tis":
        cut = sum((w.exp() >= cap).sum().item() for w in log_w)
        return [w.exp().clamp(max=cap) for w in log_w], [True] * len(rows), cut / tokens
    products = [w.sum().exp() for w in log_w]
    cut = sum(len(o) for o, w in zip(old, products, strict=True) if w > cap)
    return (
        [w.expand(len(o)) for o, w in zip(old, products, strict=True)],
        [bool(w <= cap) for w in products],
        cut / tokens,
    )


def group_advantages(s, rows, old):
    """Of each response over its group, those without a score left out; one number for all its tokens."""
    out = []
    for start in range(0, len(rows), s["group_size"]):
        group = rows[start : start + s["group_size"]]
        scores = [r["score"] for r in group if r["judged"]]
        spread = max(np.std(scores, ddof=1) if len(scores) > 1 else 0.0, 1e-3) if s["scale_advantages"] else 1.0
        out += [(r["score"] - np.mean(scores)) / spread if r["judged"] else 0.0 for r in group]
    return [torch.full_like(o, a) for o, a in zip(old, out, strict=True)]


def token_advantages(s, rows, old, ref, values, after, coef, keep):
    """PPO's: advantages and returns of each token."""
    advantages, returns = [], []
    for i, row in enumerate(rows):
        truncated, v = row["finish_reason"] == "length", values[i]
        rewards = -coef * (old[i] - ref[i]) if s["kl_coef"] and s["kl_in"] == "reward" else torch.zeros_like(old[i])
        score = row["score"] if row["judged"] else 0.0
        score = min(max(score, -s["score_clip"]), s["score_clip"]) if s["score_clip"] else score
        rewards[-1] += score - s["missing_eos_penalty"] * truncated
        after_last = after[i] if truncated and s["bootstrap_truncated"] else torch.tensor(0.0)
        deltas = rewards + s["gamma"] * torch.cat([v[1:], after_last[None]]) - v
        advantage, backwards = torch.tensor(0.0), []
        for delta in deltas.flip(0):
            advantage = delta + s["gamma"] * s["gae_lambda"] * advantage
            backwards.append(advantage)
        advantages.append(torch.stack(backwards[::-1]))
        returns.append(advantages[-1] + v)
    if s["whiten_advantages"]:
        tokens = torch.cat([a for a, k in zip(advantages, keep, strict=True) if k])
        advantages = [(a - tokens.mean()) / (tokens.var(correction=0) + 1e-8).sqrt() for a in advantages]
    return advantages, returns


def policy_terms(s, ratio, advantage):
    """PPO's clipped surrogate of each token, by cases: where a bound is active, no gradient."""
    low, high = 1 - s["clip_low"], 1 + s["clip_high"]
    clipped = torch.where(advantage > 0, ratio > high, ratio < low) & (advantage != 0)
    loss = -advantage * torch.where(clipped, ratio.detach().clamp(low, high), ratio)
    if s.get("dual_clip"):
        over = (advantage < 0) & (loss > -s["dual_clip"] * advantage)
        loss = torch.where(over, -s["dual_clip"] * advantage, loss)
    return loss, clipped


def kl_terms(s, logprob, ref, ratio):
    """Each token's estimate of the KL to the reference, and the loss whose gradient is the reverse KL's."""
    d = logprob - ref
    value = {"k1": d, "k2": d**2 / 2, "k3": (-d).exp() - 1 + d}[s["kl_estimator"]]
    return value.detach(), ratio.detach() * d**2 / 2


def value_terms(s, value, before, target):
    errors = [(value - target) ** 2]
    if s["value_clip"]:
        errors.append((before + (value - before).clamp(-s["value_clip"], s["value_clip"]) - target) ** 2)
    return torch.stack(errors).max(0).values / 2


def apply(learners, rates, s, first, norms, update=True):
    """Clip and step every learner; the gradients of the run's first optimizer step are kept in `first`.

    update=False: the gradient is measured and left out.
    """
    for name, (model, optimizer) in learners.items():
        if name not in first:
            first[name] = {n: p.grad.clone() for n, p in model.named_parameters()}
        norms[name].append(torch.nn.utils.clip_grad_norm_(model.parameters(), s["max_grad_norm"]).item())
        optimizer.param_groups[0]["lr"] = rates[name]
        if update:
            optimizer.step()
        optimizer.zero_grad()


def states(parts):
    """A copy of weights and optimizers."""
    return copy.deepcopy([part.state_dict() for pair in parts.values() for part in pair])


def restore(parts, saved):
    for part, state in zip((part for pair in parts.values() for part in pair), saved, strict=True):
        part.load_state_dict(copy.deepcopy(state))


def adamw(model, s):
    return model, torch.optim.AdamW(model.parameters(), lr=1.0, weight_decay=s["weight_decay"])


def train_policy(s, batches, policy, reference=None, critic=None, padded=True):
    """GRPO, or PPO where there is a critic, on recorded batches: figures of each step, first gradients, weights.

    Args: s: the flags; batches: of each step the recorded rows, prompt-major.
    """
    T, coef, figures, first = s["temperature"], s["kl_coef"], [], {}
    parts = {"policy": adamw(policy, s)} | ({"critic": adamw(critic, s)} if critic else {})
    factor, saved = 1.0, None
    for step, rows in enumerate(batches, 1):
        judged = [row["judged"] for row in rows]
        frozen = s.get("critic_warmup_steps", 0)
        rates = {"policy": learning_rate(step - frozen, s["num_steps"] - frozen, s["lr"], s)} if step > frozen else {}
        with torch.no_grad():
            old, _ = logprobs(policy, rows, T, padded)
            ref = logprobs(reference, rows, T, padded)[0] if reference else old
            weights, keep, cut = correction(s, old, rows)
            if critic:
                rates["critic"] = learning_rate(step, s["num_steps"], s["critic_lr"], s)
                keep = [k and j for k, j in zip(keep, judged, strict=True)]
                values, after = scalars(critic, rows, padded)
                advantages, returns = token_advantages(s, rows, old, ref, values, after, coef, keep)
            else:
                advantages = group_advantages(s, rows, old)
        sums, norms, seen = dict.fromkeys(("loss", "clipped", "entropy", "kl", "value"), 0.0), {n: [] for n in parts}, 0
        left_out, taken = False, []
        for epoch in range(s["update_epochs"]):
            order = np.random.default_rng(seed_for("minibatch", s["seed"], step, epoch)).permutation(len(rows))
            for chosen in order.reshape(-1, s["minibatch_size"] or len(rows)):
                chosen = [i for i in chosen if keep[i]]
                tokens, loss, value_loss = sum(len(old[i]) for i in chosen), 0.0, 0.0
                if tokens == 0 or left_out:
                    continue
                moved, new = 0.0, [rows[i] for i in chosen]
                new_logprobs, entropy = logprobs(policy, new, T, padded)
                new_values = scalars(critic, new, padded)[0] if critic else new_logprobs
                for i, lp, h, v in zip(chosen, new_logprobs, entropy, new_values, strict=True):
                    ratio = (lp - old[i]).exp()
                    moved += (ratio - 1 - (lp - old[i])).sum().item() / tokens
                    term, clipped = policy_terms(s, ratio, advantages[i])
                    term = term * weights[i]
                    loss = loss + term.sum() - s.get("entropy_coef", 0.0) * h.sum()
                    if reference and s.get("kl_in", "loss") == "loss":
                        value, path = kl_terms(s, lp, ref[i], ratio)
                        loss, sums["kl"] = loss + coef * path.sum(), sums["kl"] + value.sum().item()
                    if critic:
                        error = value_terms(s, v, values[i], returns[i]).sum()
                        value_loss, sums["value"] = value_loss + error, sums["value"] + error.item()
                    sums["loss"], sums["clipped"] = (
                        sums["loss"] + term.sum().item(),
                        sums["clipped"] + clipped.sum().item(),
                    )
                    sums["entropy"], seen = sums["entropy"] + h.sum().item(), seen + len(lp)
                if "policy" in rates:
                    (loss / tokens).backward()
                if critic:
                    (value_loss / tokens).backward()
                crossed = 0 < s["max_kl"] < moved
                left_out = crossed and s["on_max_kl"] != "lower-lr"
                lowered = {n: factor * rate for n, rate in rates.items()}
                taken.append(lowered.get("policy"))
                apply({n: parts[n] for n in rates}, lowered, s, first, norms, not left_out)
                if crossed and s["on_max_kl"] == "lower-lr":
                    factor *= 1 - s["kl_lr_decay"]
                if crossed and s["on_max_kl"] == "roll-back":
                    restore(parts, saved)
        saved = states(parts)
        row = {"reward/score": np.mean([r["score"] for r in rows if r["judged"]]), **audit(old, rows)}
        if "policy" in rates:
            row |= {
                "policy/loss": sums["loss"] / seen, "policy/clip_frac": sums["clipped"] / seen,
                "policy/entropy": sums["entropy"] / seen, "optim/grad_norm": np.mean(norms["policy"]),
                "optim/lr": np.mean(taken),
            }  # fmt: skip
        if critic:
            row |= {"value/loss": sums["value"] / seen, "optim/critic_grad_norm": np.mean(norms["critic"])}
            kl = np.mean([(o - f).sum() for o, f, k in zip(old, ref, keep, strict=True) if k])
            if reference:
                row |= {"policy/kl_coef": coef, "policy/ref_kl_response": kl}
                rate = {"fixed": 0.0, "adaptive": 0.1, "horizon": len(rows) / s["kl_horizon"]}[s["kl_controller"]]
                coef *= 1 + rate * min(max(kl / s["kl_target"] - 1, -0.2), 0.2) * (step > frozen)
        if reference and s.get("kl_in", "loss") == "loss" and "policy" in rates:
            row["policy/kl_loss" if critic else f"policy/ref_kl_{s['kl_estimator']}"] = sums["kl"] / seen
        if cut is not None:
            row["rollout/corrected_frac"] = cut
        figures.append(row)
    weights = {name: {n: p.detach() for n, p in model.named_parameters()} for name, (model, _) in parts.items()}
    return figures, first, weights


def train_reward_model(s, pairs, model, padded=True):
    """Bradley-Terry over the same pairs at each step.

    Args: pairs: (row of the chosen response, row of the rejected one, margin).
    """
    figures, first, norms = [], {}, {"reward_model": []}
    parts = {"reward_model": adamw(model, s)}
    for step in range(1, s["num_steps"] + 1):
        chosen, rejected = (torch.stack(scalars(model, [pair[k] for pair in pairs], padded)[1]) for k in (0, 1))
        margin = torch.tensor([pair[2] for pair in pairs])
        losses = -F.logsigmoid(chosen - rejected - margin) + s["centring_coef"] * (chosen + rejected) ** 2
        losses.mean().backward()
        rates = {"reward_model": learning_rate(step, s["num_steps"], s["lr"], s)}
        apply(parts, rates, s, first, norms)
        figures.append({
            "rm/loss": losses.mean().item(), "rm/accuracy": (chosen > rejected).float().mean().item(),
            "rm/margin": (chosen - rejected).mean().item(), "optim/grad_norm": norms["reward_model"][-1],
            "optim/lr": rates["reward_model"],
        })  # fmt: skip
    return figures, first, {"reward_model": {n: p.detach() for n, p in model.named_parameters()}}
