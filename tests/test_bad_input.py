"""The user's mistakes: one line with flag, value, rule and a value that works, before anything loads; exit status 1."""

import json
import math
import re
import shutil
import sys
from functools import cache

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import tyro
from conftest import ROOT, run
from transformers import Starcoder2Config, Starcoder2ForCausalLM

import grpo_fsdp
import ppo_fsdp
from utils import tiny
from utils.data import PromptData
from utils.preflight import check_divides, check_minibatch
from utils.replay import COLUMNS

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
AHEAD = ["--resume", "{tmp}/ahead/checkpoints/step_1", "--run-dir", "{tmp}/new"]
GUARD = ["--max-kl", "0.1", "--update-epochs", "2"]

WITH_VAL = ["--val-files", "{tmp}/data/val.parquet"]

# flags over a run that works -> what the one line must say
GRPO = {
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
    "no position left": (
        ["--max-prompt-len", "2048"], r"--max-response-len 12: .* 2048 positions; --max-prompt-len 1024 leaves room"
    ),
    "exports of saves": (
        ["--export-hf", "every", "--save-every", "0"], r"--export-hf every: has no effect with --save-every 0"
    ),
    "idle examiner": (
        [*WITH_VAL, "--eval-every", "0", "--eval-reward", "tiny"], r"--eval-reward tiny: .* with --eval-every 0"
    ),
    "no workers": (["--reward-workers", "0"], r"--reward-workers 0: must be above 0"),
    "nothing to evaluate": (["--eval-every", "5"], r"--eval-every 5: has no effect with no --val-files"),
    "steps and epochs": (["--num-steps", "2", "--num-epochs", "3"], r"--num-epochs 3: has no effect with --num-steps"),
    "rows without truth": (["--train-files", "{tmp}/truth.parquet"], r"on --train-files.* no reward_model"),
    "held-out without truth": (["--val-files", "{tmp}/truth.parquet"], r"on --val-files.* no reward_model"),
    "no weights": (["--model", "{tmp}/hollow"], r"--model .*hollow: has no weights"),
    "other rows": (["--resume", "{tmp}/used/checkpoints/step_1", "--run-dir", "{tmp}/n"], r"--train-files .*other row"),
    "beyond it": (["--num-steps", "1", *AHEAD], r"--num-steps 1: the checkpoint is at step 2 already; 2 or more"),
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
    "negative bound": (["--max-kl", "-1"], r"--max-kl -1.0: must not be below 0"),
    "action without a bound": (["--on-max-kl", "lower-lr"], r"--on-max-kl lower-lr: has no effect with --max-kl 0"),
    "decay without a bound": (["--kl-lr-decay", "0.5"], r"--kl-lr-decay 0.5: has no effect with --max-kl 0"),
    "decay of another action": (
        [*GUARD, "--kl-lr-decay", "0.5"], r"--kl-lr-decay 0.5: has no effect with --on-max-kl stop-epoch"
    ),
    "decay to nothing": (
        [*GUARD, "--on-max-kl", "lower-lr", "--kl-lr-decay", "1"], r"--kl-lr-decay 1.0: is a share, .*; 0.1 works"
    ),
    "decay of 0": (
        [*GUARD, "--on-max-kl", "lower-lr", "--kl-lr-decay", "0"], r"--kl-lr-decay 0.0: must be above 0; .* 0.1"
    ),
    "share above 1": (["--max-truncated-frac", "1"], r"--max-truncated-frac 1.0: is a share, and .* below 1; 0.5"),
    "one optimizer step": (["--max-kl", "0.1"], r"--max-kl 0.1: .* one optimizer step per batch.*-epochs 2 works"),
    "nowhere to go back to": (
        [*GUARD, "--on-max-kl", "roll-back", "--save-every", "0"], r"roll-back: needs .*; --save-every 50 works"
    ),
    "beyond the records": (
        ["--resume", "auto", "--run-dir", "{tmp}/same", "--replay", "{tmp}/recorded"],
        r"--replay .*recorded: step 2 was not recorded; a folder that holds it works",
    ),
    "other flags": (["--lr", "0.5", *RESUME], r"--lr 0.5: differs from .* 1e-06"),
    "reward of two scores": (["--reward", "model:{tmp}/two"], r"--reward model:/.*two: must have a scalar head"),
    "policy is a reward model": (["--model", "{tmp}/rm"], r"--model .*rm: must be a causal LM, and is .*of 1 label"),
}  # fmt: skip

