"""Metrics of a step: (sum, count) over micro-batches and ranks, reduced once; their log and the progress bar.

Keys are `family/quantity[_stat]`, families rollout reward policy value rm optim time perf eval data.
"""

import math
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from utils.dist import all_gather
from utils.forward import attention_shape
from utils.jsonl import append_jsonl
from utils.watchdog import say


class Metrics:
    """Accumulates one step's figures on this rank; `reduce` is the step's only collective for them."""

    def __init__(self):
        self._mean: dict[str, tuple] = {}
        self._max: dict[str, list] = {}
        self.seconds: dict[str, float] = {}  # of each phase so far, on this rank
        self.grown: dict[str, float] = {}  # GiB by which a phase's peak was above what was held when it began (CUDA)
        self.asleep_gib = 0.0  # of vLLM's sleeping memory, which is given back, and torch's allocator still counts
        self._step, self._last_lap, self._held = 0, 0.0, 0.0

    def add(self, key: str, total: float | torch.Tensor, count: float | torch.Tensor = 1.0) -> None:
        """Add `count` observations summing to `total`; the step's figure is their mean.

        Tensors stay on the device until `reduce`, so that adding never waits for the GPU.
        """
        if isinstance(total, torch.Tensor):
            total = total.detach().double()
        old_total, old_count = self._mean.get(key, (0.0, 0.0))
        self._mean[key] = (old_total + total, old_count + count)

    def add_each(self, figures: dict[str, float]) -> None:
        """Add one observation of each key."""
        for key, value in figures.items():
            self.add(key, value)

    def add_max(self, key: str, value: float | torch.Tensor) -> None:
        """Add one candidate; the step's figure is the largest."""
        self._max.setdefault(key, []).append(value)

    @contextmanager
    def timed(self, phase: str, device: torch.device) -> Iterator[None]:
        """Wall-clock seconds of a phase as time/<phase>_s, the device's queue drained at both ends."""
        synchronize(device)
        start = time.perf_counter()
        yield
        synchronize(device)
        self.add(f"time/{phase}_s", time.perf_counter() - start)

    def start(self, step: int, device: torch.device) -> None:
        """Step `step` begins: what `lap` counts from."""
        self._step = step
        say(f"step {step}")
        synchronize(device)
        self._last_lap = time.perf_counter()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
            self._held = peak_memory_gib(device)

    def lap(self, phase: str, device: torch.device) -> None:
        """A phase ends: its seconds, with the device's queue drained, as time/<phase>_s, and its peak of memory.

        Laps follow each other without a gap, so that they add up to the step.
        """
        synchronize(device)
        now = time.perf_counter()
        self.seconds[phase] = now - self._last_lap
        self._last_lap = now
        self.add(f"time/{phase}_s", self.seconds[phase])
        say(f"step {self._step}, after {phase}")
        peak = peak_memory_gib(device) - self.asleep_gib
        self.add_max("perf/peak_mem_gib", peak)
        if device.type == "cuda":
            self.add_max(f"mem/{phase}_gib", peak)
            self.grown[phase] = peak - self._held
            torch.cuda.reset_peak_memory_stats()
            self._held = peak_memory_gib(device) - self.asleep_gib

    def reduce(self) -> dict[str, float]:
        """The step's figures over all ranks, alike on every rank. Keys seen by some ranks only count those ranks."""
        mean: dict[str, tuple[float, float]] = {}
        peak: dict[str, float] = {}
        my_mean = {key: (float(total), float(count)) for key, (total, count) in self._mean.items()}
        my_max = {key: max(map(float, values)) for key, values in self._max.items()}
        for rank_mean, rank_max in all_gather((my_mean, my_max)):  # summed in rank order: reproducible
            for key, (total, count) in rank_mean.items():
                old_total, old_count = mean.get(key, (0.0, 0.0))
                mean[key] = (old_total + total, old_count + count)
            for key, value in rank_max.items():
                peak[key] = max(value, peak.get(key, value))
        figures = {key: total / count for key, (total, count) in mean.items() if count > 0}
        return dict(sorted({**figures, **peak}.items()))


def explained_variance(
    values_BR: torch.Tensor, returns_BR: torch.Tensor, mask_BR: torch.Tensor, over_ranks: Callable
) -> torch.Tensor:
    """1 - Var(return - value) / Var(return) over the masked entries of all ranks: 1 is a perfect critic, 0 a constant.

    Args: over_ranks: sums a tensor over the ranks.
    """
    pair_2BR = torch.stack([returns_BR - values_BR, returns_BR]).double() * mask_BR
    count = over_ranks(mask_BR.sum())
    mean_2 = over_ranks(pair_2BR.sum((1, 2))) / count
    error, spread = over_ranks(((pair_2BR - mean_2[:, None, None]).square() * mask_BR).sum((1, 2)))
    return 1 - error / spread  # not a number where all returns are the same


