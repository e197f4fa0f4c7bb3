"""Hybrid engine: the training process's own vLLM. FSDP2 shards -> vLLM storage in place, then generation.

    init_distributed()                                  # utils/dist.py; under torchrun or not
    engine = HybridEngine(path, seed=1, max_model_len=1024, eos_token_ids=[2], sleep_mode=True)   # weights are dummies
    report = engine.sync_weights(policy)                # every step: trainer -> engine, prefix cache reset
    rollouts = engine.generate(prompt_ids, uids, n=8, step=3, sampling=Sampling(temperature=1.0, max_tokens=512))
    engine.sleep("all"); engine.wake()                  # hand the memory to the update, and take it back: then sync

Every call is collective: all ranks make the same calls in the same order. Ranks of one tensor-parallel group are
consecutive; the groups are independent replicas. Each rank hands in its own prompts and gets its own responses back.

How weights travel: utils/reshard.py. The first sync finds out which part of which rank's shard each engine tensor
needs; later ones copy a rank's own parts straight from its shards and exchange the rest.
"""

import contextlib
import logging
import os
import socket
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from utils.dist import all_gather, seed_for, stop
from utils.memory import expandable_segments
from utils.reshard import Bucket, Unit, plan_exchange, record_plan, transfer


@dataclass(frozen=True)
class Sampling:
    """temperature 0 is greedy. Cuts (top_p, top_k) are absent on purpose: they bias the ratio by the mass cut off."""

    temperature: float
    max_tokens: int
    logprobs: bool = True


@dataclass
class Rollout:
    """One sampled response. `logprobs` are the engine's, of each sampled token at the sampling temperature, in nats."""

    uid: int
    sample: int
    prompt_ids: list[int]
    response_ids: list[int]  # ends with the end-of-sequence token when finish_reason is "stop"
    logprobs: list[float]  # as long as response_ids; empty when not asked for
    finish_reason: str  # "stop" or "length"


@dataclass
class SyncReport:
    """Cost of one weight sync on this rank. Units: seconds; bytes written into the engine."""

    seconds: float
    reset_seconds: float  # of which: resetting the prefix cache
    num_bytes: int
    received_bytes: int  # of which: from other ranks' shards


def check_engine(config, tensor_parallel_size: int, world_size: int, sleep_mode: bool) -> None:
    """Refuse a tensor-parallel size that cannot be laid over these ranks or this model, and a setting sleep forbids.

    Raises: ValueError naming a value that works.
    """
    if sleep_mode and (setting := expandable_segments()):
        raise ValueError(f"--sleep: {setting} breaks vLLM's memory pool; leave it out, or --sleep none")
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads

    width = getattr(config, "intermediate_size", None) or 4 * config.hidden_size  # GPT-2 names none

    def fits(t):  # kv heads are split, or whole ones replicated
        divides = world_size % t == 0 and heads % t == 0 and width % t == 0
        return divides and (kv_heads % t == 0 or t % kv_heads == 0)

    if tensor_parallel_size < 1 or not fits(tensor_parallel_size):
        works = [t for t in range(1, world_size + 1) if fits(t)]
        raise ValueError(
            f"--tensor-parallel-size {tensor_parallel_size}: must divide the {world_size} ranks and the model's "
            f"{heads} attention heads ({kv_heads} key-value heads); {', '.join(map(str, works))} works"
        )


