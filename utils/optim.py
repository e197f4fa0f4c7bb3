"""Optimizer steps over summed micro-batches; AdamW, with its two moments on the device or on the host."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

CHUNK_BYTES = 2**30  # of moments that are on the device at once

Parts = dict[str, tuple[nn.Module, torch.optim.Optimizer]]  # what is trained, by name: "policy", "critic"


def begin_micro_batch(model: FSDPModule, last: bool) -> None:
    """To be called before each forward with a gradient: gradients are reduced after an optimizer step's last one alone.

    One rank keeps its blocks gathered until then: the next micro-batch would cast them from the same shards again.
    """
    model.set_requires_gradient_sync(last)
    model.set_reshard_after_backward(last or dist.get_world_size() > 1)


def optimizer_step(
    parts: Parts, rates: dict[str, float], max_grad_norm: float, check: Callable, apply: bool = True
) -> dict[str, torch.Tensor]:
    """Clip each part's gradient, step its optimizer at its rate, zero the gradient; returns the norms before clipping.

    Args: check: called with the norms on every rank; it ends the run where they are not finite. The update is queued by
        then, or the device would wait for the host in between: where the run ends, its weights are not to be saved.
        apply: False: the optimizers make no step.
    """
    norms = {  # over DTensors this is the norm of the whole gradient, not of this rank's shards
        name: nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm).full_tensor()
        for name, (model, _) in parts.items()
    }
    for name, (_, optimizer) in parts.items():
        for group in optimizer.param_groups:
            group["lr"] = rates[name]
        if apply:
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    check(norms)
    return norms


def make_adamw(model: nn.Module, lr: float, weight_decay: float, offload: str) -> torch.optim.AdamW:
    """AdamW over the model's shards. Args: offload: "optimizer" keeps the moments on the host; else they are where the
    shards are.
    """
    # DETAIL: torch's own betas and epsilon (0.9, 0.999, 1e-8); weight decay, if any, is on norms and biases too,
    # because one rule for all parameters is easier to say.
    kind = HostAdamW if offload == "optimizer" else torch.optim.AdamW
    return kind(model.parameters(), lr=lr, weight_decay=weight_decay, fused=True)


class HostAdamW(torch.optim.AdamW):
    """AdamW whose moments wait on the host (pinned) and visit the device a chunk of parameters at a time.

    The same numbers as AdamW: a step over all parameters is a step over each chunk.
    """

    @torch.no_grad()
    def step(self, closure=None) -> None:
        assert closure is None, "HostAdamW takes no closure"
        groups = self.param_groups
        try:
            for group in groups:
                for chunk in _chunks(group["params"]):
                    waiting = {p: self.state.get(p, {}) for p in chunk}
                    for p, state in waiting.items():
                        here = {k: v.to(p.device, non_blocking=True) for k, v in state.items()}
                        if here:
                            self.state[p] = here
                    self.param_groups = [{**group, "params": chunk}]
                    super().step()
                    for p, state in waiting.items():
                        self.state[p] = _to_host(self.state[p], state)
        finally:
            self.param_groups = groups
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # the moments are on their way to the host


def _chunks(params: list[torch.Tensor]):
    chunk, size = [], 0
    for p in params:
        nbytes = 2 * p.to_local().nbytes
        if chunk and size + nbytes > CHUNK_BYTES:
            yield chunk
            chunk, size = [], 0
        chunk.append(p)
        size += nbytes
    if chunk:
        yield chunk


def _to_host(state: dict, waiting: dict) -> dict:
    """The moments copied into `waiting`'s host tensors, or into new ones."""
    out = {}
    for key, value in state.items():
        if key == "step":
            out[key] = value  # one number: stays where fused AdamW wants it
            continue
        host = waiting.get(key)
        if host is None:
            host = torch.empty_like(value, device="cpu", pin_memory=value.is_cuda)
        out[key] = host.copy_(value, non_blocking=True)
    return out
