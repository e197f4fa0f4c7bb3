"""GRPO's own functions against numbers worked out by hand, and against exact gradients."""

import numpy as np
import pytest
import torch

from grpo_fsdp import correction_weights, group_advantages, kl_loss, learning_rate, policy_loss
from utils.metrics import mismatch


def close(tensor, expected, tolerance=1e-5):
    torch.testing.assert_close(tensor.double(), torch.tensor(expected).double(), atol=tolerance, rtol=0)


def advantages(scores, scale, judged=None):
    judged = torch.tensor(judged or [True] * len(scores))
    return group_advantages(torch.tensor(scores, dtype=torch.float64), judged, 4, scale)


def test_group_advantages_golden():
    close(advantages([1.0, 0, 0, 0], True), [1.5, -0.5, -0.5, -0.5])
    close(advantages([1.0, 1, 0, 0], True), [0.86603, 0.86603, -0.86603, -0.86603])
    close(advantages([1.0, 0, 0, 0], False), [0.75, -0.25, -0.25, -0.25])


def test_groups_do_not_mix_and_are_prompt_major():
    both = advantages([1.0, 0, 0, 0, 1, 1, 0, 0], True)
    close(both, [1.5, -0.5, -0.5, -0.5, 0.86603, 0.86603, -0.86603, -0.86603])


def test_fault_06_a_group_of_equal_scores_has_advantage_0():
    for scale in (True, False):
        assert advantages([0.7] * 4 + [1.0] * 4 + [0.0] * 4 + [-3.0] * 4, scale).tolist() == [0.0] * 16


def test_fault_07_nearly_equal_scores_are_not_blown_up():
    # 0.1 + 0.2 - 0.3 style dust: std 5e-9 must not turn into advantages of order one
    assert advantages([0.3, 0.30000001, 0.3, 0.3], True).abs().max() < 1e-4
    # a small spread on top of a large mean, of which E[x2] - E[x]2 would leave nothing
    close(advantages([1000.0, 1000.01, 1000.0, 1000.0], True), [-0.5, 1.5, -0.5, -0.5])


def test_a_response_without_a_score_leaves_its_group_as_if_it_had_not_been_sampled():
    judged = [True, True, False, True, False, False, True, False, False, False, False, False]
    got = advantages([1.0, 0, 9, 0, 5, 5, 1, 5, 7, 7, 7, 7], True, judged)
    # (2/3, -1/3, -1/3) over the sample std 0.57735; a lone judged response has nothing to compare with
    close(got, [1.15470, -0.57735, 0, -0.57735, 0, 0, 0, 0, 0, 0, 0, 0])


RATIOS = [[1.1, 1.3, 1, 1], [0.9, 0.7, 1.0, 1.2], [1.0, 1, 1, 1], [1.25, 0.8, 1.0, 1]]
LENGTHS = [2, 4, 1, 3]


@pytest.mark.parametrize("clip_high, first_row", [(0.2, [1.65, 1.8]), (0.28, [1.65, 1.92])])
def test_clipped_loss_golden(clip_high, first_row):
    ratio = torch.tensor(RATIOS)
    group = torch.tensor([1.5, -0.5, -0.5, -0.5])
    loss, got_ratio, _ = policy_loss(ratio.log(), torch.zeros(4, 4), group[:, None], 0.2, clip_high)
    close(got_ratio, RATIOS, 1e-6)
    terms = [(-loss[i, :n]).tolist() for i, n in enumerate(LENGTHS)]
    expected = [first_row, [-0.45, -0.4, -0.5, -0.6], [-0.5], [-0.625, -0.4, -0.5]]
    for got, want in zip(terms, expected, strict=True):
        assert got == pytest.approx(want, abs=1e-5)
    # divided by the global token count (group 1 of the two-group fixture alone: its own 10 tokens)
    total = sum(sum(t) for t in terms) / 10
    assert total == pytest.approx(-0.05250 if clip_high == 0.2 else -0.04050, abs=1e-5)


def test_token_mean_over_two_groups_golden():
    one = advantages([1.0, 0, 0, 0], True)
    two = advantages([1.0, 1, 0, 0], True)
    first, _, _ = policy_loss(torch.tensor(RATIOS).log(), torch.zeros(4, 4), one[:, None], 0.2, 0.2)
    second, _, _ = policy_loss(
        torch.tensor([[1.1], [0.95], [1.3], [0.7]]).log(), torch.zeros(4, 1), two[:, None], 0.2, 0.2
    )
    mask = torch.arange(4) < torch.tensor(LENGTHS)[:, None]
    assert -(first[mask].sum() + second.sum()).item() / 14 == pytest.approx(-0.04059, abs=1e-5)


