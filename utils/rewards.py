"""Reward functions, and how `--reward` names them. They run in the worker processes of utils/reward_pool.py.

A reward function takes `(response: str, row: dict)` and returns a float, or None for "could not judge". `--reward`
names one that is built in (`gsm8k`, `tiny`), one in a file of the user's (`path/to/file.py:function`), a reward model
(`model:path/to/folder`, see utils/scoring.py), or several with weights (`gsm8k:1.0,format.py:f:0.2`). Imports only the
standard library, so that a worker starts in no time.
"""

import importlib.util
import math
import re
import sys
import traceback
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path

# ---- rules ----

# The sign may stand before or after the currency ("-$5", "$-5"). A number with a letter, a digit group of the wrong
# length or an operator behind it ("18k", "10,00", "18/2") is not the number it starts with: better unread than misread.
# `*+` never backtracks, so that a response of a hundred thousand "$" takes no longer than another.
_NUMBER = re.compile(
    r"""[\s$€£*_`"'(\[]*+(?:\\boxed\{|\\\(|\\\$)?+[\s$]*+
    (?P<sign>[-+−]?)\\?[$€£]?
    (?P<number>[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+)?|[0-9]+(?:\.[0-9]+)?|\.[0-9]+)
    (?!\w|[.,][0-9]|[ \t]*[-−+*/=^:×÷][ \t]*\$?[0-9])""",
    re.VERBOSE,
)


def _decimal(text: str) -> Decimal | None:
    match = _NUMBER.match(text)
    if match is None:
        return None
    value = Decimal(match["number"].replace(",", ""))
    return value if match["sign"] in ("", "+") else value.copy_negate()  # copy_negate does not round, `-value` does


def gsm8k_number(response: str) -> Decimal | None:
    """The number behind the last "####" of the response, exactly; None where there is none (an extraction failure)."""
    # DETAIL: the last "####" of the whole text counts, because a response may restate its steps under earlier ones.
    # DETAIL: the number must follow the marker directly, only blanks, markup or currency between; a unit may follow
    # ("18 apples"), and "18%" is 18, because the gold answers to questions about percentages are written bare.
    _, marker, tail = response.rpartition("####")
    return _decimal(tail) if marker else None


def _truth(row: dict) -> str:
    truth = (row.get("reward_model") or {}).get("ground_truth")
    if truth is None:
        raise ValueError("the row has no reward_model.ground_truth to compare with")
    return str(truth)


def gsm8k(response: str, row: dict) -> float:
    """1.0 where the number behind the last "####" equals `reward_model.ground_truth`, else (or without one) 0.0."""
    truth = _truth(row)
    gold = _decimal(truth)
    if gold is None:
        raise ValueError(f"ground_truth {truth!r} is not a number")
    # DETAIL: answers are compared as numbers, because "18.0", "$18" and "1,000" are right answers that string equality
    # rejects.
    return float(gsm8k_number(response) == gold)


def tiny(response: str, row: dict) -> float:
    """1.0 where the response is the ground truth, but for blanks around either, else 0.0."""
    return float(response.strip() == _truth(row).strip())


REWARDS: dict[str, Callable[[str, dict], float | None]] = {"gsm8k": gsm8k, "tiny": tiny}
_FORMS = f"one of {', '.join(REWARDS)}, path/to/file.py:function, or model:path/to/reward_model"


# ---- specs ----


def parse_rewards(spec: str, flag: str = "--reward") -> list[tuple[str, float]]:
    """(name, weight) of each part of a `--reward` value; a weight that is not given is 1.

    Args: flag: the one that an error names.

    Raises: ValueError on an empty part, a weight that is no finite number, or a form that is not known.
    """
    rewards = []
    for part in (part.strip() for part in spec.split(",")):
        path, dot_py, rest = ("", "model:", part[6:]) if part.startswith("model:") else part.rpartition(".py:")
        name, _, weight = rest.partition(":")
        if not name:
            raise ValueError(f"{flag} {spec!r}: a part without a name; use {_FORMS}, separated by commas")
        if not dot_py and name not in REWARDS:
            raise ValueError(f"{flag} {part}: unknown reward; use {_FORMS}")
        try:
            value = float(weight) if weight else 1.0
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            raise ValueError(f"{flag} {part}: the weight must be a finite number; {path}{dot_py}{name}:1.0 works")
        rewards.append((path + dot_py + name, value))
    return rewards


def load_reward(spec: str, flag: str = "--reward") -> Callable[[str, dict], float | None]:
    """The reward function that `spec` names: "gsm8k", "tiny", or "path/to/file.py:function" (runs that file).

    Raises: ValueError where the name is unknown, or the file is missing, does not run, or lacks such a function.
    """
    if spec in REWARDS:
        return REWARDS[spec]
    path, _, name = spec.rpartition(":")
    file = Path(path).expanduser().resolve()
    if not path.endswith(".py"):
        raise ValueError(f"{flag} {spec}: unknown reward; use {_FORMS}")
    if not file.is_file():
        raise ValueError(f"{flag} {spec}: there is no file {file}; use {_FORMS}")
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))  # the file may import its neighbours; last, so that it shadows nothing
    module_spec = importlib.util.spec_from_file_location(f"reward_file_{file.stem}", file)
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module_spec.name] = module  # dataclasses and pickle look a module up by its name
    try:
        module_spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # anything at all can be wrong with a user's file; it is named, not hidden
        rule = f"`python {file}` must run"
        raise ValueError(f"{flag} {spec}: the file does not load: {describe(error)}; {rule}") from error
    function = getattr(module, name, None)
    if not callable(function):
        found = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        wrong = "has no function" if function is None else "has something that cannot be called under the name"
        raise ValueError(f"{flag} {spec}: {file} {wrong} {name}; it has {', '.join(found) or 'none'}")
    return function


def describe(error: BaseException) -> str:
    """Type, message, file and line of an exception, on one line."""
    text = " ".join("".join(traceback.format_exception_only(error)).split())[:500]
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith("<frozen")]
    return f"{text} ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else text
