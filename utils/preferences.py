"""Preference pairs: parquet rows in, the token ids of a chosen and a rejected response to one prompt out.

    python -m utils.data hh-rlhf --out data/hh-rlhf

writes such files. A row has `prompt` (a list of {role, content}, or a string), `chosen` and `rejected` (the text of the
response, or a list of one assistant message), and if present `margin`, a number: how much better chosen is.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch.distributed as dist

from utils.data import PromptData
from utils.dist import all_gather, fail_together
from utils.prompts import encode_prompt

# What may be wrong with a column of a row: what to do about it.
FIXES = {
    "is null": "fill it in, or leave the row out",
    "does not encode": "mend it, or leave the row out",
    "is not one assistant message": "give its text, or that message alone: the turns before it belong in `prompt`",
    "is empty": "a response needs text; leave the row out",
    "goes on after an end of sequence": "give the text of one response, without the template's tokens",
    "is the same as `rejected`": "there is nothing to prefer; leave the row out",
    "is not a finite number": "give every row a number, such as 0.0, or leave the column out",
}


@dataclass(frozen=True)
class Tokens:
    """One sequence, as `utils.packing.pack` takes it."""

    prompt_ids: list[int]
    response_ids: list[int]  # the last is the end of sequence


@dataclass(frozen=True)
class Pair:
    chosen: Tokens
    rejected: Tokens
    margin: float  # 0 where there is no such column


# ---- one row ----


def encode_response(tokenizer, text: str, eos_token_id: int) -> list[int]:
    """Token ids of a response and then `eos_token_id`, once: also where the text ends in that token's own text."""
    # DETAIL: a training sequence is what a rollout is when it is scored: the prompt's ids with the generation prompt,
    # the response's, end of sequence, and nothing that a chat template puts behind it. So training and scoring read
    # the score off the same last token.
    ids = list(tokenizer(text, add_special_tokens=False).input_ids)
    while ids and ids[-1] == eos_token_id:
        ids.pop()
    return [*ids, eos_token_id]


def response_ids(tokenizer, response: str | list[dict]) -> list[int]:
    """Token ids of a row's `chosen` or `rejected`.

    Raises: ValueError starting with what is wrong, one of FIXES.
    """
    if not isinstance(response, str):
        roles = [message and message["role"] for message in response]
        if roles != ["assistant"]:
            raise ValueError(f"is not one assistant message: {len(roles)} of {', '.join(map(str, roles)) or 'no role'}")
        response = response[0]["content"] or ""
    ids = encode_response(tokenizer, response, tokenizer.eos_token_id)
    if not response.strip() or len(ids) == 1:
        raise ValueError("is empty")
    if tokenizer.eos_token_id in ids[:-1]:  # no rollout does
        raise ValueError("goes on after an end of sequence")
    return ids


def check_row(row: dict, tokenizer) -> tuple[list[tuple[str, str, str]], dict[str, list[int]]]:
    """All that is wrong with a row, as (column, what of FIXES, detail), and the token ids of its three columns."""
    faults, ids = [], {}
    for column, encode in (("prompt", encode_prompt), ("chosen", response_ids), ("rejected", response_ids)):
        if row[column] is None:
            faults.append((column, "is null", ""))
            continue
        try:
            ids[column] = encode(tokenizer, row[column])
        except ValueError as error:
            what, _, detail = str(error).partition(": ")
            faults.append((column, "does not encode" if column == "prompt" else what, detail))
    # by tokens, because the same tokens get the same score, whatever the text
    if "chosen" in ids and ids["chosen"] == ids.get("rejected"):
        faults.append(("chosen", "is the same as `rejected`", ""))
    if not isinstance(row["margin"], int | float) or not math.isfinite(row["margin"]):
        faults.append(("margin", "is not a finite number", repr(row["margin"])))
    return faults, ids


# ---- all rows ----


