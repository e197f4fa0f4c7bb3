"""Prompt files, order and encoding, on parquet files written here and a byte-level tokenizer made here."""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from utils import data as data_module
from utils import make_data
from utils.data import PromptData, epoch_order, step_uids
from utils.make_data import gsm8k_row
from utils.prompts import encode_prompt, find_overlong, overlong_error

ROOT = Path(__file__).parents[1]
GSM8K = Path(__file__).parents[2] / "shared/data/gsm8k"
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "{% if m.name is defined %}({{ m.name }}){% endif %}{{ m.role }}:{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def make_tokenizer(chat_template: str | None = TEMPLATE, adds_bos: bool = False) -> PreTrainedTokenizerFast:
    """One token per byte (UTF-8) and <s>, which strings get in front only with `adds_bos`."""
    vocab = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))} | {"<s>": 256}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    if adds_bos:
        backend.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 256)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", chat_template=chat_template)


def write(path: Path, rows: list[dict], row_group_size: int | None = None) -> str:
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=row_group_size)
    return str(path)


def rows_of(start: int, stop: int) -> list[dict]:
    return [gsm8k_row(f"What is {i} + {i}?", f"It is so.\n#### {2 * i:,}", "train", i) for i in range(start, stop)]


def indices(data: PromptData) -> list[int]:
    return [data.row(uid)["extra_info"]["index"] for uid in range(len(data))]


# ---- rows ----


def test_uids_do_not_depend_on_how_files_are_named(tmp_path, monkeypatch):
    b, a = write(tmp_path / "b.parquet", rows_of(5, 12), 3), write(tmp_path / "a.parquet", rows_of(0, 5), 2)
    monkeypatch.chdir(tmp_path)
    ways = (
        [a, b],
        [b, a],
        f"{b},{a}",
        f"{b}, {a}",
        f"{tmp_path}/*.parquet",
        ["b.parquet", a],
        ["a.parquet", b],
        "?.parquet",
    )
    for files in ways:
        assert indices(PromptData(files)) == list(range(12)), files
    assert len({PromptData(files).fingerprint() for files in ways}) == 1
    assert indices(PromptData(b)) == list(range(5, 12))
    # a name with a comma, or with the letters of a glob, is a file where there is such a file
    assert len(PromptData(write(tmp_path / "odd,[1].parquet", rows_of(0, 2)))) == 2


def test_fingerprint_tells_files_apart(tmp_path):
    for name in ("w", "x", "y", "z"):
        (tmp_path / name).mkdir()
    same, moved = write(tmp_path / "x/a.parquet", rows_of(0, 4)), write(tmp_path / "y/a.parquet", rows_of(0, 4))
    more = write(tmp_path / "z/a.parquet", rows_of(0, 5))
    other = write(tmp_path / "z/b.parquet", rows_of(0, 4))
    column = write(tmp_path / "w/a.parquet", [row | {"extra": 1} for row in rows_of(0, 4)])
    assert PromptData(same).fingerprint() == PromptData(moved).fingerprint()
    assert len({PromptData(path).fingerprint() for path in (same, more, other, column)}) == 4


def test_rows_are_read_on_demand_and_few_are_kept(tmp_path, monkeypatch):
    data = PromptData(write(tmp_path / "a.parquet", rows_of(0, 40), 4))
    assert not data._cache
    order = np.random.default_rng(0).permutation(40).tolist() * 2
    monkeypatch.setattr(data_module, "CACHE_BYTES", 2500)
    for uid in order:
        assert data.row(uid)["extra_info"]["index"] == uid
        kept = sum(table.nbytes for table in data._cache.values())
        assert len(data._cache) == 1 or kept <= 2500
    assert len(data._cache) > 1
    uid = order[-1]
    Path(data.files[0]).unlink()
    assert data.row(uid)["extra_info"]["index"] == uid  # from the cache
    with pytest.raises(ValueError, match=r"--train-files .*a.parquet: row group \d cannot be read"):
        for other in range(40):
            data.row(other)


