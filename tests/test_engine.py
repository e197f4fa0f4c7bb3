"""The hybrid engine on one rank: real vLLM, real FSDP2. One engine serves the whole file."""

import json

import pytest
import torch
from conftest import make_model, sequences
from transformers import AutoModelForCausalLM

from hybrid_engine import HybridEngine, Sampling, check_engine
from utils.models import hf_name, load_config, load_policy
from utils.packing import pack

FLOAT32 = {"master_dtype": torch.float32, "compute_dtype": torch.float32}
PROMPTS = [[1, 2, 3], [9, 8], [7, 20, 33, 41], [4, 4, 4, 4, 4]]


@pytest.fixture(scope="session")
def path(tmp_path_factory):
    path = make_model(tmp_path_factory.mktemp("engine") / "m", tie=True)
    sampling = {"eos_token_id": [5, 6], "do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20}
    (path / "generation_config.json").write_text(json.dumps(sampling))  # as many chat models come
    return str(path)


@pytest.fixture(scope="session")  # vLLM destroys the process group, which other files share, when it goes
def engine(process_group, path):
    # small blocks: a stale prefix is visible only where a prompt fills whole ones
    return HybridEngine(path, seed=1, max_model_len=128, eos_token_ids=[5, 6], kv_cache_gib=0.125, block_size=32)


@pytest.fixture
def policy(process_group, path):
    return load_policy(path, process_group, **FLOAT32)


def engine_tensors(engine):
    """The engine's parameters under Hugging Face names: fused ones taken apart by hand, not by the plan under test."""
    out = {}
    for name, param in engine.model().named_parameters():
        if "qkv_proj" in name:
            parts = zip("qkv", param.split([128, 64, 64]), strict=True)
            out.update({name.replace("qkv_proj", f"{c}_proj"): part for c, part in parts})
        elif "gate_up_proj" in name:
            out.update(
                {name.replace("gate_up", c): part for c, part in zip(("gate", "up"), param.chunk(2), strict=True)}
            )
        else:
            out[name] = param
    return {name: tensor.detach().clone() for name, tensor in out.items()}


def trainer_tensors(policy):
    return {hf_name(name): param.full_tensor().detach().clone() for name, param in policy.named_parameters()}


def engine_logprobs(engine, n=2, step=1, temperature=1.0, prompts=PROMPTS):
    return engine.generate(
        prompts, list(range(len(prompts))), n=n, step=step, sampling=Sampling(temperature, max_tokens=24)
    )


def largest_difference(rollouts, policy, temperature):
    packed = pack(rollouts, torch.device("cpu"))
    with torch.no_grad():
        trainer = policy(packed, temperature)[0]
    return (trainer - torch.tensor([x for r in rollouts for x in r.logprobs])).abs().max().item()


def test_fault_27_generate_before_the_first_sync_is_an_error(engine):
    if engine._planned_for is None:  # the first test of the file; meaningless on a rerun of one test after others
        with pytest.raises(AssertionError, match="generate before sync_weights"):
            engine_logprobs(engine)


def test_fault_30_after_a_step_and_a_sync_every_engine_parameter_is_the_trainers(engine, policy):
    engine.sync_weights(policy)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-2)
    policy(pack(sequences(PROMPTS, [[1, 2]] * 4), torch.device("cpu")), 1.0)[0].sum().backward()
    optimizer.step()
    before, trainer = engine_tensors(engine), trainer_tensors(policy)
    rows = len(trainer["model.embed_tokens.weight"])  # the engine pads the vocabulary
    before["model.embed_tokens.weight"] = before["model.embed_tokens.weight"][:rows]
    assert before.keys() == trainer.keys()
    for name, tensor in trainer.items():
        assert not torch.equal(before[name], tensor), f"{name} was the trainer's before the sync"
    report = engine.sync_weights(policy)
    after = engine_tensors(engine)
    after["model.embed_tokens.weight"] = after["model.embed_tokens.weight"][:rows]
    for name, tensor in trainer.items():
        assert torch.equal(after[name], tensor), f"{name} differs after the sync"
    assert engine.model().lm_head.weight is engine.model().model.embed_tokens.weight  # tied stays tied
    assert report.num_bytes == sum(t.nbytes for t in trainer.values()) and 0 < report.reset_seconds < report.seconds


