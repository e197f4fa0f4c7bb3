"""The user's mistakes: one line with flag, value, rule and a value that works, before anything loads; exit status 1."""

import json
import re
import shutil
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import ROOT, run

from utils import tiny
from utils.data import PromptData

REWARDS = """
import time, os
def raises(response, row): return 1 / 0
def hangs(response, row): time.sleep(1000)
def nan(response, row): return float("nan")
def text(response, row): return "good"
def dies(response, row): os._exit(3)
def raises_later(response, row): return 0.0 if response == "" else 1 / 0
"""

RESUME = ["--resume", "{tmp}/same/checkpoints/step_1", "--run-dir", "{tmp}/new"]

# flags over a run that works -> what the one line must say
CASES = {
    "no such file": (["--train-files", "{tmp}/none.parquet"], r"--train-files .*none\.parquet: no such file"),
    "glob of nothing": (["--train-files", "{tmp}/none_*.parquet"], r"--train-files .*no file matches"),
    "not parquet": (["--train-files", "{tmp}/rewards.py"], r"--train-files .*cannot be read as parquet"),
    "empty parquet": (["--train-files", "{tmp}/empty.parquet"], r"--train-files .*has 0 rows"),
    "no prompt column": (["--train-files", "{tmp}/column.parquet"], r"--train-files .*no column `prompt`.* question"),
    "prompt of numbers": (["--train-files", "{tmp}/numbers.parquet"], r"--train-files .*column `prompt` is int64"),
    "held-out file": (["--val-files", "{tmp}/none.parquet"], r"--val-files .*no such file"),
    "prompt too long": (["--max-prompt-len", "5"], r"--max-prompt-len 5: \d+ of 7495 .*--max-prompt-len 6 works"),
    "group of one": (["--group-size", "1"], r"--group-size 1: must be 2 or more"),
    "minibatch": (["--minibatch-size", "15"], r"--minibatch-size 15: must divide .* 32 responses.*; 16 works"),
    "tensor parallel": (["--tensor-parallel-size", "2"], r"--tensor-parallel-size 2: must divide the 1 rank.* 1 works"),
    "token budget": (["--max-tokens-per-gpu", "20"], r"--max-tokens-per-gpu 20: .*; 28 works"),
    "positions": (["--max-response-len", "2040"], r"--max-response-len 2040: .* 2048 positions; 2032 works"),
    "no workers": (["--reward-workers", "0"], r"--reward-workers 0: must be above 0"),
    "nothing to evaluate": (["--eval-every", "5"], r"--eval-every 5: has no effect with no --val-files"),
    "steps and epochs": (["--num-steps", "2", "--num-epochs", "3"], r"--num-epochs 3: has no effect with --num-steps"),
    "rows without truth": (["--train-files", "{tmp}/truth.parquet"], r"on --train-files.* no reward_model"),
    "held-out without truth": (["--val-files", "{tmp}/truth.parquet"], r"on --val-files.* no reward_model"),
    "no weights": (["--model", "{tmp}/hollow"], r"--model .*hollow: has no weights"),
    "other rows": (["--resume", "{tmp}/used/checkpoints/step_1", "--run-dir", "{tmp}/n"], r"--train-files .*other row"),
    "already there": (["--num-steps", "1", *RESUME], r"--num-steps 1: the checkpoint is at step 1 already; 2 or more"),
    "other vocabulary": (["--kl-coef", "0.1", "--ref-model", "{tmp}/wide"], r"--ref-model .*has another vocabulary"),
    "negative rate": (["--lr", "-1"], r"--lr -1.0: must not be below 0"),
    "hot": (["--temperature", "3"], r"--temperature 3.0: must be from 0.01 to 2"),
    "zero steps of eval": (["--eval-every", "-1"], r"--eval-every -1: must not be below 0"),
    "idle flag": (["--kl-estimator", "k1"], r"--kl-estimator k1: has no effect with --kl-coef 0"),
    "idle reference": (["--ref-model", "x"], r"--ref-model x: has no effect with --kl-coef 0"),
    "no rows named": (["--train-files", ""], r"--train-files: must be given"),
    "no reward named": (["--reward", ""], r"--reward: must be given"),
    "unknown reward": (["--reward", "gsm9k"], r"--reward gsm9k: unknown reward; use one of gsm8k, tiny"),
    "no reward file": (["--reward", "{tmp}/none.py:f"], r"--reward .*there is no file"),
    "no such function": (["--reward", "{tmp}/rewards.py:f"], r"--reward .*has no function f; it has raises, hangs"),
    "reward raises": (["--reward", "{tmp}/rewards.py:raises"], r"--reward .*ZeroDivisionError.*must return a finite"),
    "reward hangs": (["--reward", "{tmp}/rewards.py:hangs"], r"--reward .*no answer within 1 s"),
    "reward is NaN": (["--reward", "{tmp}/rewards.py:nan"], r"--reward .*returned nan"),
    "reward is text": (["--reward", "{tmp}/rewards.py:text"], r"--reward .*returned str, not a number"),
    "reward dies": (["--reward", "{tmp}/rewards.py:dies"], r"--reward .*ended with status 3"),
    "no model": (["--model", "{tmp}/none"], r"--model .*none: not a Hugging Face model folder"),
    "no tokenizer": (["--model", "{tmp}/bare"], r"--model .*bare: has no usable tokenizer"),
    "used run folder": (["--run-dir", "{tmp}/used"], r"--run-dir .*used: holds an earlier run; use --resume auto"),
    "no checkpoint": (["--resume", "{tmp}/used"], r"--resume .*used: must be a checkpoint folder"),
    "auto without folder": (["--resume", "auto", "--run-dir", ""], r"--resume auto: needs the --run-dir"),
    "other flags": (["--lr", "0.5", *RESUME], r"--lr 0.5: differs from .* 1e-06"),
}  # fmt: skip