def test_files_as_verl_writes_them_run_unchanged(tmp_path):
    schema = pa.schema(
        [
            ("data_source", pa.string()),
            ("prompt", pa.list_(pa.struct([("content", pa.string()), ("role", pa.string())]))),
            ("ability", pa.string()),
            ("reward_model", pa.struct([("ground_truth", pa.string()), ("style", pa.string())])),
            (
                "extra_info",
                pa.struct(
                    [(k, pa.int64() if k == "index" else pa.string()) for k in ("answer", "index", "question", "split")]
                ),
            ),
            ("__index_level_0__", pa.int64()),
        ]
    ).with_metadata({"huggingface": "{}", "pandas": "{}"})
    rows = [row | {"__index_level_0__": i} for i, row in enumerate(rows_of(0, 6))]
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), tmp_path / "train.parquet")
    data = PromptData(str(tmp_path / "train.parquet"))
    assert [data.row(uid) for uid in range(6)] == rows
    large = pa.schema(
        [("prompt", pa.large_list(pa.struct([("role", pa.large_string()), ("content", pa.large_string())])))]
    )
    pq.write_table(pa.Table.from_pylist([{"prompt": rows[0]["prompt"]}], schema=large), tmp_path / "large.parquet")
    assert PromptData(str(tmp_path / "large.parquet")).row(0) == {"prompt": rows[0]["prompt"]}  # no column is invented
    pq.write_table(pa.table({"prompt": pa.array(["a", "b"]).dictionary_encode()}), tmp_path / "raw.parquet")
    assert PromptData(str(tmp_path / "raw.parquet")).row(1) == {"prompt": "b"}


BAD_COLUMNS = {
    "no_prompt": ({"question": ["x"]}, "no column `prompt`; its columns are question"),
    "number": ({"prompt": [1]}, "column `prompt` is int64; it must be a string or a list of {role: string, content"),
    "strings": ({"prompt": [["a"]]}, "column `prompt` is list"),
    "no_role": ({"prompt": [[{"content": "a"}]]}, "column `prompt` is list"),
    "parts": ({"prompt": [[{"role": "user", "content": [{"text": "a"}]}]]}, "column `prompt` is list"),
    "flat_reward": ({"prompt": ["x"], "reward_model": ["18"]}, "column `reward_model` is string; it must be a struct"),
}


@pytest.mark.parametrize("name", BAD_COLUMNS)
def test_wrong_columns(tmp_path, name):
    columns, message = BAD_COLUMNS[name]
    good = write(tmp_path / "a.parquet", rows_of(0, 2))
    pq.write_table(pa.table(columns), tmp_path / "b.parquet")
    with pytest.raises(ValueError, match=rf"^--val-files .*b\.parquet: {message}"):
        PromptData([good, str(tmp_path / "b.parquet")], "--val-files")


def test_wrong_files(tmp_path):
    good = write(tmp_path / "good.parquet", rows_of(0, 2))
    pq.write_table(pa.Table.from_pylist(rows_of(0, 2)).slice(0, 0), tmp_path / "empty.parquet")
    (tmp_path / "zero.parquet").touch()
    (tmp_path / "text.parquet").write_text('{"question": "x"}\n' * 20)
    (tmp_path / "cut.parquet").write_bytes(Path(good).read_bytes()[:-40])
    for files, message in (
        (f"{tmp_path}/nope.parquet", "nope.parquet: no such file"),
        (f"{tmp_path}/nope*.parquet", "no file matches"),
        (f"{good},", "'': no such file"),
        ("", "'': no such file"),
        ([], "names no file"),
        (str(tmp_path), "is a folder"),
        ([good, f"{tmp_path}/good*"], "named more than once"),
        (f"{tmp_path}/empty.parquet", "has 0 rows"),
        (f"{tmp_path}/zero.parquet", "cannot be read as parquet"),
        (f"{tmp_path}/text.parquet", "cannot be read as parquet"),
        (f"{tmp_path}/cut.parquet", "cannot be read as parquet"),
    ):
        with pytest.raises(ValueError, match=message) as caught:
            PromptData(files, "--val-files")
        assert str(caught.value).startswith("--val-files") and "\n" not in str(caught.value)


def test_null_prompt_is_an_error(tmp_path):
    data = PromptData(write(tmp_path / "a.parquet", [{"prompt": "x"}, {"prompt": None}], 1))
    assert data.row(0) == data.row(2) == {"prompt": "x"}  # the same row in the next epoch
    for uid in (1, 3):
        with pytest.raises(ValueError, match=r"--train-files .*a\.parquet: row with uid 1 has no prompt"):
            data.row(uid)
    assert data.raw_row(3) == {"prompt": None} and data.file_of(3) == data.files[0]


# ---- order ----


