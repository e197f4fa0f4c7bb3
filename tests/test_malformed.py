"""Malformed files (parquet, prompts, models, rewards, run folders): one clear line each, before a model loads.

What is wrong with flags alone stands in tests/test_bad_input.py, whose tables these cases continue.
"""

import json
import os
import re
import shutil
import sys
from functools import cache

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import ROOT, run
from safetensors.torch import load_file, save_file
from test_bad_input import base, make_pairs

from utils import tiny

# a file's name in make_parquet -> what the one line must say
PARQUET = {
    "half": "cannot be read as parquet",
    "no_bytes": "cannot be read as parquet",
    "json": "cannot be read as parquet",
    "damaged": "row group 0 cannot be read .*, the file is damaged; make it anew",
    "folder": "is a folder",
    "pipe": "is not a file",
    "twice": "is named more than once",
    "linked": "is named more than once",
    "no_rows": "has 0 rows",
    "no_columns": "no column `prompt`",
    "two_prompts": "column `prompt` is there 2 times",
    "binary": "column `prompt` is binary",
    "nulls": "column `prompt` is null",
    "list_of_text": "column `prompt` is list",
    "list_of_null": "column `prompt` is list",
    "content_is_int": "column `prompt` is list",
    "content_is_list": "column `prompt` is list",
    "no_role": "column `prompt` is list",
    "truth_is_text": "column `reward_model` is string",
    "null_prompt": "row with uid 1 has no prompt",
    "null_message": "row with uid 1: prompt: `role` of a message must be a string, not None",
    "null_content": "row with uid 1: prompt: `content` of a message must be a string, not None",
    "no_messages": "row with uid 1: prompt: is empty",
    "no_text": "row with uid 1: prompt: is empty",
    "not_utf8": "row with uid 1 cannot be read .*utf-8",
    "surrogate": "row with uid 1 cannot be read .*utf-8",
    "surrogate_message": "row with uid 1 cannot be read .*utf-8",
    "nanoseconds": "row with uid 1 cannot be read .*anosecond",
    "year_12000": "row with uid 1 cannot be read",
    "megabyte": "1 of 3 prompts are longer .* 1000000 tokens, uid 1",
}
# what looks wrong and is not
FINE = ("control", "emoji", "own_uids", "dictionary", "more_columns")


