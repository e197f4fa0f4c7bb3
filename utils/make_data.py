"""Makes the parquet files of known data sets: python -m utils.data COMMAND ..."""

import gzip
import json
import os
import re
import sys
import zlib
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import tyro

from utils.dist import seed_for

HH_FILES = [f"{part}/{split}.jsonl.gz" for part in ("harmless-base", "helpful-base") for split in ("train", "test")]
HH_TURN = re.compile(r"\n\n(Human|Assistant):")
HH_ROLES = {"Human": "user", "Assistant": "assistant"}

# ---- reading and writing ----


def _download(repo: str, name: str) -> Path:
    """One file of a data set on the Hugging Face Hub."""
    from huggingface_hub import hf_hub_download  # only needed here, and slow to import

    try:
        return Path(hf_hub_download(repo, name, repo_type="dataset"))
    except OSError as error:  # the Hub's own errors are OSErrors
        reason = str(error).splitlines()[0]
        raise ValueError(f"{repo}: no download ({reason}); --source DIR reads local files") from error


def _read_jsonl(path: Path, keys: tuple[str, ...]) -> Iterable[dict]:
    number = 0
    try:
        # bytes, so that wrong UTF-8 is found on its line
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                try:
                    row = json.loads(line)
                except ValueError as error:
                    raise ValueError(f"--source: {path}:{number} is not JSON ({error})") from error
                if not isinstance(row, dict) or not all(isinstance(row.get(key), str) for key in keys):
                    raise ValueError(f"--source: {path}:{number} must be an object with the strings {', '.join(keys)}")
                yield row
    except (OSError, EOFError, zlib.error) as error:  # the last two, and some of the first: a damaged archive
        raise ValueError(f"--source: {path} cannot be read after line {number} ({error})") from error


def _write_splits(tables: dict[str, pa.Table], out: Path, rejected: list[dict] | None = None) -> None:
    """Write one parquet file per split, and the list of rejected rows if there is one, and print one line."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        if rejected is not None:
            (out / "rejected.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rejected))
        for split, table in tables.items():
            part = out / f".{split}.parquet.part"  # renamed when whole, so that no half-written file is ever found
            pq.write_table(table, part)
            os.replace(part, out / f"{split}.parquet")
    except OSError as error:
        raise ValueError(f"--out {out}: cannot be written ({error.strerror}); give a folder of yours") from error
    print("wrote", ", ".join(f"{table.num_rows} rows to {out / split}.parquet" for split, table in tables.items()))


# ---- GSM8K ----


def gsm8k_row(question: str, answer: str, split: str, index: int) -> dict:
    """verl's row of one question/answer pair of GSM8K."""
    _, marker, truth = answer.rpartition("####")
    if not marker:
        raise ValueError(f"{split} row {index}: the answer has no '####': {answer[-40:]!r}")
    content = question + ' Let\'s think step by step and output the final answer after "####".'
    return {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": content}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": truth.strip().replace(",", "")},
        "extra_info": {"split": split, "index": index, "answer": answer, "question": question},
    }


def gsm8k(out: Path, source: Path | None = None) -> None:
    """Write train.parquet and test.parquet of GSM8K, grade-school sums (7,473 and 1,319 rows).

    Args:
        out: folder to write to, made if it is not there.
        source: folder with train.jsonl and test.jsonl; without it the files come from the Hugging Face Hub.
    """
    tables = {}
    for split in ("train", "test"):
        if source is None:
            path = _download("openai/gsm8k", f"main/{split}-00000-of-00001.parquet")
            pairs = pq.read_table(path, columns=["question", "answer"]).to_pylist()
        else:
            path = source / f"{split}.jsonl"
            if not path.is_file():
                raise ValueError(f"--source {source}: no file {path}; give a folder with train.jsonl and test.jsonl")
            pairs = _read_jsonl(path, ("question", "answer"))
        rows = [gsm8k_row(pair["question"], pair["answer"], split, index) for index, pair in enumerate(pairs)]
        if not rows:
            raise ValueError(f"--source {source}: {path} has no rows")
        tables[split] = pa.Table.from_pylist(rows)
    _write_splits(tables, out)


# ---- HH-RLHF ----


def hh_turns(transcript: str) -> list[dict]:
    """The turns of a transcript as messages.

    Raises: ValueError with the reason, where it is not one.
    """
    # A label counts at the beginning of a paragraph alone: "... Human: ..." inside a line is text of its turn.
    before, *parts = HH_TURN.split("\n\n" + transcript.lstrip())
    if before.strip() or not parts:
        raise ValueError("does not begin with a turn")
    # DETAIL: the blanks around a turn go, because the chat template brings its own, and a response sampled from a
    # model does not begin with the blank behind "Assistant:".
    return [{"role": HH_ROLES[r], "content": text.strip()} for r, text in zip(parts[::2], parts[1::2], strict=True)]


