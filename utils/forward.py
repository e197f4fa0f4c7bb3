"""Packed forwards of a causal LM and of a scalar model: log-probs of the response tokens, or values and scores.

Shapes: T packed tokens, N response tokens of the micro-batch, b its responses, H hidden, V vocabulary, D head size. [T,
V] never exists: the head runs on the N predicting positions alone, in chunks (utils/head.py).
"""

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
)

from utils.head import KERNELS, LogProbHead, compiled_kernels
from utils.packing import Packed, pack, plan_together, to_device

if torch.cuda.is_available():
    from torch.nn.attention.varlen import varlen_attn


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


# No mask function is registered: a name that has none gets no mask, without a look at the positions on the device.
AttentionInterface.register("packed", packed_attention)


def _hidden(lm: nn.Module, packed: Packed) -> torch.Tensor:
    """The backbone's last hidden states, [T, H]."""
    return lm.base_model(
        input_ids=packed.input_ids_T[None],
        position_ids=packed.position_ids_T[None],
        use_cache=False,  # nothing decodes from here: a cache would only hold memory
        cu_seq_lens_q=packed.cu_seqlens,
        cu_seq_lens_k=packed.cu_seqlens,
        max_length_q=packed.max_seqlen,
        max_length_k=packed.max_seqlen,
    ).last_hidden_state[0]


def attention_shape(config) -> tuple[int, int, int, int]:
    """Layers, heads, key-value heads and head size; not every config names them all."""
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    return config.num_hidden_layers, heads, kv_heads, getattr(config, "head_dim", None) or config.hidden_size // heads


def _backbone_flops(lm: nn.Module, lengths: np.ndarray) -> float:
    """Of a forward and backward: 6 per token and parameter that multiplies it (no embedding), and causal attention."""
    layers, heads, _, head_size = attention_shape(lm.config)
    embedding = lm.get_input_embeddings().weight.numel()
    params = sum(p.numel() for p in lm.base_model.parameters()) - embedding
    return 6.0 * params * lengths.sum() + 6.0 * layers * heads * head_size * np.square(lengths).sum()


class PolicyModel(nn.Module):
    """A causal LM as the root FSDP module: its forward returns log-probs, so that all FSDP work is inside it."""

    auto_class = AutoModelForCausalLM

    def __init__(self, lm: nn.Module, saved_dtype: torch.dtype | None = None):
        super().__init__()
        self.lm = lm
        self.saved_dtype = saved_dtype  # of the folder it was loaded from, and of the one it is exported to
        self.generation_config_file: str | None = None  # goes into the export as it is
        self.head_kernels = KERNELS
        if lm.config.tie_word_embeddings:
            # FSDP2 keeps one owner per parameter: the alias would be left behind on every unshard, so it goes.
            lm.set_output_embeddings(None)

    def flops(self, prompts: np.ndarray, responses: np.ndarray) -> float:
        """Of a forward and backward over sequences of these lengths in tokens; the head is on response tokens alone."""
        head = self.lm.get_input_embeddings().weight.numel()  # the output matrix is as large, tied or not
        return _backbone_flops(self.lm, prompts + responses) + 6.0 * head * responses.sum()

    def compile_head(self) -> None:
        """Fuse what is done to [chunk, V] logits: each pass over them costs as much memory traffic as a small block."""
        self.head_kernels = compiled_kernels()

    def forward(self, packed: Packed, temperature: float, entropy_grad: bool = False) -> tuple:
        """Log-prob and entropy, in nats, of each response token at `temperature`.

        Shapes: both [N] float32; `packed.to_padded` brings them to [b, R]. Entropy has a gradient only if asked for.
        """
        hidden_TH = _hidden(self.lm, packed)
        head = self.lm.get_output_embeddings() or self.lm.get_input_embeddings()
        return LogProbHead.apply(
            hidden_TH[packed.predict_N], head.weight, getattr(head, "bias", None), packed.target_N, temperature,
            entropy_grad, self.head_kernels,
        )  # fmt: skip


class ScalarModel(nn.Module):
    """A critic or a reward model: `AutoModelForSequenceClassification` with one label, as the root FSDP module."""

    auto_class = AutoModelForSequenceClassification

    def __init__(self, lm: nn.Module, saved_dtype: torch.dtype | None = None):
        super().__init__()
        self.lm = lm
        self.saved_dtype = saved_dtype
        self.generation_config_file: str | None = None

    def flops(self, prompts: np.ndarray, responses: np.ndarray) -> float:
        """Of a forward and backward over sequences of these lengths in tokens."""
        return _backbone_flops(self.lm, prompts + responses)

    def forward(self, packed: Packed) -> tuple[torch.Tensor, torch.Tensor]:
        """The scalar of the state each response token is sampled in, and of the state after the last one.

        The first are a critic's values, the second a reward model's score (or the value to bootstrap from). Positions
        come from lengths alone, whatever the tokens and the other sequences are.
        Shapes: [N] and [b], float32.
        """
        hidden_TH = _hidden(self.lm, packed)
        # DETAIL: the scalar head runs in float32 (its own FSDP unit), because bfloat16 would leave 3 digits of a score.
        scalars = self.lm.score(hidden_TH[torch.cat([packed.predict_N, packed.last_b])].float())[:, 0]
        num_values = len(packed.predict_N)
        return scalars[:num_values].clone(), scalars[num_values:].clone()  # FSDP hooks want no views


# ---- whole batches ----


@torch.no_grad()
def logprobs_of(policy: PolicyModel, rollouts: Sequence, width: int, temperature: float, max_tokens: int, device):
    """Log-prob of every response token, in nats, 0 on padding (collective).

    Shapes: [B, R = width] float32. Args: max_tokens: packed tokens of a micro-batch.
    """
    out_BR = torch.zeros(len(rollouts), width, device=device)
    for part in plan_together(rollouts, range(len(rollouts)), max_tokens)[0]:
        packed = pack([rollouts[i] for i in part], device)
        out_BR[to_device(part, device)] = packed.to_padded(policy(packed, temperature)[0], len(part), width)
    return out_BR


@torch.no_grad()
def values_of(critic: ScalarModel, rollouts: Sequence, width: int, max_tokens: int, device):
    """Values of the states each token is sampled in, 0 on padding, and of the state after the last one (collective).

    Shapes: [B, R = width] and [B], float32. Args: max_tokens: packed tokens of a micro-batch.
    """
    out_BR, last_B = torch.zeros(len(rollouts), width, device=device), torch.zeros(len(rollouts), device=device)
    for part in plan_together(rollouts, range(len(rollouts)), max_tokens)[0]:
        packed = pack([rollouts[i] for i in part], device)
        part_b = to_device(part, device)
        values_N, last_B[part_b] = critic(packed)
        out_BR[part_b] = packed.to_padded(values_N, len(part), width)
    return out_BR, last_B
