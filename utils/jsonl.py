"""Files of one JSON object a line, which a full disk or a kill does not break."""

import atexit
import json
import math
import os
from pathlib import Path


def _finite(value):
    """A JSON value with null for every float that is not finite, at any depth."""
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


_unwritten: dict[Path, list[str]] = {}  # lines that a full disk did not take


def append_jsonl(path: Path, *rows: dict) -> None:
    """Append one JSON object a line. Non-finite floats are written as null: JSON has none.

    Lines that cannot be written (a full disk) are kept, which is said, and tried again with every call and at the end.
    """
    _unwritten.setdefault(path, []).extend(json.dumps(_finite(row)) + "\n" for row in rows)
    _write_lines()


@atexit.register
def _write_lines() -> None:
    for path, lines in list(_unwritten.items()):
        size = path.stat().st_size if path.exists() else 0
        try:
            with path.open("a") as file:
                file.writelines(lines)
            del _unwritten[path]
        except OSError as error:
            if path.exists():
                os.truncate(path, size)  # no half a line, which would end the file for its readers
            print(f"{path}: {len(lines)} line(s) NOT WRITTEN ({error}); kept, and tried again", flush=True)


def read_jsonl(path: Path) -> list[dict]:
    """The objects of a JSONL file, up to a line that a kill cut off."""
    rows = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return rows


def cut_jsonl(path: Path, last_step: int) -> None:
    """Keep the lines up to and including `last_step`: what a resumed run will write again goes."""
    if path.exists():
        kept = [json.dumps(row) + "\n" for row in read_jsonl(path) if row["step"] <= last_step]
        aside = path.with_suffix(".tmp")
        aside.write_text("".join(kept))
        os.replace(aside, path)
