"""Whole GRPO steps of grpo_fsdp.py as a user runs it, and of TRL's GRPOTrainer with colocated vLLM in the same call.

python -m benchmarks.step --size 0.5b --against trl
The phases of the step stand beside it; their floors are those of benchmarks.rollout, .update and .sync.
"""

import json
import math
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pyarrow as pa
import pyarrow.parquet as pq
import tyro

from benchmarks.common import make_model, report


@dataclass
class Args:
    size: str = "0.5b"
    """0.5b, 1.5b or 7b."""
    prompts: int = 64
    """Prompts per step."""
    group: int = 8
    """Responses per prompt."""
    prompt_len: int = 128
    """Tokens of each prompt."""
    response_len: int = 512
    """Tokens of each response: random weights hardly ever end one."""
    steps: int = 5
    """Steps; the first two warm up, and the median of the others counts."""
    ranks: int = 1
    """GPUs."""
    flags: str = "--compile --max-tokens-per-gpu 32768"
    """More flags of grpo_fsdp.py."""
    against: Literal["none", "trl"] = "none"
    """"trl": the same shape through TRL afterwards."""
    trl_limit_s: int = 900
    """Seconds after which TRL is ended; the steps that it made by then count."""
    trl_batch: int = 32
    """TRL's responses per micro-batch."""
    out: str = "benchmarks/results"
    """Folder for the JSON."""


def make_prompts(args: Args) -> Path:
    """Parquet of raw-text prompts: the embedded tokenizer makes one token of an ASCII character."""
    path = Path(f"runs/.bench/prompts_{args.prompt_len}.parquet")
    rows = [f"{i:08d}".ljust(args.prompt_len, "abcdefghij"[i % 10]) for i in range(4096)]
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"prompt": rows}), path)
    return path


def ours(args: Args, model: Path, prompts: Path) -> dict:
    run_dir = Path(f"runs/.bench/step_{args.size}_{args.prompts}x{args.group}x{args.response_len}_{args.ranks}")
    subprocess.run(["rm", "-rf", run_dir], check=True)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(args.ranks)]
    command = [
        sys.executable, *(launcher if args.ranks > 1 else []), "grpo_fsdp.py", "--run-dir", run_dir, "--model", model,
        "--train-files", prompts, "--reward", "benchmarks/length.py:length", "--num-steps", args.steps,
        "--prompts-per-step", args.prompts, "--group-size", args.group, "--max-prompt-len", args.prompt_len,
        "--max-response-len", args.response_len, "--max-num-seqs", args.prompts * args.group // args.ranks,
        "--save-every", 0, "--export-hf", "off", *args.flags.split(),
    ]  # fmt: skip
    subprocess.run([str(part) for part in command], check=True, stdout=sys.stderr)
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()][2:]
    keys = [key for key in rows[0] if key.startswith(("time/", "perf/", "mem/"))]
    figures = {key: statistics.median(row[key] for row in rows if key in row) for key in keys}
    figures["rollout/logprob_diff_mean"] = rows[-1]["rollout/logprob_diff_mean"]
    return {"system": "reshard", "s/step": figures["time/step_s"], **figures}


def trl(args: Args, model: Path, prompts: Path) -> dict:
    values = {"model": model, "prompts": prompts, "batch": args.trl_batch, "responses": args.prompts * args.group}
    values |= {"group": args.group, "response_len": args.response_len, "steps": args.steps}
    values |= {"longest": args.prompt_len + args.response_len}
    command = [sys.executable, "-m", "benchmarks.trl_grpo", json.dumps(values, default=str)]
    with tempfile.TemporaryFile("w+") as printed:
        try:
            subprocess.run(command, stdout=printed, check=True, timeout=args.trl_limit_s)
        except subprocess.TimeoutExpired:
            print(f"TRL was ended after {args.trl_limit_s} s", file=sys.stderr)
        printed.seek(0)
        seconds = json.loads((printed.read().strip().splitlines() or ["[]"])[-1])
    print(f"TRL's steps: {seconds}", file=sys.stderr)
    warm = seconds[2:] or seconds[1:] or [math.nan]
    return {"system": f"TRL, {args.trl_batch} a micro-batch", "s/step": statistics.median(warm)}


def main(args: Args) -> None:
    if args.steps < 3:
        raise SystemExit(f"--steps {args.steps}: the first two warm up, so take 3 or more")
    model, prompts = make_model(args.size), make_prompts(args)
    rows = [ours(args, model, prompts)] + ([trl(args, model, prompts)] if args.against == "trl" else [])
    shape = f"{args.prompts * args.group} x {args.prompt_len}+{args.response_len}"
    rows = [{"size": args.size, "shape": shape, "GPUs": args.ranks, **row} for row in rows]
    rows[0]["flags"] = args.flags
    if args.against == "trl":
        rows[0]["times faster"] = rows[1]["s/step"] / rows[0]["s/step"]
    report(f"step_{args.size}_{args.prompts * args.group}x{args.response_len}_{args.ranks}", rows, args.out)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__.splitlines()[0]))
