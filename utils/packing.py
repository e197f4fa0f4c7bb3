"""Ragged responses <-> right-padded [B, R] tensors, and micro-batches packed under a token budget.

The shift by one (the hidden state at position p predicts token p + 1) and the packing of several sequences into one
row of T tokens exist here and in utils/forward.py alone. Algorithm code sees [B, R] tensors of response tokens.

Shapes: B responses on this rank, R longest of them, b responses of a micro-batch, T packed tokens, N response tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch

from utils.dist import all_gather


def pad_rows(rows: Sequence[Sequence[float | int]], dtype: torch.dtype, width: int) -> torch.Tensor:
    """Ragged rows -> [B, R = width], right-padded with zeros; padding is told by length (`mask_from_lengths`)."""
    padded = torch.zeros(len(rows), width, dtype=dtype)
    for i, row in enumerate(rows):
        padded[i, : len(row)] = torch.as_tensor(row, dtype=dtype)
    return padded


def to_device(
    values: Sequence[int] | np.ndarray, device: torch.device, dtype: torch.dtype = torch.long
) -> torch.Tensor:
    """Numbers of the host as a device tensor, without waiting for the work that is queued on the device."""
    tensor = torch.tensor(values, dtype=dtype)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def mask_from_lengths(lengths_B: torch.Tensor, width: int) -> torch.Tensor:
    """[B] lengths -> [B, R] bool, true on real response tokens."""
    return torch.arange(width, device=lengths_B.device) < lengths_B[:, None]


def plan_micro_batches(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Split sequences into micro-batches of at most `max_tokens` packed tokens, longest first, evenly filled.

    Args: lengths: whole sequence lengths (prompt + response), in tokens.
    Returns: lists of positions in `lengths`, each ascending; every position exactly once.
    Raises: ValueError when one sequence alone is over the budget.
    """
    if lengths and max(lengths) > max_tokens:
        raise ValueError(
            f"--max-tokens-per-gpu {max_tokens}: must hold the longest prompt + response, {max(lengths)} tokens; "
            f"use {max(lengths)} or more"
        )
    # Greedy by the least-filled bin; one bin more whenever the even split does not fit.
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    count = -(-sum(lengths) // max_tokens)
    while True:
        bins: list[list[int]] = [[] for _ in range(count)]
        loads = [0] * count
        for i in order:
            k = min(range(count), key=loads.__getitem__)
            bins[k].append(i)
            loads[k] += lengths[i]
        if all(load <= max_tokens for load in loads):
            return [sorted(b) for b in bins if b]
        count += 1


@dataclass
class Packed:
    """One micro-batch as one row of T tokens, with what it takes to bring its response tokens back to [b, R]."""

    input_ids_T: torch.Tensor
    position_ids_T: torch.Tensor  # restart at 0 in each sequence
    cu_seqlens: torch.Tensor  # [b + 1] int32, cumulated sequence lengths
    max_seqlen: int
    predict_N: torch.Tensor  # for each response token, the packed position whose hidden state predicts it
    target_N: torch.Tensor  # the response tokens themselves
    row_N: torch.Tensor  # their place in the padded [b, R] tensor
    col_N: torch.Tensor
    last_b: torch.Tensor  # the packed position of each sequence's last token, found by length

    def to_padded(self, values_N: torch.Tensor, num_rows: int, width: int) -> torch.Tensor:
        """[N] per response token -> [b, R], zero on padding; differentiable."""
        return values_N.new_zeros(num_rows, width).index_put((self.row_N, self.col_N), values_N)


def plan_together(rollouts: Sequence, indices: Sequence[int], max_tokens: int) -> tuple[list[list[int]], int]:
    """Micro-batches over `indices` of this rank's rollouts, and the response tokens in them over all ranks.

    An item may also be a tuple of sequences that stay together (the two of a preference pair).
    Collective. Returns as many lists of indices on every rank, some empty, because FSDP's collectives must match.
    """
    items = [item if isinstance(item, tuple) else (item,) for item in (rollouts[i] for i in indices)]
    lengths = [sum(len(s.prompt_ids) + len(s.response_ids) for s in item) for item in items]
    plan = [[indices[j] for j in part] for part in plan_micro_batches(lengths, max_tokens)]
    gathered = all_gather((len(plan), sum(len(s.response_ids) for item in items for s in item)))
    plan += [[]] * (max(count for count, _ in gathered) - len(plan))
    return plan, sum(tokens for _, tokens in gathered)


def pack(rollouts: Sequence, device: torch.device) -> Packed:
    """Lay whole sequences end to end in one row; without any, one token that nothing reads (a filling micro-batch).

    Args: rollouts: anything with `prompt_ids` and `response_ids`.
    Raises: AssertionError on an empty prompt or response: neither has a token to predict from or to learn.
    """
    prompt_b = np.array([len(r.prompt_ids) for r in rollouts], dtype=np.int64)
    response_b = np.array([len(r.response_ids) for r in rollouts], dtype=np.int64)
    empty = np.flatnonzero((prompt_b == 0) | (response_b == 0))
    assert len(empty) == 0, f"sequence {empty[0]}: {prompt_b[empty[0]]} + {response_b[empty[0]]} tokens"
    length_b = prompt_b + response_b
    bounds = np.concatenate([[0], length_b.cumsum()])
    ids_T = np.fromiter(chain.from_iterable((*r.prompt_ids, *r.response_ids) for r in rollouts), np.int64)
    positions_T = np.arange(len(ids_T)) - np.repeat(bounds[:-1], length_b)
    row_N = np.repeat(np.arange(len(rollouts)), response_b)
    col_N = np.arange(len(row_N)) - np.repeat(response_b.cumsum() - response_b, response_b)
    predict_N = (bounds[:-1] + prompt_b - 1)[row_N] + col_N  # the last prompt token predicts the first response token
    target_N, last_b = ids_T[predict_N + 1], bounds[1:] - 1
    if not rollouts:
        ids_T, positions_T, bounds = np.zeros(1), np.zeros(1), np.arange(2)
    return Packed(
        input_ids_T=to_device(ids_T, device),
        position_ids_T=to_device(positions_T, device),
        cu_seqlens=to_device(bounds, device, torch.int32),
        max_seqlen=int(np.diff(bounds).max()),
        predict_N=to_device(predict_N, device),
        target_N=to_device(target_N, device),
        row_N=to_device(row_N, device),
        col_N=to_device(col_N, device),
        last_b=to_device(last_b, device),
    )