def test_clipped_tokens_have_no_gradient_and_are_counted():
    logprobs = torch.tensor([0.5, 1.0, 1.5, 1.5]).log()[:, None].requires_grad_()
    loss, _, clipped = policy_loss(logprobs, torch.zeros(4, 1), torch.tensor([1.0, -1, 1, -1])[:, None], 0.2, 0.2)
    close(loss[:, 0], [-0.5, 1.0, -1.2, 1.5])
    loss.sum().backward()
    close(logprobs.grad[:, 0], [-0.5, 1.0, 0.0, 1.5])
    assert clipped[:, 0].tolist() == [False, False, True, False]


PI, REF = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.25, 0.25, 0.5])
EXACT_GRADIENT = [0.23757, -0.01071, -0.22686]  # of KL(pi || ref) on pi's logits


@pytest.mark.parametrize("estimator, mean", [("k1", 0.21801), ("k2", 0.20906), ("k3", 0.21801)])
@pytest.mark.parametrize("old", [[0.5, 0.3, 0.2], [0.4, 0.4, 0.2]])
def test_fault_04_kl_has_the_estimators_value_and_the_reverse_kls_gradient(estimator, mean, old):
    """Expectations over the three tokens, taken exactly; off-policy the ratio must correct the gradient."""
    logits = PI.log().clone().requires_grad_()
    old = torch.tensor(old)
    kl = kl_loss(logits.log_softmax(-1)[None], old.log()[None], REF.log()[None], estimator)[0]
    close((PI * kl.detach()).sum(), mean)  # on-policy weights for the value
    (old * kl).sum().backward()  # tokens drawn from the old policy
    close(logits.grad, EXACT_GRADIENT)


def test_learning_rate():
    def rates(schedule, warmup):
        return [learning_rate(s, 4, 1.0, schedule, warmup) for s in (1, 2, 3, 4)]

    assert rates("constant", 0) == [1, 1, 1, 1]
    assert rates("constant", 2) == [0.5, 1, 1, 1]
    assert rates("cosine", 2) == pytest.approx([0.5, 1.0, 0.75, 0.25])
    assert all(a >= b > 0 for a, b in zip(rates("cosine", 0), rates("cosine", 0)[1:], strict=False))


OLD, ENGINE = [[-1.0, -2.0, -0.5]], [[-1.1, -3.0, -0.45]]  # w = 1.10517, 2.71828, 0.95123; their product 2.85765


def correct(kind, cap, length=3):
    mask = torch.arange(3) < torch.tensor([[length]])
    weights, kept = correction_weights(torch.tensor(OLD), torch.tensor(ENGINE), mask, kind, cap)
    return weights[0], kept.tolist()


def test_correction_weights_golden():
    weights, kept = correct("token-tis", 2.0)
    close(weights, [1.10517, 2.0, 0.95123])
    assert kept == [True]
    for cap, keep in ((3.0, True), (2.0, False)):
        weights, kept = correct("seq-mask", cap)
        close(weights, [2.85765] * 3)
        assert kept == [keep]
    weights, kept = correct("seq-mask", 2.0, length=1)  # what stands on the padding does not count
    close(weights[:1], [1.10517])
    assert kept == [True]


def test_mismatch_golden(process_group):
    mask = torch.tensor([[True, True, True, False]])
    old, engine = torch.tensor([OLD[0] + [9.0]]), torch.tensor([ENGINE[0] + [0.0]])
    figures = mismatch(old, engine, mask)
    assert figures["rollout/ratio_k3"] == pytest.approx(0.24156, abs=1e-5)
    assert figures["rollout/ess"] == pytest.approx(0.79863, abs=1e-5)
    assert figures["rollout/logprob_diff_max"] == pytest.approx(1.0)
    assert figures["rollout/logprob_diff_mean"] == pytest.approx((0.1 + 1.0 + 0.05) / 3)
    assert figures["rollout/ratio_p99"] == pytest.approx(np.quantile([1.10517, 2.71828, 0.95123], 0.99), abs=1e-5)
