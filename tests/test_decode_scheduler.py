"""Responses scheduled in streaks are vLLM's own to the bit, whenever they end, and wherever a streak cannot be."""

import random
from collections import deque
from itertools import chain
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import make_model

from hybrid_engine import HybridEngine, Sampling
from utils.models import load_policy

BLOCKS, PLACES = 48, 16  # of 32 tokens; responses at a time


@pytest.fixture(scope="session")  # vLLM destroys the process group, which other files share, when it goes
def engine(process_group, tmp_path_factory):
    path = str(make_model(tmp_path_factory.mktemp("streaks") / "m", tie=True))
    engine = HybridEngine(
        path, seed=1, max_model_len=128, eos_token_ids=list(range(5, 9)), max_num_seqs=PLACES, block_size=32,
        num_gpu_blocks_override=BLOCKS + 1,
    )  # fmt: skip
    policy = load_policy(path, process_group, master_dtype=torch.float32, compute_dtype=torch.float32)
    engine.sync_weights(policy)
    return engine


def generate(engine, counts, monkeypatch, streaks, prompts, max_tokens, logprobs=True, temperature=2.0, free=BLOCKS):
    """Rollouts without their prompts; into `counts`: decode steps in streaks, steps in all, streaks begun."""
    scheduler = type(engine._scheduler)
    counts |= {"in streaks": 0, "steps": 0, "streaks": 0}
    with monkeypatch.context() as patch:
        schedule, begin = scheduler.schedule, scheduler._begin

        def counted(self, *args, **kwargs):
            output = schedule(self, *args, **kwargs)
            counts["steps"] += output.total_num_scheduled_tokens > 0
            counts["in streaks"] += hasattr(output, "slots")
            return output

        def counted_begin(self, output):
            if streaks:
                begin(self, output)
                counts["streaks"] += self._streak is not None

        patch.setattr(scheduler, "schedule", counted)
        patch.setattr(scheduler, "_begin", counted_begin)
        sampling, ended = Sampling(temperature, max_tokens, logprobs), []
        rollouts = engine.generate(
            prompts, range(len(prompts)), n=2, step=3, sampling=sampling,
            on_finish=lambda r: ended.append((r.uid, r.sample, len(r.response_ids))),
        )  # fmt: skip
    scheduler = engine._scheduler
    assert not (scheduler.responses or scheduler.requests or scheduler.running or scheduler._streak)
    assert scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == free, "a block was not given back"
    assert sorted(ended) == sorted((r.uid, r.sample, len(r.response_ids)) for r in rollouts)
    return [(r.uid, r.sample, r.response_ids, r.logprobs, r.finish_reason) for r in rollouts]


def prompts(number, longest, seed=0):
    draw = random.Random(seed)
    return [[draw.randrange(20, 200) for _ in range(draw.randint(1, longest))] for _ in range(number)]


@pytest.mark.parametrize("name, number, longest, max_tokens, share", [
    ("all at once, ends at any step", 8, 12, 80, 0.9),
    ("all at once, all equally long", 8, 1, 3, 0.3),
    ("one response after another joins", 40, 12, 60, 0.5),
    ("prompts of several cache blocks", 8, 90, 30, 0.8),
    ("the longest that the model takes", 4, 100, 127, 0.9),
    ("one token each", 8, 5, 1, 0.0),
])  # fmt: skip
def test_streaks_change_nothing(engine, monkeypatch, name, number, longest, max_tokens, share):
    asked = (prompts(number, longest), max_tokens)
    counts, plain = {}, {}
    mine = generate(engine, counts, monkeypatch, True, *asked)
    assert mine == generate(engine, plain, monkeypatch, False, *asked)
    assert plain["in streaks"] == 0 and counts["in streaks"] >= share * counts["steps"], counts
    if max_tokens > 3:
        assert {reason for *_, reason in mine} == {"stop", "length"} and len({len(ids) for _, _, ids, *_ in mine}) > 4


def test_streaks_end_when_many_can_join_and_begin_again(engine, monkeypatch):
    seen = []
    for share in (16, 4):  # when 1 place is free, and when 4 are
        monkeypatch.setattr("utils.decode_scheduler.JOIN_SHARE", share)
        generate(engine, counts := {}, monkeypatch, True, prompts(40, 12), 60)
        assert 3 < counts["streaks"] < counts["steps"] / 4, counts
        seen.append(counts["streaks"])
    assert seen[1] < seen[0] / 2, seen


