"""AdamW, with its two moments on the device or on the host."""

import torch
from torch import nn

CHUNK_BYTES = 2**30  # of moments that are on the device at once


def make_adamw(model: nn.Module, lr: float, weight_decay: float, offload: str) -> torch.optim.AdamW:
    """AdamW over the model's shards. Args: offload: "optimizer" keeps the moments on the host; else they are where the
    shards are.
    """
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
