"""Parquet rows, in an order that resuming can recompute; and the files themselves.

    python -m utils.data gsm8k --out data/gsm8k

writes train.parquet and test.parquet. A row has the columns of verl's files, which run unchanged: `prompt` (a list of
{role, content}, or a string), and if present `data_source`, `ability`, `reward_model` {style, ground_truth} and
`extra_info`. For the rows of a reward model, see utils/preferences.py.
"""

import bisect
import glob
import hashlib
import json
import os
import sys
from collections import OrderedDict
from functools import lru_cache

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from utils.dist import seed_for

CACHE_BYTES = 512 * 2**20  # row groups kept per process; most prompt sets fit whole

# ---- rows ----


def _find_files(files: str | list[str], flag: str) -> list[str]:
    """Absolute paths, sorted, so that a uid does not depend on how or in which order the files were named."""
    if isinstance(files, str):
        files = [files] if os.path.exists(files) else [part.strip() for part in files.split(",")]
    works = "a path, a glob or several with commas; python -m utils.data {gsm8k,hh-rlhf} --out FOLDER makes some"
    found = []
    for name in map(os.path.expanduser, files):
        paths = [name] if os.path.exists(name) else sorted(glob.glob(name, recursive=True))
        if not paths:
            raise ValueError(f"{flag} {name or repr(name)}: no such file, or no file matches; give {works}")
        for path in paths:
            if os.path.isdir(path):
                raise ValueError(f"{flag} {path}: is a folder, and files are wanted; {os.path.join(path, '*.parquet')}")
            if not os.path.isfile(path):  # a pipe would be waited for without end
                raise ValueError(f"{flag} {path}: is not a file, and may be read more than once; write it to a file")
        found += [os.path.abspath(path) for path in paths]
    real = [os.path.realpath(path) for path in found]
    for path, target in zip(found, real, strict=True):
        if real.count(target) > 1:
            raise ValueError(f"{flag}: {path} is named more than once, its rows would count twice; name it once")
    if not found:
        raise ValueError(f"{flag}: names no file; give {works}")
    return sorted(found)


def _check_columns(schema: pa.Schema, path: str, flag: str, texts: tuple[str, ...]) -> None:
    types = {field.name: field.type for field in schema}
    for name in schema.names:
        if schema.names.count(name) > 1:
            raise ValueError(f"{flag} {path}: column `{name}` is there {schema.names.count(name)} times; keep one")

    def is_text(kind: pa.DataType) -> bool:
        kind = kind.value_type if pa.types.is_dictionary(kind) else kind
        return pa.types.is_string(kind) or pa.types.is_large_string(kind)

    def is_messages(kind: pa.DataType) -> bool:
        if not (pa.types.is_list(kind) or pa.types.is_large_list(kind)) or not pa.types.is_struct(kind.value_type):
            return False
        fields = {field.name: field.type for field in kind.value_type}
        return all(name in fields and is_text(fields[name]) for name in ("role", "content"))

    for name in texts:
        if name not in types:
            rule = f"it must have {', '.join(texts)}"
            raise ValueError(f"{flag} {path}: no column `{name}`; its columns are {', '.join(types)}; {rule}")
        if not is_text(types[name]) and not is_messages(types[name]):
            rule = "it must be a string or a list of {role: string, content: string}"
            raise ValueError(f"{flag} {path}: column `{name}` is {types[name]}; {rule}")
    if "reward_model" in types and not pa.types.is_struct(types["reward_model"]):
        rule = "it must be a struct {style, ground_truth}"
        raise ValueError(f"{flag} {path}: column `reward_model` is {types['reward_model']}; {rule}")