def _import_vllm():
    """Import vLLM set up for in-process use. What differs between vLLM 0.26 (CUDA) and 0.32 (CPU) is settled here."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    if torch.cuda.is_available():
        os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "1")  # its seeded sampling is nearly free
    logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"])  # it warns before it has read that itself
    import vllm
    from vllm.platforms import current_platform
    from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

    def distributed_args(self):
        # vLLM names its shared memory after the end of this string; env:// would be the same name for every job.
        init = f"tcp://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        return init, int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])

    ExecutorWithExternalLauncher._distributed_args = distributed_args
    if torch.cuda.is_available():
        from utils.sampled_logprobs import give_sampled_logprobs_alone

        give_sampled_logprobs_alone()
    else:
        import vllm.model_executor.layers.utils as layer_utils

        def keep_weight(layer, remove_weight):
            layer.cpu_linear = torch.nn.functional.linear

        # The CPU backend repacks linear weights after loading and drops the original: in-place copies would be lost.
        layer_utils.dispatch_cpu_unquantized_gemm = keep_weight
        # The sampler's small kernels would be compiled by the C++ compiler for every new batch shape, seconds each.
        type(current_platform).simple_compile_backend = "eager"
    return vllm


def _fingerprint(tensor: torch.Tensor) -> torch.Tensor:
    """Sum, absolute sum and 16 sampled elements: [18] float32."""
    flat = tensor.flatten()
    places = torch.arange(16, device=flat.device) * (len(flat) - 1) // 15  # in integers: floats cannot count that far
    sums = flat.sum(dtype=torch.float32), torch.linalg.vector_norm(flat, 1, dtype=torch.float32)
    return torch.cat([torch.stack(sums), flat[places].float()])


def _sweep_shared_memory() -> None:
    """Remove what vLLM's CPU collectives left when a run was killed: it bears that run's port, where none listens now.

    A run on the same port would stop at it. To be called before any rank of this run builds its engine.
    """
    for segment in Path("/dev/shm").glob("*-cpushm_*"):
        port = segment.name.partition("-")[0]
        with socket.socket() as sock, contextlib.suppress(OSError):
            own = port == os.environ["MASTER_PORT"]  # this run's group is there, and its engine is not
            if port.isdigit() and (own or sock.connect_ex(("127.0.0.1", int(port))) != 0):
                segment.unlink()


class HybridEngine:
    """vLLM in this process. Build it before the trainer's model: it measures free memory and reseeds global RNGs."""

    def __init__(
        self,
        model_path: str,
        *,
        seed: int,
        max_model_len: int,
        eos_token_ids: Sequence[int],
        tensor_parallel_size: int = 1,
        max_num_seqs: int = 256,
        kv_cache_gib: float = 1.0,
        dtype: torch.dtype = torch.float32,
        sleep_mode: bool = False,
        **vllm_args,
    ):
        """
        Args: seed: of the run, enters every sample's seed. max_model_len: longest prompt + response, in tokens.
            eos_token_ids: all ids that end a response. vllm_args: handed to `vllm.LLM`, over what is set here.
        """
        assert dist.is_initialized(), "HybridEngine needs the process group: call init_distributed() first"
        self.seed, self.eos_token_ids, self.dtype = seed, list(eos_token_ids), dtype
        self.on_cuda = torch.cuda.is_available()
        self.device = torch.device("cuda" if self.on_cuda else "cpu")
        self.sleep_mode = sleep_mode and self.on_cuda
        self.synced = False  # weights written since the last wake
        self._plan: list[Unit] = []
        self._planned_for: nn.Module | None = None  # the policy whose FSDP modules the plan names
        self._buckets: list[Bucket] = []
        self.kv_cache_gib = kv_cache_gib
        self._asleep: str | None = None
        self._kv_asleep = False
        rank, size = dist.get_rank(), tensor_parallel_size
        for first in range(0, dist.get_world_size(), size):  # every rank takes part in making every group
            group = dist.new_group(list(range(first, first + size)), backend="gloo")
            if first <= rank < first + size:
                self.tp_group, self.tp_rank, self.tp_size = group, rank - first, size

        if not self.on_cuda and os.environ["LOCAL_RANK"] == "0":
            _sweep_shared_memory()
        dist.barrier()
        saved_env = os.environ.get("LOCAL_WORLD_SIZE")
        set_num_threads, num_threads = torch.set_num_threads, torch.get_num_threads()
        settings = {
            "model": model_path,
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "distributed_executor_backend": "external_launcher",
            "tensor_parallel_size": size,
            "dtype": str(dtype).removeprefix("torch."),
            "seed": 0,  # ranks of a group must agree; samples are seeded one by one
            "max_model_len": max_model_len,
            "max_num_seqs": max_num_seqs,
            "kv_cache_memory_bytes": int(kv_cache_gib * 2**30),
            "logprobs_mode": "processed_logprobs",  # of the distribution sampled from: temperature included
            "disable_log_stats": True,
            "scheduler_cls": "utils.decode_scheduler.DecodeScheduler",
            "enforce_eager": not self.on_cuda,
            "enable_sleep_mode": self.sleep_mode,
        }
        if self.on_cuda:
            settings["max_cudagraph_capture_size"] = max_num_seqs
            settings["gpu_memory_utilization"] = 0.05  # of what must be free at the start: the cache is sized above
            # Splitting a sequence for attention pays when few, long ones fill no GPU; it costs up to what was measured.
            if max_model_len <= 128 + 2048:
                settings["attention_config"] = {"flash_attn_max_num_splits_for_cuda_graph": 1}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about vLLM's own use of torch
            self.vllm = _import_vllm()
            self.llm = self.vllm.LLM(**{**settings, **vllm_args})
        if type(self.model()).__name__.startswith("Transformers"):
            rule = "vLLM has no code of its own for it, and changes transformers' classes, which the trainer uses"
            stop(f"--model {model_path}: {rule}; a Qwen or Llama model works")
        self._scheduler = self.llm.llm_engine.engine_core.engine_core.scheduler
        # vLLM's CPU worker replaces set_num_threads by a no-op and overwrites LOCAL_WORLD_SIZE.
        torch.set_num_threads = set_num_threads
        torch.set_num_threads(num_threads)
        if saved_env is None:
            os.environ.pop("LOCAL_WORLD_SIZE", None)
        else:
            os.environ["LOCAL_WORLD_SIZE"] = saved_env

    def model(self) -> nn.Module:
        """vLLM's own module on this rank, by reference."""
        return self.llm.apply_model(lambda module: module)[0]

    # ---- weights -----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def sync_weights(self, policy: nn.Module) -> SyncReport:
        """Write the policy's current weights into the engine, in place, and reset its prefix cache."""
        assert self._asleep is None, f"sync_weights while asleep ({self._asleep}): call wake() first"
        start = time.perf_counter()
        if self._planned_for is not policy:
            self._plan, self._planned_for = record_plan(self.model(), policy), policy
            self._buckets = plan_exchange(self._plan, self.dtype)
        for unit in self._plan:
            unit.module.reshard()  # what a forward left gathered is old by now, and only takes memory
        transfer(self._buckets, self.dtype, self.device)
        self._finish_wake()
        if self.on_cuda:
            torch.cuda.synchronize()
        copied = time.perf_counter()
        self._abort_leftovers()
        self._reset_prefix_cache()  # blocks computed with the old weights would serve new requests
        self.synced = True
        end = time.perf_counter()
        own = sum(to.nbytes for bucket in self._buckets for to, _ in bucket.own)
        received = sum(to.nbytes for bucket in self._buckets for each in bucket.received for to in each)
        return SyncReport(end - start, end - copied, own + received, received)

    def _reset_prefix_cache(self) -> None:
        assert self.llm.reset_prefix_cache(), "vLLM refused to reset its prefix cache: requests are still running"

    @torch.no_grad()
    def verify_sync(self, policy: nn.Module) -> float:
        """Prove that the engine holds the trainer's weights, without the copy plan; returns the seconds it took.

        Each block goes through vLLM's own loader once more: what that changes was stale. Fingerprints of every slice
        that the loader writes, and of every whole parameter, are compared before and after, on all ranks (collective).
        Ends the run with the names, where there are any.
        """
        assert self.synced and self._planned_for is policy, "verify_sync before sync_weights"
        start, engine_model, stale = time.perf_counter(), self.model(), []

        def whole():
            return torch.stack([_fingerprint(param) for param in engine_model.parameters()])

        before = whole()
        for unit in self._plan:
            unit.module.reshard()
            unit.module.unshard()
            slices = torch.stack([_fingerprint(s.destination) for s in unit.slices])
            engine_model.load_weights(iter(unit.fed().items()))
            same = (torch.stack([_fingerprint(s.destination) for s in unit.slices]) == slices).all(-1).tolist()
            stale += [unit.names[s.name] for s, ok in zip(unit.slices, same, strict=True) if not ok]
            unit.module.reshard()
        same = (whole() == before).all(-1).tolist()
        engine_names = [name for name, _ in engine_model.named_parameters()]
        stale = stale or [name for name, ok in zip(engine_names, same, strict=True) if not ok]
        found = [(rank, names) for rank, names in enumerate(all_gather(stale)) if names]
        if found:
            rank, names = found[0]
            stop(
                f"weight sync: after it, the engine of rank {rank} still held other weights than the trainer in "
                f"{', '.join(names[:3])}{f' and {len(names) - 3} more' if len(names) > 3 else ''} "
                f"({len(found)} of {dist.get_world_size()} ranks)"
            )
        return time.perf_counter() - start

    # ---- generation --------------------------------------------------------------------------------------------

    def generate(
        self,
        prompt_ids: Sequence[Sequence[int]],
        uids: Sequence[int],
        *,
        n: int,
        step: int,
        sampling: Sampling,
        on_finish: Callable[[Rollout], None] | None = None,
    ) -> list[Rollout]:
        """Sample `n` responses to each of this rank's prompts (their number may differ between ranks, or be zero).

        Args: on_finish: called with each of this rank's responses the moment it is complete, others still running.
        Returns: len(prompt_ids) * n rollouts, prompt-major. Sample i of a prompt depends on (run seed, step, uid, i)
            and the weights alone, not on rank, world size or tensor-parallel size.
        """
        assert self.synced, "generate before sync_weights (since the engine was built or last woken)"
        assert len(prompt_ids) == len(uids), f"{len(prompt_ids)} prompts but {len(uids)} uids"
        self._abort_leftovers()
        # Ranks of a tensor-parallel group compute the same forward passes, so each runs the whole group's prompts.
        shares = [None] * self.tp_size
        dist.all_gather_object(shares, list(zip(uids, prompt_ids, strict=True)), group=self.tp_group)
        engine, requests, mine = self.llm.llm_engine, {}, set()
        for owner, share in enumerate(shares):
            for uid, ids in share:
                for sample in range(n):
                    # n single requests rather than one of n: that one would seed its children seed, seed + 1, ...
                    params = self._sampling_params(sampling, seed_for("sample", self.seed, step, uid, sample))
                    request_id = engine.add_request(str(len(requests)), {"prompt_token_ids": list(ids)}, params)
                    requests[request_id] = Rollout(uid, sample, list(ids), [], [], "")
                    if owner == self.tp_rank:
                        mine.add(request_id)
        # vLLM's step() without its output objects, which cost Python per token: the scheduler keeps what was sampled.
        while engine.has_unfinished_requests():
            ended = [each for each in engine.engine_core.get_output().outputs if each.finish_reason is not None]
            engine.output_processor.process_outputs(ended)  # forgets the request
            for output in ended:
                rollout = requests[output.request_id]
                rollout.response_ids, rollout.logprobs = self._scheduler.responses.pop(output.request_id)
                rollout.finish_reason = str(output.finish_reason)
                expected = len(rollout.response_ids) if sampling.logprobs else 0
                assert len(rollout.logprobs) == expected, f"prompt {rollout.uid}: {len(rollout.logprobs)} log-probs"
                if on_finish is not None and output.request_id in mine:
                    on_finish(rollout)
        rollouts = [requests[request_id] for request_id in requests if request_id in mine]
        assert all(r.response_ids for r in rollouts), "vLLM returned an empty response"
        return rollouts

    def _abort_leftovers(self) -> None:
        """End the requests of a `generate` that raised (its on_finish, a prompt, an interrupt).

        On every rank of a tensor-parallel group: where only one raises, the others wait for it inside vLLM.
        """
        engine = self.llm.llm_engine
        if left := {*self._scheduler.responses, *engine.output_processor.request_states}:
            engine.abort_request(list(left), internal=True)
            self._scheduler.responses.clear()
            self._reset_prefix_cache()  # blocks are cached when a prompt is scheduled: what fills them may not have run

    def _sampling_params(self, sampling: Sampling, seed: int):
        return self.vllm.SamplingParams(
            temperature=sampling.temperature,
            max_tokens=sampling.max_tokens,
            seed=seed,
            stop_token_ids=list(self.eos_token_ids),  # the token that stops stays in the response: it is learned too
            logprobs=0 if sampling.logprobs else None,  # 0: the sampled token alone
            detokenize=False,
            skip_clone=True,  # the object is this request's alone
            output_kind=self.vllm.sampling_params.RequestOutputKind.FINAL_ONLY,
        )

    # ---- memory ------------------------------------------------------------------------------------------------

    def sleep(self, what: str) -> float:
        """Give memory back until `wake`: "kv" the KV cache, "all" the weights too. On CPU it only changes the state.

        Returns: the GiB given back; torch's allocator goes on counting them as allocated.
        Raises: ValueError for anything else.
        """
        if what not in ("kv", "all"):
            raise ValueError(f'sleep("{what}"): must be "kv" or "all"')
        assert self._asleep is None, f"already asleep ({self._asleep})"
        assert not self._kv_asleep, "sleep() after wake(): sync_weights() first, which brings the KV cache back"
        if self.on_cuda:
            assert self.sleep_mode, "sleep() on CUDA needs HybridEngine(sleep_mode=True)"
            if what == "all":
                self.llm.sleep(level=2)
            else:  # level 1 parks the weights on the host; bringing them straight back leaves the KV cache freed
                self.llm.sleep(level=1)
                self.llm.wake_up(["weights"])
        self._asleep, self.synced = what, False
        held = self.memory()
        return self.on_cuda * (held["mem/kv_cache_gib"] + (what == "all") * held["mem/engine_weights_gib"])

    def wake(self) -> None:
        """Map the weights again; their contents, and the KV cache, come with the next `sync_weights`."""
        assert self._asleep is not None, "wake() without sleep()"
        if self.on_cuda:
            torch.cuda.empty_cache()
            if self._asleep == "all":
                self.llm.wake_up(["weights"])
        self._asleep, self._kv_asleep = None, True

    def _finish_wake(self) -> None:
        """After the weights are written: the gathered blocks' memory is free again, so the KV cache now fits."""
        if self._kv_asleep and self.on_cuda:
            torch.cuda.empty_cache()
            self.llm.wake_up(["kv_cache"])
        self._kv_asleep = False

    def memory(self) -> dict[str, float]:
        """GiB on this rank of the engine's weights and of its KV cache, while it is awake."""
        weights = sum(p.nbytes for p in self.model().parameters())
        return {"mem/engine_weights_gib": weights / 2**30, "mem/kv_cache_gib": self.kv_cache_gib}

    def close(self) -> None:
        """End vLLM and the process group it shares with the trainer: the last collective call of a run."""
        dist.barrier()
        self.llm.llm_engine.engine_core.shutdown()
        self._plan, self._buckets, self._planned_for, self.llm, self.synced = [], [], None, None, False
        if dist.is_initialized():  # vLLM's CPU worker ends it itself
            dist.destroy_process_group()