TINY_AND_OTHER = ["--reward", "tiny,model:{tmp}/wide_rm:0.5"]
PPO = {
    "warm-up of all steps": (
        ["--num-steps", "3", "--critic-warmup-steps", "3"], r"--critic-warmup-steps 3: .* 3 steps; 2 works"
    ),
    "warm-up of all epochs": (
        ["--prompts-per-step", "4000", "--critic-warmup-steps", "2"], r"--critic-warmup-steps 2: .* 2 steps; 1 works"
    ),
    "two scores": (["--reward", "model:{tmp}/two"], r"--reward model:/.*two: must have a scalar head, .*of 2 label"),
    "causal LM as reward": (["--reward", "model:{tmp}/model"], r"--reward model:.*: must have a scalar head, .*LM;"),
    "no reward model": (["--reward", "model:{tmp}/none"], r"--reward model:/.*none: not a Hugging Face model folder"),
    "reward without weights": (["--reward", "model:{tmp}/hollow"], r"--reward model:/.*hollow: has no weights"),
    "reward without tokenizer": (["--reward", "model:{tmp}/bare_rm"], r"--reward model:/.*bare_rm: has no usable"),
    "reward's positions": (["--reward", "model:{tmp}/short_rm"], r"--reward model:.*: has 20 .* with 28 or more works"),
    "reward's template": (
        [*TINY_AND_OTHER, "--train-files", "{tmp}/messages.parquet"],
        r"--reward model:.*wide_rm: its tokenizer must encode .*prompt;.*--train-files: .*uid 0: .*no chat template",
    ),
    "reward's template, held-out": (
        [*TINY_AND_OTHER, "--val-files", "{tmp}/messages.parquet"],
        r"--reward model:.*wide_rm: its tokenizer must encode .*prompt;.*--val-files: .*uid 0: .*no chat template",
    ),
    "reward without an end": (["--reward", "model:{tmp}/endless_rm"], r"--reward model:.*: .*no end-of-sequence"),
    "reward without a path": (["--reward", "model:"], r"--reward 'model:': a part without a name; use .*model:"),
    "weight is a word": (["--reward", "model:{tmp}/rm:big"], r"--reward model:.*rm:big: .* finite .*/rm:1\.0 works"),
    "weight is NaN": (["--reward", "tiny,model:{tmp}/rm:nan"], r"--reward model:.*rm:nan: .* finite .*/rm:1\.0 works"),
    "held-out by two scores": ([*WITH_VAL, "--eval-reward", "model:{tmp}/two"], r"--eval-reward model:/.*two: must"),
    "held-out by unknown": ([*WITH_VAL, "--eval-reward", "gsm9k"], r"--eval-reward gsm9k: unknown reward; use one of"),
    "held-out by no file": ([*WITH_VAL, "--eval-reward", "{tmp}/no.py:f"], r"--eval-reward .*no\.py:f: there is no"),
    "held-out reward raises": (
        [*WITH_VAL, "--eval-reward", "{tmp}/rewards.py:raises"], r"--eval-reward .*on --val-files.*ZeroDivisionError"
    ),
    "held-out without rows": (["--eval-reward", "tiny"], r"--eval-reward tiny: has no effect with no --val-files"),
    "nothing to normalise": (["--normalize-scores"], r"--normalize-scores: has no effect with no model: in --reward"),
    "no scale": (["--normalize-scores", "--reward", "model:{tmp}/rm"], r"--normalize-scores: .*rm/config.json has no"),
    "scale of 0": (["--normalize-scores", "--reward", "model:{tmp}/flat"], r"--normalize-scores: .* no score_std"),
    "critic of two scores": (["--critic-model", "{tmp}/two"], r"--critic-model .*two: must be a causal LM or .*of 2"),
    "no critic": (["--critic-model", "{tmp}/none"], r"--critic-model .*none: not a Hugging Face model folder"),
    "critic's vocabulary": (["--critic-model", "{tmp}/wide"], r"--critic-model .*wide: has another vocabulary than"),
    "critic's positions": (["--critic-model", "{tmp}/short_rm"], r"--critic-model .*: has 20 .* with 28 or more works"),
    "reference's vocabulary": (["--ref-model", "{tmp}/wide"], r"--ref-model .*wide: has another vocabulary than"),
    "reference's positions": (["--ref-model", "{tmp}/short"], r"--ref-model .*: has 20 .* with 28 or more works"),
    "reward model as reference": (["--ref-model", "{tmp}/rm"], r"--ref-model .*rm: must be a causal LM, .*of 1 label"),
    "reward model as policy": (["--model", "{tmp}/rm"], r"--model .*rm: must be a causal LM, and is .*of 1 label"),
    "idle controller": (["--kl-controller", "adaptive", "--kl-coef", "0"], r"--kl-controller adaptive: has no effect"),
    "idle place": (["--kl-in", "loss", "--kl-coef", "0"], r"--kl-in loss: has no effect with --kl-coef 0"),
    "idle target": (["--kl-target", "3"], r"--kl-target 3.0: has no effect with --kl-controller fixed"),
    "idle horizon": (["--kl-horizon", "5"], r"--kl-horizon 5: has no effect with --kl-controller fixed"),
    "idle horizon too": (["--kl-horizon", "5", "--kl-controller", "adaptive"], r"--kl-horizon 5: has .* adaptive"),
    "idle estimator": (["--kl-estimator", "k3", "--kl-in", "reward"], r"--kl-estimator k3: has .* --kl-in reward"),
    "target of 0": (["--kl-controller", "adaptive", "--kl-target", "0"], r"--kl-target 0.0: must be above 0; .* 6.0"),
    "dual clip": (["--dual-clip", "0.5"], r"--dual-clip 0.5: must be above 1, or 0 for no bound; 3.0 works"),
    "gamma": (["--gamma", "1.5"], r"--gamma 1.5: must be from 0 to 1; 1.0 works"),
    "lambda": (["--gae-lambda", "-0.1"], r"--gae-lambda -0.1: must be from 0 to 1; 0.95 works"),
    "no responses": (["--group-size", "0"], r"--group-size 0: must be above 0; the default is 1"),
    "minibatch": (["--minibatch-size", "15"], r"--minibatch-size 15: must divide .* 32 responses.*; 16 works"),
    "one optimizer step": (
        ["--max-kl", "0.1", "--minibatch-size", "32"], r"--max-kl 0.1: has no effect with one .*-epochs 2 works"
    ),
    "critic's rate": (["--critic-lr", "-1"], r"--critic-lr -1.0: must not be below 0; the default is 1e-05"),
}  # fmt: skip

