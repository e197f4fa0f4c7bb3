"""Load a Hugging Face model onto FSDP2 shards: configuration, tokenizer, weights, and what is refused of each."""

import math
from pathlib import Path
from typing import Literal

import torch
from accelerate import init_empty_weights
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from transformers import (
    AutoConfig,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
)
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import cached_file
from transformers.utils import logging as transformers_logging

from utils.dist import fail_together, seed_for
from utils.forward import PolicyModel, ScalarModel
from utils.model_files import check_vocabulary, weights_damage

LOGIT_KNOBS = ("final_logit_softcapping", "attn_logit_softcapping", "logit_scale", "logits_scaling")

transformers_logging.disable_progress_bar()  # one bar, the run's own
transformers_logging.set_verbosity_error()  # a head that is missing on purpose; what is missing else is an error here


def has_scalar_head(config: PreTrainedConfig) -> bool:
    """Whether the folder holds a sequence classification head with a single output."""
    return config.num_labels == 1 and any(n.endswith("ForSequenceClassification") for n in config.architectures or [])


def named(flag: str, path: str) -> str:
    """`--flag path` as the user writes it; "--reward model:" is the flag and the beginning of its value."""
    return flag + path if flag.endswith(":") else f"{flag} {path}"


def load_config(path: str, flag: str = "--model", head: Literal["lm", "scalar", "any"] = "lm") -> PreTrainedConfig:
    """The model's config, refused where the packed forward would not compute what the model defines.

    Args: head: what the folder must hold: a causal LM, a reward model, or either of the two.
    Raises: ValueError for a missing or unusable folder, another head, or an architecture this cannot run.
    """
    name = named(flag, path)
    try:
        config = AutoConfig.from_pretrained(path)
    except (OSError, ValueError, TypeError, StrictDataclassError) as error:
        raise ValueError(
            f"{name}: not a Hugging Face model folder or Hub name ({' '.join(str(error).split())[:200]}); "
            "a folder with config.json, tokenizer and safetensors works, or Qwen/Qwen2.5-0.5B-Instruct"
        ) from error
    if Path(path).is_dir() and (damage := weights_damage(Path(path))):
        raise ValueError(f"{name}: {damage}; a folder of save_pretrained works")
    for knob in LOGIT_KNOBS:
        if getattr(config, knob, None) not in (None, 1.0):
            raise ValueError(f"{name}: {knob} is not computed by the packed head; a Qwen or Llama model works")
    layers = {*(getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or [])}
    if others := layers - {"full_attention", "sliding_attention", "attention"}:
        rule = f"its {sorted(others)[0]} layers are not computed right where sequences are packed"
        raise ValueError(f"{name}: {rule}; a Qwen or Llama model works")
    kinds = config.architectures or []
    is_lm = all(kind.endswith(("ForCausalLM", "LMHeadModel")) for kind in kinds)
    is_scalar = has_scalar_head(config)
    fits, wanted, works = {
        "lm": (is_lm, "be a causal LM", "Qwen/Qwen2.5-0.5B-Instruct"),
        "scalar": (is_scalar, "have a scalar head", "a folder written by reward_model_bt.py"),
        "any": (is_lm or is_scalar, "be a causal LM or have a scalar head", "Qwen/Qwen2.5-0.5B-Instruct"),
    }[head]
    if not fits:
        labels = "" if is_lm else f" of {config.num_labels} label(s)"
        raise ValueError(f"{name}: must {wanted}, and is {', '.join(kinds) or 'unnamed'}{labels}; {works} works")
    return config


def load_tokenizer(path: str, flag: str = "--model") -> PreTrainedTokenizerBase:
    """Raises: ValueError when the model comes without a tokenizer, or has no rows for all of its tokens."""
    missing = f"{named(flag, path)}: has no usable tokenizer; a folder with tokenizer.json works"
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:  # the last two: JSON of another shape
        raise ValueError(f"{missing} ({' '.join(str(error).split())[:200]})") from error
    if not tokenizer("0", add_special_tokens=False).input_ids:  # transformers makes up an empty one, without a word
        raise ValueError(missing)
    check_vocabulary(named(flag, path), tokenizer, AutoConfig.from_pretrained(path).vocab_size)
    return tokenizer


