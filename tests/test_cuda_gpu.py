"""What only CUDA shows. On a machine with a GPU: python -m pytest tests/test_cuda_gpu.py"""

import sys

import numpy as np
import pytest
import torch
from conftest import ROOT, make_model, run, sequences
from safetensors.numpy import load_file
from test_golden import GOLDEN, SCRIPTS
from test_runs import rows
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from hybrid_engine import HybridEngine, Sampling
from utils import tiny
from utils.forward import logprobs_of, values_of
from utils.models import hf_name, load_policy, load_scalar
from utils.packing import pack

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

SIZES = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4, "vocab_size": 2048}
PROMPTS = [list(range(7 * i + 10, 7 * i + 10 + 3 * i + 1)) for i in range(24)]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return str(make_model(tmp_path_factory.mktemp("cuda") / "m", tie=True, **SIZES))


@pytest.fixture(scope="module")
def engine(process_group, path):
    return HybridEngine(
        path, seed=1, max_model_len=256, eos_token_ids=[5, 6], kv_cache_gib=1, dtype=torch.bfloat16, max_num_seqs=64,
        sleep_mode=True,
    )  # fmt: skip


def load(path, mesh, dtype=torch.bfloat16, **options):
    return load_policy(path, mesh, master_dtype=torch.float32, compute_dtype=dtype, **options)


def generate(engine, n=2, temperature=1.0):
    return engine.generate(PROMPTS, range(len(PROMPTS)), n=n, step=1, sampling=Sampling(temperature, 32))


def pack_rollouts(rollouts):
    return pack(rollouts, torch.device("cuda"))


def mismatch(rollouts, policy, exact):
    """Mean |engine - trainer| log-prob, over what rounding to bfloat16 alone costs the trainer on these tokens."""
    with torch.no_grad():
        trainer, float32 = (model(pack_rollouts(rollouts), 1.0)[0] for model in (policy, exact))
    engine = torch.tensor([x for r in rollouts for x in r.logprobs], device="cuda")
    return ((trainer - engine).abs().mean() / (trainer - float32).abs().mean()).item()


@pytest.mark.parametrize("family, window", [("qwen2", None), ("llama", None), ("qwen2", 8)])
@pytest.mark.parametrize("options", [{}, {"activation_checkpointing": True}, {"compile_blocks": True}])
def test_packed_varlen_is_as_near_to_float32_as_plain_bf16(process_group, tmp_path, family, window, options):
    sizes = {"use_sliding_window": True, "sliding_window": window, "max_window_layers": 0} if window else {}
    path = str(make_model(tmp_path / "m", family, tie=False, **{**SIZES, **sizes}))
    generator = torch.Generator().manual_seed(1)
    responses = [torch.randint(7, 2048, (int(n),), generator=generator).tolist() for n in range(1, 25)]

    def plain(dtype):
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).cuda()
        parts = []
        for prompt, response in zip(PROMPTS, responses, strict=True):
            logits = model(torch.tensor([prompt + response], device="cuda")).logits[0].float().log_softmax(-1)
            index = torch.arange(len(response), device="cuda") + len(prompt) - 1
            parts.append(logits[index, torch.tensor(response, device="cuda")])
        logprobs = torch.cat(parts)
        logprobs.mean().backward()
        return logprobs.detach(), {n: p.grad.float() for n, p in model.named_parameters()}

    exact, exact_grads = plain(torch.float32)
    rough, rough_grads = plain(torch.bfloat16)
    policy = load(path, process_group, **options)
    logprobs, _ = policy(pack(sequences(PROMPTS, responses), torch.device("cuda")), 1.0)
    logprobs.mean().backward()
    grads = {hf_name(n): p.grad.full_tensor() for n, p in policy.named_parameters()}
    assert (logprobs - exact).abs().mean() < 1.5 * (rough - exact).abs().mean() + 1e-4

    def error(mine):
        return sum((mine[n] - g).square().sum() for n, g in exact_grads.items()).sqrt()

    norm = sum(g.square().sum() for g in exact_grads.values()).sqrt()
    assert error(grads) < 1.5 * error(rough_grads) + 1e-3 * norm


def test_float32_on_cuda_is_exact(process_group, path):
    policy = load(path, process_group, torch.float32)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).cuda()
    prompt, response = PROMPTS[5], [30, 40, 50]
    expected = model(torch.tensor([prompt + response], device="cuda")).logits[0].log_softmax(-1)
    index = torch.arange(3, device="cuda") + len(prompt) - 1
    got = policy(pack(sequences([prompt, PROMPTS[1]], [response, [9]]), torch.device("cuda")), 1.0)[0][:3]
    torch.testing.assert_close(got, expected[index, torch.tensor(response, device="cuda")], atol=1e-3, rtol=0)


