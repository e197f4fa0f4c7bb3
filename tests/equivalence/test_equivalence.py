"""Every loss on every layout against a plain loop on one device (plain.py): the same figures, gradients, weights.

The scripts train on recorded rollouts, so no row waits for an engine; worker.py runs the rows of a layout in one go.
Rollouts are made ragged on purpose: responses of one token, a group of equal scores, responses without a score.
"""

import json
import typing

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from conftest import ROOT, torchrun
from plain import logprobs, scalars, train_policy, train_reward_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

import grpo_fsdp
import ppo_fsdp
import reward_model_bt
from utils import tiny
from utils.data import step_uids
from utils.replay import COLUMNS

LR, T = 2e-3, 0.7
OPTIMIZER = {"lr": LR, "lr_schedule": "cosine", "warmup_steps": 1, "weight_decay": 1.0, "max_grad_norm": 1.0}
OPTIMIZER |= {"num_steps": 2, "seed": 1}
POLICY = OPTIMIZER | {
    "prompts_per_step": 8, "group_size": 4, "minibatch_size": 16, "update_epochs": 2, "temperature": T,
    "clip_low": 0.1, "clip_high": 0.3, "rollout_correction": "none", "correction_cap": 2.0, "kl_coef": 0.5,
    "max_kl": 0.0, "on_max_kl": "stop-epoch", "kl_lr_decay": 0.1,
}  # fmt: skip
GRPO = POLICY | {"scale_advantages": True, "kl_estimator": "k3"}
PPO = POLICY | {
    "critic_lr": 1e-3, "critic_warmup_steps": 0, "gamma": 0.9, "gae_lambda": 0.8, "bootstrap_truncated": True,
    "whiten_advantages": True, "dual_clip": 1.1, "value_clip": 0.05, "entropy_coef": 0.02, "kl_in": "reward",
    "kl_estimator": "k1", "kl_controller": "fixed", "kl_target": 6.0, "kl_horizon": 10000, "score_clip": 0.4,
    "missing_eos_penalty": 0.3,
}  # fmt: skip
REWARD_MODEL = OPTIMIZER | {"pairs_per_step": 8, "centring_coef": 0.01}
# Each crosses its bound: going back, at the end of step 2, to the weights after step 1, or after the critic's first.
GUARDS = {
    "stop-epoch": {"max_kl": 0.5},
    "lower-lr": {"max_kl": 0.1, "on_max_kl": "lower-lr", "kl_lr_decay": 0.5},
    "roll-back": {"on_max_kl": "roll-back", "save_every": 1},
}
LOSSES = {
    "grpo_fsdp": {
        "base": GRPO,
        "k1": GRPO | {"kl_estimator": "k1"},
        "k2": GRPO | {"kl_estimator": "k2"},
        "no kl": GRPO | {"kl_coef": 0.0},
        "one update": GRPO | {"kl_coef": 0.0, "minibatch_size": 0, "update_epochs": 1},
        "unscaled": GRPO | {"scale_advantages": False},
        "constant": GRPO | {"lr_schedule": "constant", "warmup_steps": 0, "weight_decay": 0.0},
        "token-tis": GRPO | {"rollout_correction": "token-tis", "correction_cap": 1.2},
        "seq-mask": GRPO | {"rollout_correction": "seq-mask", "correction_cap": 1.2},
        "few": GRPO | {"prompts_per_step": 4, "group_size": 2, "minibatch_size": 2, "update_epochs": 1},
        "untied": GRPO | {"model": "untied", "ref_model": "untied ref"},
        "stop-epoch": GRPO | GUARDS["stop-epoch"],
        "lower-lr": GRPO | GUARDS["lower-lr"],
        "roll-back": GRPO | GUARDS["roll-back"] | {"max_kl": 2.5, "lr_schedule": "constant", "warmup_steps": 2},
    },
    "ppo_fsdp": {
        "base": PPO,
        "adaptive": PPO | {"kl_controller": "adaptive", "kl_target": 0.001},
        "horizon": PPO | {"kl_controller": "horizon", "kl_target": 0.001, "kl_horizon": 64},
        "no kl": PPO | {"kl_coef": 0.0},
        "k1 in loss": PPO | {"kl_in": "loss", "kl_estimator": "k1"},
        "k2 in loss": PPO | {"kl_in": "loss", "kl_estimator": "k2"},
        "k3 in loss": PPO | {"kl_in": "loss", "kl_estimator": "k3"},
        "plain": PPO | {
            "whiten_advantages": False, "bootstrap_truncated": False, "dual_clip": 0.0, "value_clip": 0.0,
            "entropy_coef": 0.0, "score_clip": 0.0, "missing_eos_penalty": 0.0, "lr_schedule": "constant",
            "update_epochs": 1, "minibatch_size": 0, "gamma": 1.0, "gae_lambda": 0.95,
        },
        "reinforce": PPO | {"whiten_advantages": False, "gae_lambda": 1.0, "gamma": 1.0, "dual_clip": 0.0},
        "critic first": PPO | {"critic_warmup_steps": 1},
        "token-tis": PPO | {"rollout_correction": "token-tis", "correction_cap": 1.2},
        "seq-mask": PPO | {"rollout_correction": "seq-mask", "correction_cap": 1.2},
        "stop-epoch": PPO | GUARDS["stop-epoch"],
        "lower-lr": PPO | GUARDS["lower-lr"],
        "roll-back": PPO | GUARDS["roll-back"] | {"max_kl": 0.02, "critic_warmup_steps": 1},
        "few": PPO | {"prompts_per_step": 4, "group_size": 1, "minibatch_size": 1, "update_epochs": 1},
    },
    "reward_model_bt": {
        "base": REWARD_MODEL,
        "no centring": REWARD_MODEL | {"centring_coef": 0.0},
        "no margin": REWARD_MODEL | {"pairs": "no margin"},
        "constant": REWARD_MODEL | {"lr_schedule": "constant", "warmup_steps": 0},
        "few": REWARD_MODEL | {"pairs_per_step": 4, "pairs": "few"},
    },
}  # fmt: skip
# Flags of the systems group, which never change the numbers. Tokens of a micro-batch: all, half, an eighth, the least.
LAYOUTS = {
    "whole": {}, "halves": {"max_tokens_per_gpu": 120}, "eighths": {"max_tokens_per_gpu": 26},
    "uneven": {"max_tokens_per_gpu": 60}, "checkpointed": {"activation_checkpointing": True},
    "moments offloaded": {"offload": "optimizer"}, "offloaded": {"offload": "all", "max_tokens_per_gpu": 60},
}  # fmt: skip
COMPILED = {"compiled": {"compile": True, "max_tokens_per_gpu": 60}}
SCRIPTS = {"grpo_fsdp": grpo_fsdp, "ppo_fsdp": ppo_fsdp, "reward_model_bt": reward_model_bt}
MODELS = ("model", "ref", "critic", "untied", "untied ref")