def test_sync_writes_the_shards_not_what_a_forward_left_gathered(engine, policy):
    engine.sync_weights(policy)  # records the plan, which gathers anew; the next sync is the usual one
    sharded = list(policy.parameters())  # what an optimizer holds
    with torch.no_grad():
        policy(pack(sequences(PROMPTS, [[1, 2]] * 4), torch.device("cpu")), 1.0)  # leaves gathered copies behind
        for param in sharded:
            param.to_local().add_(0.01)
    engine.sync_weights(policy)
    trainer, after = trainer_tensors(policy), engine_tensors(engine)
    for name, tensor in trainer.items():
        assert torch.equal(after[name][: len(tensor)], tensor), name


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_fault_15_engine_logprobs_are_the_trainers(engine, policy, temperature):
    engine.sync_weights(policy)
    rollouts = engine_logprobs(engine, temperature=temperature)
    assert largest_difference(rollouts, policy, temperature) < 1e-4


def test_greedy_tokens_are_those_of_transformers(engine, policy, path):
    engine.sync_weights(policy)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    sampling = Sampling(0.0, max_tokens=24, logprobs=False)
    for prompt, rollout in zip(
        PROMPTS, engine.generate(PROMPTS, range(4), n=1, step=0, sampling=sampling), strict=True
    ):
        expected = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=24, pad_token_id=0)
        assert rollout.response_ids == expected[0, len(prompt) :].tolist()


def test_fault_16_the_folders_generation_config_does_not_cut_the_sampling(engine, policy, path):
    """Its top_p of 0.8 would leave out what stands behind 0.8 of the mass, a fifth of the tokens."""
    engine.sync_weights(policy)
    rollouts = engine_logprobs(engine, n=6)
    assert largest_difference(rollouts, policy, 1.0) < 1e-4
    model, behind = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), []
    for rollout in rollouts:
        ids = torch.tensor(rollout.prompt_ids + rollout.response_ids)
        probs = model(ids[None]).logits[0, len(rollout.prompt_ids) - 1 : -1].softmax(-1)
        sampled = probs.gather(-1, torch.tensor(rollout.response_ids)[:, None])
        behind += ((probs * (probs > sampled)).sum(-1) > 0.8).tolist()
    assert len(behind) > 400 and 0.15 < sum(behind) / len(behind) < 0.25


def test_fault_23_each_prompt_gets_its_own_response_in_whatever_order_they_end(engine, policy, path, monkeypatch):
    ends = list(range(5, 40))
    monkeypatch.setattr(engine, "eos_token_ids", ends)
    engine.sync_weights(policy)
    prompts, finished = [[i + 50, i + 90] for i in range(24)], []
    rollouts = engine.generate(
        prompts, range(24), n=1, step=0, sampling=Sampling(0.0, max_tokens=24, logprobs=False),
        on_finish=lambda rollout: finished.append(rollout.uid),
    )  # fmt: skip
    assert finished != sorted(finished) and len({len(r.response_ids) for r in rollouts}) > 3
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    for uid, (prompt, rollout) in enumerate(zip(prompts, rollouts, strict=True)):
        greedy = {"do_sample": False, "max_new_tokens": 24, "eos_token_id": ends, "pad_token_id": 0}
        expected = model.generate(torch.tensor([prompt]), **greedy)[0, 2:].tolist()
        assert (rollout.uid, rollout.prompt_ids, rollout.response_ids) == (uid, prompt, expected)