@pytest.mark.parametrize(("n", "per_step"), [(10, 4), (12, 4), (7, 7), (5, 12), (1, 3)])
def test_fault_44_every_uid_once_per_epoch(n, per_step):
    stream = [uid for step in range(1, 3 * n + 1) for uid in step_uids(n, 5, step, per_step)]
    assert len(set(stream)) == len(stream)  # a row that comes again has another uid, so other samples
    for start in range(0, len(stream) - n + 1, n):
        epoch = [uid - start for uid in stream[start : start + n]]  # uid = row + n * epoch
        assert sorted(epoch) == list(range(n))
        assert epoch == epoch_order(n, 5, start // n).tolist()


def test_fault_44_order_depends_on_seed_and_epoch_and_step_alone():
    want = {step: step_uids(100, 3, step, 16) for step in range(1, 20)}
    epoch_order.cache_clear()
    assert step_uids(100, 3, 19, 16) == want[19]  # without the steps before
    script = "from utils.data import step_uids; print(step_uids(100, 3, 19, 16))"
    out = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert json.loads(out) == want[19]
    assert len({tuple(epoch_order(100, seed, epoch)) for seed in (0, 1) for epoch in (0, 1)}) == 4
    with pytest.raises(ValueError, match="read-only"):
        epoch_order(100, 3, 0)[0] = 1
    assert all(type(uid) is int for uid in want[1])


# ---- tokens ----


def test_messages_go_through_the_template_once():
    for adds_bos in (False, True):
        ids = encode_prompt(make_tokenizer(adds_bos=adds_bos), [{"role": "user", "content": "hé", "name": None}])
        assert ids[0] == 256 and ids.count(256) == 1
        assert make_tokenizer().decode(ids[1:]) == "user:hé\nassistant:"
        assert type(ids) is list and all(type(token) is int for token in ids)


def test_strings_get_no_template_and_the_tokenizers_own_bos():
    plain, bos = make_tokenizer(), make_tokenizer(adds_bos=True)
    assert plain.decode(encode_prompt(plain, "2+2=")) == "2+2="
    assert encode_prompt(bos, "2+2=") == [256, *encode_prompt(plain, "2+2=")]
    assert encode_prompt(bos, "<s>2+2=") == encode_prompt(bos, "2+2=")  # not a second one
    assert encode_prompt(make_tokenizer(chat_template=None), "x")


@pytest.mark.parametrize(
    ("prompt", "template", "message"),
    [
        ("", TEMPLATE, "prompt: is empty"),
        ([], TEMPLATE, "prompt: is empty"),
        ([{"role": "user", "content": "x"}], "{{ '' }}", "encodes to no token"),
        ([{"role": "user", "content": "x"}], None, "no chat template; use string prompts"),
        ([{"role": "system", "content": "x"}], TEMPLATE, r"chat template refuses it \(no system role\)"),
        ([{"role": "user", "content": None}], TEMPLATE, "`content` of a message must be a string, not None"),
        ([{"content": "x"}], TEMPLATE, "`role` of a message must be a string"),
        ("a\ud800", TEMPLATE, "cannot be written as UTF-8"),
        ([{"role": "user", "content": "\udfff"}], TEMPLATE, "cannot be written as UTF-8"),
    ],
)
def test_prompts_that_cannot_be_encoded(prompt, template, message):
    with pytest.raises(ValueError, match=message) as caught:
        encode_prompt(make_tokenizer(template), prompt)
    assert type(caught.value) is ValueError


def test_find_overlong(tmp_path):
    prompts = ["x" * (1 + uid * 7 % 11) for uid in range(23)]
    data = PromptData(write(tmp_path / "a.parquet", [{"prompt": prompt} for prompt in prompts], 5))
    want = [(uid, len(prompt)) for uid, prompt in enumerate(prompts) if len(prompt) > 8]
    assert 0 < len(want) < 23 and (8 in map(len, prompts))
    for world in (1, 2, 4, 30):
        parts = [find_overlong(data, make_tokenizer(), 8, (rank, world)) for rank in range(world)]
        assert [item for part in parts for item in part] == want
    assert find_overlong(data, make_tokenizer(), 11) == []
    message = overlong_error(want, len(data), 8)
    assert message.startswith(
        f"--max-prompt-len 8: {len(want)} of 23 prompts are longer (the longest has 11 tokens, uid 3)"
    )
    assert message.endswith("--max-prompt-len 11 works")
    empty = PromptData(write(tmp_path / "b.parquet", [{"prompt": "x"}, {"prompt": ""}]), "--val-files")
    with pytest.raises(ValueError, match=r"--val-files: row with uid 1: prompt: is empty"):
        find_overlong(empty, make_tokenizer(), 8)


# ---- making the files ----


def run_cli(*args: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "utils.data", *args]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


def test_gsm8k_row():
    row = gsm8k_row("How many?", "So.\n#### 1,080 ", "test", 4)
    assert row["prompt"] == [
        {"role": "user", "content": 'How many? Let\'s think step by step and output the final answer after "####".'}
    ]
    assert row["reward_model"] == {"style": "rule", "ground_truth": "1080"}
    assert row["extra_info"] == {"split": "test", "index": 4, "answer": "So.\n#### 1,080 ", "question": "How many?"}
    assert (row["data_source"], row["ability"]) == ("openai/gsm8k", "math")


def test_cli_writes_what_prompt_data_reads(tmp_path, capsys):
    pairs = [{"question": f"{i} + 1? é\u2028x", "answer": f"It is\n#### {i + 1}"} for i in range(9)]
    for split, count in (("train", 9), ("test", 3)):
        lines = [json.dumps(pair, ensure_ascii=False) + "\n" for pair in pairs[:count]]
        (tmp_path / f"{split}.jsonl").write_text("".join(lines), encoding="utf-8")
    out = tmp_path / "new/gsm8k"
    make_data.main(["gsm8k", "--source", str(tmp_path), "--out", str(out)])
    assert capsys.readouterr().out == f"wrote 9 rows to {out}/train.parquet, 3 rows to {out}/test.parquet\n"
    data = PromptData(f"{out}/train.parquet")
    assert [data.row(uid) for uid in range(9)] == [
        gsm8k_row(**pair, split="train", index=i) for i, pair in enumerate(pairs)
    ]
    assert sorted(path.name for path in out.iterdir()) == ["test.parquet", "train.parquet"]


@pytest.mark.skipif(not GSM8K.exists(), reason="needs ../shared/data, absent on a user's machine")
def test_cli_on_the_real_files(tmp_path):
    done = run_cli("gsm8k", "--source", str(GSM8K), "--out", str(tmp_path / "out"))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("\n") == 1 and "7473 rows" in done.stdout and "1319 rows" in done.stdout
    data = PromptData(f"{tmp_path}/out/*.parquet")
    assert len(data) == 7473 + 1319
    assert data.row(0)["reward_model"]["ground_truth"] == "18"  # test.parquet sorts first
    assert find_overlong(data, make_tokenizer(), 2000) == []
    assert len(find_overlong(data, make_tokenizer(), 500, (0, 8))) > 0


def test_cli_errors_are_one_line(tmp_path, capsys):
    cases = {
        "bad": '{"question": "x"',
        "missing": '{"question": "x"}',
        "unmarked": '{"question": "x", "answer": "5"}',
        "none": "",
    }
    for name, text in cases.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.jsonl").write_text(text)
    good = tmp_path / "good"
    good.mkdir()
    for split in ("train", "test"):
        (good / f"{split}.jsonl").write_text('{"question": "x", "answer": "#### 5"}\n')
    (tmp_path / "file").touch()
    for source, out, message in (
        ("nope", "out", "--source .*nope: no file .*train.jsonl"),
        ("bad", "out", r"--source: .*train.jsonl:1 is not JSON"),
        ("missing", "out", r"--source: .*train.jsonl:1 must be an object with the strings question, answer"),
        ("unmarked", "out", "train row 0: the answer has no '####'"),
        ("none", "out", "has no rows"),
        ("good", "file", "--out .*file: cannot be written"),
    ):
        with pytest.raises(SystemExit) as caught:
            make_data.main(["gsm8k", "--source", str(tmp_path / source), "--out", str(tmp_path / out)])
        error = capsys.readouterr().err
        assert caught.value.code == 2 and error.startswith("error: ") and error.count("\n") == 1
        assert re.search(message, error), error
    assert not (tmp_path / "out").exists()


def test_cli_without_a_source_and_without_a_network(tmp_path, monkeypatch, capsys):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    with pytest.raises(SystemExit):
        make_data.main(["gsm8k", "--out", str(tmp_path / "out")])
    error = capsys.readouterr().err
    assert error.startswith("error: openai/gsm8k: no download (") and "--source DIR" in error and error.count("\n") == 1
