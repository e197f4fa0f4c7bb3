"""Load a Hugging Face causal LM onto FSDP2 shards; packed forward that returns log-probs of the response tokens.

Shapes: T packed tokens, N response tokens of the micro-batch, H hidden, V vocabulary. [T, V] never exists: the head
runs on the N predicting positions alone, in chunks, and is recomputed in the backward pass.
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from accelerate import init_empty_weights
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
)
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import cached_file
from transformers.utils import logging as transformers_logging

from utils.dist import fail_together
from utils.packing import Packed

if torch.cuda.is_available():
    from torch.nn.attention.varlen import varlen_attn

HEAD_CHUNK = 2048  # response tokens per head chunk; at a vocabulary of 152k one float32 [chunk, V] is 1.2 GiB
LOGIT_KNOBS = ("final_logit_softcapping", "attn_logit_softcapping", "logit_scale", "logits_scaling")


def packed_attention(
    module, query, key, value, attention_mask, scaling=None, sliding_window=None, cu_seq_lens_q=None,
    max_length_q=None, **kwargs,
):  # fmt: skip
    """Causal attention inside each packed sequence; the attention function every model here is loaded with.

    Args: query: [1, heads, T, D]; key, value: [1, kv_heads, T, D]; cu_seq_lens_q: [n + 1]; sliding_window: tokens.
    Returns: [1, T, heads, D] and None, as transformers wants it.
    """
    assert cu_seq_lens_q is not None, "packed_attention needs cu_seq_lens_q: the model did not hand its kwargs down"
    grouped = query.shape[1] != key.shape[1]
    q_THD, k_THD, v_THD = (x[0].transpose(0, 1) for x in (query, key, value))
    if query.is_cuda and query.dtype != torch.float32:
        window = (sliding_window - 1 if sliding_window else -1, 0)
        gqa = {"enable_gqa": grouped} if "enable_gqa" in varlen_attn.__kwdefaults__ else {}
        out_THD = varlen_attn(
            q_THD, k_THD, v_THD, cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q,
            scale=scaling, window_size=window, **gqa,
        )  # fmt: skip
        return out_THD[None], None
    # No varlen kernel for float32, nor on CPU. One right-padded row per sequence costs n x max_length^2 instead of the
    # T^2 of a block-diagonal mask; a causal row never sees the padding behind it.
    lengths = cu_seq_lens_q.diff()
    row_T = torch.repeat_interleave(torch.arange(len(lengths), device=query.device), lengths)
    col_T = torch.arange(len(row_T), device=query.device) - cu_seq_lens_q[row_T]

    def padded(x_THD):
        return x_THD.new_zeros(len(lengths), max_length_q, *x_THD.shape[1:]).index_put((row_T, col_T), x_THD)

    q, k, v = (padded(x).transpose(1, 2) for x in (q_THD, k_THD, v_THD))
    mask = None
    if sliding_window and sliding_window < max_length_q:
        i = torch.arange(max_length_q, device=query.device)
        mask = (i[:, None] >= i) & (i[:, None] - i < sliding_window)
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=grouped
    )
    return out.transpose(1, 2)[row_T, col_T][None], None


transformers_logging.disable_progress_bar()  # one bar, the run's own
AttentionInterface.register("packed", packed_attention)
AttentionMaskInterface.register("packed", lambda *args, **kwargs: None)


def _head_chunk(hidden_NH, weight_VH, bias_V, target_N, temperature):
    # DETAIL: logits are divided by the temperature once, in float32, before log-prob and entropy alike, as the engine
    # does (processed_logprobs); dividing log-probs instead would leave them unnormalised.
    logits_NV = F.linear(hidden_NH, weight_VH, bias_V).float() / temperature
    lse_N = logits_NV.logsumexp(-1)
    logprobs_N = logits_NV.gather(-1, target_N[:, None])[:, 0] - lse_N
    with torch.no_grad():  # logged, not trained on
        entropy_N = lse_N - (logits_NV - lse_N[:, None]).exp_().mul_(logits_NV).sum(-1)
    return logprobs_N, entropy_N


class PolicyModel(nn.Module):
    """A causal LM as the root FSDP module: its forward returns log-probs, so that all FSDP work is inside it."""

    def __init__(self, lm: nn.Module, saved_dtype: torch.dtype | None = None):
        super().__init__()
        self.lm = lm
        self.saved_dtype = saved_dtype  # of the folder it was loaded from, and of the one it is exported to
        self.generation_config_file: str | None = None  # goes into the export as it is
        if lm.config.tie_word_embeddings:
            # FSDP2 keeps one owner per parameter: the alias would be left behind on every unshard, so it goes.
            lm.set_output_embeddings(None)

    def forward(self, packed: Packed, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-prob and entropy, in nats, of each response token at `temperature`.

        Shapes: both [N] float32; `packed.to_padded` brings them to [b, R]. Entropy carries no gradient.
        """
        hidden_TH = self.lm.base_model(
            input_ids=packed.input_ids_T[None],
            position_ids=packed.position_ids_T[None],
            use_cache=False,  # nothing decodes from here: a cache would only hold memory
            cu_seq_lens_q=packed.cu_seqlens,
            cu_seq_lens_k=packed.cu_seqlens,
            max_length_q=packed.max_seqlen,
            max_length_k=packed.max_seqlen,
        ).last_hidden_state[0]
        head = self.lm.get_output_embeddings() or self.lm.get_input_embeddings()
        bias_V = getattr(head, "bias", None)
        chunks = []
        for hidden, target in zip(
            hidden_TH[packed.predict_N].split(HEAD_CHUNK), packed.target_N.split(HEAD_CHUNK), strict=True
        ):
            args = (hidden, head.weight, bias_V, target, temperature)
            grad = torch.is_grad_enabled()
            chunks.append(checkpoint(_head_chunk, *args, use_reentrant=False) if grad else _head_chunk(*args))
        logprobs_N, entropy_N = (torch.cat(parts) for parts in zip(*chunks, strict=True))
        return logprobs_N, entropy_N