@pytest.fixture(scope="module")
def tmp(tmp_path_factory):
    tmp = tmp_path_factory.mktemp("bad")
    tiny.make_model(tmp / "model", seed=1, num_sft_steps=0)
    tiny.make_data(tmp / "data")
    tokenizer = tiny.make_tokenizer()
    tokenizer.add_tokens(["one more"])
    tokenizer.save_pretrained(tmp / "wide")
    shutil.copytree(tmp / "model", tmp / "bare", ignore=shutil.ignore_patterns("token*", "chat*", "special*"))
    (tmp / "rewards.py").write_text(REWARDS)
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), tmp / "empty.parquet")
    pq.write_table(pa.table({"question": ["1+1="]}), tmp / "column.parquet")
    pq.write_table(pa.table({"prompt": [1, 2]}), tmp / "numbers.parquet")
    pq.write_table(pa.table({"prompt": ["1+1="]}), tmp / "truth.parquet")
    shutil.copytree(tmp / "model", tmp / "hollow", ignore=shutil.ignore_patterns("*.safetensors"))
    fingerprint = PromptData(str(tmp / "data/train.parquet")).fingerprint()
    for name, data in (("used", "0"), ("same", fingerprint)):
        (tmp / name / "checkpoints/step_1").mkdir(parents=True)
        (tmp / name / "metrics.jsonl").write_text('{"step": 1}\n')
        state = {"step": 1, "args": {"lr": 1e-6, "seed": 1}, "data": {"train-files": data}}
        (tmp / name / "checkpoints/step_1/state.json").write_text(json.dumps(state))
    return tmp


def base(tmp):
    return [
        "--model", f"{tmp}/model", "--train-files", f"{tmp}/data/train.parquet", "--reward", "tiny",
        "--prompts-per-step", "8", "--group-size", "4", "--max-prompt-len", "16", "--max-response-len", "12",
        "--run-dir", f"{tmp}/run", "--reward-timeout-s", "1", "--kv-cache-gib", "0.125",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def endings(tmp):
    lists = [[*base(tmp), *(flag.format(tmp=tmp) for flag in flags)] for flags, _ in CASES.values()]
    (tmp / "lists.json").write_text(json.dumps(lists))
    result = run([sys.executable, ROOT / "tests/workers/bad_inputs.py", tmp / "lists.json"])
    assert result.returncode == 0, result.stderr[-4000:]
    return dict(zip(CASES, json.loads(result.stdout.splitlines()[-1]), strict=True))


@pytest.mark.parametrize("case", CASES)
def test_one_clear_line(endings, case):
    ending = endings[case]
    assert isinstance(ending, str) and ending.startswith("error: --") and "\n" not in ending, ending
    assert re.search(CASES[case][1], ending), ending


def test_the_script_prints_that_line_and_exits_with_1(tmp):
    result = run([sys.executable, ROOT / "grpo_fsdp.py", *base(tmp), "--group-size", "1"])
    assert result.returncode == 1 and "Traceback" not in result.stderr
    assert [line for line in result.stderr.splitlines() if line.startswith("error:")] == [
        "error: --group-size 1: must be 2 or more, one response has no group to compare with; 8 works"
    ]


def test_two_ranks_stop_together_on_what_one_of_them_finds(tmp):
    """Only the second rank's share holds the long prompt; three prompts do not divide by two ranks."""
    rows = pq.read_table(tmp / "data/train.parquet").to_pylist()[:20]
    rows[19]["prompt"] = "1" * 40 + "="
    pq.write_table(pa.Table.from_pylist(rows), tmp / "long.parquet")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2]
    for flags, message in (
        (["--train-files", tmp / "long.parquet"], r"--max-prompt-len 16: 1 of 20 .* 41 tokens, uid 19"),
        (["--prompts-per-step", 3], r"--prompts-per-step 3: must divide by the 2 ranks; 2 or 4 works"),
    ):
        result = run([*launcher, ROOT / "grpo_fsdp.py", *base(tmp), *flags], timeout=120, OMP_NUM_THREADS="1")
        assert result.returncode != 0
        assert len(re.findall(message, result.stderr)) == 1, result.stderr[-3000:]


def test_a_reward_that_fails_on_everything_stops_the_run_and_loses_no_checkpoint(tmp):
    command = [sys.executable, ROOT / "grpo_fsdp.py", *base(tmp), "--run-dir", tmp / "later", "--save-every", 1]
    first = run([*command, "--num-steps", 1])
    assert first.returncode == 0, first.stderr[-3000:]
    broken = f"{tmp}/rewards.py:raises_later"
    args = tmp / "later/checkpoints/step_1/state.json"  # the recorded run used the broken reward all along
    args.write_text(args.read_text().replace('"reward": "tiny"', f'"reward": "{broken}"'))
    result = run([*command, "--num-steps", 3, "--resume", "auto", "--reward", broken])
    assert result.returncode == 1
    assert "error: --reward" in result.stderr and "failed on all responses of step 2" in result.stderr
    assert "ZeroDivisionError" in result.stderr and "Traceback" not in result.stderr
    assert [p.name for p in (tmp / "later/checkpoints").iterdir()] == ["step_1"]