def test_fault_20_stale_prefixes_do_not_survive_a_sync(engine, policy):
    """A prompt of three whole cache blocks, before and after the weights change."""
    prompt = [list(range(20, 120))]
    engine.sync_weights(policy)
    engine_logprobs(engine, prompts=prompt)
    with torch.no_grad():
        for param in policy.parameters():
            param.mul_(1.1)
    engine.sync_weights(policy)
    assert largest_difference(engine_logprobs(engine, prompts=prompt), policy, 1.0) < 1e-4


def test_fault_24_samples_depend_on_seed_step_uid_and_sample_alone(engine, policy):
    engine.sync_weights(policy)

    def sample(order, step=1, n=3):
        sampling = Sampling(1.0, max_tokens=12)
        rollouts = engine.generate([PROMPTS[i] for i in order], order, n=n, step=step, sampling=sampling)
        assert [(r.uid, r.sample) for r in rollouts] == [(i, s) for i in order for s in range(n)]  # prompt-major
        assert all(r.prompt_ids == PROMPTS[r.uid] for r in rollouts)
        return {(r.uid, r.sample): r.response_ids for r in rollouts}

    first = sample([0, 1, 2, 3])
    assert len(set(map(tuple, first.values()))) == 12  # no two samples share a seed
    reordered = sample([3, 1, 0])
    assert all(reordered[key] == first[key] for key in reordered)
    assert sample([0, 1, 2, 3], n=1) == {key: ids for key, ids in first.items() if key[1] == 0}
    assert all(first[key] != ids for key, ids in sample([0, 1, 2, 3], step=2).items())
    engine.seed, seed = 2, engine.seed
    assert all(first[key] != ids for key, ids in sample([0, 1, 2, 3]).items())
    engine.seed = seed


def test_fault_21_every_end_of_sequence_id_ends_a_response_and_stays_in_it(engine, policy, monkeypatch):
    ends = {5, 6, 7, 8}  # the folder names 5 and 6, which vLLM finds by itself
    monkeypatch.setattr(engine, "eos_token_ids", sorted(ends))
    engine.sync_weights(policy)
    sampling = Sampling(2.0, max_tokens=60)
    rollouts = engine.generate([[i + 10] for i in range(60)], range(60), n=4, step=1, sampling=sampling)
    stopped = [r for r in rollouts if r.finish_reason == "stop"]
    assert {r.response_ids[-1] for r in stopped} == ends
    assert all(not ends & set(r.response_ids[:-1]) for r in rollouts)
    assert all(len(r.response_ids) == 60 and r.finish_reason == "length" for r in rollouts if r not in stopped)
    assert all(len(r.logprobs) == len(r.response_ids) for r in rollouts)


def test_on_finish_hands_over_each_response_once_and_whole_while_others_run(engine, policy):
    engine.sync_weights(policy)
    seen, unfinished = [], []

    def on_finish(rollout):
        seen.append((rollout.uid, rollout.sample, list(rollout.response_ids)))
        unfinished.append(engine.llm.llm_engine.get_num_unfinished_requests())

    sampling = Sampling(2.0, max_tokens=60)
    rollouts = engine.generate(
        [[i + 10] for i in range(30)], range(30), n=2, step=1, sampling=sampling, on_finish=on_finish
    )
    assert sorted(seen) == sorted((r.uid, r.sample, r.response_ids) for r in rollouts)
    assert max(unfinished) > 0


@pytest.mark.parametrize("prompts", [PROMPTS, [*PROMPTS, [1] * 200]])
def test_a_call_that_raises_leaves_nothing_to_the_next(engine, policy, prompts):
    engine.sync_weights(policy)
    before = engine_logprobs(engine)

    def on_finish(rollout):
        raise KeyboardInterrupt("interrupted")

    for sync in (False, True):
        with pytest.raises(BaseException, match=r"interrupted|200 input tokens"):  # vLLM refuses what is too long
            engine.generate(prompts, range(len(prompts)), n=2, step=1, sampling=Sampling(1.0, 24), on_finish=on_finish)
        assert engine._scheduler.responses
        if sync:
            engine.sync_weights(policy)
            assert not engine._scheduler.responses
        assert engine_logprobs(engine) == before
    assert not engine.llm.llm_engine.output_processor.request_states