# ---- models and data ----


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("equivalence")
    for i, name in enumerate(MODELS):
        tiny.make_model(folder / name, seed=3 + i, num_sft_steps=0, num_layers=2, tie="untied" not in name)
    file = folder / "model/generation_config.json"  # many ends, so that some of a random model's responses do end
    file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token_id": [256, *range(40, 60)]}))
    torch.manual_seed(0)
    critic = AutoModelForSequenceClassification.from_pretrained(folder / "critic", num_labels=1)
    critic.score.weight.data.normal_(0.0, 0.03)
    critic.save_pretrained(folder / "critic")
    pq.write_table(pa.table({"prompt": ["unread"] * 40}), folder / "train.parquet")
    for script in ("grpo_fsdp", "ppo_fsdp"):
        for s in LOSSES[script].values():
            make_rollouts(folder, s)
    for name, rows in (("margin", 8), ("no margin", 8), ("few", 4)):
        make_pairs(folder / f"{name}.parquet", rows, margin=name != "no margin")
    return folder


def rollouts_of(folder, s):
    return folder / f"rollouts {s['prompts_per_step']} {s['group_size']} {s.get('model', 'model')}"


def pairs_of(folder, s):
    return folder / f"{s.get('pairs', 'margin')}.parquet"


def make_rollouts(folder, s):
    """Random ids; the engine's log-probs are the model's, moved by up to 0.2 nats a token."""
    out, P, G = rollouts_of(folder, s), s["prompts_per_step"], s["group_size"]
    if out.exists():
        return
    out.mkdir()
    generator = np.random.default_rng(P)
    model = AutoModelForCausalLM.from_pretrained(folder / s.get("model", "model"), dtype=torch.float32)
    num_rows = pq.read_metadata(folder / "train.parquet").num_rows
    for step in (1, 2):
        rows = []
        for i, uid in enumerate(step_uids(num_rows, s["seed"], step, P)):
            prompt = generator.integers(0, 256, generator.integers(1, 9)).tolist()
            for sample in range(G):
                length = 1 if (i, sample) in ((0, 0), (3, 1)) else int(generator.integers(2, 13))
                score = 0.5 if i == 1 else generator.normal()
                rows.append({
                    "uid": uid, "sample": sample, "prompt_ids": prompt, "length": length, "score": score,
                    "response_ids": generator.integers(0, 256, length).tolist(),
                    "finish_reason": "length" if generator.random() < 0.4 else "stop",
                    "judged": (i, sample) not in ((2, 1), (3, 0)) or G == 1,
                })  # fmt: skip
        with torch.no_grad():
            for row, lp in zip(rows, logprobs(model, rows, T)[0], strict=True):
                shift = 0.1 * generator.choice([-1, 0, 1]) + generator.uniform(-0.2, 0.2, len(lp))
                row["logprobs"] = (lp.numpy() + shift).tolist()
        table = pa.Table.from_pylist(rows, COLUMNS).replace_schema_metadata({"temperature": repr(T)})
        pq.write_table(table, out / f"step_{step}.parquet")


