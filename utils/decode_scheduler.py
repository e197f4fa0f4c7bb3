"""vLLM's scheduler, without its cost per response and step while all responses do nothing but decode.

vLLM visits each running request several times a decode step: about 14 us of Python (what is saved here, by 44.7 and
125.4 k tokens/s in `benchmarks.rollout`), so that hundreds of responses take the host longer than the GPU. But where
every running request decodes and has room for all its tokens, there is nothing to decide until one of them ends. Such
steps make a streak: their schedules are one vector each, their tokens wait in a matrix, and a request hears of them
when it ends or when the streak does. Whatever else happens is vLLM's to schedule.

Follows vllm.v1.core.sched, releases 0.26 and 0.32. Imported when the engine is built, as vLLM itself.
"""

from dataclasses import replace

import numpy as np
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import CachedRequestData
from vllm.v1.core.sched.utils import remove_all
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs

JOIN_SHARE = 16  # requests that wait join when one in so many places is free: a streak's end visits all of them once


class Streak:
    """Requests that decode together, each in a slot. Counts of a slot are those before the streak's first step.

    A slot takes part in every step until its request ends, so its tokens stand in the first rows of its column.
    Shapes: [slots]; tokens and logprobs [steps, slots].
    """

    def __init__(self, requests: list, first, max_model_len: int):
        self.requests, self.template = requests, first
        self.ids = [r.request_id for r in requests]
        self.slot_of = {name: slot for slot, name in enumerate(self.ids)}
        self.computed = np.array([r.num_computed_tokens for r in requests])
        self.sampled = np.array([r.num_output_tokens + r.num_output_placeholders for r in requests])
        self.limit = np.array([min(r.max_tokens, max_model_len - r.num_prompt_tokens) for r in requests])
        stops = {t for r in requests for t in (r.sampling_params.eos_token_id, *r.sampling_params.stop_token_ids)}
        self.stops = np.array(sorted(stops - {None}), dtype=np.int64)
        self.alive = np.ones(len(requests), dtype=bool)
        self.scheduled = self.updated = 0  # steps
        rows = max(0, int((self.limit - self.sampled).max()))
        self.tokens = np.zeros((rows, len(requests)), dtype=np.int64)
        self.logprobs = np.zeros((rows, len(requests)), dtype=np.float32)
        self.slots, self.names = np.arange(0), []  # of the last schedule
        self.has_logprobs = False


