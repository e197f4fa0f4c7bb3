"""Prompts to token ids, each checked before a run begins that it encodes and fits."""

import torch.distributed as dist
from jinja2 import TemplateError

from utils.data import PromptData
from utils.dist import all_gather, fail_together


def encode_prompt(tokenizer, prompt: str | list[dict]) -> list[int]:
    """Token ids of a prompt: a list of messages through the chat template, once; a string as it stands.

    Raises: ValueError where there is no chat template, the template refuses, or nothing is left to encode.
    """
    if not prompt:
        raise ValueError("prompt: is empty; at least one message, or one character, is needed")
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    for message in messages:
        message = message or {}  # one that is null
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                rule = f"`{key}` of a message must be a string, not {message.get(key)!r}"
                raise ValueError(f"prompt: {rule}; mend it, or leave the row out")
            try:
                message[key].encode()
            except UnicodeEncodeError as error:
                rule = f"not valid text, it cannot be written as UTF-8 ({error.reason})"
                raise ValueError(f"prompt: {rule}; mend it, or leave the row out") from error
    if isinstance(prompt, str):
        # DETAIL: the tokenizer's own default decides on a BOS token, because that is what the model was trained with;
        # a string that already starts with it gets no second one.
        has_bos = bool(tokenizer.bos_token) and prompt.startswith(tokenizer.bos_token)
        ids = tokenizer(prompt, add_special_tokens=not has_bos).input_ids
    elif not tokenizer.chat_template:
        raise ValueError("prompt: is a list of messages, but the tokenizer has no chat template; use string prompts")
    else:
        # parquet gives every message every key: one that is null was not there
        messages = [{key: value for key, value in message.items() if value is not None} for message in messages]
        # DETAIL: messages are tokenized by the template itself, because text tokenized again would get a second BOS.
        try:
            ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
        except (TemplateError, TypeError, ValueError) as error:  # raised by the template, or by what it does
            rule = f"the model's chat template refuses it ({' '.join(str(error).split())})"
            raise ValueError(f"prompt: {rule}; mend the prompt or the template, or use string prompts") from error
    if not ids:
        raise ValueError("prompt: encodes to no token; at least one is needed")
    return list(ids)


def find_overlong(data: PromptData, tokenizer, max_prompt_len: int, part=(0, 1)) -> list[tuple[int, int]]:
    """(uid, length in tokens) of each prompt longer than `max_prompt_len`, in the share of `part` = (rank, world).

    The shares of all ranks, joined in the order of ranks, are the whole, sorted by uid.

    Raises: ValueError naming the row, where a prompt cannot be encoded.
    """
    rank, world = part
    overlong = []
    # consecutive rows, because then each rank reads only its own row groups
    for uid in range(len(data) * rank // world, len(data) * (rank + 1) // world):
        row = data.row(uid)
        try:
            length = len(encode_prompt(tokenizer, row["prompt"]))
        except ValueError as error:
            raise ValueError(f"{data.flag}: row with uid {uid}: {error}") from error
        if length > max_prompt_len:
            overlong.append((uid, length))
    return overlong


def overlong_error(overlong: list[tuple[int, int]], num_rows: int, max_prompt_len: int) -> str:
    """The error text for `overlong`, the (uid, length) of all ranks, which must not be empty."""
    uid, longest = max(overlong, key=lambda item: item[1])
    return (
        f"--max-prompt-len {max_prompt_len}: {len(overlong)} of {num_rows} prompts are longer (the longest has "
        f"{longest} tokens, uid {uid}); every prompt must fit; --max-prompt-len {longest} works"
    )


def load_prompts(files: str, flag: str, tokenizer, max_prompt_len: int) -> PromptData:
    """The rows, once every prompt is known to encode and to fit; each rank checks its share (collective).

    Raises: ValueError, the same on every rank.
    """
    with fail_together():
        data = PromptData(files, flag)
        mine = find_overlong(data, tokenizer, max_prompt_len, (dist.get_rank(), dist.get_world_size()))
    if overlong := [item for share in all_gather(mine) for item in share]:
        raise ValueError(overlong_error(overlong, len(data), max_prompt_len))
    return data