def make_pairs(path, num_rows, margin):
    """Prompts of 1 to 4 letters, answers of 1 to 8."""
    generator = np.random.default_rng(7)

    def word(longest):
        return "".join(chr(97 + c) for c in generator.integers(0, 26, generator.integers(1, longest + 1)))

    rows = [{"prompt": word(4), "chosen": word(8), "rejected": word(8)} for _ in range(num_rows)]
    more = {"margin": generator.uniform(0, 1, num_rows).tolist()} if margin else {}
    pq.write_table(pa.table({k: [row[k] for row in rows] for k in rows[0]} | more), path)


# ---- both sides of the comparison ----


def settings_of(folder, script, s):
    """All of a row's flags and their values."""
    files = {"model": folder / s.get("model", "model"), "train_files": folder / "train.parquet"}
    files |= {"max_prompt_len": 8, "max_response_len": 12, "save_every": 0, "export_hf": "off"}
    files |= {"hang_timeout_s": 0.0}  # all rows of a layout are one process, which would be watched by as many threads
    if script == "reward_model_bt":
        files |= {"max_prompt_len": 4, "max_response_len": 9, "model": folder / "critic"}
        return {k: v for k, v in s.items() if k != "pairs"} | files | {"train_files": pairs_of(folder, s)}
    files |= {"replay": rollouts_of(folder, s), "reward": "tiny"}
    files |= {"ref_model": folder / s.get("ref_model", "ref")} if s["kl_coef"] else {}
    files |= {"save_every": s.get("save_every", 0)}
    return s | files | ({"critic_model": folder / "critic"} if script == "ppo_fsdp" else {})


def as_flags(script, settings):
    """On the command line; what is at its default stays away, as an idle flag is an error."""
    defaults = SCRIPTS[script].DEFAULTS
    for name, value in settings.items():
        if value != defaults[name]:
            word = name.replace("_", "-")
            yield from [f"--{'' if value else 'no-'}{word}"] if isinstance(value, bool) else [f"--{word}", str(value)]


def expected(folder, script, s, padded=True):
    """The plain loop's figures, gradients and weights."""
    critic = AutoModelForSequenceClassification.from_pretrained(folder / "critic", dtype=torch.float32)
    if script == "reward_model_bt":
        tokenizer = AutoTokenizer.from_pretrained(folder / "critic")
        end, pairs = tokenizer.eos_token_id, []
        for row in pq.read_table(pairs_of(folder, s)).to_pylist():
            ids = {
                k: tokenizer(row[k], add_special_tokens=False)["input_ids"] for k in ("prompt", "chosen", "rejected")
            }
            sides = [{"prompt_ids": ids["prompt"], "response_ids": [*ids[k], end]} for k in ("chosen", "rejected")]
            pairs.append((*sides, row.get("margin", 0.0)))
        return train_reward_model(s, pairs, critic, padded)
    load = AutoModelForCausalLM.from_pretrained
    policy = load(folder / s.get("model", "model"), dtype=torch.float32)
    reference = load(folder / s.get("ref_model", "ref"), dtype=torch.float32) if s["kl_coef"] else None
    batches = [pq.read_table(rollouts_of(folder, s) / f"step_{step}.parquet").to_pylist() for step in (1, 2)]
    return train_policy(s, batches, policy, reference, critic if script == "ppo_fsdp" else None, padded)