def check_rows(data: PromptData, tokenizer, limits: tuple[int, int], part=(0, 1)) -> tuple[list, list]:
    """What is wrong with the rows and which pairs are too long, in the share of `part` = (rank, world).

    Returns: faults, a list of (column, what of FIXES, uid, detail), and overlong, one of (uid, prompt tokens, tokens of
    the longer response), both by uid: the shares of all ranks, joined in the order of ranks, are the whole.
    """
    rank, world = part
    no_margin = {"margin": None if "margin" in data.columns else 0.0}  # None: some files have the column, others not
    faults, overlong = [], []
    for uid in range(len(data) * rank // world, len(data) * (rank + 1) // world):  # consecutive, see `find_overlong`
        wrong, ids = check_row(no_margin | data.raw_row(uid), tokenizer)
        faults += [(column, what, uid, detail) for column, what, detail in wrong]
        if not wrong:
            lengths = len(ids["prompt"]), max(len(ids["chosen"]), len(ids["rejected"]))
            if lengths[0] > limits[0] or lengths[1] > limits[1]:
                overlong.append((uid, *lengths))
    return faults, overlong


def fault_lines(faults: list[tuple[str, str, int, str]], data: PromptData) -> list[str]:
    """One line for each kind of fault: how many rows have it, where the first of them is, what to do."""
    kinds: dict[tuple[str, str], list[tuple[int, str]]] = {}
    for column, what, uid, detail in faults:
        kinds.setdefault((column, what), []).append((uid, detail))
    lines = []
    for (column, what), rows in sorted(kinds.items()):
        uid, detail = rows[0]
        first = f"the first is uid {uid} of {data.file_of(uid)}{detail and ': ' + detail}"
        lines.append(f"{data.flag}: `{column}` {what} in {len(rows)} of {len(data)} rows ({first}); {FIXES[what]}")
    return lines


def overlong_lines(overlong: list[tuple[int, int, int]], num_rows: int, limits: tuple[int, int]) -> list[str]:
    """One line for each of the two limits (prompt, response) that some pair is over."""
    lines = []
    for column, (name, limit) in enumerate(zip(("prompt", "response"), limits, strict=True), 1):
        if over := [pair for pair in overlong if pair[column] > limit]:
            longest = max(over, key=lambda pair: pair[column])
            lines.append(
                f"--max-{name}-len {limit}: {len(over)} of {num_rows} pairs have a longer {name} (the longest has "
                f"{longest[column]} tokens, uid {longest[0]}); --max-{name}-len {longest[column]} works"
            )
    return lines


class PairData:
    """The pairs to train on or to evaluate, tokenised when asked for; made by `load_pairs`."""

    def __init__(self, rows: PromptData, tokenizer, uids: list[int]):
        self.rows, self.tokenizer, self.flag = rows, tokenizer, rows.flag
        self.uids = uids  # of the rows that are kept, ascending
        self.num_dropped = len(rows) - len(uids)

    def __len__(self) -> int:
        return len(self.uids)

    def fingerprint(self) -> str:
        """That of the files: see `PromptData.fingerprint`."""
        return self.rows.fingerprint()

    def pair(self, i: int) -> Pair:
        """The kept pair i, 0 <= i < len(self)."""
        assert 0 <= i < len(self), (i, len(self))
        row = self.rows.row(self.uids[i])
        prompt_ids = encode_prompt(self.tokenizer, row["prompt"])
        chosen, rejected = (Tokens(prompt_ids, response_ids(self.tokenizer, row[k])) for k in ("chosen", "rejected"))
        return Pair(chosen, rejected, float(row.get("margin", 0.0)))


def load_pairs(
    files: str, flag: str, tokenizer, max_prompt_len: int, max_response_len: int, overlong: Literal["error", "drop"]
) -> PairData:
    """The pairs, once every row is known to be usable; each rank checks its share (collective).

    Args: max_response_len: in tokens, end of sequence included. overlong: what becomes of a pair over a limit.
    Raises: ValueError, the same on every rank, with one line for each thing that is wrong.
    """
    with fail_together():
        if tokenizer.eos_token_id is None:
            rule = "every response must end in one; set eos_token in its tokenizer_config.json"
            raise ValueError(f"--model {tokenizer.name_or_path}: the tokenizer has no end-of-sequence token, {rule}")
        data = PromptData(files, flag, ("prompt", "chosen", "rejected"))
        limits = (max_prompt_len, max_response_len)
        mine = check_rows(data, tokenizer, limits, (dist.get_rank(), dist.get_world_size()))
    shares = all_gather(mine)
    if faults := [fault for share, _ in shares for fault in share]:
        raise ValueError("\n".join(fault_lines(faults, data)))
    too_long = [pair for _, share in shares for pair in share]
    none_left = len(too_long) == len(data)
    if too_long and (overlong == "error" or none_left):
        drop = "--overlong drop would leave no pair" if none_left else "so does --overlong drop, which leaves them out"
        raise ValueError("\n".join(f"{line}; {drop}" for line in overlong_lines(too_long, len(data), limits)))
    dropped = {uid for uid, *_ in too_long}
    return PairData(data, tokenizer, [uid for uid in range(len(data)) if uid not in dropped])