def test_a_step_that_failed_leaves_no_cached_blocks(engine, policy, monkeypatch):
    """vLLM caches whole blocks of a prompt when it schedules them."""
    executor, prompts = engine.llm.llm_engine.engine_core.engine_core.model_executor, [[9] * 70, [7] * 70]
    engine.sync_weights(policy)
    before = engine_logprobs(engine, prompts=prompts)
    engine.sync_weights(policy)  # an empty cache

    def fail(*args, **kwargs):
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="out of memory"):
        patch.setattr(executor, "execute_model", fail)
        engine_logprobs(engine, prompts=prompts)
    with torch.no_grad():  # else what the blocks held before would do
        for cache in executor.driver_worker.worker.model_runner.kv_caches:
            cache.zero_()
    assert engine_logprobs(engine, prompts=prompts) == before


def test_fault_27_sleep_and_wake(engine, policy):
    engine.sync_weights(policy)
    with pytest.raises(ValueError, match="kv"):
        engine.sleep("weights")
    with pytest.raises(AssertionError, match="wake"):
        engine.wake()
    for what in ("kv", "all"):
        engine.sleep(what)
        for call, args in ((engine_logprobs, [engine]), (engine.sync_weights, [policy]), (engine.sleep, [what])):
            with pytest.raises(AssertionError):
                call(*args)
        engine.wake()
        with pytest.raises(AssertionError, match="generate before sync_weights"):
            engine_logprobs(engine)
        with pytest.raises(AssertionError, match="sync_weights"):
            engine.sleep(what)
        engine.sync_weights(policy)
        assert largest_difference(engine_logprobs(engine), policy, 1.0) < 1e-4


def test_no_prompts_no_rollouts(engine, policy):
    engine.sync_weights(policy)
    assert engine.generate([], [], n=2, step=1, sampling=Sampling(1.0, 4)) == []


def test_the_trainers_thread_count_survives_the_engine(engine):
    torch.set_num_threads(1)
    assert torch.get_num_threads() == 1
    torch.set_num_threads(2)
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize("size, world, message", [(3, 3, "4 attention heads"), (2, 3, "3 ranks"), (0, 2, "1, 2 works")])
def test_tensor_parallel_sizes_that_cannot_work(path, size, world, message):
    with pytest.raises(ValueError, match=message):
        check_engine(load_config(path), size, world, False)
    check_engine(load_config(path), 4, 8, False)  # two key-value heads, each held twice


@pytest.mark.parametrize("engine_name, rows, named", [
    ("model.embed_tokens.weight", slice(0, 1), "model.embed_tokens.weight"),  # the tied head
    ("model.layers.1.self_attn.qkv_proj.weight", slice(128, 192), "model.layers.1.self_attn.k_proj.weight"),
    ("model.layers.0.mlp.gate_up_proj.weight", slice(256, 512), "model.layers.0.mlp.up_proj.weight"),
    ("model.norm.weight", slice(7, 8), "model.norm.weight"),
])  # fmt: skip
def test_a_stale_parameter_is_named_by_the_sync_proof(engine, policy, engine_name, rows, named, capsys):
    """The plan leaves one slice out, as a wrong one would: the trainer moves on, that slice does not."""
    engine.sync_weights(policy)
    engine.verify_sync(policy)
    with torch.no_grad():
        dict(engine.model().named_parameters())[engine_name][rows] *= 1.001
    with pytest.raises(SystemExit, match=rf"rank 0 still held other weights than the trainer in {named} \(1 of 1"):
        engine.verify_sync(policy)
    engine.sync_weights(policy)
    assert engine.verify_sync(policy) > 0
