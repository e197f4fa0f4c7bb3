"""Checks of flag values that mean the same in every script, made before anything loads. `flags`: values by name.

Every error is a ValueError with flag, value, rule and a value that works.
"""

import math


def flag(name: str, flags: dict) -> str:
    """`--name value`, as the user writes it."""
    return f"--{name.replace('_', '-')} {flags[name]}"


def check_flags(
    flags: dict, default: dict, positive: str, not_negative: str, idle: dict[str, tuple[str, bool]]
) -> None:
    """Ranges, and flags without effect.

    Args: positive, not_negative: names, separated by spaces. idle: flag -> (what makes it idle, whether that is so); an
        idle flag that differs from its default is an error.
    Raises: ValueError.
    """
    for name in positive.split():
        if not (flags[name] > 0 and math.isfinite(flags[name])):
            raise ValueError(f"{flag(name, flags)}: must be above 0; the default is {default[name]}")
    for name in not_negative.split():
        if not (flags[name] >= 0 and math.isfinite(flags[name])):
            raise ValueError(f"{flag(name, flags)}: must not be below 0; the default is {default[name]}")
    if not 0.01 <= flags.get("temperature", 1.0) <= 2:  # below, vLLM samples at 0.01 instead
        raise ValueError(f"{flag('temperature', flags)}: must be from 0.01 to 2, vLLM's limits; 1.0 works")
    for name, example in (("train_files", "data/gsm8k/train.parquet"), ("reward", "gsm8k")):
        if not flags.get(name, example):
            word = f"--{name.replace('_', '-')}"
            raise ValueError(f"{word}: must be given with {flag('model', flags)}; {word} {example}, for example")
    for name, (cause, is_idle) in idle.items():
        if is_idle and flags[name] != default[name]:
            raise ValueError(f"{flag(name, flags)}: has no effect with {cause}; leave one of the two out")
    if flags["resume"] == "auto" and not flags["run_dir"]:
        raise ValueError("--resume auto: needs the --run-dir to look in; --run-dir runs/NAME")


def check_divides(flags: dict, name: str, world_size: int) -> None:
    """A global batch size lies evenly over the ranks. Raises: ValueError."""
    if flags[name] % world_size:
        lower = flags[name] // world_size * world_size
        works = " or ".join(str(v) for v in (lower, lower + world_size) if v)
        raise ValueError(f"{flag(name, flags)}: must divide by the {world_size} ranks; {works} works")


def check_minibatch(flags: dict) -> None:
    """The minibatch divides the step's responses. Raises: ValueError."""
    responses, minibatch = flags["prompts_per_step"] * flags["group_size"], flags["minibatch_size"]
    if minibatch and responses % minibatch:
        near = min((v for v in range(1, responses + 1) if responses % v == 0), key=lambda v: abs(v - minibatch))
        raise ValueError(
            f"{flag('minibatch_size', flags)}: must divide the step's {responses} responses "
            f"(--prompts-per-step x --group-size); {near} works"
        )


def check_lengths(flags: dict, positions: int, sequences: int = 1) -> None:
    """Lengths over the model's positions, and over the budget that holds `sequences` of them. Raises: ValueError."""
    longest = flags["max_prompt_len"] + flags["max_response_len"]
    if longest > positions:
        raise ValueError(
            f"{flag('max_response_len', flags)}: with {flag('max_prompt_len', flags)} goes beyond the model's "
            f"{positions} positions; {positions - flags['max_prompt_len']} works"
        )
    if flags["max_tokens_per_gpu"] < sequences * longest:
        times = f"{sequences} x (--max-prompt-len + --max-response-len)"
        times = times if sequences > 1 else "--max-prompt-len + --max-response-len"
        raise ValueError(f"{flag('max_tokens_per_gpu', flags)}: must hold {times}; {sequences * longest} works")