class DecodeScheduler(AsyncScheduler):
    """`responses` holds the ids and log-probs sampled so far, by request id; whoever takes a response removes it.

    An output tells that a request has ended, not all that it sampled: LLM.generate would lose tokens here.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.responses: dict[str, tuple[list[int], list[float]]] = {}
        self._streak: Streak | None = None
        self._full = False  # no room for a streak was left, and no request has ended since: there is still none

    def add_request(self, request) -> None:
        self.responses[request.request_id] = ([], [])
        super().add_request(request)

    def finish_requests(self, *args, **kwargs):
        self._end()
        return super().finish_requests(*args, **kwargs)

    # ---- which requests compute -----------------------------------------------------------------------------------

    def schedule(self, *args, **kwargs):
        output = self._next() if self._streak else None
        if output is None:
            self._end()
            output = super().schedule(*args, **kwargs)
            self._begin(output)
        return output

    def _some_can_join(self) -> bool:
        running, waiting = self.get_request_counts()
        return waiting > 0 and self.max_num_running_reqs - running >= min(
            waiting, max(1, self.max_num_running_reqs // JOIN_SHARE)
        )

    def _begin(self, output) -> None:
        """Start a streak after this step, if it is one of decoding alone and the KV cache has room for all to come."""
        self._full = self._full and not output.finished_req_ids
        groups, n = self.kv_cache_config.kv_cache_groups, len(self.running)
        cached = output.scheduled_cached_reqs
        decodes = len(cached.req_ids) == n == output.total_num_scheduled_tokens > 0
        if not decodes or cached.resumed_req_ids or output.preempted_req_ids or output.scheduled_spec_decode_tokens:
            return
        if any(r.is_prefill_chunk or r.use_structured_output or r.has_encoder_inputs for r in self.running):
            return
        if len(groups) != 1 or self.connector is not None or self.defer_block_free:
            return
        if self._full or self._some_can_join():
            return
        streak = Streak(list(self.running), output, self.max_model_len)
        assert streak.ids == cached.req_ids, "vLLM scheduled its running requests in another order"
        manager, block = self.kv_cache_manager, groups[0].kv_cache_spec.block_size
        more = streak.limit - streak.sampled  # tokens that are still to be computed: the last one never is
        held = np.array([len(manager.get_blocks(name).blocks[0]) for name in streak.ids])
        needed = np.maximum(0, -(-(streak.computed + more) // block) - held)
        self._full = bool(needed.sum() > manager.block_pool.get_num_free_blocks())
        if self._full:
            return
        for slot in np.flatnonzero(needed):
            blocks = manager.allocate_slots(streak.requests[slot], int(more[slot]))
            assert blocks is not None, f"no room for {needed[slot]} blocks that were counted as free"
            now, new = cached.new_block_ids[slot], blocks.get_block_ids()
            cached.new_block_ids[slot] = new if now is None else tuple(a + b for a, b in zip(now, new, strict=True))
        zero = (output.new_block_ids_to_zero or []) + (self._get_new_block_ids_to_zero() or [])
        output.new_block_ids_to_zero = zero or None
        self._streak = streak

    def _next(self):
        """The streak's next step, or None when it is to end."""
        streak, k = self._streak, self._streak.scheduled
        slots = np.flatnonzero(streak.alive & (streak.sampled + k < streak.limit))
        if len(slots) == 0 or self._some_can_join():
            return None
        if not np.array_equal(slots, streak.slots):
            streak.slots, streak.names = slots, [streak.ids[slot] for slot in slots]
        cached = CachedRequestData(
            req_ids=streak.names,
            resumed_req_ids=set(),
            new_token_ids=[],
            all_token_ids={},
            new_block_ids=[None] * len(slots),
            num_computed_tokens=(streak.computed[slots] + k).tolist(),
            num_output_tokens=(streak.sampled[slots] + k).tolist(),
        )
        output = replace(
            streak.template,
            scheduled_cached_reqs=cached,
            num_scheduled_tokens=dict.fromkeys(streak.names, 1),
            total_num_scheduled_tokens=len(slots),
            finished_req_ids=self.finished_req_ids,
            new_block_ids_to_zero=None,
            kv_cache_block_copies=None,
        )
        output.streak, output.slots = streak, slots
        self.finished_req_ids = set()
        streak.scheduled += 1
        return output

    # ---- what they sampled ----------------------------------------------------------------------------------------

    def update_from_output(self, scheduled, output):
        taken, output.logprobs = output.logprobs, None  # before vLLM makes objects of each
        logprobs = None
        if taken is not None:
            assert taken.cu_num_generated_tokens is None, "speculative decoding: several tokens a request and step"
            logprobs = taken.logprobs[:, 0]
        if self._streak is not None and getattr(scheduled, "streak", None) is self._streak:
            names, rows = scheduled.scheduled_cached_reqs.req_ids, slice(None)
            if output.req_ids != names:  # vLLM's first model runner keeps an order of its own
                rows = np.array([output.req_id_to_index[name] for name in names])
            return self._update(scheduled.slots, output, rows, logprobs)
        outputs = super().update_from_output(scheduled, output)
        logprobs = None if logprobs is None else logprobs.tolist()
        for each in (one for client in outputs.values() for one in client.outputs):
            ids, kept = self.responses[each.request_id]
            ids += each.new_token_ids
            if logprobs and each.new_token_ids:
                kept.append(logprobs[output.req_id_to_index[each.request_id]])
            if each.finish_reason is not None and self._streak:  # scheduled before the streak began
                self._leave(self._streak.slot_of[each.request_id])
        return outputs

    def _update(self, slots: np.ndarray, output, rows, logprobs: np.ndarray | None) -> dict:
        """Keep what a step of the streak sampled in these slots, `rows` of its output, and end requests that ended."""
        streak, k = self._streak, self._streak.updated
        sampled = np.array([token for (token,) in output.sampled_token_ids])[rows]
        streak.tokens[k, slots] = sampled
        if logprobs is not None:
            streak.logprobs[k, slots] = logprobs[rows]
            streak.has_logprobs = True
        ends = np.isin(sampled, streak.stops) | (streak.sampled[slots] + k + 1 >= streak.limit[slots])
        ended = []
        for slot in slots[ends & streak.alive[slots]]:
            request, token = streak.requests[slot], int(streak.tokens[k, slot])
            # Not into the prefix cache: no request will start with this response. It gets no hashes, and is updated by
            # Scheduler's method, because AsyncScheduler's would look for them.
            request._block_hasher = None
            self._tell(slot, k)
            _, stopped = super(AsyncScheduler, self)._update_request_with_output(request, [token])
            assert stopped, f"request {request.request_id} goes on after token {token}"
            request.num_in_flight_tokens -= 1
            ids, kept = self.responses[request.request_id]
            ids.append(token)
            if logprobs is not None:
                kept.append(float(streak.logprobs[k, slot]))
            reason = request.get_finished_reason()
            self._free_request(request)
            self._leave(slot)
            ended.append(EngineCoreOutput(request.request_id, [token], finish_reason=reason))
        streak.updated += 1
        if ended:
            self.running = remove_all(self.running, {streak.requests[streak.slot_of[e.request_id]] for e in ended})
        return {0: EngineCoreOutputs(outputs=ended)} if ended else {}

    def _tell(self, slot: int, known: int) -> None:
        """Bring a request up to the streak's last schedule, and to the tokens of its first `known` steps."""
        streak, request = self._streak, self._streak.requests[slot]
        steps = min(streak.scheduled, int(streak.limit[slot] - streak.sampled[slot]))
        known = min(known, steps)
        tokens = streak.tokens[:known, slot].tolist()
        request.append_output_token_ids(tokens)
        request.num_computed_tokens += steps
        request.num_output_placeholders += steps - known
        request.num_in_flight_tokens += steps - known
        ids, kept = self.responses[request.request_id]
        ids += tokens
        if streak.has_logprobs:
            kept += streak.logprobs[:known, slot].tolist()

    def _leave(self, slot: int) -> None:
        self._streak.alive[slot] = False
        if not self._streak.alive.any():
            self._streak = None

    def _end(self) -> None:
        """End the streak, if there is one: from here on every request is as vLLM would have left it."""
        if self._streak:
            for slot in np.flatnonzero(self._streak.alive):
                self._tell(slot, self._streak.updated)
            self._streak = None
