"""Preference pairs: encoding, the check of all rows, and the parquet files made of HH-RLHF transcripts."""

import gzip
import json
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from conftest import ROOT, SHARED, needs_shared, torchrun
from tokenizers import processors

from utils import make_data
from utils.data import PromptData
from utils.make_data import hh_row
from utils.packing import pack
from utils.preferences import FIXES, Pair, Tokens, check_rows, encode_response, load_pairs
from utils.prompts import encode_prompt
from utils.tiny import make_tokenizer

TOKENIZER = make_tokenizer()  # one token per byte
EOS = TOKENIZER.eos_token_id
pytestmark = pytest.mark.usefixtures("process_group")


def write(path: Path, rows: list[dict]) -> str:
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=3)
    return str(path)


def good(uid: int) -> dict:
    return {"prompt": f"{uid}?", "chosen": f"yes {uid}", "rejected": "no", "margin": 0.5}


def load(files: str, max_prompt_len: int = 20, max_response_len: int = 10, overlong="error", flag="--train-files"):
    return load_pairs(files, flag, TOKENIZER, max_prompt_len, max_response_len, overlong)


def error_of(*args, **kwargs) -> str:
    with pytest.raises(ValueError) as caught:
        load(*args, **kwargs)
    return str(caught.value)


# ---- one row ----


def test_a_response_ends_in_one_end_of_sequence():
    ids = encode_response(TOKENIZER, "hé y", EOS)
    assert len(ids) == len("hé y".encode()) + 1 and TOKENIZER.decode(ids[:-1]) == "hé y" and ids[-1] == EOS
    assert encode_response(TOKENIZER, "hé y<|eos|>", EOS) == ids
    assert encode_response(TOKENIZER, "hé y<|eos|><|eos|>", EOS) == ids
    assert encode_response(TOKENIZER, "a<|eos|>b", EOS).count(EOS) == 2  # `load_pairs` refuses it
    assert all(type(token) is int for token in ids)


def test_no_token_is_put_in_front_of_a_response():
    tokenizer = make_tokenizer()
    user = tokenizer.convert_tokens_to_ids("<|user|>")
    front = processors.TemplateProcessing("<|user|> $A", special_tokens=[("<|user|>", user)])
    tokenizer.backend_tokenizer.post_processor = front
    assert tokenizer("x").input_ids[0] == user
    assert encode_response(tokenizer, "x", EOS) == encode_response(TOKENIZER, "x", EOS)


def test_a_pair_is_what_a_rollout_looks_like(tmp_path):
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    rows = [
        {"prompt": turns, "chosen": "yes", "rejected": "no<|eos|>", "margin": 2},
        {"prompt": turns[:1], "chosen": "é", "rejected": "e", "margin": 0},
    ]
    data = load(write(tmp_path / "a.parquet", rows))
    assert len(data) == 2 and data.uids == [0, 1] and data.num_dropped == 0 and data.flag == "--train-files"
    pair = data.pair(0)
    assert type(pair) is Pair and type(pair.chosen) is Tokens
    assert pair.chosen.prompt_ids == pair.rejected.prompt_ids == encode_prompt(TOKENIZER, turns)
    whole = TOKENIZER.decode(pair.chosen.prompt_ids + pair.chosen.response_ids)
    assert whole == "<|user|>a<|assistant|>b<|eos|><|user|>c<|assistant|>yes<|eos|>"
    assert TOKENIZER.decode(pair.rejected.response_ids) == "no<|eos|>"
    assert pair.margin == 2.0 and type(pair.margin) is float
    assert data.pair(1).margin == 0.0 and len(data.pair(1).chosen.response_ids) == 3
    packed = pack([pair.chosen, pair.rejected], torch.device("cpu"))
    assert [packed.input_ids_T[end - 1].item() for end in packed.cu_seqlens[1:]] == [EOS, EOS]
    for i in (-1, 2):
        with pytest.raises(AssertionError):
            data.pair(i)