REWARD_MODEL = {
    "identical": (["--train-files", "{tmp}/same.parquet"], r"--train-files: `chosen` is the same as `rejected`.*uid 3"),
    "empty response": (["--train-files", "{tmp}/blank.parquet"], r"--train-files: `rejected` is empty in 1 of 5 rows"),
    "null prompt": (["--train-files", "{tmp}/null.parquet"], r"--train-files: `prompt` is null in 1 of 5 rows"),
    "NaN margin": (["--train-files", "{tmp}/nan.parquet"], r"--train-files: `margin` is not a finite number.*: nan"),
    "two kinds": (["--train-files", "{tmp}/both.parquet"], r"--train-files: `margin` .*\n--train-files: `prompt` is"),
    "held-out rows": (["--val-files", "{tmp}/same.parquet"], r"--val-files: `chosen` is the same as `rejected`"),
    "no column": (["--train-files", "{tmp}/halves.parquet"], r"--train-files .*: no column `rejected`.* rejected$"),
    "no such file": (["--train-files", "{tmp}/none.parquet"], r"--train-files .*none\.parquet: no such file.*hh-rlhf"),
    "no rows named": (["--train-files", ""], r"--train-files: must be given"),
    "long response": (
        ["--train-files", "{tmp}/long.parquet"],
        r"--max-response-len 12: 1 of 5 .* 31 tokens, uid 3.*; --max-response-len 31 works; so does --overlong drop",
    ),
    "long prompts": (
        ["--overlong", "drop", "--max-prompt-len", "1"],
        r"--max-prompt-len 1: 5 of 5 .*; --max-prompt-len 2 works; --overlong drop would leave no pair",
    ),
    "token budget": (["--max-tokens-per-gpu", "55"], r"--max-tokens-per-gpu 55: must hold 2 x .*; 56 works"),
    "positions": (["--max-response-len", "2040"], r"--max-response-len 2040: .* 2048 positions; 2032 works"),
    "no pairs": (["--pairs-per-step", "0"], r"--pairs-per-step 0: must be above 0; the default is 64"),
    "centring": (["--centring-coef", "-1"], r"--centring-coef -1.0: must not be below 0; the default is 0.0"),
    "nothing to evaluate": (["--eval-every", "5"], r"--eval-every 5: has no effect with no --val-files"),
    "no chat template": (
        ["--model", "{tmp}/plain", "--train-files", "{tmp}/message_pairs.parquet"],
        r"--train-files: `prompt` does not encode in 5 of 5 rows .*no chat template; use string prompts",
    ),
    "two scores": (["--model", "{tmp}/two"], r"--model .*two: must be a causal LM or have a scalar head, .*of 2 label"),
    "no model": (["--model", "{tmp}/none"], r"--model .*none: not a Hugging Face model folder"),
    "pad ends responses": (["--model", "{tmp}/padless"], r"--model .*padless: its pad token .* may end a response"),
    "no end of sequence": (["--model", "{tmp}/endless"], r"--model .*endless: .* no end-of-sequence token.*; set"),
    "used run folder": (["--run-dir", "{tmp}/used"], r"--run-dir .*used: holds an earlier run; use --resume auto"),
}  # fmt: skip
TABLES = {"grpo_fsdp": GRPO, "ppo_fsdp": PPO, "reward_model_bt": REWARD_MODEL}
CASES = [(script, case) for script, table in TABLES.items() for case in table]


