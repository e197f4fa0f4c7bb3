"""The packed forward against plain transformers: log-probs, entropy and gradients."""

import json
from types import SimpleNamespace

import pytest
import torch
from conftest import make_model, sequences
from torch.distributed.fsdp import FSDPModule
from transformers import AutoModelForCausalLM

from utils import head, models
from utils.models import load_config, load_policy, positions_of
from utils.optim import begin_micro_batch
from utils.packing import pack

CPU = torch.device("cpu")
PROMPTS = [[1, 2, 3], [9], list(range(20, 50)), [4, 4]]
RESPONSES = [[8, 5], [11, 12, 13, 6], [3], [0, 0, 0]]
SEQUENCES = sequences(PROMPTS, RESPONSES)
WEIGHTS = torch.randn(10, generator=torch.Generator().manual_seed(3))  # a different gradient for every token


def plain(path, temperature):
    """Log-probs and entropies of the response tokens, one unpadded sequence at a time, without any code of ours."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    logprobs, entropies = [], []
    for prompt, response in zip(PROMPTS, RESPONSES, strict=True):
        logits = model(torch.tensor([prompt + response])).logits[0] / temperature
        dist = torch.distributions.Categorical(logits=logits[len(prompt) - 1 : -1])
        logprobs.append(dist.log_prob(torch.tensor(response)))
        entropies.append(dist.entropy())
    return model, torch.cat(logprobs), torch.cat(entropies)


families = pytest.mark.parametrize(
    "family, tie, options",
    [
        ("qwen2", True, {}),
        ("qwen2", False, {"activation_checkpointing": True}),
        ("llama", False, {}),
        ("sliding", True, {}),
        ("phi", False, {}),  # a bias on the head, and dropout
        ("opt", True, {}),  # dropout as a function, of a rate that is no module's
        ("gpt2", True, {}),  # absolute positions: a shift of a whole sequence changes its numbers
    ],
)


@families
def test_fault_39_packed_equals_one_by_one(process_group, tmp_path, monkeypatch, family, tie, options):
    monkeypatch.setattr(head, "HEAD_CHUNK", 3)  # several chunks, the last one short
    compare(process_group, tmp_path, family, tie, options, temperature=1.0)


@families
def test_fault_15_logits_are_divided_by_the_temperature(process_group, tmp_path, family, tie, options):
    """Once, before log-prob and entropy alike."""
    compare(process_group, tmp_path, family, tie, options, temperature=0.5)


def compare(process_group, tmp_path, family, tie, options, temperature):
    """Log-probs, entropies and the gradient of the packed forward with those of `plain`."""
    sizes = {}
    if family == "sliding":
        family, sizes = "qwen2", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
    if family == "phi":
        sizes = {"resid_pdrop": 0.5, "embd_pdrop": 0.5}
    if family == "opt":
        sizes = {"dropout": 0.5, "attention_dropout": 0.5, "layerdrop": 0.5, "ffn_dim": 256, "word_embed_proj_dim": 128}
    path = make_model(tmp_path / "m", family, tie, **sizes)
    reference, logprobs, entropies = plain(path, temperature)
    policy = load_policy(str(path), process_group, master_dtype=torch.float32, compute_dtype=torch.float32, **options)
    got_logprobs, got_entropies = policy(pack(SEQUENCES, CPU), temperature)
    torch.testing.assert_close(got_logprobs, logprobs, atol=2e-6, rtol=1e-6)
    torch.testing.assert_close(got_entropies, entropies, atol=5e-6, rtol=1e-6)
    assert not got_entropies.requires_grad

    (logprobs * WEIGHTS).sum().backward()
    (got_logprobs * WEIGHTS).sum().backward()
    expected = {name: param.grad for name, param in reference.named_parameters()}
    got = {models.hf_name(name): param.grad.full_tensor() for name, param in policy.named_parameters()}
    assert got.keys() == expected.keys()
    largest = max(gradient.abs().max().item() for gradient in expected.values())
    for name, gradient in expected.items():
        scale = max(gradient.abs().max().item(), 1e-2 * largest)  # a bias of keys has none, but for rounding
        torch.testing.assert_close(got[name], gradient, atol=2e-5 * scale, rtol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def test_router_jitter_is_off(process_group, tmp_path):
    path = make_model(tmp_path / "m", "mixtral", router_jitter_noise=0.5, num_local_experts=4)
    policy = load_policy(str(path), process_group, master_dtype=torch.float32, compute_dtype=torch.float32)
    one, other = (policy(pack(SEQUENCES, CPU), 1.0)[0] for _ in range(2))
    assert torch.equal(one, other)


def test_the_window_of_a_sliding_model_matters(process_group, tmp_path):
    """The sliding case above would pass with the window ignored if the window never bit: see that it does."""
    path = make_model(tmp_path / "m", use_sliding_window=True, sliding_window=4, max_window_layers=1)
    with_window = plain(path, 1.0)[1]
    full = make_model(tmp_path / "full")
    assert (with_window - plain(full, 1.0)[1]).abs().max() > 1e-3


def fsdp_groups(policy):
    return [m._get_fsdp_state()._fsdp_param_group for m in policy.modules() if isinstance(m, FSDPModule)]


def test_micro_batches_with_gradient_sync_off_add_up(process_group, tmp_path):
    """Four micro-batches, the second of them empty, give the gradient of one; the next forward sees new weights."""
    path = str(make_model(tmp_path / "m"))
    dtypes = {"master_dtype": torch.float32, "compute_dtype": torch.float32}
    gradients, logprobs = [], []
    for parts in ([[0, 1, 2, 3]], [[0, 3], [], [2], [1]]):
        policy = load_policy(path, process_group, **dtypes)
        for k, part in enumerate(parts):
            begin_micro_batch(policy, k == len(parts) - 1)
            packed = pack([SEQUENCES[i] for i in part], CPU)
            policy(packed, 1.0)[0].sum().backward()
            reduced = {p.sharded_param.grad is not None for group in fsdp_groups(policy) for p in group.fsdp_params}
            assert reduced == {k == len(parts) - 1}, "gradients are reduced after the last micro-batch alone"
            gathered = {group.is_unsharded for group in fsdp_groups(policy)}
            assert gathered == {k < len(parts) - 1}, "one rank keeps its blocks gathered until then"
        gradients.append([p.grad.full_tensor() for p in policy.parameters()])
        with torch.no_grad():
            for p in policy.parameters():
                p.mul_(0.5)
            logprobs.append(policy(pack(SEQUENCES, CPU), 1.0)[0])
    torch.testing.assert_close(logprobs[1], logprobs[0])
    assert (logprobs[0] - plain(path, 1.0)[1]).abs().max() > 1e-3
    for one, four in zip(*gradients, strict=True):
        torch.testing.assert_close(four, one, atol=1e-5, rtol=1e-5)


def test_refuses_models_it_would_compute_wrongly(tmp_path):
    with pytest.raises(ValueError, match=r"--model .*nowhere: not a Hugging Face model folder"):
        load_config(str(tmp_path / "nowhere"))
    path = make_model(tmp_path / "m", final_logit_softcapping=30.0)
    with pytest.raises(ValueError, match="final_logit_softcapping"):
        load_config(str(path))
    path = make_model(tmp_path / "hybrid") / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"layer_types": ["conv", "full_attention"]}))
    with pytest.raises(ValueError, match="its conv layers are not computed right where sequences are packed"):
        load_config(str(path.parent))


@pytest.mark.parametrize("kind, nested, positions", [
    ("longrope", False, 64), ("longrope", True, 64), ("dynamic", False, 64), ("yarn", False, 512),
])  # fmt: skip
def test_positions_end_where_a_table_of_rope_would_change(kind, nested, positions):
    rope = {"rope_type": kind, "original_max_position_embeddings": 64}
    each = {"full_attention": rope, "sliding_attention": {"rope_type": "default"}} if nested else rope
    assert positions_of(SimpleNamespace(max_position_embeddings=512, rope_parameters=each)) == positions
    assert positions_of(SimpleNamespace(max_position_embeddings=512)) == 512


def test_a_folder_whose_weights_do_not_fill_the_model_is_refused(process_group, tmp_path):
    from safetensors.torch import load_file, save_file

    path = make_model(tmp_path / "m")
    weights = load_file(path / "model.safetensors")
    weights.pop("model.layers.1.mlp.up_proj.weight")
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"weights missing from the folder.*layers\.1\.mlp\.up_proj"):
        load_policy(str(path), process_group, master_dtype=torch.float32, compute_dtype=torch.float32)


def test_gradients_are_reduced_in_float32(process_group, tmp_path):
    path = str(make_model(tmp_path / "m"))
    policy = load_policy(path, process_group, master_dtype=torch.float32, compute_dtype=torch.bfloat16)
    policy(pack(SEQUENCES, CPU), 1.0)[0].sum().backward()
    for module in (m for m in policy.modules() if isinstance(m, FSDPModule)):
        assert module._get_fsdp_state()._mp_policy.reduce_dtype == torch.float32
    assert {p.grad.dtype for p in policy.parameters()} == {torch.float32}
