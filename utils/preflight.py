"""Checks of flag values, made before anything loads. `flags`: values by name, those that the script has.

Every error is a ValueError with flag, value, rule and a value that works.
"""

import math


def flag(name: str, flags: dict) -> str:
    """`--name value`, as the user writes it."""
    word, value = name.replace("_", "-"), flags[name]
    return f"--{word} {value}" if not isinstance(value, bool) else f"--{word}" if value else f"--no-{word}"


POSITIVE = (  # names in any script
    "num_epochs prompts_per_step pairs_per_step group_size max_prompt_len max_response_len max_num_seqs "
    "reward_workers reward_timeout_s update_epochs max_grad_norm max_tokens_per_gpu correction_cap kl_target "
    "kl_horizon kl_lr_decay"
)
NOT_NEGATIVE = (
    "num_steps save_every keep_checkpoints eval_every minibatch_size lr critic_lr warmup_steps critic_warmup_steps "
    "weight_decay clip_low clip_high dual_clip value_clip entropy_coef kl_coef centring_coef score_clip "
    "missing_eos_penalty verify_sync hang_timeout_s max_kl max_reward_std grad_norm_bound min_entropy "
    "max_truncated_frac kv_cache_gib"
)


def check_flags(flags: dict, default: dict, idle: list[tuple[str, bool, str]]) -> None:
    """Ranges, and flags without effect.

    Args: idle: (what makes flags idle, whether that is so, their names); an idle flag that differs from its default is
        an error.
    Raises: ValueError.
    """
    for name in (n for n in POSITIVE.split() if n in flags):
        if not (flags[name] > 0 and math.isfinite(flags[name])):
            raise ValueError(f"{flag(name, flags)}: must be above 0; the default is {default[name]}")
    for name in (n for n in NOT_NEGATIVE.split() if n in flags):
        if not (flags[name] >= 0 and math.isfinite(flags[name])):
            raise ValueError(f"{flag(name, flags)}: must not be below 0; the default is {default[name]}")
    if not 0.01 <= flags.get("temperature", 1.0) <= 2:  # below, vLLM samples at 0.01 instead
        raise ValueError(f"{flag('temperature', flags)}: must be from 0.01 to 2, vLLM's limits; 1.0 works")
    for name, example in (("train_files", "data/train.parquet"), ("reward", "gsm8k")):
        if not flags.get(name, example):
            word = f"--{name.replace('_', '-')}"
            raise ValueError(f"{word}: must be given with {flag('model', flags)}; {word} {example}, for example")
    everywhere = [
        ("--num-steps above 0", flags["num_steps"] > 0, "num_epochs"),
        ("--save-every 0", flags["save_every"] == 0, "keep_checkpoints checksums"),
        ("--save-every 0", flags["save_every"] == 0 and flags["export_hf"] == "every", "export_hf"),
        ("no --val-files", not flags["val_files"], "eval_every eval_reward"),
        ("--eval-every 0", flags["eval_every"] == 0, "eval_reward"),
        ("--rollout-correction none", flags.get("rollout_correction") == "none", "correction_cap"),
        ("--max-kl 0", flags.get("max_kl") == 0, "on_max_kl kl_lr_decay"),
        (f"--on-max-kl {flags.get('on_max_kl')}", flags.get("on_max_kl") != "lower-lr", "kl_lr_decay"),
        ("--replay, which makes no rollouts", bool(flags.get("replay")), "record"),
    ]
    for cause, is_idle, names in everywhere + idle:
        for name in names.split() if is_idle else []:
            if flags.get(name, default.get(name)) != default.get(name):
                raise ValueError(f"{flag(name, flags)}: has no effect with {cause}; leave it out")
    if flags["resume"] == "auto" and not flags["run_dir"]:
        raise ValueError("--resume auto: needs the --run-dir to look in; --run-dir runs/NAME")
    for name in (n for n in ("gamma", "gae_lambda") if n in flags):
        if not 0 <= flags[name] <= 1:
            raise ValueError(f"{flag(name, flags)}: must be from 0 to 1; {default[name]} works")
    if 0 < flags.get("dual_clip", 0.0) <= 1:
        raise ValueError(f"{flag('dual_clip', flags)}: must be above 1, or 0 for no bound; 3.0 works")
    if flags.get("kl_controller") == "horizon":
        responses = flags["prompts_per_step"] * flags["group_size"]
        if flags["kl_horizon"] < responses:
            rule = f"must be at least the step's {responses} responses; 10000 works"
            raise ValueError(f"{flag('kl_horizon', flags)}: {rule}")


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


def check_guards(flags: dict) -> None:
    """Bounds that cannot be crossed, and actions without what they take. Raises: ValueError."""
    for name, works in (("kl_lr_decay", 0.1), ("max_truncated_frac", 0.5)):
        if flags[name] >= 1:
            raise ValueError(f"{flag(name, flags)}: is a share, and must be below 1; {works} works")
    if flags["on_max_kl"] == "roll-back" and flags["save_every"] == 0:
        raise ValueError("--on-max-kl roll-back: needs checkpoints, and --save-every is 0; --save-every 50 works")
    responses = flags["prompts_per_step"] * flags["group_size"]
    if flags["max_kl"] and flags["update_epochs"] == 1 and flags["minibatch_size"] in (0, responses):
        raise ValueError(
            f"{flag('max_kl', flags)}: has no effect with one optimizer step per batch, before which the KL to the "
            "policy that sampled it is 0; --update-epochs 2 works, or a smaller --minibatch-size"
        )


def check_lengths(flags: dict, positions: int, sequences: int = 1) -> None:
    """Lengths over the model's positions, and over the budget that holds `sequences` of them. Raises: ValueError."""
    longest = flags["max_prompt_len"] + flags["max_response_len"]
    if longest > positions:
        left = positions - flags["max_prompt_len"]
        works = f"{left} works" if left > 0 else f"--max-prompt-len {positions // 2} leaves room for a response"
        raise ValueError(
            f"{flag('max_response_len', flags)}: with {flag('max_prompt_len', flags)} goes beyond the model's "
            f"{positions} positions; {works}"
        )
    if flags["max_tokens_per_gpu"] < sequences * longest:
        times = f"{sequences} x (--max-prompt-len + --max-response-len)"
        times = times if sequences > 1 else "--max-prompt-len + --max-response-len"
        raise ValueError(f"{flag('max_tokens_per_gpu', flags)}: must hold {times}; {sequences * longest} works")