@pytest.fixture(scope="module")
def plain(folder):
    cache = {}

    def get(script, loss):
        if (script, loss) not in cache:
            cache[script, loss] = expected(folder, script, LOSSES[script][loss])
        return cache[script, loss]

    return get


def cases_of(ranks):
    """(script, loss, layout) of every row: each loss on one rank and two, each layout of the base loss on all three."""
    for script, losses in LOSSES.items():
        yield from ((script, "base", layout) for layout in LAYOUTS if ranks < 4 or "offloaded" not in layout)
        yield from ((script, loss, "uneven") for loss in losses if loss != "base" and (ranks < 4 or loss == "few"))


@pytest.fixture(scope="module")
def ran(folder):
    """ran(ranks, script, loss, layout): where a row's results are. The first call runs all rows of its rank count."""
    done = {}

    def get(ranks, *case):
        if ranks not in done:
            done[ranks] = {}  # should the launch fail, it is not made again, into run folders that are there
            done[ranks] = start(folder, ranks, cases_of(ranks))
        assert done[ranks], f"the launch of {ranks} ranks failed: the first test that needed it has its output"
        return done[ranks][case]

    return get


def start(folder, ranks, cases):
    """Run the cases in one torchrun; the place of each one's results."""
    outs, spec = {}, []
    for script, loss, layout in cases:
        out = outs[script, loss, layout] = folder / f"{ranks} {script} {loss} {layout}.safetensors"
        settings = settings_of(folder, script, LOSSES[script][loss]) | (LAYOUTS | COMPILED)[layout]
        flags = [*as_flags(script, settings | {"run_dir": str(out.with_suffix(""))})]
        spec.append({"script": script, "flags": flags, "out": str(out)})
    work(folder / f"{ranks} {len(spec)}.json", ranks, spec)
    return outs


def work(file, ranks, spec):
    file.write_text(json.dumps(spec))
    torchrun(ranks, ROOT / "tests/equivalence/worker.py", file, timeout=900)


def residual(mine, other):
    """Largest and mean difference of two lists of tensors."""
    far = torch.cat([(a - b).abs().double().flatten() for a, b in zip(mine, other, strict=True)])
    return far.max().item(), far.mean().item()


def agree(out, plain, updates, mean_bound=2e-5):
    """Figures, the gradient of the first optimizer step, the weights after the last: the largest and mean difference.

    Figures of step 2 come after `updates` / 2 optimizer steps, each of which magnifies rounding where gradients are
    near 0; so do the weights, at most 0.1 of the learning rate an update.
    """
    figures, gradients, weights = plain
    tensors = load_file(out)
    rows = [json.loads(line) for line in (out.with_suffix("") / "metrics.jsonl").read_text().splitlines()]
    for row, expected in zip(rows, figures, strict=True):
        assert {k: row[k] for k in expected} == {
            k: pytest.approx(
                v,
                rel=1e-9 if k.endswith("lr") else 5e-4,
                abs=0 if k.endswith("lr") else 1e-4 if k.endswith("_max") else 2e-5,
            )
            for k, v in expected.items()
        }
    for part in gradients:
        for kind, theirs in (("gradient", gradients[part]), ("weight", weights[part])):
            mine = {
                key.removeprefix(f"{kind}/{part}/"): t
                for key, t in tensors.items()
                if key.startswith(f"{kind}/{part}/")
            }
            assert mine.keys() == theirs.keys() and len(mine) > 20
            most, mean = residual(mine.values(), [theirs[name] for name in mine])
            if kind == "gradient":
                largest, usual = residual(theirs.values(), [torch.zeros(()) for _ in theirs])
                assert most < 1e-5 * largest and mean < 1e-5 * usual, (part, most / largest, mean / usual)
            else:
                assert most < 0.1 * LR * updates and mean < mean_bound * LR * updates, (part, most / LR, mean / LR)
                for name, tensor in mine.items():  # a small tensor is lost in the mean over all
                    assert residual([tensor], [theirs[name]])[1] < 1e-3 * LR * updates, (part, name)


