"""PPO's formulas against numbers worked out by hand, and against exact sums."""

import math

import pytest
import torch
from test_algorithm import close

from ppo_fsdp import dual_clip_bound, gae, next_kl_coef, policy_loss, token_rewards, value_loss, whiten
from utils.metrics import explained_variance
from utils.packing import mask_from_lengths


def alone(x):
    """The sum over the ranks of a world of one."""
    return x


def one_gae(rewards, values, bootstrap, gamma, lam):
    rewards, values = torch.tensor([rewards]), torch.tensor([values])
    advantages, returns = gae(rewards, values, torch.tensor([bootstrap]), torch.tensor([rewards.shape[1]]), gamma, lam)
    return advantages[0], returns[0]


@pytest.mark.parametrize("rewards, values, bootstrap, gamma, lam, expected", [
    ([0.0, 0, 1], [0.5, 0.5, 0.5], 0.0, 1.0, 0.95, [0.45125, 0.47500, 0.50000]),
    ([0.0, 0, 1], [0.5, 0.5, 0.5], 0.0, 1.0, 1.0, [0.5, 0.5, 0.5]),
    ([0.0, 0, 0], [0.5, 0.5, 0.5], 0.4, 1.0, 0.95, [-0.09025, -0.09500, -0.10000]),  # truncated, bootstrapped
    ([0.0, 0, 0], [0.5, 0.5, 0.5], 0.0, 1.0, 0.95, [-0.45125, -0.47500, -0.50000]),  # truncated, not
    ([0.1, -0.2, 1], [0.3, 0.6, 0.2], 0.0, 0.9, 0.8, [0.30832, -0.04400, 0.80000]),
    ([-0.02, 0.01, 0.97], [0.5, 0.5, 0.5], 0.0, 1.0, 0.95, [0.41367, 0.45650, 0.47000]),  # KL in the reward
])  # fmt: skip
def test_fault_09_gae_golden(rewards, values, bootstrap, gamma, lam, expected):
    advantages, returns = one_gae(rewards, values, bootstrap, gamma, lam)
    close(advantages, expected)
    close(returns, [a + v for a, v in zip(expected, values, strict=True)])


def test_fault_09_gae_is_the_sum_of_discounted_td_errors_on_ragged_rows():
    """The definition (1506.02438 eq. 16), row by row, with rows of 1 to 7 tokens and garbage on the padding."""
    torch.manual_seed(0)
    lengths, gamma, lam = torch.tensor([7, 1, 4, 6]), 0.9, 0.7
    rewards, values, bootstrap = torch.randn(4, 7), torch.randn(4, 7), torch.randn(4)
    advantages, returns = gae(rewards, values, bootstrap, lengths, gamma, lam)
    for i, n in enumerate(lengths.tolist()):
        nexts = [*values[i, 1:n].tolist(), bootstrap[i].item()]
        deltas = [rewards[i, t].item() + gamma * nexts[t] - values[i, t].item() for t in range(n)]
        expected = [sum((gamma * lam) ** (s - t) * deltas[s] for s in range(t, n)) for t in range(n)]
        close(advantages[i, :n], expected)
        close(returns[i, :n], [e + v for e, v in zip(expected, values[i].tolist(), strict=False)])
        assert (advantages[i, n:] == 0).all() and (returns[i, n:] == 0).all()


def test_lambda_1_and_value_zero_is_the_discounted_return_to_go():
    advantages, _ = one_gae([0.5, -1.0, 2.0], [0.0, 0, 0], 0.0, 0.9, 1.0)
    close(advantages, [0.5 - 0.9 + 0.81 * 2, -1 + 0.9 * 2, 2.0])


def test_fault_09_token_rewards_golden():
    """The score stands on the last token of each response, the KL on all of them."""
    kl = torch.tensor([[-1 + 1.2, -0.5 + 0.4, -2 + 2.3], [0.5, 0, 0]])
    rewards = token_rewards(torch.tensor([1.0, -2.0], dtype=torch.float64), torch.tensor([3, 1]), kl, 0.1)
    close(rewards, [[-0.02, 0.01, 0.97], [-2.05, 0.0, 0.0]])


def test_whitening_golden():
    """Over the masked tokens alone: what stands on the padding does not count, and stays 0."""
    x = torch.tensor([[0.45125, 0.475, 0.5], [-0.2, 0.1, 99.0]])
    mask = mask_from_lengths(torch.tensor([3, 2]), 3)
    close(whiten(x, mask, alone), [[0.67696, 0.76340, 0.85438], [-1.69330, -0.60144, 0.0]])
    constant = whiten(torch.full((2, 3), 0.3), mask, alone)
    assert constant.abs().max() < 1e-3


