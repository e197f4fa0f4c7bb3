"""Hugging Face export: a folder that transformers and vLLM load."""

import os
import shutil
from pathlib import Path

import torch.distributed as dist
from accelerate import init_empty_weights
from safetensors import SafetensorError
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from utils.dist import broadcast
from utils.models import PolicyModel, ScalarModel, hf_name


def set_safe_pad(tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig, eos_ids: list[int]) -> int:
    """The pad id an exported reward model can carry, set on the tokenizer too: one that never ends a response.

    transformers reads a score at the last id that differs from the pad id: were that an end-of-sequence id, it would
    read the token before.
    Raises: ValueError where there is none.
    """
    ends = {*eos_ids, tokenizer.eos_token_id}
    if tokenizer.pad_token_id is None or tokenizer.pad_token_id in ends:
        reserved = [
            token.content
            for i, token in tokenizer.added_tokens_decoder.items()
            if token.special
            and i < config.vocab_size  # transformers gives some tokenizers a token that the model has no row for
            and i not in {*ends, tokenizer.bos_token_id}
            and token.content not in (tokenizer.chat_template or "")
        ]
        if reserved:
            tokenizer.pad_token = reserved[0]
        elif len(tokenizer) < config.vocab_size:  # the embedding has rows that no token uses
            tokenizer.add_special_tokens({"pad_token": f"<|pad_{len(tokenizer)}|>"})
        else:
            raise ValueError(
                f"--model {tokenizer.name_or_path}: its pad token ({tokenizer.pad_token}) may end a response, and its "
                "vocabulary has neither a reserved token nor a free id; give its tokenizer a pad_token of its own"
            )
    return tokenizer.pad_token_id


def _save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Raises: OSError on a full disk, for which the tokenizers library has a bare Exception."""
    try:
        tokenizer.save_pretrained(folder)
    except Exception as error:
        if "os error" in str(error):
            raise OSError(str(error)) from error
        raise


def export_hf(folder: Path, model: PolicyModel | ScalarModel, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Write a folder that the model's auto class (and vLLM) loads, in the dtype it was loaded in (collective).

    False where it could not be written (a full disk), which is said; what the folder held then stays.
    """
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    error = ""
    if dist.get_rank() == 0:
        dtype = model.saved_dtype
        with init_empty_weights():
            shell = model.auto_class.from_config(model.lm.config, dtype=dtype)
        aside = folder.with_name(f"{folder.name}.tmp")
        try:
            shutil.rmtree(aside, ignore_errors=True)
            shell.save_pretrained(aside, state_dict={hf_name(k): v.to(dtype) for k, v in full.items()})
            _save_tokenizer(tokenizer, aside)
            if model.generation_config_file:  # copied, because transformers refuses to save some that it loads
                shutil.copyfile(model.generation_config_file, aside / "generation_config.json")
            shutil.rmtree(folder, ignore_errors=True)
            os.replace(aside, folder)
        except (OSError, SafetensorError) as caught:
            error = " ".join(str(caught).split())
            shutil.rmtree(aside, ignore_errors=True)
            free = shutil.disk_usage(folder.parent).free / 2**30
            print(f"{folder}: NOT WRITTEN ({error}; {free:.1f} GiB are free there); checkpoints stay", flush=True)
    return not broadcast(error)
