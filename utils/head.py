"""Log-prob and entropy of the output head, a chunk of tokens at a time, forward and backward: [N, V] never exists.

Shapes: N tokens, n of a chunk, H hidden, V vocabulary. Autograd would keep several float32 copies of [n, V] logits, or
with checkpoints pass over them once more; here the backward pass computes the logits again and goes through them once.
"""

import torch
import torch.nn.functional as F

HEAD_CHUNK = 2048  # tokens; at a vocabulary of 152k one float32 [chunk, V] is 1.2 GiB


def over_temperature(logits_nV: torch.Tensor, temperature: float) -> torch.Tensor:
    # DETAIL: logits are divided by the temperature once, in float32, before log-prob and entropy alike, as the engine
    # does (processed_logprobs); dividing log-probs instead would leave them unnormalised.
    return logits_nV.float() if temperature == 1.0 else logits_nV.float() / temperature


def chunk_forward(logits_nV: torch.Tensor, target_n: torch.Tensor, temperature: float) -> tuple:
    """Log-prob of the targets, entropy, and log-sum-exp of the logits over the temperature: all [n] float32, nats."""
    logits_nV = over_temperature(logits_nV, temperature)
    max_n1 = logits_nV.amax(-1, keepdim=True)
    centred_nV = logits_nV - max_n1
    exp_nV = centred_nV.exp()
    sum_n = exp_nV.sum(-1)
    lse_n = max_n1[:, 0] + sum_n.log()
    # H = lse - E[logit], of centred logits
    entropy_n = sum_n.log() - (exp_nV * centred_nV).sum(-1) / sum_n
    return logits_nV.gather(-1, target_n[:, None])[:, 0] - lse_n, entropy_n, lse_n


def chunk_backward(
    logits_nV: torch.Tensor,
    target_n: torch.Tensor,
    temperature: float,
    lse_n: torch.Tensor,
    entropy_n: torch.Tensor,
    grad_logprob_n: torch.Tensor,
    grad_entropy_n: torch.Tensor | None,
) -> torch.Tensor:
    """Gradient of the logits [n, V], in their dtype: d log p_t / dz_v = [v = t] - p_v, dH / dz_v = -p_v (log p_v + H).

    z: logits over the temperature.
    """
    logprobs_nV = over_temperature(logits_nV, temperature) - lse_n[:, None]
    # in place where it can be: uncompiled, every line is a float32 [n, V]
    probs_nV = logprobs_nV.exp_() if grad_entropy_n is None else logprobs_nV.exp()
    v_V = torch.arange(logits_nV.shape[-1], device=logits_nV.device)
    grad_nV = torch.where(v_V == target_n[:, None], probs_nV - 1, probs_nV).mul_(-grad_logprob_n[:, None])
    if grad_entropy_n is not None:
        grad_nV -= logprobs_nV.add_(entropy_n[:, None]).mul_(probs_nV).mul_(grad_entropy_n[:, None])
    return over_temperature(grad_nV, temperature).to(logits_nV.dtype)


KERNELS = chunk_forward, chunk_backward


def compiled_kernels() -> tuple:
    """The kernels fused. torch.compile's default makes a variable of what changes: n, not V and the temperature.

    With V a variable too (in a process that sees several), an index of [n, V] costs divisions, and those several times
    the memory traffic.
    """
    return tuple(torch.compile(kernel) for kernel in KERNELS)


class LogProbHead(torch.autograd.Function):
    """hidden [N, H], weight [V, H], bias [V] or None, target [N] -> log-prob and entropy, each [N] float32.

    `LogProbHead.apply(hidden, weight, bias, target, temperature, entropy_grad, kernels)`; kernels: `KERNELS`, or those
    compiled. Entropy has a gradient only with entropy_grad.
    """

    @staticmethod
    def forward(ctx, hidden_NH, weight_VH, bias_V, target_N, temperature, entropy_grad, kernels):
        chunks = [
            kernels[0](F.linear(hidden_nH, weight_VH, bias_V), target_n, temperature)
            for hidden_nH, target_n in zip(hidden_NH.split(HEAD_CHUNK), target_N.split(HEAD_CHUNK), strict=True)
        ]
        logprobs_N, entropy_N, lse_N = (torch.cat(parts) for parts in zip(*chunks, strict=True))
        ctx.save_for_backward(hidden_NH, weight_VH, bias_V, target_N, lse_N, entropy_N)
        ctx.temperature, ctx.entropy_grad, ctx.kernels = temperature, entropy_grad, kernels
        if not entropy_grad:
            ctx.mark_non_differentiable(entropy_N)
        return logprobs_N, entropy_N

    @staticmethod
    def backward(ctx, grad_logprobs_N, grad_entropy_N):
        hidden_NH, weight_VH, bias_V, *per_token = ctx.saved_tensors
        of_hidden, of_weight, of_bias = ctx.needs_input_grad[:3]
        grad_hidden_NH = torch.empty_like(hidden_NH) if of_hidden else None
        grad_weight_VH = torch.zeros_like(weight_VH) if of_weight else None
        grad_bias_V = torch.zeros_like(bias_V) if of_bias else None
        for start in range(0, len(hidden_NH), HEAD_CHUNK):
            n = slice(start, start + HEAD_CHUNK)
            target_n, lse_n, entropy_n = (x[n] for x in per_token)
            grad_entropy_n = grad_entropy_N[n] if ctx.entropy_grad else None
            grad_nV = ctx.kernels[1](
                F.linear(hidden_NH[n], weight_VH, bias_V), target_n, ctx.temperature, lse_n, entropy_n,
                grad_logprobs_N[n], grad_entropy_n,
            )  # fmt: skip
            if of_hidden:
                torch.mm(grad_nV, weight_VH, out=grad_hidden_NH[n])
            if of_weight:
                # DETAIL: a micro-batch's gradient of the output matrix is summed in the forward's dtype, chunk after
                # chunk of 2,048 tokens, because a float32 sum would take 4 more bytes for each of its elements;
                # micro-batches and ranks are summed in float32, as all gradients are.
                grad_weight_VH.addmm_(grad_nV.T, hidden_NH[n])
            if of_bias:
                grad_bias_V += grad_nV.sum(0)
            del grad_nV  # or the next chunk would be computed beside it
        return grad_hidden_NH, grad_weight_VH, grad_bias_V, None, None, None, None