def hh_row(chosen: str, rejected: str, file: str, index: int) -> dict:
    """The preference row of two transcripts of one conversation, which differ in its last turn.

    Raises: ValueError with the reason, where they cannot be used.
    """
    try:
        (chosen + rejected).encode()
    except UnicodeEncodeError as error:
        raise ValueError("not valid text") from error
    (*prompt, last), (*other_prompt, other_last) = hh_turns(chosen), hh_turns(rejected)
    if {last["role"], other_last["role"]} != {"assistant"}:
        raise ValueError("does not end with an Assistant turn")
    if prompt != other_prompt:
        raise ValueError("prompts differ")
    # DETAIL: two turns in a row of one speaker are no conversation that a policy could be in, and templates refuse them
    if [turn["role"] for turn in prompt] != ["user", "assistant"] * (len(prompt) // 2) + ["user"]:
        raise ValueError("turns do not alternate, Human first")
    if not all(turn["content"] for turn in prompt):
        raise ValueError("empty turn in the prompt")
    if not last["content"] or not other_last["content"]:
        raise ValueError("empty response")
    if last == other_last:
        raise ValueError("identical responses")
    return {
        "data_source": "Anthropic/hh-rlhf",
        "prompt": prompt,
        "chosen": last["content"],
        "rejected": other_last["content"],
        "extra_info": {"file": file, "index": index},
    }


def _hh_files(source: Path | None) -> dict[str, Path]:
    if source is None:
        return {name: _download("Anthropic/hh-rlhf", name) for name in HH_FILES}
    paths = sorted([*source.glob("*.jsonl"), *source.glob("*.jsonl.gz")])
    if not paths:
        raise ValueError(f"--source {source}: no *.jsonl or *.jsonl.gz in it; give a folder such as harmless-base")
    for path in paths:
        if path.with_name(path.name + ".gz") in paths:
            raise ValueError(f"--source {source}: {path.name} is there packed too and would count twice; keep one")
    return {path.name: path for path in paths}


def _hold_out(rows: list[dict]) -> dict[str, list[dict]]:
    """Nine tenths of the conversations as train, one tenth as test; the same ones in every run."""
    # DETAIL: held out by first turn, because the same conversation is in several rows, cut off at different turns.
    first_turns = sorted({row["prompt"][0]["content"] for row in rows}, key=lambda text: seed_for("hh-rlhf", text))
    held_out = set(first_turns[: -(-len(first_turns) // 10)])
    splits: dict[str, list[dict]] = {"train": [], "test": []}
    for row in rows:
        splits["test" if row["prompt"][0]["content"] in held_out else "train"].append(row)
    return splits


def hh_rlhf(out: Path, source: Path | None = None) -> None:
    """Write train.parquet and test.parquet of Anthropic's HH-RLHF, and rejected.jsonl, the rows that cannot be used.

    Where all files are of one split, a tenth of the conversations is held out as test.parquet.

    Args:
        out: folder to write to, made if it is not there.
        source: folder with *.jsonl or *.jsonl.gz, those with "test" in their name held out; without it harmless-base
            and helpful-base come from the Hugging Face Hub.
    """
    splits: dict[str, list[dict]] = {"train": [], "test": []}
    rejected, files, num_read = [], _hh_files(source), 0
    for name, path in files.items():
        split = "test" if "test" in name else "train"
        for index, pair in enumerate(_read_jsonl(path, ("chosen", "rejected"))):
            num_read += 1
            try:
                splits[split].append(hh_row(pair["chosen"], pair["rejected"], name, index))
            except ValueError as error:
                rejected.append({"file": name, "index": index, "reason": str(error)})
    if len({"test" in name for name in files}) == 1:
        print(f"only {split} files: a tenth of the conversations is held out")
        splits = _hold_out(splits["train"] + splits["test"])
    num_kept = sum(map(len, splits.values()))
    assert num_kept + len(rejected) == num_read, (num_kept, len(rejected), num_read)
    print(f"read {num_read} pairs, kept {num_kept}, rejected {len(rejected)}:")
    for reason, number in Counter(row["reason"] for row in rejected).most_common():
        print(f"{number:8}  {reason}")
    for split, rows in splits.items():
        if not rows:
            raise ValueError(f"--source {source}: leaves no row for {split}.parquet; give files with more usable rows")
    _write_splits({split: pa.Table.from_pylist(rows) for split, rows in splits.items()}, out, rejected)


def main(argv: list[str]) -> None:
    """`python -m utils.data COMMAND ...`; exits with status 2 and one line on an error of the user's."""
    try:
        commands = {"gsm8k": gsm8k, "hh-rlhf": hh_rlhf}
        tyro.extras.subcommand_cli_from_dict(commands, prog="python -m utils.data", args=argv)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