def make_folder(tmp, name, num_labels=0, without=(), tokenizer=None, **config):
    """A copy of tmp/model whose config.json says something else: a reward model of `num_labels` scores, for one."""
    shutil.copytree(tmp / "model", tmp / name, ignore=shutil.ignore_patterns(*without))
    if num_labels:
        labels = [f"LABEL_{i}" for i in range(num_labels)]
        config |= {"architectures": ["Qwen2ForSequenceClassification"], "id2label": dict(enumerate(labels))}
        config |= {"label2id": {label: i for i, label in enumerate(labels)}}
    file = tmp / name / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    if tokenizer is not None:
        tokenizer.save_pretrained(tmp / name)


def make_tokenizer(*more, **attributes):
    tokenizer = tiny.make_tokenizer()
    tokenizer.add_tokens(list(more))
    for name, value in attributes.items():
        setattr(tokenizer, name, value)
    return tokenizer


def make_folders(tmp):
    make_folder(tmp, "hollow", num_labels=1, without=["*.safetensors"])
    make_folder(tmp, "bare", without=["token*", "chat*", "special*"])
    make_folder(tmp, "bare_rm", num_labels=1, without=["token*", "chat*", "special*"])
    make_folder(tmp, "rm", num_labels=1)
    make_folder(tmp, "two", num_labels=2)
    make_folder(tmp, "flat", num_labels=1, score_mean=1.0, score_std=0.0)
    make_folder(tmp, "short", max_position_embeddings=20)
    make_folder(tmp, "short_rm", num_labels=1, max_position_embeddings=20)
    make_folder(tmp, "wide", vocab_size=262, tokenizer=make_tokenizer("one more"))
    make_folder(tmp, "plain", without=["chat*"], tokenizer=make_tokenizer(chat_template=None))
    other = make_tokenizer("one more", chat_template=None)
    make_folder(tmp, "wide_rm", 1, without=["chat*"], vocab_size=262, tokenizer=other)
    make_folder(tmp, "endless", tokenizer=make_tokenizer(eos_token=None))
    other = make_tokenizer("one more", eos_token=None)
    make_folder(tmp, "endless_rm", num_labels=1, vocab_size=262, tokenizer=other)
    every = tiny.EOS + tiny.PAD + tiny.USER + tiny.ASSISTANT  # a template with every special token: none is to spare
    make_folder(tmp, "padless", tokenizer=make_tokenizer(pad_token=tiny.EOS, chat_template=every + tiny.CHAT_TEMPLATE))


def make_record(folder):
    folder.mkdir()
    pq.write_table(COLUMNS.empty_table().replace_schema_metadata({"temperature": "1.0"}), folder / "step_1.parquet")


