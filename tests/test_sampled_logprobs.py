"""The CUDA kernel of sampled log-probs by Triton's interpreter; on a GPU, and in vLLM: tests/test_cuda_gpu.py."""

import importlib.util
import inspect
import sys

import pytest
import torch


def test_the_kernel_is_log_softmax(tmp_path):
    """Its source in a process of its own: Triton is to be imported as an interpreter, and vLLM has it off on a CPU."""
    from conftest import run

    from utils.sampled_logprobs import _logprobs_kernel

    pytest.importorskip("triton")
    source = inspect.getsource(getattr(_logprobs_kernel, "fn", _logprobs_kernel))
    file = tmp_path / "kernel.py"
    file.write_text(f"import triton\nimport triton.language as tl\n\n\n{source}")
    result = run([sys.executable, "-W", "ignore", __file__, file], TRITON_INTERPRET="1")  # numpy warns of -inf
    assert result.returncode == 0, result.stderr[-3000:]


def check(kernel, dtype, vocabulary, block):
    generator = torch.Generator().manual_seed(vocabulary)
    logits = (20 * torch.randn(6, vocabulary + 24, generator=generator)).to(dtype)[:, :vocabulary]  # rows are padded
    tokens = torch.randint(0, vocabulary, (6,), generator=generator)
    logits[1, : vocabulary - 1] = float("-inf")  # whole blocks of it first
    tokens[1] = vocabulary - 1
    logits[2, 0] = float("nan")
    logits[3] += 1000  # exp() alone would overflow
    logits[4, (tokens[4] + 1) % vocabulary] = float("-inf")
    out = torch.full((6, 1), 7.0)
    kernel[(6,)](out, logits, logits.stride(0), tokens, vocabulary, BLOCK=block)
    exact = logits.double().log_softmax(-1).gather(-1, tokens[:, None])
    torch.testing.assert_close(out.double(), exact, atol=2e-5, rtol=1e-6, equal_nan=True)


if __name__ == "__main__":
    spec = importlib.util.spec_from_file_location("kernel", sys.argv[1])
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for dtype in (torch.float32, torch.bfloat16):
        for vocabulary, block in ((1000, 1024), (1024, 256), (1001, 256), (2, 256)):
            check(module._logprobs_kernel, dtype, vocabulary, block)