def test_explained_variance():
    returns = torch.tensor([[1.0, 2.0, 77.0], [4.0, 77.0, 77.0]])
    mask = mask_from_lengths(torch.tensor([2, 1]), 3)
    assert explained_variance(returns, returns, mask, alone) == 1
    assert abs(explained_variance(torch.full((2, 3), 5.0), returns, mask, alone)) < 1e-12
    values = torch.tensor([[1.5, 1.0, 0.0], [4.5, 0.0, 0.0]])  # errors -0.5, 1, -0.5: variance 0.5; returns: 14/9
    assert explained_variance(values, returns, mask, alone).item() == pytest.approx(1 - 0.5 / (14 / 9))


def test_value_loss_golden_and_gradient():
    values = torch.tensor([[0.8, 0.2]], requires_grad=True)
    loss, clipped = value_loss(values, torch.tensor([[0.5, 0.5]]), torch.tensor([[1.0, 1.0]]), 0.2)
    close(loss, [[0.045, 0.32]])
    assert loss.mean().item() == pytest.approx(0.18250)
    assert clipped.tolist() == [[True, False]]
    loss.sum().backward()
    close(values.grad, [[0.0, -0.8]])
    plain, clipped = value_loss(values.detach(), torch.zeros(1, 2), torch.ones(1, 2), 0.0)
    close(plain, [[0.02, 0.32]])
    assert not clipped.any()


def test_dual_clip_golden():
    """A = -1, c = 3: beyond a ratio of 3 the loss stays at 3 and has no gradient; positive advantages know no bound."""
    logprobs = torch.tensor([[0.5, 1.0, 2.0, 5.0]]).log().requires_grad_()
    advantages = torch.full((1, 4), -1.0)
    loss, _, _ = policy_loss(logprobs, torch.zeros(1, 4), advantages, 0.2, 0.2)
    loss = torch.minimum(loss, dual_clip_bound(advantages, 3.0))
    close(loss, [[0.8, 1.0, 2.0, 3.0]])
    loss.sum().backward()
    close(logprobs.grad, [[0.0, 1.0, 2.0, 0.0]])
    assert (dual_clip_bound(torch.tensor([2.0, 0.0]), 3.0) == math.inf).all()


@pytest.mark.parametrize("controller, expected", [
    ("adaptive", [0.20400, 0.19800, 0.19600]),
    ("horizon", [0.202048, 0.198976, 0.197952]),
    ("fixed", [0.2, 0.2, 0.2]),
])  # fmt: skip
def test_kl_controller_golden(controller, expected):
    for kl, coef in zip([9.0, 5.4, 1.0], expected, strict=True):
        assert next_kl_coef(0.2, kl, 6.0, 512, 10000, controller) == pytest.approx(coef, abs=1e-7)


def test_fault_04_kl_in_the_reward_has_the_gradient_of_the_whole_sequences_kl():
    """Two tokens of two kinds, summed over all four sequences: what a token does to the KL of the next one counts."""
    torch.manual_seed(0)
    first, second = torch.randn(2, requires_grad=True), torch.randn(2, 2, requires_grad=True)
    ref_first, ref_second = torch.randn(2).log_softmax(-1), torch.randn(2, 2).log_softmax(-1)

    def paths():
        lp, lps = first.log_softmax(-1), second.log_softmax(-1)
        for a in range(2):
            for b in range(2):
                yield torch.stack([lp[a], lps[a, b]]), torch.stack([ref_first[a], ref_second[a, b]])

    exact = sum(lp.sum().exp() * (lp.sum() - ref.sum()) for lp, ref in paths())
    expected = torch.autograd.grad(exact, (first, second))
    total = 0.0
    for lp, ref in paths():
        kl = (lp - ref).detach()[None]
        rewards = token_rewards(torch.zeros(1), torch.tensor([2]), kl, 1.0)
        advantages, _ = gae(rewards, torch.zeros(1, 2), torch.zeros(1), torch.tensor([2]), 1.0, 1.0)
        loss, _, _ = policy_loss(lp[None], lp.detach()[None], advantages, 0.2, 0.2)
        total = total + lp.sum().exp().detach() * loss.sum()
    for got, want in zip(torch.autograd.grad(total, (first, second)), expected, strict=True):
        torch.testing.assert_close(got, want, atol=1e-6, rtol=0)