def make_pairs(tmp):
    def write(name, **changes):
        rows = [{"prompt": f"{i}?", "chosen": "yes", "rejected": "no", "margin": 0.5} for i in range(5)]
        rows[3] |= changes
        pq.write_table(pa.Table.from_pylist(rows), tmp / f"{name}.parquet")
        return rows

    rows = write("pairs")
    write("same", chosen="no")
    write("blank", rejected=" ")
    write("null", prompt=None)
    write("nan", margin=math.nan)
    write("both", prompt=None, margin=math.nan)
    write("long", chosen="y" * 30)
    pq.write_table(pa.table({"prompt": ["1?"], "chosen": ["yes"]}), tmp / "halves.parquet")
    message = {"prompt": [{"role": "user", "content": "1+1="}]}
    pq.write_table(pa.Table.from_pylist([row | message for row in rows]), tmp / "message_pairs.parquet")
    truth = {"reward_model": {"ground_truth": "2"}}
    pq.write_table(pa.Table.from_pylist([message | truth for _ in range(8)]), tmp / "messages.parquet")


@pytest.fixture(scope="module")
def tmp(tmp_path_factory):
    tmp = tmp_path_factory.mktemp("bad")
    tiny.make_model(tmp / "model", seed=1, num_sft_steps=0)
    tiny.make_data(tmp / "data")
    make_folders(tmp)
    make_pairs(tmp)
    make_record(tmp / "recorded")
    (tmp / "rewards.py").write_text(REWARDS)
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), tmp / "empty.parquet")
    pq.write_table(pa.table({"question": ["1+1="]}), tmp / "column.parquet")
    pq.write_table(pa.table({"prompt": [1, 2]}), tmp / "numbers.parquet")
    pq.write_table(pa.table({"prompt": ["1+1="]}), tmp / "truth.parquet")
    fingerprint = PromptData(str(tmp / "data/train.parquet")).fingerprint()
    for name, step, data in (("used", 1, "0"), ("same", 1, fingerprint), ("ahead", 2, fingerprint)):
        (tmp / name / "checkpoints/step_1").mkdir(parents=True)
        (tmp / name / "metrics.jsonl").write_text('{"step": 1}\n')
        state = {"step": step, "args": {"lr": 1e-6, "seed": 1}, "data": {"train-files": data}, "files": {}}
        state["parts"] = ["policy"]
        (tmp / name / "checkpoints/step_1/state.json").write_text(json.dumps(state))
    return tmp


def base(tmp, script="grpo_fsdp"):
    """Flags of a run that works."""
    flags = ["--model", f"{tmp}/model", "--run-dir", f"{tmp}/run", "--max-prompt-len", "16", "--max-response-len", "12"]
    if script == "reward_model_bt":
        return [*flags, "--train-files", f"{tmp}/pairs.parquet", "--pairs-per-step", "2"]
    flags += ["--train-files", f"{tmp}/data/train.parquet", "--reward", "tiny", "--prompts-per-step", "8"]
    flags += ["--group-size", "4", "--reward-timeout-s", "1", "--kv-cache-gib", "0.125"]
    return flags + (["--minibatch-size", "16"] if script == "ppo_fsdp" else [])


@pytest.fixture(scope="module")
def endings(tmp):
    """Of a script: how each of its cases ended. The last is the run that works, stopped where a model loads."""

    @cache
    def of(script):
        flags = [*(flags for flags, _ in TABLES[script].values()), []]
        lists = [[*base(tmp, script), *(flag.format(tmp=tmp) for flag in case)] for case in flags]
        (tmp / "lists.json").write_text(json.dumps(lists))
        result = run([sys.executable, ROOT / "tests/workers/bad_inputs.py", script, tmp / "lists.json"])
        assert result.returncode == 0, result.stderr[-4000:]
        return dict(zip([*TABLES[script], None], json.loads(result.stdout.splitlines()[-1]), strict=True))

    return of


@pytest.mark.parametrize(("script", "case"), CASES)
def test_one_clear_line(endings, script, case):
    ending, pattern = endings(script)[case], TABLES[script][case][1]
    assert isinstance(ending, str) and ending.startswith("error: --"), ending
    assert re.search(pattern, ending), ending
    lines = ending.removeprefix("error: ").split("\n")  # one for each kind of fault in preference rows
    assert len(lines) == 1 + pattern.count(r"\n"), ending
    assert all(line.startswith("--") and "; " in line for line in lines), "the rule, and what works"


@pytest.mark.parametrize(("script", "case"), [
    ("grpo_fsdp", "minibatch"), ("grpo_fsdp", "tensor parallel"), ("ppo_fsdp", "minibatch"),
])  # fmt: skip
def test_fault_37_a_size_that_does_not_divide_is_refused(endings, script, case):
    """Over the ranks: see `test_two_ranks_stop_together_on_what_one_of_them_finds`."""
    test_one_clear_line(endings, script, case)


