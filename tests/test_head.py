"""The head's own forward and backward passes against autograd through plain logits."""

import pytest
import torch
import torch.nn.functional as F

from utils import head

H, V = 6, 11


def plain(hidden_NH, weight_VH, bias_V, target_N, temperature):
    dist = torch.distributions.Categorical(logits=F.linear(hidden_NH, weight_VH, bias_V) / temperature)
    return dist.log_prob(target_N), dist.entropy()


def inputs(num_tokens: int, bias: bool, scale: float = 1.0) -> tuple:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return (scale * torch.randn(*shape, generator=generator)).requires_grad_()

    target_N = torch.randint(0, V, (num_tokens,), generator=generator)
    return (draw(num_tokens, H), draw(V, H), draw(V) if bias else None), target_N, draw(2, num_tokens).detach()


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.5])
@pytest.mark.parametrize("bias", [False, pytest.param(True, id="bias")])
@pytest.mark.parametrize("entropy_grad", [False, pytest.param(True, id="entropy_grad")])
@pytest.mark.parametrize("scale", [1.0, 30.0])  # logits of a thousand: exp() of them would overflow
def test_values_and_gradients_are_those_of_autograd(monkeypatch, temperature, bias, entropy_grad, scale):
    compare(monkeypatch, head.KERNELS, temperature, bias, entropy_grad, scale)


@pytest.mark.parametrize("entropy_grad", [False, pytest.param(True, id="entropy_grad")])
def test_compiled_kernels_too(monkeypatch, entropy_grad):
    torch.compiler.reset()
    kernels = head.compiled_kernels()
    assert kernels != head.KERNELS
    compare(monkeypatch, kernels, 0.7, False, entropy_grad, 1.0)


def compare(monkeypatch, kernels, temperature, bias, entropy_grad, scale):
    monkeypatch.setattr(head, "HEAD_CHUNK", 3)  # 8 tokens: three chunks, the last one short
    tensors, target_N, (for_logprobs_N, for_entropy_N) = inputs(8, bias, scale)
    leaves = [t for t in tensors if t is not None]
    got = head.LogProbHead.apply(*tensors, target_N, temperature, entropy_grad, kernels)
    expected = plain(*tensors, target_N, temperature)
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-5)
    assert got[1].requires_grad == entropy_grad

    def gradients(logprobs_N, entropy_N):
        loss = (logprobs_N * for_logprobs_N).sum() + (entropy_N * for_entropy_N).sum() * entropy_grad
        return torch.autograd.grad(loss, leaves)

    for ours, theirs in zip(gradients(*got), gradients(*expected), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5 * theirs.abs().max().item(), rtol=1e-4)


def test_no_tokens_give_a_gradient_of_zeros():
    """A rank without responses still takes part in the reduction."""
    tensors, target_N, _ = inputs(0, True)
    logprobs_N, entropy_N = head.LogProbHead.apply(*tensors, target_N, 1.0, False, head.KERNELS)
    assert logprobs_N.shape == entropy_N.shape == (0,)
    logprobs_N.sum().backward()
    assert all(not t.grad.any() for t in tensors)


@pytest.mark.parametrize("entropy_grad", [False, pytest.param(True, id="entropy_grad")])
def test_bfloat16_logits_are_summed_in_float32(monkeypatch, entropy_grad):
    monkeypatch.setattr(head, "HEAD_CHUNK", 3)
    tensors, target_N, (for_logprobs_N, for_entropy_N) = inputs(8, False)
    mine, autograds = ([t.detach().bfloat16().requires_grad_() for t in tensors[:2]] for _ in range(2))
    got = head.LogProbHead.apply(*mine, None, target_N, 1.0, entropy_grad, head.KERNELS)
    logprobs_NV = F.linear(*autograds).float().log_softmax(-1)
    expected = logprobs_NV.gather(-1, target_N[:, None])[:, 0], -(logprobs_NV.exp() * logprobs_NV).sum(-1)
    torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-6)
    for logprobs_N, entropy_N in (got, expected):
        ((logprobs_N * for_logprobs_N).sum() + (entropy_N * for_entropy_N).sum() * entropy_grad).backward()
    for ours, theirs in zip(mine, autograds, strict=True):
        assert ours.grad.dtype == torch.bfloat16
        torch.testing.assert_close(ours.grad, theirs.grad, atol=0.02 * theirs.grad.abs().max().item(), rtol=0)


def test_what_is_frozen_costs_no_gradient():
    tensors, target_N, _ = inputs(8, True)
    tensors[1].requires_grad_(False)
    head.LogProbHead.apply(*tensors, target_N, 1.0, False, head.KERNELS)[0].sum().backward()
    assert tensors[1].grad is None and tensors[0].grad.any() and tensors[2].grad.any()