def test_a_cache_without_room_for_all_tokens_is_left_to_vllm(engine, monkeypatch):
    """16 responses of up to 4 blocks in 28: vLLM preempts some when the others outgrow it."""
    from utils.decode_scheduler import Streak

    asked, preempted, pool = (prompts(8, 4), 110), [], engine._scheduler.kv_cache_manager.block_pool
    held, scheduler = pool.get_new_blocks(BLOCKS - 28), type(engine._scheduler)
    preempt = scheduler._preempt_request
    patched = lambda self, *args, **kwargs: preempted.append(args) or preempt(self, *args, **kwargs)  # noqa: E731
    monkeypatch.setattr(scheduler, "_preempt_request", patched)
    counts, plain = {}, {}
    init, built = Streak.__init__, []
    monkeypatch.setattr(Streak, "__init__", lambda *args: built.append(args) or init(*args))
    mine = generate(engine, counts, monkeypatch, True, *asked, free=28)
    assert len(built) <= 2 * PLACES, "room was looked for at every step, though none had ended"
    assert preempted and mine == generate(engine, plain, monkeypatch, False, *asked, free=28)
    assert 0 < counts["in streaks"] < counts["steps"], counts  # once enough of them have ended
    pool.free_blocks(held)


def test_a_step_in_flight_as_on_a_gpu(engine, monkeypatch):
    """vLLM's loop with two steps at a time; one is still in flight after a generate, and returns in the next."""
    core, asked = engine.llm.llm_engine.engine_core.engine_core, (prompts(24, 40), 60)
    monkeypatch.setattr(core, "batch_queue_size", 2)
    monkeypatch.setattr(core, "batch_queue", deque(maxlen=2))
    monkeypatch.setattr(core, "step_fn", core.step_with_batch_queue)
    mine = [generate(engine, counts := {}, monkeypatch, True, *asked) for _ in range(2)]
    assert counts["in streaks"] and len(core.batch_queue) == 1
    assert engine.llm.reset_prefix_cache()
    assert mine[0] == mine[1] == generate(engine, {}, monkeypatch, False, *asked)


@pytest.mark.parametrize("temperature, logprobs", [(0.0, False), (1.0, False), (0.7, True)])
def test_any_sampling(engine, monkeypatch, temperature, logprobs):
    asked = (prompts(8, 12), 40, logprobs, temperature)
    counts = {}
    mine = generate(engine, counts, monkeypatch, True, *asked)
    assert counts["streaks"] and mine == generate(engine, {}, monkeypatch, False, *asked)