def check(ran, plain, ranks, script, loss, layout="uneven"):
    s = LOSSES[script][loss]
    per_step = s.get("prompts_per_step", 0) * s.get("group_size", 0)
    updates = s.get("update_epochs", 1) * (per_step // s["minibatch_size"] if s.get("minibatch_size") else 1)
    # single responses have the smallest gradients, of which Adam makes the most
    agree(ran(ranks, script, loss, layout), plain(script, loss), 2 * updates, 2e-4 if loss == "few" else 2e-5)


EVERY = [(script, loss) for script in LOSSES for loss in LOSSES[script] if loss not in ("base", "few")]
KL = [("grpo_fsdp", "k1"), ("grpo_fsdp", "k2"), *(("ppo_fsdp", f"k{i} in loss") for i in (1, 2, 3))]


def micro_batches(out):
    """How many sequences (or pairs) each one holds: [rank][call][micro-batch]."""
    return json.loads(out.with_suffix(".json").read_text())


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("script, loss", [case for case in EVERY if case not in KL])
def test_every_loss(ran, plain, ranks, script, loss):
    check(ran, plain, ranks, script, loss)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("loss, steps", [("stop-epoch", {1, 2}), ("lower-lr", {1}), ("roll-back", {2})])
@pytest.mark.parametrize("script", ["grpo_fsdp", "ppo_fsdp"])
def test_the_rows_of_guards_cross_their_bound(ran, ranks, script, loss, steps):
    events = ran(ranks, script, loss, "uneven").with_suffix("") / "events.jsonl"
    rows = [json.loads(line) for line in events.read_text().splitlines()]
    assert {row["action"] for row in rows} == {loss} and {row["step"] for row in rows} == steps
    assert all(row["value"] > row["bound"] for row in rows)
    assert len({(row["step"], row["reason"]) for row in rows}) == len(rows), "written by one rank"


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("script, loss", KL)
def test_fault_03_the_kl_and_the_policy_term_have_one_denominator(ran, plain, ranks, script, loss):
    check(ran, plain, ranks, script, loss)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("layout", ["whole", "checkpointed"])
@pytest.mark.parametrize("script", LOSSES)
def test_fault_12_gradients_and_their_norm_do_not_depend_on_ranks(ran, plain, ranks, script, layout):
    check(ran, plain, ranks, script, "base", layout)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("layout", ["moments offloaded", "offloaded"])
@pytest.mark.parametrize("script", LOSSES)
def test_what_lives_on_the_host_changes_no_number(ran, plain, ranks, script, layout):
    check(ran, plain, ranks, script, "base", layout)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("layout", ["halves", "eighths", "uneven"])
@pytest.mark.parametrize("script", LOSSES)
def test_fault_01_and_fault_02_micro_batches_are_the_whole_batch(ran, plain, ranks, script, layout):
    """Not a mean of means over micro-batches of other lengths, and not divided by their number once more."""
    check(ran, plain, ranks, script, "base", layout)
    calls = [call for rank in micro_batches(ran(ranks, script, "base", layout)) for call in rank]
    if ranks == 1:
        assert {"halves": {2}, "eighths": {6, 7, 8}, "uneven": {3, 4}}[layout] >= {len(call) for call in calls}
        assert layout != "uneven" or any(len(set(call)) > 1 for call in calls), "all hold as many sequences"


@pytest.mark.parametrize("ranks", [2, 4])
def test_fault_10_advantages_are_whitened_over_all_ranks(ran, plain, ranks):
    assert LOSSES["ppo_fsdp"]["base"]["whiten_advantages"]
    check(ran, plain, ranks, "ppo_fsdp", "base", "whole")


@pytest.mark.parametrize("script", LOSSES)
def test_fault_11_and_fault_36_ranks_that_hold_little_or_nothing(ran, plain, script):
    """Of four ranks one holds a response, the others none: they fill up with passes that weigh nothing."""
    check(ran, plain, 4, script, "few")
    held = micro_batches(ran(4, script, "few", "uneven"))
    for call in zip(*held, strict=True):
        assert len({len(rank) for rank in call}) == 1, "ranks that make other numbers of passes wait for each other"
    if script != "reward_model_bt":
        assert any(rank == [0] for call in zip(*held, strict=True) for rank in call)


@pytest.mark.parametrize("script", LOSSES)
def test_packed_is_padded_is_one_by_one(ran, folder, plain, script):
    """The scripts pack; the plain loop's two ways of not doing so give the same."""
    alone = expected(folder, script, LOSSES[script]["base"], padded=False)
    agree(ran(1, script, "base", "whole"), alone, updates=8)


def test_compiled(folder, plain):
    for script, out in zip(
        LOSSES, start(folder, 1, [(script, "base", "compiled") for script in LOSSES]).values(), strict=True
    ):
        agree(out, plain(script, "base"), updates=8)


def dense_by_row(text, row):
    """The rule of tests/dense_reward.py."""
    return (sum(ord(c) % 7 for c in text) / 10 + len(text) / 20) * (1 + int(row["reward_model"]["ground_truth"]) % 10)


@pytest.mark.parametrize("script, ranks, tp", [("grpo_fsdp", 2, 2), ("ppo_fsdp", 2, 2)])
def test_with_the_engine(folder, script, ranks, tp):
    """Two steps whose responses vLLM samples from the weights so far, paid by a rule and (PPO) a reward model too."""
    tiny.make_data(folder / "sums")
    rule, s = f"{ROOT}/tests/dense_reward.py:dense_by_row", LOSSES[script]["base"]
    out = folder / f"online {script}.safetensors"
    settings = settings_of(folder, script, s) | {
        "train_files": folder / "sums/train.parquet", "max_prompt_len": 16, "record": folder / f"record {script}",
        "reward": f"{rule}:2,model:{folder / 'critic'}:3" if script == "ppo_fsdp" else rule, "kv_cache_gib": 0.125,
        "max_num_seqs": 64, "tensor_parallel_size": tp, "run_dir": out.with_suffix(""), "replay": "",
    }  # fmt: skip
    work(folder / "online.json", ranks, [{"script": script, "flags": [*as_flags(script, settings)], "out": str(out)}])

    load, data = AutoModelForCausalLM.from_pretrained, pq.read_table(folder / "sums/train.parquet").to_pylist()
    batches = [pq.read_table(folder / f"record {script}/step_{step}.parquet").to_pylist() for step in (1, 2)]
    tokenizer, critic = AutoTokenizer.from_pretrained(folder / "model"), None
    rows = [row for batch in batches for row in batch]
    assert {row["finish_reason"] for row in rows} == {"stop", "length"}
    texts = [tokenizer.decode(row["response_ids"], skip_special_tokens=True) for row in rows]
    scores = [dense_by_row(text, data[row["uid"]]) for text, row in zip(texts, rows, strict=True)]
    if script == "ppo_fsdp":
        critic = AutoModelForSequenceClassification.from_pretrained(folder / "critic", dtype=torch.float32)
        with torch.no_grad():
            scores = [2 * a + 3 * b.item() for a, b in zip(scores, scalars(critic, rows)[1], strict=True)]
    assert [row["score"] for row in rows] == pytest.approx(scores, rel=1e-5, abs=1e-5)
    plain = train_policy(s, batches, load(folder / "model"), load(folder / "ref"), critic)
    agree(out, plain, updates=8)
    # what vLLM sampled from was the trainer's policy, before the first update and after it
    assert max(row["rollout/logprob_diff_max"] for row in plain[0]) < 1e-4


def test_every_choice_that_changes_a_loss_has_a_row():
    for name, script in SCRIPTS.items():
        for flag, kind in typing.get_type_hints(script.Args).items():
            if typing.get_origin(kind) is typing.Literal and flag not in ("export_hf", "dtype", "sleep", "overlong"):
                rows = (
                    [script.DEFAULTS | row for row in LAYOUTS.values()] if flag == "offload" else LOSSES[name].values()
                )
                assert {row[flag] for row in rows} == set(typing.get_args(kind)), f"{name} --{flag}"