def test_a_response_is_a_string_or_one_assistant_message_and_a_margin_may_be_absent(tmp_path):
    message = {"role": "assistant", "content": "yes"}
    lists = write(
        tmp_path / "a.parquet", [{"prompt": "1?", "chosen": [message], "rejected": [message | {"content": "no"}]}]
    )
    texts = write(tmp_path / "b.parquet", [{"prompt": "1?", "chosen": "yes", "rejected": "no"}])
    assert load(lists).pair(0) == load(texts).pair(0)
    assert load(lists).pair(0).margin == 0.0
    assert load(texts).fingerprint() == PromptData(texts).fingerprint() != load(lists).fingerprint()


# ---- all rows ----

USER, ASSISTANT = {"role": "user", "content": "x"}, {"role": "assistant", "content": "x"}
FAULTS = {
    "null prompt": ({"prompt": None}, r"`prompt` is null", r"\)"),
    "empty prompt": ({"prompt": ""}, "`prompt` does not encode", ": is empty; at least one"),
    "null chosen": ({"chosen": None}, "`chosen` is null", r"\)"),
    "null rejected": ({"rejected": None}, "`rejected` is null", r"\)"),
    "empty chosen": ({"chosen": ""}, "`chosen` is empty", r"\)"),
    "empty rejected": ({"rejected": ""}, "`rejected` is empty", r"\)"),
    "blank": ({"chosen": " \n"}, "`chosen` is empty", r"\)"),
    "nothing but the end": ({"chosen": "<|eos|>"}, "`chosen` is empty", r"\)"),
    "goes on": ({"rejected": "a<|eos|>\n"}, "`rejected` goes on after an end of sequence", r"\)"),
    "identical": ({"chosen": "no"}, "`chosen` is the same as `rejected`", r"\)"),
    "identical but for the end": ({"chosen": "no<|eos|>"}, "`chosen` is the same as `rejected`", r"\)"),
    "null margin": ({"margin": None}, "`margin` is not a finite number", ": None"),
    "NaN margin": ({"margin": float("nan")}, "`margin` is not a finite number", ": nan"),
    "infinite margin": ({"margin": float("-inf")}, "`margin` is not a finite number", ": -inf"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_rows_that_cannot_be_used(tmp_path, name):
    change, rule, detail = FAULTS[name]
    write(tmp_path / "a.parquet", [good(uid) for uid in range(5)])
    write(tmp_path / "b.parquet", [good(5), good(6) | change, good(7), good(8) | change])
    message = error_of(f"{tmp_path}/*.parquet", overlong="drop", flag="--val-files")
    first = rf"\(the first is uid 6 of {tmp_path}/b\.parquet{detail}"
    assert re.match(rf"--val-files: {rule} in 2 of 9 rows {first}", message), message
    assert "\n" not in message and message.endswith(FIXES[re.sub(r"^`\w+` ", "", rule)])


@pytest.mark.parametrize(
    ("messages", "seen"),
    [
        ([USER, ASSISTANT], "2 of user, assistant"),
        ([ASSISTANT, ASSISTANT], "2 of assistant, assistant"),
        ([USER], "1 of user"),
        ([], "0 of no role"),
        ([None], "1 of None"),
    ],
)
def test_a_list_must_be_one_assistant_message(tmp_path, messages, seen):
    row = {"prompt": "1?", "chosen": [ASSISTANT], "rejected": [ASSISTANT | {"content": "no"}]}
    file = write(tmp_path / "a.parquet", [row, row | {"rejected": messages}, row])
    assert re.search(rf"`rejected` is not one assistant message in 1 of 3 rows .*uid 1 .*: {seen}\);", error_of(file))


def test_messages_that_are_null_or_that_the_template_refuses(tmp_path):
    row = {"prompt": [USER], "chosen": "yes", "rejected": "no"}
    null = write(tmp_path / "a.parquet", [row, row | {"prompt": [USER, None]}])
    assert "`prompt` does not encode in 1 of 2 rows (the first is uid 1" in error_of(null)
    content = {"role": "assistant", "content": None}
    null = write(tmp_path / "b.parquet", [row | {"chosen": [ASSISTANT]}, row | {"chosen": [content]}])
    assert "`chosen` is empty in 1 of 2 rows (the first is uid 1" in error_of(null)


def test_every_kind_of_fault_has_its_line_and_comes_before_lengths(tmp_path):
    rows = [good(0), good(1) | {"prompt": None, "margin": None}, good(2) | {"chosen": "", "margin": None}]
    rows += [good(3) | {"prompt": "x" * 50}]
    lines = error_of(write(tmp_path / "a.parquet", rows)).split("\n")
    assert [re.sub(r" \(.*", "", line) for line in lines] == [
        "--train-files: `chosen` is empty in 1 of 4 rows",
        "--train-files: `margin` is not a finite number in 2 of 4 rows",
        "--train-files: `prompt` is null in 1 of 4 rows",
    ]


def test_a_margin_in_some_files_only(tmp_path):
    write(tmp_path / "a.parquet", [good(0)])
    write(tmp_path / "b.parquet", [{k: v for k, v in good(1).items() if k != "margin"}])
    message = error_of(f"{tmp_path}/*.parquet")
    assert re.search(r"`margin` is not a finite number in 1 of 2 rows .*uid 1 of .*b\.parquet: None\)", message)


def test_columns(tmp_path):
    for column, wrong, message in (
        ("chosen", None, "no column `chosen`; its columns are prompt, rejected, margin"),
        ("rejected", None, "no column `rejected`"),
        ("prompt", None, "no column `prompt`"),
        ("chosen", 1, "column `chosen` is int64; it must be a string or a list of"),
        ("rejected", ["a"], "column `rejected` is list"),
    ):
        row = good(0) | {column: wrong}
        file = write(tmp_path / "a.parquet", [{k: v for k, v in row.items() if v is not None}])
        assert error_of(file).startswith(f"--train-files {file}: {message}")
    text = write(tmp_path / "a.parquet", [good(0) | {"margin": "big"}])
    assert "`margin` is not a finite number in 1 of 1 rows" in error_of(text)
    assert len(PromptData(write(tmp_path / "a.parquet", [{"prompt": "x"}]))) == 1  # prompts need no more than before


def test_a_tokenizer_without_end_of_sequence(tmp_path):
    tokenizer = make_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match=r"^--model .*: the tokenizer has no end-of-sequence token"):
        load_pairs(write(tmp_path / "a.parquet", [good(0)]), "--train-files", tokenizer, 20, 10, "error")


def lengthy(path: Path) -> str:
    """Prompt tokens 2 + uid * 3 % 10; longer response 1 + uid * 7 % 11 and its end, chosen and rejected by turns."""
    rows = []
    for uid in range(23):
        long, short = "x" * (1 + uid * 7 % 11) + "y", "z"
        chosen, rejected = (long, short) if uid % 2 else (short, long)
        rows.append({"prompt": "p" * (2 + uid * 3 % 10), "chosen": chosen, "rejected": rejected})
    return write(path, rows)


def kept(prompt_limit: int, response_limit: int) -> list[int]:
    return [u for u in range(23) if 2 + u * 3 % 10 <= prompt_limit and 3 + u * 7 % 11 <= response_limit]


def test_overlong_pairs_are_an_error_that_names_what_works(tmp_path):
    file = lengthy(tmp_path / "a.parquet")
    assert load(file, 11, 13).uids == list(range(23))  # the longest of each just fit
    drop = "so does --overlong drop, which leaves them out"
    prompts = "--max-prompt-len 10: 2 of 23 pairs have a longer prompt (the longest has 11 tokens, uid 3); "
    prompts += f"--max-prompt-len 11 works; {drop}"
    responses = "--max-response-len 11: 4 of 23 pairs have a longer response (the longest has 13 tokens, uid 3); "
    responses += f"--max-response-len 13 works; {drop}"
    assert error_of(file, 10, 13) == prompts
    assert error_of(file, 11, 11) == responses
    assert error_of(file, 10, 11) == f"{prompts}\n{responses}"


@pytest.mark.parametrize("limits", [(10, 13), (11, 12), (11, 11), (6, 7), (2, 13), (11, 3)])
def test_overlong_pairs_are_dropped_and_counted(tmp_path, limits):
    data = load(lengthy(tmp_path / "a.parquet"), *limits, overlong="drop")
    assert data.uids == kept(*limits) and 0 < len(data.uids) < 23
    assert len(data) == len(data.uids) and data.num_dropped == 23 - len(data)
    pairs = [data.pair(i) for i in range(len(data))]
    assert [len(pair.chosen.prompt_ids) for pair in pairs] == [2 + uid * 3 % 10 for uid in data.uids]
    assert max(len(side.response_ids) for pair in pairs for side in (pair.chosen, pair.rejected)) <= limits[1]


def test_all_dropped_is_an_error(tmp_path):
    file = lengthy(tmp_path / "a.parquet")
    for overlong in ("drop", "error"):
        message = error_of(file, 1, 13, overlong)
        assert message.endswith("--max-prompt-len 11 works; --overlong drop would leave no pair"), message


def test_the_check_does_not_depend_on_the_number_of_ranks(tmp_path):
    rows = [good(uid) for uid in range(23)]
    for uid in (2, 3, 11, 22):
        rows[uid] |= {"margin": None, "chosen": ""}
    bad = PromptData(write(tmp_path / "a.parquet", rows), texts=("prompt", "chosen", "rejected"))
    long = PromptData(lengthy(tmp_path / "b.parquet"), texts=("prompt", "chosen", "rejected"))
    for data in (bad, long):
        whole = check_rows(data, TOKENIZER, (6, 7))
        assert len(whole[0]) == (8 if data is bad else 0)
        assert data is bad or [uid for uid, *_ in whole[1]] == sorted({*range(23)} - {*kept(6, 7)})
        for world in (2, 4, 30):
            shares = [check_rows(data, TOKENIZER, (6, 7), (rank, world)) for rank in range(world)]
            assert tuple([item for share in shares for item in share[kind]] for kind in (0, 1)) == whole


def test_three_ranks_end_as_one_does(tmp_path):
    last = [good(uid) for uid in range(8)]
    last[7] |= {"chosen": None}  # in the last rank's share alone
    rows = [good(uid) for uid in range(8)]
    rows[0] |= {"prompt": "x" * 30}
    rows[6] |= {"rejected": "x" * 30}
    cases = [(write(tmp_path / "last.parquet", last), "error")]
    cases += [(write(tmp_path / "long.parquet", rows), overlong) for overlong in ("error", "drop")]
    damaged = Path(write(tmp_path / "damaged.parquet", [good(uid) for uid in range(9)]))
    start = pq.ParquetFile(damaged).metadata.row_group(2).column(0).dictionary_page_offset
    whole = damaged.read_bytes()
    damaged.write_bytes(whole[:start] + b"\xff" * 16 + whole[start + 16 :])  # only the last rank reads this row group
    cases += [(str(damaged), "error")]
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    torchrun(3, ROOT / "tests/workers/pair_ranks.py", tmp_path / "cases.json", tmp_path / "out.json")
    ranks = json.loads((tmp_path / "out.json").read_text())
    data = load(*cases[2][:1], overlong="drop")
    one = [error_of(cases[0][0]), error_of(cases[1][0]), [data.uids, 2, data.fingerprint()], error_of(cases[3][0])]
    assert ranks == [one] * 3 and data.uids == [1, 2, 3, 4, 5, 7]
    assert re.search(r"damaged\.parquet: row group 2 cannot be read", one[3])


# ---- HH-RLHF ----

START = "\n\nHuman: hi \n\nAssistant: Hello.  Human: you?\nAssistant: x\n\nHuman:  so\n\nmore"


def test_hh_row():
    row = hh_row(f"{START}\n\nAssistant: Yes,\n\nHuman beings.\n", f"{START}\n\nAssistant:   No", "f.jsonl", 7)
    assert row == {
        "data_source": "Anthropic/hh-rlhf",
        "prompt": [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": "Hello.  Human: you?\nAssistant: x"},  # labels inside a paragraph
            {"role": "user", "content": "so\n\nmore"},
        ],
        "chosen": "Yes,\n\nHuman beings.",
        "rejected": "No",
        "extra_info": {"file": "f.jsonl", "index": 7},
    }
    # nothing but blanks differs in the prompt
    other = START.replace("hi ", " hi").lstrip()
    assert hh_row(f"{START}\n\nAssistant: a", f"{other}\n\nAssistant: b", "f", 0)["prompt"] == row["prompt"]


ASK = "\n\nHuman: q"
REASONS = [
    (f"{ASK}\n\nAssistant: a", f"{ASK}\n\nAssistant: a ", "identical responses"),
    (f"{ASK}\n\nAssistant:", f"{ASK}\n\nAssistant: b", "empty response"),
    (f"{ASK}\n\nAssistant: a", f"{ASK}\n\nAssistant: \n", "empty response"),
    (f"{ASK}\n\nAssistant: a", f"{ASK}!\n\nAssistant: b", "prompts differ"),
    (f"{ASK}\n\nAssistant: a", f"{ASK}\n\nAssistant: b{ASK}\n\nAssistant: a", "prompts differ"),
    (f"{ASK}\n\nAssistant: a{ASK}", f"{ASK}\n\nAssistant: b", "does not end with an Assistant turn"),
    (f"{ASK}\n\nAssistant: a", f"{ASK}\n\nAssistant: b{ASK}", "does not end with an Assistant turn"),
    (f"{ASK}\n\nAssistant: a{ASK}", f"{ASK}\n\nAssistant: b{ASK}", "does not end with an Assistant turn"),
    ("Oh.\n\nAssistant: a", "Oh.\n\nAssistant: b", "does not begin with a turn"),
    ("", f"{ASK}\n\nAssistant: b", "does not begin with a turn"),
    ("\n\nAssistant: a", "\n\nAssistant: b", "turns do not alternate, Human first"),
    (f"{ASK}{ASK}\n\nAssistant: a", f"{ASK}{ASK}\n\nAssistant: b", "turns do not alternate, Human first"),
    (f"{ASK}\n\nAssistant: c\n\nAssistant: a", f"{ASK}\n\nAssistant: c\n\nAssistant: b", "turns do not alternate, Hu"),
    ("\n\nHuman: \n\nAssistant: a", "\n\nHuman:\n\nAssistant: b", "empty turn in the prompt"),
    (f"{ASK}\n\nAssistant: \ud800", f"{ASK}\n\nAssistant: b", "not valid text"),
]


@pytest.mark.parametrize(("chosen", "rejected", "reason"), REASONS)
def test_hh_rows_that_cannot_be_used(chosen, rejected, reason):
    with pytest.raises(ValueError, match=rf"^{reason}"):
        hh_row(chosen, rejected, "f", 0)


def transcripts(count: int, start: int = 0) -> list[dict]:
    """Three rows of each conversation, cut off at different turns."""
    pairs = []
    for i in range(start, start + count):
        turns = f"\n\nHuman: q{i // 3}" + "\n\nAssistant: a\n\nHuman: b" * (i % 3)
        pairs.append({"chosen": f"{turns}\n\nAssistant: yes", "rejected": f"{turns}\n\nAssistant: no"})
    return pairs


def write_jsonl(path: Path, pairs: list[dict]) -> None:
    with gzip.open(path, "wb") if path.suffix == ".gz" else path.open("wb") as file:
        file.write("".join(json.dumps(pair) + "\n" for pair in pairs).encode())


def make_hh(source: Path, out: Path, capsys) -> tuple[list[dict], list[dict], str]:
    make_data.main(["hh-rlhf", "--source", str(source), "--out", str(out)])
    return *(pq.read_table(out / f"{name}.parquet").to_pylist() for name in ("train", "test")), capsys.readouterr().out


def test_hh_files_by_name_and_rejected_rows_listed(tmp_path, capsys):
    bad = [{"chosen": chosen, "rejected": rejected} for chosen, rejected, _ in REASONS]
    write_jsonl(tmp_path / "a-train.jsonl.gz", [*bad[:2], *transcripts(6), *bad[2:]])
    write_jsonl(tmp_path / "b.jsonl", transcripts(3, 6))
    write_jsonl(tmp_path / "b-test.jsonl", [*transcripts(2, 9), bad[0]])
    train, test, printed = make_hh(tmp_path, tmp_path / "out", capsys)
    places = [(row["extra_info"]["file"], row["extra_info"]["index"]) for row in train + test]
    kept_places = [("a-train.jsonl.gz", i) for i in range(2, 8)] + [("b.jsonl", i) for i in range(3)]
    assert (len(train), len(test)) == (9, 2) and places == [*kept_places, ("b-test.jsonl", 0), ("b-test.jsonl", 1)]
    assert [row["prompt"][0]["content"] for row in train] == ["q0"] * 3 + ["q1"] * 3 + ["q2"] * 3
    listed = [json.loads(line) for line in (tmp_path / "out/rejected.jsonl").read_text().splitlines()]
    assert [(row["file"], row["index"]) for row in listed] == [
        *[("a-train.jsonl.gz", i) for i in (0, 1, *range(8, len(bad) + 6))], ("b-test.jsonl", 2)
    ]  # fmt: skip
    for row, (_, _, reason) in zip(listed, [*REASONS, REASONS[0]], strict=True):
        assert row["reason"].startswith(reason)
    lines = printed.splitlines()
    assert lines[0] == f"read 27 pairs, kept 11, rejected {len(bad) + 1}:" and "held out" not in printed
    assert {line.strip() for line in lines[1:-1]} == {
        "3  turns do not alternate, Human first",
        "3  does not end with an Assistant turn",
        "2  identical responses",
        "2  empty response",
        "2  prompts differ",
        "2  does not begin with a turn",
        "1  empty turn in the prompt",
        "1  not valid text",
    }
    assert lines[-1] == f"wrote 9 rows to {tmp_path}/out/train.parquet, 2 rows to {tmp_path}/out/test.parquet"
    assert len(load(f"{tmp_path}/out/*.parquet", 1000)) == 11


@pytest.mark.parametrize("name", ["test", "train"])
def test_hh_files_of_one_split_hold_out_a_tenth_of_the_conversations(tmp_path, capsys, name):
    (tmp_path / "in").mkdir()
    write_jsonl(tmp_path / f"in/{name}.jsonl", transcripts(150))
    train, test, printed = make_hh(tmp_path / "in", tmp_path / "out", capsys)
    assert f"only {name} files: a tenth of the conversations is held out" in printed
    first_turns = [{row["prompt"][0]["content"] for row in rows} for rows in (train, test)]
    assert [len(turns) for turns in first_turns] == [45, 5] and not first_turns[0] & first_turns[1]
    assert (len(train), len(test)) == (135, 15)
    assert first_turns[1] == {"q3", "q12", "q15", "q24", "q32"}  # fixed in the code
    write_jsonl(tmp_path / f"in/{name}.jsonl", transcripts(150)[::-1])
    again = make_hh(tmp_path / "in", tmp_path / "out", capsys)[1]
    assert {row["prompt"][0]["content"] for row in again} == first_turns[1]


def test_hh_errors_are_one_line(tmp_path, capsys):
    for name, pairs in (
        ("none", None),
        ("bad", "{"),
        ("missing", [{"chosen": "x"}]),
        ("useless", [{"chosen": "x", "rejected": "x"}]),
        ("single", transcripts(3)),
        ("twice", transcripts(150)),
        ("cut", transcripts(150)),
        ("notgz", None),
    ):
        (tmp_path / name).mkdir()
        if isinstance(pairs, list):
            write_jsonl(tmp_path / name / "test.jsonl.gz", pairs)
    write_jsonl(tmp_path / "twice/test.jsonl", transcripts(150))
    (tmp_path / "bad/test.jsonl").write_text("{")
    cut = tmp_path / "cut/test.jsonl.gz"
    cut.write_bytes(cut.read_bytes()[:-30])
    (tmp_path / "notgz/test.jsonl.gz").write_text("{}")
    for name, message in (
        ("nowhere", r"--source .*nowhere: no \*\.jsonl or \*\.jsonl\.gz in it; give a folder"),
        ("none", r"--source .*none: no \*\.jsonl or \*\.jsonl\.gz in it; give a folder"),
        ("bad", r"--source: .*test\.jsonl:1 is not JSON"),
        ("missing", r"--source: .*test\.jsonl\.gz:1 must be an object with the strings chosen, rejected"),
        ("useless", r"--source .*useless: leaves no row for train\.parquet"),
        ("single", r"--source .*single: leaves no row for train\.parquet"),
        ("twice", r"--source .*twice: test\.jsonl is there packed too"),
        ("cut", r"--source: .*test\.jsonl\.gz cannot be read after line \d+"),
        ("notgz", r"--source: .*test\.jsonl\.gz cannot be read after line 0"),
    ):
        with pytest.raises(SystemExit) as caught:
            make_hh(tmp_path / name, tmp_path / "out", capsys)
        error = capsys.readouterr().err
        assert caught.value.code == 2 and re.match(f"error: {message}", error) and error.count("\n") == 1, error
    assert not (tmp_path / "out").exists()


def test_hh_from_the_hub(tmp_path, monkeypatch, capsys):
    import huggingface_hub

    asked = []

    def download(repo, name, repo_type):
        asked.append((repo, name, repo_type))
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        write_jsonl(path, transcripts(6))
        return str(path)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    make_data.main(["hh-rlhf", "--out", str(tmp_path / "out")])
    names = [f"{part}-base/{split}.jsonl.gz" for part in ("harmless", "helpful") for split in ("train", "test")]
    assert asked == [("Anthropic/hh-rlhf", name, "dataset") for name in names]
    assert "wrote 12 rows to" in capsys.readouterr().out
    files = {row["extra_info"]["file"] for row in pq.read_table(tmp_path / "out/test.parquet").to_pylist()}
    assert files == {names[1], names[3]}


@needs_shared
def test_hh_on_the_real_file(tmp_path, capsys):
    train, test, printed = make_hh(SHARED / "data/hh_rlhf", tmp_path, capsys)
    rows = train + test
    listed = [json.loads(line) for line in (tmp_path / "rejected.jsonl").read_text().splitlines()]
    assert len(rows) + len(listed) == 2312 and "read 2312 pairs, kept 2299, rejected 13:" in printed
    places = [row["extra_info"]["index"] for row in rows] + [row["index"] for row in listed]
    assert sorted(places) == list(range(2312))
    for row in rows:
        assert row["prompt"][-1]["role"] == "user" and row["chosen"] != row["rejected"]
        for text in (row["chosen"], row["rejected"], *(turn["content"] for turn in row["prompt"])):
            assert text and text == text.strip() and not re.search(r"\n\n(Human|Assistant):", text)
    assert 0.08 < len(test) / len(rows) < 0.12
    assert not {row["prompt"][0]["content"] for row in train} & {row["prompt"][0]["content"] for row in test}
    data = load(f"{tmp_path}/test.parquet", 800, 400, "drop")
    assert len(data) + data.num_dropped == len(test) and 0 < data.num_dropped < len(test)
    texts = {row["chosen"]: row for row in test}
    pair = data.pair(len(data) - 1)
    assert texts[TOKENIZER.decode(pair.chosen.response_ids[:-1])]["rejected"] == TOKENIZER.decode(
        pair.rejected.response_ids[:-1]
    )