def test_every_engine_parameter_is_the_trainers_and_logprobs_agree(engine, process_group, path):
    policy = load(path, process_group)
    engine.sync_weights(policy)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3, fused=True)
    policy(pack_rollouts(generate(engine)), 1.0)[0].mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    engine.sync_weights(policy)
    exact = load(path, process_group, torch.float32)
    exact.load_state_dict(policy.state_dict())
    expected = {hf_name(n): p.full_tensor().bfloat16() for n, p in policy.named_parameters()}
    for name, param in engine.model().named_parameters():
        if "qkv_proj" in name:
            want = torch.cat([expected[name.replace("qkv_proj", f"{c}_proj")] for c in "qkv"])
        elif "gate_up_proj" in name:
            want = torch.cat([expected[name.replace("gate_up", c)] for c in ("gate", "up")])
        else:
            want = expected[name]
        assert torch.equal(param[: len(want)], want), name
    assert mismatch(generate(engine), policy, exact) < 2


@pytest.mark.parametrize("rows", [1, 7, 64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_log_probs_in_one_kernel_are_vllms(engine, dtype, rows):
    from vllm.v1.worker.gpu.sample import logprob, sampler

    generator = torch.Generator("cuda").manual_seed(rows)
    logits = 20 * torch.randn(rows, 20100, device="cuda", generator=generator).to(dtype)[:, :20001]  # padded rows
    logits[:, 5] = float("-inf")
    tokens = torch.randint(6, 20001, (rows,), device="cuda", generator=generator)
    logits[0, :10000], tokens[0] = float("-inf"), 10001  # a whole block
    for num_logprobs in (0, 2):  # with others than the sampled token's, vLLM's own
        ours, theirs = (
            compute(logits, num_logprobs, tokens, None, max_per_req_token_ids=0, logits_mode=False)
            for compute in (sampler.compute_topk_scores, logprob.compute_topk_scores)
        )
        torch.testing.assert_close(ours.logprobs, theirs.logprobs, atol=1e-5, rtol=1e-6)
        on_host = ours.to_cpu_nonblocking()
        torch.cuda.synchronize()
        assert (on_host.tolists().logprobs == ours.logprobs.cpu().numpy()).all()
        assert num_logprobs == 0 or torch.equal(ours.logprob_token_ids, theirs.logprob_token_ids)
    assert sampler.compute_topk_scores is not logprob.compute_topk_scores


def test_same_samples_again_and_other_samples_at_another_step(engine, process_group, path):
    engine.sync_weights(load(path, process_group))
    first, again = generate(engine), generate(engine)
    assert [r.response_ids for r in first] == [r.response_ids for r in again]
    assert len({tuple(r.response_ids) for r in first}) == len(first)


def test_streaks_are_vllms_own_scheduling_two_steps_in_flight(engine, process_group, path, monkeypatch):
    engine.sync_weights(load(path, process_group))
    monkeypatch.setattr(engine, "eos_token_ids", list(range(5, 25)))
    scheduler, begun = type(engine._scheduler), []
    begin = scheduler._begin

    def sample():
        assert engine.llm.reset_prefix_cache()
        return engine.generate(PROMPTS, range(len(PROMPTS)), n=5, step=1, sampling=Sampling(2.0, 150))  # 64 at a time

    monkeypatch.setattr(scheduler, "_begin", lambda self, output: begin(self, output) or begun.append(self._streak))
    mine = sample()
    assert engine.llm.llm_engine.engine_core.engine_core.batch_queue_size == 2 and any(begun)
    monkeypatch.setattr(scheduler, "_begin", lambda self, output: None)
    theirs = sample()
    assert len({len(r.response_ids) for r in mine}) > 20 and {r.finish_reason for r in mine} == {"stop", "length"}
    same = [a.response_ids == b.response_ids for a, b in zip(mine, theirs, strict=True)]
    assert sum(same) >= 0.95 * len(same)  # an attention kernel's rounding may tip a token
    assert max(abs(a.logprobs[0] - b.logprobs[0]) for a, b in zip(mine, theirs, strict=True)) < 0.05


def test_sleep_gives_memory_back_and_wake_and_sync_restore_the_engine(engine, process_group, path):
    policy, exact = load(path, process_group), load(path, process_group, torch.float32)
    engine.sync_weights(policy)
    before = generate(engine, temperature=0.0)
    weights = sum(p.nbytes for p in engine.model().parameters())
    for what, at_least in (("kv", 0.9 * 2**30), ("all", 0.9 * (2**30 + weights))):
        free, allocated = torch.cuda.mem_get_info()[0], torch.cuda.memory_allocated()
        given = engine.sleep(what) * 2**30
        assert torch.cuda.mem_get_info()[0] - free > at_least and given > at_least, what
        assert torch.cuda.memory_allocated() > allocated - 0.1 * given, what  # so a peak is less what sleeps
        engine.wake()
        with pytest.raises(AssertionError, match="generate before sync_weights"):
            generate(engine)
        engine.sync_weights(policy)
        assert [r.response_ids for r in generate(engine, temperature=0.0)] == [r.response_ids for r in before], what
        assert mismatch(generate(engine), policy, exact) < 2, what


@pytest.mark.parametrize("options", [{}, {"activation_checkpointing": True}, {"compile_blocks": True}])
def test_scores_and_values_are_as_near_to_float32_as_plain_bf16(process_group, path, options):
    """Of the critic and the reward model, with their gradients; the head itself runs in float32."""
    generator = torch.Generator().manual_seed(1)
    responses = [torch.randint(7, 2048, (int(n),), generator=generator).tolist() for n in range(1, 25)]
    how = {"flag": "-", "head_std": 0.2, "seed": 3, "master_dtype": torch.float32}
    model = load_scalar(path, process_group, compute_dtype=torch.bfloat16, **options, **how)

    def plain(dtype):
        config = AutoConfig.from_pretrained(path, num_labels=1)
        reference = AutoModelForSequenceClassification.from_pretrained(path, config=config, dtype=torch.float32).cuda()
        reference.score.weight.data.copy_(model.lm.score.weight.full_tensor())
        reference.to(dtype)
        values, scores = [], []
        for prompt, response in zip(PROMPTS, responses, strict=True):
            ids = torch.tensor([prompt + response], device="cuda")
            scalars = reference.score(reference.model(ids).last_hidden_state)[0, len(prompt) - 1 :, 0].float()
            values.append(scalars[:-1]), scores.append(scalars[-1])
        out = torch.cat(values), torch.stack(scores)
        (out[0].mean() + out[1].mean()).backward()
        return [x.detach() for x in out], {n: p.grad.float() for n, p in reference.named_parameters()}

    (exact, exact_grads), (rough, rough_grads) = plain(torch.float32), plain(torch.bfloat16)
    got = model(pack(sequences(PROMPTS, responses), torch.device("cuda")))
    (got[0].mean() + got[1].mean()).backward()
    for mine, true, plain_bf16 in zip(got, exact, rough, strict=True):
        assert mine.dtype == torch.float32
        assert (mine - true).abs().mean() < 1.2 * (plain_bf16 - true).abs().mean()
    grads = {hf_name(n): p.grad.full_tensor() for n, p in model.named_parameters()}
    for name, true in exact_grads.items():
        assert (grads[name] - true).norm() < 1.5 * (rough_grads[name] - true).norm() + 1e-6 * true.norm(), name


def test_entropy_has_a_gradient_only_if_asked_for(process_group, path):
    policy = load(path, process_group)
    packed = pack(sequences(PROMPTS, [[9, 8, 7]] * len(PROMPTS)), torch.device("cuda"))
    for entropy_grad in (True, False):
        _, entropy = policy(packed, 1.0, entropy_grad)
        assert entropy.requires_grad == entropy_grad


def test_the_no_grad_forwards_do_not_wait_for_the_device(process_group, path):
    """Log-probs, values and scores of several micro-batches are queued one behind the other."""
    frozen = {"master_dtype": torch.bfloat16, "compute_dtype": torch.bfloat16, "trainable": False}
    policy = load_policy(path, process_group, **frozen)
    critic = load_scalar(path, process_group, flag="-", head_std=0.2, **frozen)
    rollouts, device = sequences(PROMPTS, [[9, 8, 7, 6]] * len(PROMPTS)), torch.device("cuda")
    expected = logprobs_of(policy, rollouts, 4, 1.0, 128, device), values_of(critic, rollouts, 4, 128, device)[0]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = logprobs_of(policy, rollouts, 4, 1.0, 128, device), values_of(critic, rollouts, 4, 128, device)[0]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(x, y) for x, y in zip(got, expected, strict=True))


def test_what_lives_on_the_host_changes_no_number(tmp_path):
    """Ten recorded steps in float32: moments that visit the card are stepped there, to the bit; a step on the host is
    another kernel's.
    """
    tiny.make_model(tmp_path / "model", seed=11, num_sft_steps=0)
    tiny.make_data(tmp_path / "data")
    for offload in ("none", "optimizer", "all"):
        result = run([
            sys.executable, ROOT / "grpo_fsdp.py", "--run-dir", tmp_path / offload, "--model", tmp_path / "model",
            "--train-files", tmp_path / "data/train.parquet", "--num-steps", 10, "--lr", 3e-4, "--max-prompt-len", 16,
            "--max-response-len", 12, *SCRIPTS["grpo_fsdp"], "--replay", GOLDEN / "rollouts", "--dtype", "float32",
            "--save-every", 5, "--offload", offload,
        ])  # fmt: skip
        assert result.returncode == 0, result.stderr[-3000:]
    last = {offload: rows(tmp_path / offload)[-1] for offload in ("none", "optimizer", "all")}
    assert last["optimizer"]["mem/optimizer_gib"] < 0.01 * last["none"]["mem/optimizer_gib"]
    assert last["all"]["mem/weights_gib"] == 0 < last["optimizer"]["mem/weights_gib"]
    weights = {offload: load_file(tmp_path / offload / "hf/model.safetensors") for offload in last}
    assert all(np.array_equal(weights["optimizer"][key], w) for key, w in weights["none"].items())
    apart = np.concatenate([np.abs(weights["all"][key] - w).ravel() for key, w in weights["none"].items()])
    assert apart.max() < 0.1 * 3e-4 * 20 and apart.mean() < 1e-2 * 3e-4
