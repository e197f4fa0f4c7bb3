"""Shared by the benchmarks: random models in the shapes of Qwen2.5, the card's own rates, and the table of results."""

import json
import os
import platform
import statistics
import subprocess
import time
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import Qwen2Config, Qwen2ForCausalLM

from utils import tiny

SHAPES = {  # of Qwen2.5: hidden, intermediate, layers, heads, key-value heads, vocabulary, tied
    "0.5b": (896, 4864, 24, 14, 2, 151936, True),
    "1.5b": (1536, 8960, 28, 12, 2, 151936, True),
    "7b": (3584, 18944, 28, 28, 4, 152064, False),
}
PEAK_FLOPS = 989e12  # dense bfloat16 of an H100 or H200 (SXM)


def make_model(size: str) -> Path:
    """A folder with random bfloat16 weights in that shape, and the embedded tokenizer; made once, by rank 0."""
    folder = Path(f"runs/.bench/{size}")
    if not (folder / "tokenizer.json").exists() and int(os.environ.get("RANK", 0)) == 0:
        hidden, intermediate, layers, heads, kv_heads, vocabulary, tied = SHAPES[size]
        tokenizer = tiny.make_tokenizer()
        config = Qwen2Config(
            vocab_size=vocabulary, hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers,
            num_attention_heads=heads, num_key_value_heads=kv_heads, tie_word_embeddings=tied,
            max_position_embeddings=32768, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
            bos_token_id=None, dtype="bfloat16",
        )  # fmt: skip
        torch.manual_seed(0)
        torch.set_default_dtype(torch.bfloat16)
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            model = Qwen2ForCausalLM(config)
        torch.set_default_dtype(torch.float32)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        del model
        torch.cuda.empty_cache()
    if dist.is_initialized():
        dist.barrier()
    return folder


def timed(function, rounds: int = 5) -> float:
    """Median seconds of `function` on the device, after one round to warm up."""
    seconds = []
    for _ in range(rounds + 1):
        torch.cuda.synchronize()
        start = time.perf_counter()
        function()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])


def copy_bandwidth() -> float:
    """Bytes read plus bytes written per second of a copy of 2 GiB on the device."""
    a = torch.empty(2**31, dtype=torch.uint8, device="cuda")
    b = torch.empty_like(a)
    return 2 * a.nbytes / timed(lambda: b.copy_(a))


def matmul_rate() -> float:
    """FLOP/s of a square bfloat16 matrix product."""
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    return 2 * 8192**3 / timed(lambda: a @ a)


def block_matmul_rate(size: str, tokens: int, fill=torch.randn) -> float:
    """FLOP/s of a block's matrix products, forward and backward, back to back as often as the model has blocks."""
    hidden, intermediate, layers, heads, kv_heads, *_ = SHAPES[size]
    kv, options = kv_heads * hidden // heads, {"device": "cuda", "dtype": torch.bfloat16}
    shapes = [(hidden, n) for n in (hidden, kv, kv, hidden, intermediate, intermediate)] + [(intermediate, hidden)]
    factors = [(fill(tokens, i, **options), fill(o, i, **options), fill(tokens, o, **options)) for i, o in shapes]

    def multiply() -> None:
        for _ in range(layers):
            for x, weight, grad in factors:
                x @ weight.T, grad @ weight, grad.T @ x

    return layers * sum(6 * tokens * i * o for i, o in shapes) / timed(multiply)


def gather_bandwidth() -> float:
    """Bytes that each rank receives per second of an all-gather of 512 MiB a rank; 0 on one rank."""
    world = dist.get_world_size()
    mine = torch.empty(2**29, dtype=torch.uint8, device="cuda")
    whole = torch.empty(world * 2**29, dtype=torch.uint8, device="cuda")
    return (world - 1) * mine.nbytes / timed(lambda: dist.all_gather_into_tensor(whole, mine))


def report(name: str, rows: list[dict], out: str) -> None:
    """Print the rows as a Markdown table, and write them with date, commit, card and versions to `out`/name.json.

    On rank 0 alone, where there are several.
    """
    import vllm

    if dist.is_initialized() and dist.get_rank():
        return
    columns = list(dict.fromkeys(key for row in rows for key in row))
    print("| " + " | ".join(columns) + " |\n|" + "---|" * len(columns))
    for row in rows:
        cells = (row.get(column, "") for column in columns)
        print("| " + " | ".join(f"{c:.4g}" if isinstance(c, float) else str(c) for c in cells) + " |", flush=True)
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True).stdout.strip()
    about = {
        "date": time.strftime("%Y-%m-%d"), "commit": commit, "card": torch.cuda.get_device_name(),
        "torch": torch.__version__, "vllm": vllm.__version__, "python": platform.python_version(),
    }  # fmt: skip
    Path(out).mkdir(parents=True, exist_ok=True)
    (Path(out) / f"{name}.json").write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")