def drive(engine, monkeypatch, streaks, ahead, waits=(), aborts=(), budget=2048):
    """Schedule made-up responses with `ahead` steps whose tokens are not known yet, as vLLM does on a GPU (1), where a
    step is scheduled before the one before it has returned. Every step's blocks are checked: enough for its tokens,
    none that its response could not fill, each zeroed when it is handed out.

    Args: waits: requests that are added after so many steps. aborts: after so many, the oldest that runs is aborted.
        budget: tokens a step: prompts are computed in chunks. Returns: each step as the model runner sees it, in order;
        each response.
    """
    from vllm import SamplingParams
    from vllm.v1.request import Request, RequestStatus

    scheduler, hasher = engine._scheduler, engine.llm.llm_engine.engine_core.engine_core.request_block_hasher
    assert scheduler.reset_prefix_cache()
    monkeypatch.setattr(scheduler, "max_num_scheduled_tokens", budget)
    monkeypatch.setattr(scheduler, "needs_kv_cache_zeroing", True)
    monkeypatch.setattr(scheduler.kv_cache_manager.coordinator.single_type_managers[0], "_record_new_block_ids", True)
    asked = {}

    def add(number):
        draw = random.Random(number)  # 64 tokens after 1, 2, 32: a block just full, just begun, begun at once
        prompt = [draw.randrange(20, 200) for _ in range(draw.choice([1, 2, 32, draw.randint(3, 60)]))]
        params = SamplingParams(max_tokens=draw.choice([1, 2, 40, 64]), stop_token_ids=[number % 5], logprobs=0)
        params.update_from_generation_config({}, 6)  # the end-of-sequence token
        asked[f"r{number}"] = request = Request(f"r{number}", prompt, params, None, block_hasher=hasher)
        scheduler.add_request(request)

    def token(name, k):  # one response in three ends early; half of these once more with the step in flight
        stops = random.Random(f"{name} {k // 2}").random() < 0.02
        draw = random.Random(f"{name} {k}")
        return draw.choice([int(name[1:]) % 5, 6]) if stops else draw.randrange(20, 200)

    for number in range(24):
        add(number)
    steps, responses, flying, blocks, sampled, told, kinds = [], {}, [], {}, {}, set(), set()
    if not streaks:
        monkeypatch.setattr(type(scheduler), "_begin", lambda self, output: None)
    while scheduler.has_requests() or flying:
        if scheduler.has_requests():
            if len(steps) in waits:
                add(100 + len(steps))
            output = scheduler.schedule()
            kinds.add(hasattr(output, "slots"))
            new, cached = output.scheduled_new_reqs, output.scheduled_cached_reqs
            before = {r.req_id: r.num_computed_tokens for r in new}
            before |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
            assert not told & output.finished_req_ids, "told twice"
            told |= output.finished_req_ids
            finished = output.finished_req_ids & blocks.keys()  # an earlier test's are told now too
            for name in finished:
                blocks.pop(name)
            handed = {r.req_id: list(r.block_ids[0]) for r in new}
            for name, more in zip(cached.req_ids, cached.new_block_ids, strict=True):
                handed[name] = more[0] if more else []
            for name, more in handed.items():
                blocks[name] = blocks.get(name, []) + more
            assert sorted(chain.from_iterable(handed.values())) == sorted(output.new_block_ids_to_zero or [])
            for name, number in output.num_scheduled_tokens.items():
                assert len(blocks[name]) * 32 >= before[name] + number, f"step {len(steps)}: no block for {name}"
                longest = asked[name].num_prompt_tokens + asked[name].max_tokens - 1
                assert (len(blocks[name]) - 1) * 32 < longest, f"step {len(steps)}: a block too many for {name}"
            held = [tuple(blocks[name]) for name in output.num_scheduled_tokens]
            assert len({ids[-1] for ids in held}) == len(held), "two requests write the same block"
            outputs = dict(zip(cached.req_ids, cached.num_output_tokens, strict=True))
            steps.append((before, outputs, dict(output.num_scheduled_tokens), finished))
            names = list(output.num_scheduled_tokens)
            random.Random(len(steps)).shuffle(names)  # the runner's order is its own
            ids = []
            for name in names:
                samples = before[name] + output.num_scheduled_tokens[name] >= asked[name].num_prompt_tokens
                sampled[name] = sampled.get(name, 0) + samples
                ids.append([token(name, sampled[name])] if samples else [])
            logprobs = [-sum(ids[i]) / 7 - sampled[name] for i, name in enumerate(names)]
            logprobs = np.array(logprobs, dtype=np.float32)[:, None]
            flying.append((output, names, ids, logprobs))
        if len(flying) > ahead or not scheduler.has_requests():
            if len(steps) in aborts and scheduler.running:  # between a step's return and its update, as vLLM
                name = scheduler.running[0].request_id
                scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
                responses[name] = (*scheduler.responses.pop(name), "abort")
            output, names, ids, logprobs = flying.pop(0)
            model_output = SimpleNamespace(
                sampled_token_ids=ids, req_ids=names, req_id_to_index={name: i for i, name in enumerate(names)},
                logprobs=SimpleNamespace(logprobs=logprobs, cu_num_generated_tokens=None), prompt_logprobs_dict={},
                prompt_token_id_logprobs_dict={}, pooler_output=None, num_nans_in_logits=None, kv_connector_output=None,
                ec_connector_output=None, cudagraph_stats=None, routed_experts=None,
            )  # fmt: skip
            for client in scheduler.update_from_output(output, model_output).values():
                for each in client.outputs:
                    if each.finish_reason is not None:
                        kept = scheduler.responses.pop(each.request_id)
                        responses[each.request_id] = (*kept, str(each.finish_reason))
        for request in scheduler.running if scheduler._streak is None else ():
            in_flight = sum(output.num_scheduled_tokens.get(request.request_id, 0) for output, *_ in flying)
            assert request.num_in_flight_tokens == in_flight, request.request_id
    monkeypatch.undo()
    assert (True in kinds) == streaks
    assert scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == BLOCKS and not scheduler.responses
    for name, (ids, logprobs, _) in responses.items():
        assert ids == [token(name, k + 1) for k in range(len(ids))], name
        assert logprobs == [float(np.float32(-t / 7 - k - 1)) for k, t in enumerate(ids)], name
    return steps, responses


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("waits, aborts, budget", [
    ((), (), 2048), ((7, 8, 20, 50), (), 2048), ((), (9, 10, 30), 2048), ((7, 8, 20, 50), (), 4),
])  # fmt: skip
def test_every_step_is_scheduled_as_vllm_would(engine, monkeypatch, ahead, waits, aborts, budget):
    mine, theirs = (drive(engine, monkeypatch, streaks, ahead, waits, aborts, budget) for streaks in (True, False))
    assert len(mine[1]) == 24 + len(waits) and mine[1] == theirs[1]
    assert mine[0] == theirs[0]