class PromptData:
    """The rows of one or many parquet files; `uid` is a row's index over the sorted list of files.

    Construction reads only the files' footers (row counts and columns); rows are read when asked for, by row group.
    `texts` names the columns that every file must have, of strings or of message lists.

    Raises: ValueError naming `flag` where a file is missing, not parquet, empty, or lacks the columns.
    """

    def __init__(self, files: str | list[str], flag: str = "--train-files", texts: tuple[str, ...] = ("prompt",)):
        self.flag = flag
        self.files = _find_files(files, flag)
        self.columns: set[str] = set()  # of all files together
        self._groups: list[tuple[str, int]] = []  # (file, row group) ...
        self._starts: list[int] = []  # ... and the uid of its first row
        self._cache: OrderedDict[int, pa.Table] = OrderedDict()
        self._num_rows = 0
        digest = hashlib.sha256()
        for path in self.files:
            try:
                with pq.ParquetFile(path) as file:
                    metadata, schema = file.metadata, file.schema_arrow
            except (pa.ArrowException, OSError) as error:
                reason = str(error).splitlines()[0]
                raise ValueError(f"{flag} {path}: cannot be read as parquet ({reason}); give a parquet file") from error
            _check_columns(schema, path, flag, texts)
            if metadata.num_rows == 0:
                raise ValueError(f"{flag} {path}: has 0 rows; leave it out, or make it anew")
            for group in range(metadata.num_row_groups):
                if metadata.row_group(group).num_rows:
                    self._groups.append((path, group))
                    self._starts.append(self._num_rows)
                    self._num_rows += metadata.row_group(group).num_rows
            self.columns.update(schema.names)
            columns = [f"{field.name}: {field.type}" for field in schema]
            digest.update(json.dumps([os.path.basename(path), metadata.num_rows, columns]).encode())
        self._fingerprint = digest.hexdigest()[:16]

    def __len__(self) -> int:
        return self._num_rows

    def fingerprint(self) -> str:
        """16 hex digits over file names, row counts and columns (not contents): has the data changed since a save?"""
        return self._fingerprint

    def row(self, uid: int) -> dict:
        """The row of uid % len(self), as plain Python values: `step_uids` counts on from epoch to epoch.

        Raises: ValueError where the row group cannot be read, or the row has no prompt.
        """
        row = self.raw_row(uid)
        if row["prompt"] is None:
            where = f"{self.flag} {self.file_of(uid)}: row with uid {uid % len(self)}"
            raise ValueError(f"{where} has no prompt (null); fill it in, or leave the row out")
        return row

    def raw_row(self, uid: int) -> dict:
        """`row`, whatever may be null in it. Raises: ValueError as `row` does, but for a null prompt."""
        index = self._group_of(uid)
        row = self._read(index).slice(uid % len(self) - self._starts[index], 1)
        try:
            return row.to_pylist()[0]
        except (ValueError, OverflowError, pa.ArrowException) as error:  # not UTF-8, nanoseconds, year 12000
            where = f"{self.flag} {self.file_of(uid)}: row with uid {uid % len(self)} cannot be read"
            raise ValueError(f"{where} ({error}); mend it, or leave the row or its column out") from error

    def file_of(self, uid: int) -> str:
        """The path of the file that the row is in."""
        return self._groups[self._group_of(uid)][0]

    def _group_of(self, uid: int) -> int:
        return bisect.bisect_right(self._starts, uid % len(self)) - 1

    def _read(self, index: int) -> pa.Table:
        if index not in self._cache:
            path, group = self._groups[index]
            try:
                with pq.ParquetFile(path) as file:
                    table = file.read_row_group(group)
            except (pa.ArrowException, OSError) as error:
                reason = str(error).splitlines()[0]
                rule = "the file is damaged; make it anew"
                raise ValueError(f"{self.flag} {path}: row group {group} cannot be read ({reason}), {rule}") from error
            self._cache[index] = table
            while len(self._cache) > 1 and sum(table.nbytes for table in self._cache.values()) > CACHE_BYTES:
                self._cache.popitem(last=False)
        self._cache.move_to_end(index)
        return self._cache[index]


# ---- order ----


@lru_cache(maxsize=4)
def epoch_order(n: int, seed: int, epoch: int) -> np.ndarray:
    """The uids 0..n-1 in the order of this epoch (the first is 0), a pure function of the arguments; read-only.

    Shapes: [n].
    """
    # DETAIL: every epoch is a fresh permutation, because one order for all would repeat the same batches.
    order = np.random.default_rng(seed_for("epoch_order", seed, epoch)).permutation(n)
    order.flags.writeable = False  # the cache hands the same array out again
    return order


def step_uids(n: int, seed: int, step: int, prompts_per_step: int) -> list[int]:
    """The uids of step `step` (the first is 1), over all ranks; depends on no earlier call, so resuming is arithmetic.

    Shapes: [prompts_per_step]. Units: row + n * epoch.
    """
    assert step >= 1 and n >= 1, (step, n)
    # DETAIL: a batch runs on into the next epoch, because dropping or padding the last one would change how often a row
    # is seen. Such a batch may hold a row twice; the uid then differs by n, so that the two get samples of their own.
    start = (step - 1) * prompts_per_step
    slots = range(start, start + prompts_per_step)
    return [int(epoch_order(n, seed, i // n)[i % n]) + n * (i // n) for i in slots]


if __name__ == "__main__":
    from utils.make_data import main

    main(sys.argv[1:])
