"""Log-probs of sampled tokens on CUDA: the logits are read once, and one number a token comes to the host."""

import torch
from vllm.triton_utils import tl, triton
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.gpu.sample import logprob, sampler

NOTHING = torch.empty(0)


@triton.jit
def _logprobs_kernel(logprobs, logits, stride, tokens, vocabulary: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    top, total = -3.4e38, 0.0  # finite: a first block of -inf alone shall add nothing
    for start in range(0, vocabulary, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        x = tl.load(logits + ids, mask=ids < vocabulary, other=float("-inf")).to(tl.float32)
        new = tl.maximum(top, tl.max(x, 0))
        total = total * tl.exp(top - new) + tl.sum(tl.exp(x - new), 0)
        top = new
    tl.store(logprobs + row, tl.load(logits + tl.load(tokens + row)).to(tl.float32) - top - tl.log(total))


class SampledLogprobs(LogprobsTensors):
    """vLLM's tuple, with log-probs alone: the ids come to the host anyhow, and nobody reads the tokens' ranks."""

    def to_cpu_nonblocking(self):
        logprobs = self.logprobs.to("cpu", non_blocking=True)
        return SampledLogprobs(NOTHING, logprobs, NOTHING, self.cu_num_generated_tokens)


def logprobs_of_sampled(logits_nV: torch.Tensor, token_n: torch.Tensor) -> torch.Tensor:
    """Natural log of softmax(logits) at each row's token: [n, 1] float32, rounded as float32 sums are."""
    logprobs_n1 = torch.empty(len(logits_nV), 1, dtype=torch.float32, device=logits_nV.device)
    rows, vocabulary = logits_nV.shape
    _logprobs_kernel[(rows,)](logprobs_n1, logits_nV, logits_nV.stride(0), token_n, vocabulary, BLOCK=8192, num_warps=4)
    return logprobs_n1


def give_sampled_logprobs_alone() -> None:
    """Where no more is asked for than the sampled tokens' log-probs, vLLM's runner computes and copies nothing else.

    vLLM's own way takes two kernels, the second for ranks, and three copies a step. For DecodeScheduler: in the
    outputs of LLM.generate there would be no log-probs.
    """
    general = logprob.compute_topk_scores

    def scores(logits_nV, num_logprobs, token_n, counts=None, **more):
        if num_logprobs or more.get("max_per_req_token_ids") or more.get("logits_mode"):
            return general(logits_nV, num_logprobs, token_n, counts, **more)
        return SampledLogprobs(NOTHING, logprobs_of_sampled(logits_nV, token_n), NOTHING, counts)

    sampler.compute_topk_scores = scores