def load_config(path: str, flag: str = "--model") -> PreTrainedConfig:
    """The model's config, refused where the packed forward would not compute what the model defines.

    Raises: ValueError for a missing or unusable folder, or an architecture this cannot run.
    """
    try:
        config = AutoConfig.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{flag} {path}: not a Hugging Face model folder or Hub name ({str(error).splitlines()[0]}); "
            "a folder with config.json, tokenizer and safetensors works, or Qwen/Qwen2.5-0.5B-Instruct"
        ) from error
    if Path(path).is_dir() and not any(Path(path).glob("*.safetensors")) and not any(Path(path).glob("*.bin")):
        raise ValueError(f"{flag} {path}: has no weights (*.safetensors or *.bin); a folder of save_pretrained works")
    for knob in LOGIT_KNOBS:
        if getattr(config, knob, None) not in (None, 1.0):
            raise ValueError(f"{flag} {path}: {knob} is not computed by the packed head; a Qwen or Llama model works")
    return config


def load_tokenizer(path: str, flag: str = "--model") -> PreTrainedTokenizerBase:
    """Raises: ValueError when the model comes without a tokenizer."""
    missing = f"{flag} {path}: has no usable tokenizer; a folder with tokenizer.json works"
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(missing) from error
    if not tokenizer("0", add_special_tokens=False).input_ids:  # transformers makes up an empty one, without a word
        raise ValueError(missing)
    return tokenizer


def end_of_sequence_ids(path: str, config, tokenizer) -> list[int]:
    """All ids that end a response: those of the generation config, else of the model's config, else the tokenizer's."""
    try:
        ids = GenerationConfig.from_pretrained(path).eos_token_id
    except OSError:  # no generation_config.json
        ids = None
    for source in (config, tokenizer):
        ids = getattr(source, "eos_token_id", None) if ids is None else ids
    if ids is None:
        raise ValueError(
            f"--model {path}: names no eos_token_id, responses could not end; add it to generation_config.json"
        )
    return ids if isinstance(ids, list) else [ids]


def load_policy(
    path: str,
    mesh: DeviceMesh,
    *,
    master_dtype: torch.dtype,
    compute_dtype: torch.dtype,
    trainable: bool = True,
    activation_checkpointing: bool = False,
    compile_blocks: bool = False,
    flag: str = "--model",
) -> PolicyModel:
    """Build on meta, shard with `fully_shard` (each block, then the root), then fill the shards from rank 0.

    Args: master_dtype: of the sharded parameters (float32 to train); compute_dtype: of the unsharded ones in forward
        and backward. Gradients are reduced in float32. trainable=False: a frozen reference.
    Raises: ValueError when the folder's weights do not fill the model.
    """
    config = load_config(path, flag)
    saved_dtype = config.dtype or torch.float32
    device = torch.device(mesh.device_type, torch.cuda.current_device() if mesh.device_type == "cuda" else None)
    with init_empty_weights(include_buffers=False):  # parameters on meta; buffers (rotary tables) real
        lm = AutoModelForCausalLM.from_config(config, dtype=master_dtype, attn_implementation="packed")
    if not lm._supports_attention_backend:
        raise ValueError(f"{flag} {path}: {type(lm).__name__} takes no attention function; Qwen2 or Llama works")
    policy = PolicyModel(lm, saved_dtype).train(trainable).requires_grad_(trainable)
    for module in policy.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0  # DETAIL: no dropout, because it would make old and new log-probs differ by noise
    if activation_checkpointing:
        lm.gradient_checkpointing_enable({"use_reentrant": False})
    blocks = [m for m in policy.modules() if isinstance(m, GradientCheckpointingLayer)]
    assert blocks, f"{type(lm).__name__}: no transformer blocks found"
    precision = MixedPrecisionPolicy(compute_dtype, torch.float32, cast_forward_inputs=False)
    for block in blocks:
        if compile_blocks:
            block.compile()
        # one rank gains nothing by freeing a block that the backward pass casts again; a reference has no backward
        fully_shard(block, mesh=mesh, mp_policy=precision, reshard_after_forward=mesh.size() > 1 or not trainable)
    fully_shard(policy, mesh=mesh, mp_policy=precision, reshard_after_forward=not trainable)
    policy.generation_config_file = cached_file(
        path, "generation_config.json", _raise_exceptions_for_missing_entries=False
    )
    policy._apply(lambda t: torch.empty_like(t, device=device) if t.is_meta else t.to(device))

    full = {}
    with fail_together():
        if mesh.get_rank() == 0:
            source, info = AutoModelForCausalLM.from_pretrained(path, dtype=master_dtype, output_loading_info=True)
            if info["missing_keys"]:
                missing = sorted(info["missing_keys"])[:3]
                raise ValueError(f"{flag} {path}: weights missing from the folder, {missing} among them")
            full = PolicyModel(source).state_dict()
    set_model_state_dict(policy, full, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    return policy


def hf_name(name: str) -> str:
    """Parameter name inside a PolicyModel -> name in the Hugging Face checkpoint."""
    return name.removeprefix("lm.")
