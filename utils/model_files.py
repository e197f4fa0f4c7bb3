"""What a model's folder holds, looked at before anything loads: weights cut off, tokens without a row, wrong ends."""

import json
from pathlib import Path

from safetensors import SafetensorError, safe_open
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedTokenizerBase
from transformers.utils import cached_file


def weights_damage(folder: Path) -> str:
    """What is wrong with the weights of a local folder by its index and the headers of its shards, "" if nothing."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    shards = {single.name}
    if not single.exists():
        if not index.exists():
            known = [folder / name for name in ("pytorch_model.bin", "pytorch_model.bin.index.json")]
            return (
                "" if any(p.exists() for p in known) else f"has no weights ({single.name}, or shards and their index)"
            )
        try:
            shards = {*json.loads(index.read_text())["weight_map"].values()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            return f"its {index.name} does not read ({error})"
    for name in sorted(shards):
        if not (folder / name).is_file():
            return f"{name} is missing"
        try:
            with safe_open(folder / name, "pt"):  # reads the header and compares it with the file's size
                pass
        except SafetensorError as error:
            return f"{name} is cut off or no safetensors file ({error})"
    return ""


def check_vocabulary(name: str, tokenizer: PreTrainedTokenizerBase, rows: int) -> None:
    """Refuse a tokenizer with ids that the embedding of `rows` rows does not have. Raises: ValueError."""
    # a special token that is in no text may be without a row: transformers gives some tokenizers one
    used = f"{tokenizer.chat_template} {tokenizer.eos_token}"
    special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    spare = {token for token in special.union(tokenizer.all_special_tokens) if token not in used}
    if beyond := [token for token, i in tokenizer.get_vocab().items() if i >= rows and token not in spare]:
        raise ValueError(
            f"{name}: its config.json has vocab_size {rows}, and its tokenizer has {len(beyond)} tokens beyond "
            f"({beyond[0]!r} is one); tokenizer and weights of one model work"
        )


def end_of_sequence_ids(path: str, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """All ids that end a response: those of the generation config, else of the model's config, else the tokenizer's."""
    ids, file = None, "generation_config.json"
    if cached_file(path, file, _raise_exceptions_for_missing_entries=False):
        try:
            ids = GenerationConfig.from_pretrained(path).eos_token_id
        except (OSError, ValueError, TypeError, AttributeError) as error:
            reason = f"its {file} does not read ({' '.join(str(error).split())[:200]})"
            raise ValueError(f"--model {path}: {reason}; one with an eos_token_id works, or none") from error
    for source in (config, tokenizer):
        ids = getattr(source, "eos_token_id", None) if ids is None else ids
    if ids is None or ids == []:
        raise ValueError(f"--model {path}: names no eos_token_id, responses could not end; add it to {file}")
    ids = ids if isinstance(ids, list) else [ids]
    if wrong := [i for i in ids if not isinstance(i, int) or not 0 <= i < config.vocab_size]:
        rule = f"must be ids from 0 to {config.vocab_size - 1}; {tokenizer.eos_token_id} works"
        raise ValueError(f"--model {path}: eos_token_id {wrong[0]!r} of its {file} or config.json {rule}")
    return ids