def test_fault_37_a_size_that_is_named_as_working_divides():
    def named(check, *args):
        with pytest.raises(ValueError, match=r"works$") as caught:
            check(*args)
        return [int(n) for n in re.findall(r"(\d+) (?:or|works)", str(caught.value))]

    for prompts, ranks, sizes in ((3, 2, [2, 4]), (1, 8, [8]), (65, 8, [64, 72])):
        assert named(check_divides, {"prompts_per_step": prompts}, "prompts_per_step", ranks) == sizes
        for size in sizes:
            check_divides({"prompts_per_step": size}, "prompts_per_step", ranks)
    flags = {"prompts_per_step": 6, "group_size": 4, "minibatch_size": 9}  # in responses, whatever the ranks
    assert named(check_minibatch, flags) == [8]
    check_minibatch(flags | {"minibatch_size": 8})


@pytest.mark.parametrize("script", [grpo_fsdp, ppo_fsdp])
@pytest.mark.parametrize("flag", ["--top-p", "--top-k", "--min-p"])
def test_fault_16_there_is_no_flag_that_cuts_the_sampling(script, flag, capsys):
    with pytest.raises(SystemExit) as ending:
        tyro.cli(script.Args, args=[flag, "0.9"])
    assert ending.value.code == 2 and flag in capsys.readouterr().err


@pytest.mark.parametrize("script", TABLES)
def test_without_a_mistake_the_model_loads(endings, script):
    assert endings(script)[None] == "a model loads"


def test_a_resume_that_is_refused_leaves_the_run_as_it_was(endings, tmp):
    assert "was not recorded" in endings("grpo_fsdp")["beyond the records"]
    assert {path.name for path in (tmp / "same").iterdir()} == {"checkpoints", "metrics.jsonl"}


def test_the_script_prints_that_line_and_exits_with_1(tmp):
    result = run([sys.executable, ROOT / "grpo_fsdp.py", *base(tmp), "--group-size", "1"])
    assert result.returncode == 1 and "Traceback" not in result.stderr
    assert [line for line in result.stderr.splitlines() if line.startswith("error:")] == [
        "error: --group-size 1: must be 2 or more, one response has no group to compare with; 8 works"
    ]


def test_a_model_that_vllm_runs_through_transformers_own_classes_is_refused(tmp):
    """vLLM changes those classes, in this process, and the trainer would not load."""
    shutil.copytree(tmp / "model", tmp / "backend", ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "vocab_size": 261}
    config = Starcoder2Config(num_attention_heads=2, num_key_value_heads=2, eos_token_id=0, bos_token_id=None, **sizes)
    Starcoder2ForCausalLM(config).save_pretrained(tmp / "backend")
    if torch.cuda.is_available():
        pytest.skip("which models these are depends on vLLM's version; this is one for that of the CPU")
    result = run([sys.executable, "grpo_fsdp.py", *base(tmp), "--model", tmp / "backend"], OMP_NUM_THREADS="1")
    assert result.returncode == 1
    assert re.fullmatch(r"error: --model .*: vLLM has no code of its own for it.*", result.stderr.splitlines()[-1])


def test_two_ranks_stop_together_on_what_one_of_them_finds(tmp):
    """Only the second rank's share holds the long prompt; three prompts do not divide by two ranks."""
    rows = pq.read_table(tmp / "data/train.parquet").to_pylist()[:20]
    rows[19]["prompt"] = "1" * 40 + "="
    pq.write_table(pa.Table.from_pylist(rows), tmp / "one_long.parquet")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2]
    for script, flags, message in (
        ("grpo_fsdp", ["--train-files", tmp / "one_long.parquet"], r"--max-prompt-len 16: 1 of 20 .* 41 tokens"),
        ("grpo_fsdp", ["--prompts-per-step", 3], r"--prompts-per-step 3: must divide by the 2 ranks; 2 or 4 works"),
        ("reward_model_bt", ["--pairs-per-step", 3], r"--pairs-per-step 3: must divide by the 2 ranks; 2 or 4 works"),
    ):
        command = [*launcher, ROOT / f"{script}.py", *base(tmp, script), *flags]
        result = run(command, timeout=120, OMP_NUM_THREADS="1")
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
