"""Packing: every sequence once, under the budget; ragged rows survive the way to [B, R] and back."""

import json

import pytest
import torch
from conftest import ROOT, sequences, torchrun

from utils.dist import seed_for
from utils.packing import mask_from_lengths, pack, pad_rows, plan_micro_batches, plan_together

CPU = torch.device("cpu")


def test_fault_38_pad_and_mask_tell_padding_by_length_not_by_value():
    rows = [[0, 7, 0], [0], [3, 0]]  # token 0 is both padding and a real token
    padded_BR = pad_rows(rows, torch.long, 3)
    mask_BR = mask_from_lengths(torch.tensor([3, 1, 2]), 3)
    assert padded_BR.tolist() == [[0, 7, 0], [0, 0, 0], [3, 0, 0]]
    assert mask_BR.tolist() == [[True] * 3, [True, False, False], [True, True, False]]


def test_fault_39_pack_golden():
    packed = pack(sequences([[1, 2], [3]], [[4], [5, 6]]), CPU)
    assert packed.input_ids_T.tolist() == [1, 2, 4, 3, 5, 6]
    assert packed.position_ids_T.tolist() == [0, 1, 2, 0, 1, 2]
    assert packed.cu_seqlens.tolist() == [0, 3, 6] and packed.max_seqlen == 3
    assert packed.predict_N.tolist() == [1, 3, 4]  # the position before each response token
    assert packed.target_N.tolist() == [4, 5, 6] and packed.last_b.tolist() == [2, 5]
    assert packed.cu_seqlens.dtype == torch.int32 and packed.input_ids_T.dtype == torch.long  # the kernels' own types
    assert packed.to_padded(torch.tensor([0.1, 0.2, 0.3]), 2, 3).tolist() == [
        [pytest.approx(0.1), 0, 0],
        [pytest.approx(0.2), pytest.approx(0.3), 0],
    ]


def test_pack_of_nothing_is_a_row_that_reads_nothing():
    packed = pack([], CPU)
    assert len(packed.input_ids_T) == 1 and len(packed.target_N) == 0 and packed.cu_seqlens.tolist() == [0, 1]
    assert len(packed.last_b) == 0 and packed.position_ids_T.tolist() == [0]
    assert packed.to_padded(torch.zeros(0), 0, 5).shape == (0, 5)


def test_pack_refuses_empty_sequences():
    for prompt, response in (([], [1]), ([1], [])):
        with pytest.raises(AssertionError, match="sequence 1"):
            pack(sequences([[1], prompt], [[1], response]), CPU)


@pytest.mark.parametrize("budget", [9, 10, 17, 64, 10_000])
def test_plan_holds_every_sequence_once_under_the_budget(budget):
    generator = torch.Generator().manual_seed(budget)
    lengths = torch.randint(1, 10, (57,), generator=generator).tolist()
    plan = plan_micro_batches(lengths, budget)
    assert sorted(i for part in plan for i in part) == list(range(57))
    assert all(sum(lengths[i] for i in part) <= budget for part in plan)
    loads = [sum(lengths[i] for i in part) for part in plan]
    if budget >= 64:  # even: no micro-batch is left with a remnant
        assert max(loads) - min(loads) <= max(lengths)


def test_plan_of_nothing_and_of_one_that_does_not_fit():
    assert plan_micro_batches([], 8) == []
    with pytest.raises(ValueError, match=r"--max-tokens-per-gpu 8: .* 9 or more"):
        plan_micro_batches([3, 9], 8)


def test_plan_together_speaks_of_the_callers_indices(process_group):
    plan, tokens = plan_together(sequences([[1]] * 6, [[2]] * 6), [1, 3, 5], 4)
    assert sorted(i for part in plan for i in part) == [1, 3, 5] and tokens == 3


def test_parts_of_a_seed_do_not_run_together():
    assert seed_for("x", 1, 23) != seed_for("x", 12, 3)
    assert 0 <= seed_for("x") < 2**63


def test_fault_36_ranks_make_as_many_passes(tmp_path):
    torchrun(3, ROOT / "tests/workers/plan_ranks.py", tmp_path / "plans.json")
    plans = json.loads((tmp_path / "plans.json").read_text())
    assert plans == [[[[2], [1], [0]], 7], [[[0], [], []], 7], [[[], [], []], 7]]