def same_vocabulary(one: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase) -> bool:
    """Whether an id means the same token to both. Pad tokens aside: a reward model may have got one of its own."""
    pads = {one.pad_token, other.pad_token}
    first, second = ({k: v for k, v in t.get_vocab().items() if k not in pads} for t in (one, other))
    return first == second


def positions_of(config: PreTrainedConfig) -> int:
    """Tokens of the longest sequence that the packed forward computes right.

    Where RoPE's table depends on the length, all of a packed row take that of its longest sequence: then only as far as
    the first table goes.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    each = [rope, *(own for own in rope.values() if isinstance(own, dict))]  # some have one for each kind of layer
    moving = [own for own in each if own.get("rope_type") in ("longrope", "dynamic")]
    ends = [own.get("original_max_position_embeddings") or math.inf for own in moving]
    return min([config.max_position_embeddings, *ends])


def check_positions(path: str, flag: str, config: PreTrainedConfig, longest: int) -> None:
    """Refuse a model with fewer positions than `longest`, prompt + response in tokens. Raises: ValueError."""
    if (positions := positions_of(config)) < longest:
        raise ValueError(
            f"{named(flag, path)}: has {positions} positions, and must have those of "
            f"--max-prompt-len + --max-response-len; a model with {longest} or more works"
        )


def check_sibling(
    path: str, flag: str, tokenizer: PreTrainedTokenizerBase, longest: int, head: Literal["lm", "any"] = "lm"
) -> PreTrainedConfig:
    """Refuse a model that cannot read the policy's token ids: another vocabulary, or fewer positions than `longest`.

    Args: head: see `load_config`.
    Returns: its config.
    Raises: ValueError.
    """
    config = load_config(path, flag, head)
    if not same_vocabulary(load_tokenizer(path, flag), tokenizer):
        raise ValueError(f"{flag} {path}: has another vocabulary than --model; one of the same family works")
    check_positions(path, flag, config, longest)
    return config


def load_policy(path: str, mesh: DeviceMesh, *, flag: str = "--model", **how) -> PolicyModel:
    """The causal LM of a folder, sharded. `how`: see `_load`.

    Raises: ValueError when the folder's weights do not fill the model.
    """
    return _load(PolicyModel, path, load_config(path, flag), mesh, flag, **how)


def load_scalar(
    path: str, mesh: DeviceMesh, *, flag: str, seed: int = 0, head_std: float | None = None, **how
) -> ScalarModel:
    """The reward model of a folder, or with `head_std` the backbone of any, sharded. `how`: see `_load`.

    Args: head_std: where the folder is a causal LM's, it gets a new head drawn with this std (0: zeros) from `seed`;
        None: the folder must bring the head.
    Raises: ValueError when the head is not scalar, or the folder's weights do not fill the model.
    """
    config = load_config(path, flag, "scalar" if head_std is None else "any")
    brings_head, config.num_labels = has_scalar_head(config), 1

    def new_head(source: nn.Module, missing: list[str]) -> list[str]:
        if "score.weight" in missing and not brings_head:
            generator = torch.Generator().manual_seed(seed_for("head", seed))
            source.score.weight.data.normal_(0.0, head_std, generator=generator)
            missing.remove("score.weight")
        return missing

    return _load(ScalarModel, path, config, mesh, flag, fill=new_head, **how)


def _load(
    wrapper: type[PolicyModel] | type[ScalarModel],
    path: str,
    config: PreTrainedConfig,
    mesh: DeviceMesh,
    flag: str,
    *,
    master_dtype: torch.dtype,
    compute_dtype: torch.dtype,
    trainable: bool = True,
    activation_checkpointing: bool = False,
    compile_blocks: bool = False,
    offload: bool = False,
    fill=lambda source, missing: missing,
) -> nn.Module:
    """Build on meta, shard with `fully_shard` (each block, then the root), then fill the shards from rank 0.

    Args: master_dtype: of the sharded parameters (float32 to train); compute_dtype: of the unsharded ones in forward
        and backward. Gradients are reduced in float32. trainable=False: frozen. offload: shards and their gradients
        live on the host, blocks visit the device. fill: initialises what is missing from the folder, returns what still
        is.
    """
    saved_dtype = config.dtype or torch.float32
    device = torch.device(mesh.device_type, torch.cuda.current_device() if mesh.device_type == "cuda" else None)
    with init_empty_weights(include_buffers=False):  # parameters on meta; buffers (rotary tables) real
        lm = wrapper.auto_class.from_config(config, dtype=master_dtype, attn_implementation="packed")
    if not lm._supports_attention_backend:
        raise ValueError(f"{named(flag, path)}: {type(lm).__name__} takes no attention function; Qwen2 or Llama works")
    model = wrapper(lm, saved_dtype).train(trainable).requires_grad_(trainable)
    for module in model.modules():  # rates are nn.Dropout's p, or floats that forward hands to F.dropout
        # DETAIL: no dropout (nor router jitter), because it would make old and new log-probs differ by noise
        for name, value in list(vars(module).items()):
            if isinstance(value, float) and (isinstance(module, nn.Dropout) or "drop" in name or "jitter" in name):
                setattr(module, name, 0.0)
    if activation_checkpointing:
        lm.gradient_checkpointing_enable({"use_reentrant": False})
    blocks = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    assert blocks, f"{type(lm).__name__}: no transformer blocks found"
    if compile_blocks and wrapper is PolicyModel:
        model.compile_head()
    precision = MixedPrecisionPolicy(compute_dtype, torch.float32, cast_forward_inputs=False)
    shards = {"mesh": mesh, "offload_policy": CPUOffloadPolicy(device.type == "cuda") if offload else OffloadPolicy()}
    for block in blocks:
        if compile_blocks:
            block.compile()
        # one rank gains nothing by freeing a block that the backward pass casts again; a frozen one has no backward
        fully_shard(block, **shards, mp_policy=precision, reshard_after_forward=mesh.size() > 1 or not trainable)
    if wrapper is ScalarModel:
        float32 = MixedPrecisionPolicy(torch.float32, torch.float32, cast_forward_inputs=False)
        fully_shard(lm.score, **shards, mp_policy=float32)
    fully_shard(model, **shards, mp_policy=precision, reshard_after_forward=not trainable)
    model.generation_config_file = cached_file(
        path, "generation_config.json", _raise_exceptions_for_missing_entries=False
    )
    home = torch.device("cpu") if offload else device
    model._apply(lambda t: torch.empty_like(t, device=home) if t.is_meta else t.to(device))

    full = {}
    with fail_together():
        if mesh.get_rank() == 0:
            try:
                source, info = wrapper.auto_class.from_pretrained(
                    path, config=config, dtype=master_dtype, output_loading_info=True
                )
            except RuntimeError as error:  # transformers' word for weights of other sizes
                reason = " ".join(str(error).split())[:200]
                raise ValueError(f"{named(flag, path)}: its weights do not fit its config.json ({reason})") from error
            if missing := fill(source, sorted(info["missing_keys"])):
                raise ValueError(f"{named(flag, path)}: weights missing from the folder, {missing[:3]} among them")
            full = wrapper(source).state_dict()
    set_model_state_dict(model, full, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    return model


def hf_name(name: str) -> str:
    """Parameter name inside a PolicyModel or ScalarModel -> name in the Hugging Face checkpoint."""
    return name.removeprefix("lm.")