def make_parquet(tmp):
    def write(name, prompts=None, kind=None, **columns):
        prompts = ["1+1=", "1+2=", "1+3="] if prompts is None else prompts
        truth = pa.array([{"style": "rule", "ground_truth": str(i + 2)} for i in range(len(prompts))])
        table = {"prompt": pa.array(prompts, kind), "reward_model": truth, **columns}
        pq.write_table(pa.table(table), tmp / f"{name}.parquet")
        return tmp / f"{name}.parquet"

    def raw(*texts: bytes):
        """Strings of any bytes, as a writer that checks nothing leaves them."""
        return pa.array(texts, pa.binary()).view(pa.string())

    whole = write("fine").read_bytes()
    (tmp / "half.parquet").write_bytes(whole[: len(whole) // 2])
    (tmp / "no_bytes.parquet").touch()
    (tmp / "json.parquet").write_text('{"prompt": "1+1="}\n')
    (tmp / "damaged.parquet").write_bytes(whole[:4] + bytes(200) + whole[204:])
    (tmp / "folder.parquet").mkdir()
    os.mkfifo(tmp / "pipe.parquet")
    (tmp / "linked_to.parquet").symlink_to(tmp / "fine.parquet")
    write("no_rows", [], pa.string(), reward_model=pa.array([], pa.struct([("ground_truth", pa.string())])))
    pq.write_table(pa.table({}), tmp / "no_columns.parquet")
    both = pa.Table.from_arrays([pa.array(["1+1="]), pa.array(["1+2="])], names=["prompt", "prompt"])
    pq.write_table(both, tmp / "two_prompts.parquet")
    write("binary", [b"1+1="] * 3)
    write("nulls", [None] * 3)
    write("list_of_text", [["user", "1+1="]] * 3)
    write("list_of_null", [[None]] * 3)
    write("content_is_int", [[{"role": "user", "content": 2}]] * 3)
    write("content_is_list", [[{"role": "user", "content": ["1+1="]}]] * 3)
    write("no_role", [[{"content": "1+1="}]] * 3)
    write("truth_is_text", reward_model=pa.array(["2", "3", "4"]))
    message = [{"role": "user", "content": "1+1="}]
    write("null_prompt", ["1+1=", None, "1+3="])
    write("null_message", [message, [None], message])
    write("null_content", [message, [{"role": "user", "content": None}], message])
    write("no_messages", [message, [], message])
    write("no_text", ["1+1=", "", "1+3="])
    write("not_utf8", prompt=raw(b"1+1=", b"\xff\xfe1=", b"1+3="))
    write("surrogate", prompt=raw(b"1+1=", "\ud800=".encode("utf-8", "surrogatepass"), b"1+3="))
    bad = raw(b"1+1=", "\udfff=".encode("utf-8", "surrogatepass"), b"1+3=")
    turns = pa.StructArray.from_arrays([pa.array(["user"] * 3), bad], ["role", "content"])
    write("surrogate_message", prompt=pa.ListArray.from_arrays([0, 1, 2, 3], turns))
    write("nanoseconds", when=pa.array([0, 1, 2], pa.timestamp("ns")))
    write("year_12000", when=pa.array([0, 4_000_000, 0], pa.date32()))
    write("megabyte", ["1+1=", "1" * 1_000_000, "1+3="])
    write("control", ["\x00\x01\x1b[31m", "\r\n\t", "\x7f\x85"])
    write("emoji", ["\U0001f600", "\ufffd\ufeff", "\u202e"])
    write("own_uids", uid=pa.array([7, 7, 7]))
    write("dictionary", prompt=pa.array(["1+1=", "1+2=", "1+1="]).dictionary_encode())
    write("more_columns", prompt_ids=pa.array([[1], None, []]), extra_info=pa.array([{"a": [None]}, None, {"a": []}]))


PAIRS = {
    "margin_text": "`margin` is not a finite number in 5 of 5",
    "margin_null": "`margin` is not a finite number in 1 of 5",
    "pair_surrogate": "row with uid 3 cannot be read .*utf-8",
    "answer_of_user": "`chosen` is not one assistant message in 5 of 5",
    "answer_of_null": "`chosen` is not one assistant message in 1 of 5",
    "no_answer": "`chosen` is not one assistant message in 5 of 5",
    "null_answer": "`chosen` is empty in 1 of 5",
    "null_turn": "`chosen` is not one assistant message in 1 of 5",
    "answer_empty": "`chosen` is not one assistant message in 1 of 5",
    "null_chosen": "`chosen` is null in 1 of 5",
    "on_and_on": "`chosen` goes on after an end of sequence in 1 of 5",
    "numbers_chosen": "column `chosen` is int64",
}


def make_pair_files(tmp):
    def write(name, one=None, **every):
        rows = [{"prompt": f"{i}?", "chosen": "yes", "rejected": "no"} | every for i in range(5)]
        rows[3] |= one or {}
        pq.write_table(pa.Table.from_pylist(rows), tmp / f"{name}.parquet")

    write("margin_text", margin="much")
    write("margin_null", {"margin": None}, margin=0.5)
    bad = pa.array([b"yes", b"yes", b"yes", b"\xed\xa0\x80", b"yes"], pa.binary()).view(pa.string())
    table = pa.table({"prompt": ["1?"] * 5, "chosen": bad, "rejected": ["no"] * 5})
    pq.write_table(table, tmp / "pair_surrogate.parquet")
    write("answer_of_user", chosen=[{"role": "user", "content": "yes"}])
    answer = {"role": "assistant", "content": "yes"}
    write("answer_of_null", {"chosen": [answer | {"role": None}]}, chosen=[answer])
    write("no_answer", chosen=[{"role": "user", "content": "yes"}, {"role": "assistant", "content": "yes"}])
    write("null_answer", {"chosen": [answer | {"content": None}]}, chosen=[answer])
    write("null_turn", {"chosen": [None]}, chosen=[answer])
    write("answer_empty", {"chosen": []}, chosen=[answer])
    write("null_chosen", {"chosen": None})
    write("on_and_on", {"chosen": f"yes{tiny.EOS}no"})
    write("numbers_chosen", chosen=1)


# what is done to a model's folder -> what the one line must say
MODELS = {
    "config_half": "not a Hugging Face model folder",
    "config_list": "not a Hugging Face model folder",
    "config_no_kind": "not a Hugging Face model folder",
    "config_unknown_kind": "not a Hugging Face model folder",
    "config_text_size": "not a Hugging Face model folder",
    "config_binary": "not a Hugging Face model folder",
    "tokenizer_half": "has no usable tokenizer",
    "tokenizer_empty": "has no usable tokenizer",
    "tokenizer_config_half": "has no usable tokenizer",
    "tokenizer_config_list": "has no usable tokenizer",
    "generation_half": "generation_config.json",
    "eos_text": "eos_token_id",
    "eos_beyond": "eos_token_id",
    "eos_none_left": "eos_token_id",
    "fewer_rows": "vocab_size 100, and its tokenizer has 159 tokens beyond",
    "shard_missing": "model-00002-of-00002.safetensors is missing",
    "shard_half": "model-00001-of-00002.safetensors",
    "index_half": "model.safetensors.index.json",
    "index_list": "model.safetensors.index.json",
    "weights_half": "model.safetensors",
    "weights_empty": "model.safetensors",
    "weights_pointer": "model.safetensors",
    "weights_folder": "model.safetensors",
    "template_syntax": "chat template",
    "template_type": "chat template",
    "template_none": "chat template",
}


def make_models(tmp):
    def copy(name):
        shutil.copytree(tmp / "model", tmp / name)
        return tmp / name

    def half(name, file):
        path = copy(name) / file
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])

    def write(name, file, content):
        (copy(name) / file).write_text(content if isinstance(content, str) else json.dumps(content))

    half("config_half", "config.json")
    write("config_list", "config.json", [])
    write("config_no_kind", "config.json", {"hidden_size": 128})
    write("config_unknown_kind", "config.json", {"model_type": "qwen99"})
    config = json.loads((tmp / "model/config.json").read_text())
    write("config_text_size", "config.json", config | {"hidden_size": "big"})
    (copy("config_binary") / "config.json").write_bytes(b"\xff\xfe{}")
    half("tokenizer_half", "tokenizer.json")
    write("tokenizer_empty", "tokenizer.json", {})
    half("tokenizer_config_half", "tokenizer_config.json")
    write("tokenizer_config_list", "tokenizer_config.json", [])
    half("generation_half", "generation_config.json")
    write("eos_text", "generation_config.json", {"eos_token_id": "</s>"})
    write("eos_beyond", "generation_config.json", {"eos_token_id": [1, 5000]})
    write("eos_none_left", "generation_config.json", {"eos_token_id": []})
    write("fewer_rows", "config.json", config | {"vocab_size": 100})
    tensors = load_file(tmp / "model/model.safetensors")
    names = sorted(tensors)
    parts = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    index = {"metadata": {}, "weight_map": {name: file for file, share in parts.items() for name in share}}
    for name in ("shards", "shard_missing", "shard_half", "index_half", "index_list"):
        folder = copy(name)
        (folder / "model.safetensors").unlink()
        for file, share in parts.items():
            save_file({key: tensors[key] for key in share}, folder / file, {"format": "pt"})
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp / "shard_missing/model-00002-of-00002.safetensors").unlink()
    part = tmp / "shard_half/model-00001-of-00002.safetensors"
    part.write_bytes(part.read_bytes()[: part.stat().st_size // 2])
    (tmp / "index_half/model.safetensors.index.json").write_text(json.dumps(index)[:100])
    (tmp / "index_list/model.safetensors.index.json").write_text("[]")
    half("weights_half", "model.safetensors")
    write("weights_empty", "model.safetensors", "")
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:" + "0" * 64 + "\nsize 2000000\n"
    write("weights_pointer", "model.safetensors", pointer)
    folder = copy("weights_folder")
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").mkdir()
    write("template_syntax", "chat_template.jinja", "{% for m in messages %}{{ m.content }")
    write("template_type", "chat_template.jinja", "{{ messages[0].content + 1 }}")
    write("template_none", "chat_template.jinja", "")


REWARD_FILES = {
    "syntax": ("def f(response, row:\n    return 1\n", r"does not load: .*SyntaxError"),
    "imports": ("import no_such_module\ndef f(response, row): return 1.0\n", r"ModuleNotFoundError"),
    "exits": ("import sys\nsys.exit('no')\n", r"does not load: SystemExit"),
    "value": ("f = 3\n", r"has something that cannot be called under the name f"),
    "other_name": ("def g(response, row): return 1.0\n", r"has no function f; it has g"),
    "one_argument": ("def f(response): return 1.0\n", r"TypeError: f\(\) takes 1 positional argument"),
    "keywords": ("def f(*, response, row): return 1.0\n", r"TypeError: f\(\) takes 0 positional"),
    "text": ("def f(response, row): return '1.0'\n", r"returned str, not a number"),
    "infinite": ("def f(response, row): return float('inf')\n", r"returned inf"),
    "complex": ("def f(response, row): return 1j\n", r"returned complex, not a number"),
    "awaited": ("async def f(response, row): return 1.0\n", r"returned coroutine, not a number"),
    "yields": ("def f(response, row):\n    yield 1.0\n", r"returned generator, not a number"),
    "list": ("def f(response, row): return [1.0]\n", r"returned list, not a number"),
    "two": ("import numpy\ndef f(response, row): return numpy.ones(2)\n", r"returned ndarray, not a number"),
    "odd": (
        "class Odd:\n    def __float__(self): raise RuntimeError('no')\ndef f(response, row): return Odd()\n",
        r"returned Odd, not a number",
    ),
    "deep": ("def f(response, row): return f(response, row)\n", r"RecursionError"),
    "interrupts": ("def f(response, row): raise KeyboardInterrupt\n", r"KeyboardInterrupt"),
    "latin": ("x = '\xe9'\ndef f(response, row): return 1.0\n".encode("latin-1"), r"does not load: .*SyntaxError"),
    "nul": (b"x = 1\0\n", r"does not load: SyntaxError"),
    "no_bytes": ("", r"has no function f; it has none"),
}


def make_rewards(tmp):
    for name, (text, _) in REWARD_FILES.items():
        (tmp / f"{name}.py").write_bytes(text if isinstance(text, bytes) else text.encode())
    (tmp / "folder.py").mkdir()


# of a run folder, a checkpoint, a record: flags -> the line
FOLDERS = {
    "run-dir is a file": (["--run-dir", "{tmp}/syntax.py"], r"--run-dir .*cannot be written"),
    "run-dir under a file": (["--run-dir", "{tmp}/syntax.py/run"], r"--run-dir .*cannot be written"),
    "state is half": (["--resume", "{tmp}/state_half/checkpoints/step_1"], r"--resume: .*damaged, its state.json"),
    "state is a list": (["--resume", "{tmp}/state_list/checkpoints/step_1"], r"--resume: .*damaged, its state.json"),
    "state lacks": (["--resume", "{tmp}/state_lacks/checkpoints/step_1"], r"--resume: .*damaged, its state.json"),
    "state lists a number": (["--resume", "{tmp}/state_files/checkpoints/step_1"], r"--resume: .*damaged, its state"),
    "record is a file": (["--record", "{tmp}/syntax.py"], r"--record .*: cannot be written"),
    "replay of nothing": (["--replay", "{tmp}/none"], r"--replay .*: must hold step_N.parquet"),
    "replay is a file": (["--replay", "{tmp}/syntax.py"], r"--replay .*: must hold step_N.parquet"),
    "replay is half": (["--replay", "{tmp}/replay_half"], r"--replay .*step_1.parquet: cannot be read as parquet"),
    "replay of prompts": (["--replay", "{tmp}/replay_prompts"], r"--replay .*step_1.parquet: has other columns"),
    "reward is a folder": (["--reward", "{tmp}/folder.py:f"], r"--reward .*there is no file"),
    "tensor parallel 0": (["--tensor-parallel-size", "0"], r"--tensor-parallel-size 0: must divide"),
    "tensor parallel -1": (["--tensor-parallel-size", "-1"], r"--tensor-parallel-size -1: must divide"),
    "rate is NaN": (["--lr", "nan"], r"--lr nan"),
    "beta is infinite": (["--kl-coef", "inf"], r"--kl-coef inf"),
}


def make_run_folders(tmp):
    for name, state in (
        ("half", '{"step": 1, "fil'), ("list", "[]"), ("lacks", '{"files": {}}'),
        ("files", '{"step": 1, "args": {}, "data": {}, "parts": ["policy"], "files": {"a": 3}}'),
    ):  # fmt: skip
        folder = tmp / f"state_{name}/checkpoints/step_1"
        folder.mkdir(parents=True)
        (folder / "state.json").write_text(state)
    for name, of in (("replay_half", "half"), ("replay_prompts", "fine")):
        (tmp / name).mkdir()
        shutil.copyfile(tmp / f"{of}.parquet", tmp / f"{name}/step_1.parquet")
    (tmp / "odd_record").mkdir()
    (tmp / "odd_record/step_one.parquet").touch()


def cases():
    """name -> (script, flags, what the line says)."""
    table = {}
    for name, pattern in PARQUET.items():
        files = f"{{tmp}}/{name}.parquet"
        files = {
            "twice": "{tmp}/fine.parquet,{tmp}/fine.parquet",
            "linked": "{tmp}/fine.parquet,{tmp}/linked_to.parquet",
        }.get(name, files)
        flag = r"--max-prompt-len 16: " if name == "megabyte" else "--train-files"
        table[f"parquet {name}"] = "grpo_fsdp", ["--train-files", files], f"^error: {flag}.*{pattern}"
    for name, pattern in PAIRS.items():
        table[f"pairs {name}"] = (
            "reward_model_bt",
            ["--train-files", f"{{tmp}}/{name}.parquet"],
            f"--train-files.*{pattern}",
        )
    for name, pattern in MODELS.items():
        flags = ["--model", f"{{tmp}}/{name}"]
        if name.startswith("template"):
            flags += ["--train-files", "{tmp}/messages.parquet"]
        table[f"model {name}"] = "grpo_fsdp", flags, f"--.*{pattern}"
    for name, (_, pattern) in REWARD_FILES.items():
        table[f"reward {name}"] = (
            "grpo_fsdp",
            ["--reward", f"{{tmp}}/{name}.py:f"],
            f"--reward .*{name}.py:f: .*{pattern}",
        )
    for name, (flags, pattern) in FOLDERS.items():
        table[name] = "grpo_fsdp", flags, pattern
    for name in FINE:
        table[f"fine {name}"] = (
            "grpo_fsdp",
            ["--train-files", f"{{tmp}}/{name}.parquet", "--max-prompt-len", "64"],
            None,
        )
    for name, flags in (
        ("shards", ["--model", "{tmp}/shards"]),
        ("seed below 0", ["--seed", "-1"]),
        ("other names in the record", ["--record", "{tmp}/odd_record"]),
    ):
        table[f"fine {name}"] = "grpo_fsdp", flags, None
    return table


CASES = cases()


@pytest.fixture(scope="module")
def tmp(tmp_path_factory):
    tmp = tmp_path_factory.mktemp("malformed")
    tiny.make_model(tmp / "model", seed=1, num_sft_steps=0)
    tiny.make_data(tmp / "data")
    make_pairs(tmp)
    make_parquet(tmp)
    make_pair_files(tmp)
    make_models(tmp)
    make_rewards(tmp)
    make_run_folders(tmp)
    return tmp


@pytest.fixture(scope="module")
def endings(tmp):
    @cache
    def of(script):
        mine = {name: flags for name, (of, flags, _) in CASES.items() if of == script}
        lists = [[*base(tmp, script), *(flag.format(tmp=tmp) for flag in flags)] for flags in mine.values()]
        for k, argv in enumerate(lists):
            argv += [] if "--run-dir" in mine[list(mine)[k]] else ["--run-dir", f"{tmp}/run_{script}_{k}"]
        (tmp / f"{script}.json").write_text(json.dumps(lists))
        result = run(
            [sys.executable, ROOT / "tests/workers/bad_inputs.py", script, tmp / f"{script}.json"], timeout=900
        )
        assert result.returncode == 0, result.stderr[-4000:]
        return dict(zip(mine, json.loads(result.stdout.splitlines()[-1]), strict=True))

    return of


@pytest.mark.parametrize("case", CASES)
def test_one_clear_line(endings, case):
    script, _, pattern = CASES[case]
    ending = endings(script)[case]
    if pattern is None:
        assert ending == "a model loads"
        return
    assert isinstance(ending, str) and ending.startswith("error: --"), ending
    assert re.search(pattern, ending), ending
    assert "\n" not in ending and "; " in ending, "one line, with the rule and what works"
