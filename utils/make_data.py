"""Makes the parquet files of known data sets: python -m utils.data COMMAND ..."""

import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import tyro


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


def _read_jsonl(path: Path, keys: tuple[str, ...]) -> Iterable[dict]:
    with open(path, "rb") as lines:  # bytes, so that wrong UTF-8 is found on its line
        for number, line in enumerate(lines, 1):
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ValueError(f"--source: {path}:{number} is not JSON ({error})") from error
            if not isinstance(row, dict) or not all(isinstance(row.get(key), str) for key in keys):
                raise ValueError(f"--source: {path}:{number} must be an object with the strings {', '.join(keys)}")
            yield row


def gsm8k(out: Path, source: Path | None = None) -> None:
    """Write train.parquet and test.parquet of GSM8K, grade-school sums (7,473 and 1,319 rows).

    Args:
        out: folder to write to, made if it is not there.
        source: folder with train.jsonl and test.jsonl; without it the files come from the Hugging Face Hub.
    """
    tables = {}
    for split in ("train", "test"):
        if source is None:
            from huggingface_hub import hf_hub_download  # only needed here, and slow to import

            name = f"main/{split}-00000-of-00001.parquet"
            try:
                path = hf_hub_download("openai/gsm8k", name, repo_type="dataset")
            except OSError as error:  # the Hub's own errors are OSErrors
                reason = str(error).splitlines()[0]
                raise ValueError(f"openai/gsm8k: no download ({reason}); --source DIR reads local files") from error
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


def _write_splits(tables: dict[str, pa.Table], out: Path) -> None:
    """Write one parquet file per split and print one line."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        for split, table in tables.items():
            part = out / f".{split}.parquet.part"  # renamed when whole, so that no half-written file is ever found
            pq.write_table(table, part)
            os.replace(part, out / f"{split}.parquet")
    except OSError as error:
        raise ValueError(f"--out {out}: cannot be written ({error.strerror}); give a folder of yours") from error
    print("wrote", ", ".join(f"{table.num_rows} rows to {out / split}.parquet" for split, table in tables.items()))


def main(argv: list[str]) -> None:
    """`python -m utils.data COMMAND ...`; exits with status 2 and one line on an error of the user's."""
    try:
        tyro.extras.subcommand_cli_from_dict({"gsm8k": gsm8k}, prog="python -m utils.data", args=argv)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