def wilson(right: int, total: int) -> tuple[float, float]:
    """95 % interval of a share that was right in `right` of `total` cases (Wilson 1927)."""
    z, p = 1.959964, right / total
    middle = p + z * z / (2 * total)
    half = z * math.sqrt(p * (1 - p) / total + z * z / (4 * total * total))
    return (middle - half) / (1 + z * z / total), (middle + half) / (1 + z * z / total)


def mismatch(trainer_BR: torch.Tensor, engine_BR: torch.Tensor, mask_BR: torch.Tensor) -> dict[str, float]:
    """How far the engine's log-probs are from the trainer's before the update, over all ranks (collective).

    With w = pi_trainer / pi_engine of each sampled token: mean and largest |log w|; percentiles of w; KL(engine ||
    trainer) as k3, w - 1 - log w; the effective sample size (sum w)^2 / (n sum w^2), 1 where both agree.
    Shapes: all [B, R]. Units: nats.
    """
    mine = (trainer_BR.double() - engine_BR.double())[mask_BR].float().cpu().numpy()
    log_w = np.concatenate(all_gather(mine)).astype(np.float64)
    w = np.exp(log_w)
    low, high = np.quantile(w, (0.01, 0.99))
    return {
        "rollout/logprob_diff_mean": np.abs(log_w).mean(),
        "rollout/logprob_diff_max": np.abs(log_w).max(),
        "rollout/ratio_p01": low,
        "rollout/ratio_p99": high,
        "rollout/ratio_k3": (w - 1 - log_w).mean(),
        "rollout/ess": w.sum() ** 2 / (len(w) * np.square(w).sum()),
    }


PEAKS = {  # card: dense bfloat16 FLOP/s, bytes/s of its memory (data sheets, SXM)
    "A100": (312e12, 2.04e12),
    "H100": (989e12, 3.35e12),
    "H200": (989e12, 4.8e12),
    "B200": (2250e12, 8e12),
}


def speed(
    learners: dict, policy: torch.nn.Module, rollouts: Sequence, epochs: float, seconds: dict[str, float]
) -> dict[str, float]:
    """Tokens per second of the step, its rollout and its update on this rank; on a known card its utilisation as well.

    perf/mfu: 6 FLOPs per token and parameter that it is multiplied with (the head on response tokens alone), and causal
    attention, of each model that was updated, over what the card can do in bfloat16; recomputed ones do not count.
    perf/mbu: the keys and values that decoding reads for each response, over what the card's memory can do; the weights
    are left out, which are read once for all responses of a decode step.
    Args: learners: {name: (model, optimizer)}; epochs: times that the update went over the batch.
    """
    prompts, responses = (
        np.array([len(getattr(r, name)) for r in rollouts]) for name in ("prompt_ids", "response_ids")
    )
    whole = prompts + responses
    figures = {
        "time/step_s": sum(seconds.values()),
        "perf/tokens_per_s_per_gpu": whole.sum() / sum(seconds.values()),
        "perf/rollout_tokens_per_s_per_gpu": responses.sum() / seconds["rollout"],
        "perf/update_tokens_per_s_per_gpu": epochs * whole.sum() / seconds["update"],
    }
    card = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    peaks = [rates for name, rates in PEAKS.items() if name in card]
    if peaks:
        flops = sum(model.flops(prompts, responses) for model, _ in learners.values())
        figures["perf/mfu"] = epochs * flops / seconds["update"] / peaks[0][0]
        layers, _, kv_heads, head_size = attention_shape(policy.lm.config)
        read = 2 * 2 * layers * kv_heads * head_size * (responses * prompts + np.square(responses) / 2).sum()
        figures["perf/mbu"] = read / seconds["rollout"] / peaks[0][1]
    return figures


def synchronize(device: torch.device) -> None:
    """Wait for the device's queued work; nothing to do on CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def peak_memory_gib(device: torch.device) -> float:
    """GiB: torch's peak allocation on CUDA, the process's peak resident set on CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


SHOWN = {  # on the progress bar
    "eval/score": "eval",
    "eval/accuracy": "accuracy",
    "rm/loss": "loss",
    "reward/score": "score",
    "rollout/response_len": "len",
    "policy/entropy": "entropy",
    "optim/grad_norm": "grad_norm",
    "time/step_s": "s/step",
}


class Progress:
    """metrics.jsonl, and a tqdm bar with the figures that matter; of rank 0 alone."""

    def __init__(self, run_dir: Path, done: int, total: int, show: bool):
        how = {"unit": "step", "disable": not show, "dynamic_ncols": True}
        self.bar = tqdm(desc=run_dir.name, initial=done, total=total, **how)
        self.file, self.show = run_dir / "metrics.jsonl", show
        self.last: dict[str, float] = {}

    def log(self, step: int, figures: dict[str, float]) -> None:
        """Write the step's line of metrics.jsonl and move the bar on; step 0 is what was evaluated before the first."""
        if self.show:
            append_jsonl(self.file, {"step": step, **figures})
        self.last.update(figures)
        self.bar.set_postfix({word: f"{self.last[key]:.3g}" for key, word in SHOWN.items() if key in self.last})
        self.bar.update(min(step, 1))

    def close(self) -> None:
        self.bar.close()
