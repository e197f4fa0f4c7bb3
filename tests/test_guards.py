"""Guards: what is over its bound, what then happens to the run, and what is left of a step that is not finite."""

import json
import math
import re
import sys
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from conftest import ROOT, run, torchrun
from safetensors.torch import load_file, save_file
from test_golden import COMMON, GOLDEN
from test_golden import SCRIPTS as FLAGS
from test_ppo_runs import state_of
from test_runs import rows, weights

from utils import tiny
from utils.dist import seed_for
from utils.guards import check_finite, crossed, mean_over_ranks, note
from utils.jsonl import append_jsonl, read_jsonl
from utils.optim import optimizer_step
from utils.tiny_pairs import make_pairs

SCRIPTS = ["grpo_fsdp", "ppo_fsdp"]
TOUCHY = ["--max-kl", 1e-9]  # below what any optimizer step after the batch's first sees, above rounding
BOUNDS = {
    "max_reward_std": ("reward/score_std", 1e-6), "grad_norm_bound": ("optim/grad_norm", 1e-6),
    "min_entropy": ("policy/entropy", 100.0), "max_truncated_frac": ("rollout/truncated_frac", 1e-6),
}  # fmt: skip
ALL_BOUNDS = [f"--{name.replace('_', '-')}={bound}" for name, (_, bound) in BOUNDS.items()]
# crossed in steps 6 and 7, not in 8
BACK = ["--max-kl", 0.0255, "--on-max-kl", "roll-back", "--save-every", 2, "--warmup-steps", 6]
LOWER = [*TOUCHY, "--on-max-kl", "lower-lr", "--kl-lr-decay", 0.5, "--save-every", 1]


# ---- by hand ----


def test_what_is_beyond_its_bound():
    figures = {"reward/score_std": 2.0, "optim/grad_norm": 3.0, "policy/entropy": 0.5, "rollout/truncated_frac": 0.25}
    at = {"max_reward_std": 2.0, "grad_norm_bound": 3.0, "min_entropy": 0.5, "max_truncated_frac": 0.25}
    assert list(crossed(figures, at)) == []  # at the bound is not beyond it
    beyond = {"max_reward_std": 1.9, "grad_norm_bound": 2.9, "min_entropy": 0.6, "max_truncated_frac": 0.2}
    assert [event[:5] for event in crossed(figures, beyond)] == [
        ("max_reward_std", "reward/score_std", 2.0, 1.9, "none"),
        ("grad_norm_bound", "optim/grad_norm", 3.0, 2.9, "none"),
        ("min_entropy", "policy/entropy", 0.5, 0.6, "none"),
        ("max_truncated_frac", "rollout/truncated_frac", 0.25, 0.2, "none"),
    ]
    assert [event[5] for event in crossed(figures, beyond)][2] == "policy/entropy 0.5 is below --min-entropy 0.6"
    assert list(crossed(figures, dict.fromkeys(beyond, 0.0))) == []  # 0 is no bound
    assert list(crossed({}, beyond)) == []  # a step that trained the critic alone has no entropy


def test_the_mean_is_over_tokens_of_all_micro_batches(process_group):
    seen = []
    note(seen, [0, 2], kl=torch.tensor([[0.5, 0.25], [1.0, 0.0]], requires_grad=True))
    note(seen, [1], other=torch.tensor([8.0]))
    note(seen, [1], kl=torch.tensor([[0.25, 0.0]]))
    assert not seen[0][1]["kl"].requires_grad
    assert mean_over_ranks(seen, "kl", 4) == 0.5
    assert mean_over_ranks([], "kl", 4) == 0.0


def test_an_optimizer_step_that_is_left_out_moves_nothing_and_leaves_no_gradient(process_group):
    class Gradient(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = torch.nn.Parameter(torch.distributed.tensor.distribute_tensor(torch.ones(2), process_group))

    model, norms = Gradient(), []
    parts = {"policy": (model, torch.optim.AdamW(model.parameters(), weight_decay=0.0))}
    for apply, expected in ((False, 1.0), (True, 0.5)):
        (model.w.full_tensor() * torch.tensor([3.0, 4.0])).sum().backward()
        assert optimizer_step(parts, {"policy": 0.5}, 1.0, norms.append, apply)["policy"] == 5.0
        assert model.w.full_tensor().tolist() == pytest.approx([expected] * 2) and model.w.grad is None
    assert norms == [{"policy": torch.tensor(5.0)}] * 2


def strict(path):
    """The rows of a file, which holds JSON and nothing that only Python reads."""
    refuse = {"parse_constant": lambda word: pytest.fail(f"{word} is no JSON")}
    return [json.loads(line, **refuse) for line in path.read_text().splitlines()]


def test_floats_that_are_not_finite_are_null_at_any_depth(tmp_path):
    append_jsonl(tmp_path / "x.jsonl", {"a": math.nan, "b": [1.0, [math.inf, 2]], "c": {"d": -math.inf}, "e": "nan"})
    assert strict(tmp_path / "x.jsonl") == [{"a": None, "b": [1.0, [None, 2]], "c": {"d": None}, "e": "nan"}]


@pytest.mark.parametrize("case", ["finite", "row", "padding", "gradient"])
def test_what_is_dumped(process_group, tmp_path, case):
    rollouts = [SimpleNamespace(uid=9, sample=i, prompt_ids=[1], response_ids=[2] * n, logprobs=[-1.0] * n)
                for i, n in enumerate((2, 1, 2))]  # fmt: skip
    loss = torch.tensor([[0.5, 0.0], [0.25, 1.0]])
    loss[(1, 0) if case == "row" else (0, 1)] = math.nan if case in ("row", "padding") else 2.0
    seen, batch = [], {"score": torch.tensor([0.0, 1.0, 2.0])}
    note(seen, [1, 2], loss=loss, new_logprobs=-loss)  # row 1 has one token: its second is padding
    norm = torch.tensor(math.inf if case in ("row", "gradient") else 1.0)  # a loss alone is enough
    path = tmp_path / "run/nonfinite_step3_rank0.jsonl"
    if case == "finite":
        check_finite(tmp_path / "run", 3, rollouts, seen, batch, {"policy": norm})
        return
    (tmp_path / "run").mkdir()
    path.write_text("of an earlier run\n")
    with pytest.raises(SystemExit) as ending:
        check_finite(tmp_path / "run", 3, rollouts, seen, batch, {"policy": norm})
    line = f"error: step 3: not finite: loss {'3.75' if case == 'gradient' else 'nan'}, policy gradient norm {norm:g}, "
    assert str(ending.value).startswith(line), ending.value
    event = strict(tmp_path / "run/events.jsonl")
    assert [(e["step"], e["event"], e["value"], e["action"]) for e in event] == [(3, "nonfinite", None, "stop")]
    row = {"uid": 9, "sample": 2, "prompt_ids": [1], "response_ids": [2, 2], "engine_logprobs": [-1.0, -1.0]}
    row |= {"score": 2.0, "loss": [0.25, 1.0], "new_logprobs": [-0.25, -1.0], "nonfinite": {}}
    if case == "row":
        assert "from rank(s) 0; see " in str(ending.value) and str(path) in str(ending.value)
        bad = {"loss": [None, 1.0], "new_logprobs": [None, -1.0], "nonfinite": {"loss": "nan", "new_logprobs": "nan"}}
        assert strict(path) == [row | bad]
    else:
        assert "of no single row's loss; all rows of rank(s) 0 are dumped" in str(ending.value)
        assert [r["sample"] for r in strict(path)] == [1, 2] and strict(path)[1] == row


# ---- runs on recorded rollouts ----


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("guards")
    tiny.make_model(folder / "model", seed=11, num_sft_steps=0)
    tiny.make_data(folder / "data")
    make_pairs(folder / "data")
    tiny.make_model(folder / "broken", seed=11, num_sft_steps=0)
    tensors = load_file(folder / "broken/model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = math.nan
    save_file(tensors, folder / "broken/model.safetensors", metadata={"format": "pt"})
    table = pq.read_table(GOLDEN / "rollouts/step_1.parquet")
    responses = table.to_pylist()
    responses[12]["score"] = 1e308  # of the second of two ranks; more than a float32 holds
    (folder / "extreme").mkdir()
    pq.write_table(pa.Table.from_pylist(responses, table.schema), folder / "extreme/step_1.parquet")
    return folder


def flags(folder, script, name, steps, *more):
    policy = script != "reward_model_bt"
    data = folder / f"data/{'train' if policy else 'train_pairs'}.parquet"
    files = ["--run-dir", folder / name, "--model", folder / "model", "--train-files", data]
    files += ["--replay", GOLDEN / "rollouts"] if policy else []
    return [str(f) for f in (*files, *COMMON, *FLAGS[script], "--export-hf", "last", "--num-steps", steps, *more)]


def play(folder, ranks, cases):
    """How each case ended on each rank, and what was printed: all in one process a rank."""
    file = folder / f"cases_{ranks}_{len(cases)}.json"
    file.write_text(json.dumps([[script, flags(folder, script, *case)] for script, *case in cases]))
    command = [ROOT / "tests/workers/runs.py", file]
    result = torchrun(ranks, *command) if ranks > 1 else run([sys.executable, *command], OMP_NUM_THREADS="1")
    assert result.returncode == 0, result.stderr[-4000:]
    return json.loads(result.stdout.splitlines()[-1]), result.stdout


@pytest.fixture(scope="module")
def ran(folder):
    cases, back = [], ["--on-max-kl", "roll-back"]
    for script in SCRIPTS:
        first = folder / f"lowered {script}/checkpoints/step_1"
        cases += [
            (script, f"stopped {script}", 2, *TOUCHY, "--save-every", 1, *ALL_BOUNDS),
            (script, f"lowered {script}", 3, *LOWER),
            (script, f"lowered resumed {script}", 3, *LOWER, "--resume", first),
            (script, f"back {script}", 6, *BACK),
            (script, f"back straight {script}", 8, *BACK),
            (script, f"back {script}", 8, *BACK, "--resume", "auto"),
        ]
    elsewhere = ["--resume", folder / "back grpo_fsdp/checkpoints/step_4", "--save-every", 50]
    cases += [
        ("grpo_fsdp", "back elsewhere", 6, *BACK, *elsewhere),
        ("ppo_fsdp", "warm", 4, *TOUCHY, *back, "--critic-warmup-steps", 2, "--save-every", 2),
        ("ppo_fsdp", "nowhere", 2, *TOUCHY, *back, "--save-every", 9),
        ("reward_model_bt", "pairs", 2, "--model", folder / "broken"),
    ]
    endings, printed = play(folder, 1, cases)
    return {case[1]: ending[0] for case, ending in zip(cases, endings, strict=True)}, printed


def events(run_dir, name="max_kl"):
    return [e for e in strict(run_dir / "events.jsonl") if e["event"] == name]


@pytest.mark.parametrize("script", SCRIPTS)
def test_stop_epoch_makes_the_optimizer_steps_up_to_the_one_that_crosses(folder, ran, tmp_path, script):
    """Of the four of a batch the first, before which nothing has moved."""
    run_dir = folder / f"stopped {script}"
    assert ran[0][run_dir.name] == ""
    found = events(run_dir)
    assert [e["step"] for e in found] == [1, 2] and all("before optimizer step 2" in e["reason"] for e in found)
    assert all(e["key"] == "policy/approx_kl" and e["value"] > e["bound"] == 1e-9 for e in found)
    state = state_of(run_dir / "checkpoints/step_2", tmp_path)
    made = {name.split(".")[1]: tensor.item() for name, tensor in state.items() if name.endswith(".step")}
    assert made == ({"policy": 2} if script == "grpo_fsdp" else {"policy": 2, "critic": 2})
    # the figures are of both optimizer steps that were looked at; the first has no KL
    assert rows(run_dir)[0]["policy/approx_kl"] == pytest.approx(found[0]["value"] / 2, rel=0.2)
    assert f"{run_dir.name}: step 1: max_kl: {found[0]['reason']}; stop-epoch\n" in ran[1]


@pytest.mark.parametrize("script", SCRIPTS)
def test_bounds_that_only_raise_an_event(folder, ran, script):
    run_dir = folder / f"stopped {script}"
    for name, (key, bound) in BOUNDS.items():
        found = events(run_dir, name)
        assert [e["step"] for e in found] == [1, 2] and all(e["key"] == key and e["bound"] == bound for e in found)
        assert [e["value"] for e in found] == [row[key] for row in rows(run_dir)] and found[0]["action"] == "none"
        assert f"{run_dir.name}: step 1: {name}: {found[0]['reason']}; none\n" in ran[1]


@pytest.mark.parametrize("script", SCRIPTS)
def test_lowered_rates_stay_and_come_back_on_resume(folder, ran, script):
    straight, resumed = folder / f"lowered {script}", folder / f"lowered resumed {script}"
    assert ran[0][straight.name] == ran[0][resumed.name] == ""
    assert [e["step"] for e in events(straight)] == [1] * 3 + [2] * 3 + [3] * 3  # not of a batch's first optimizer step
    for step in (1, 2, 3):
        state = json.loads((straight / f"checkpoints/step_{step}/state.json").read_text())["state"]
        assert state["lr_factor"] == 0.5 ** (3 * step)
        for key in ("optim/lr", "optim/critic_lr")[: 1 + (script == "ppo_fsdp")]:
            mean = 3e-4 * 0.5 ** (3 * (step - 1)) * (1 + 1 + 0.5 + 0.25) / 4  # of the rates that it was trained at
            assert rows(straight)[step - 1][key] == pytest.approx(mean, rel=1e-12)
    for mine, other in zip(rows(resumed), rows(straight)[1:], strict=True):
        same = [{k: v for k, v in row.items() if not k.startswith(("time/", "perf/"))} for row in (mine, other)]
        assert same[0] == same[1]
    assert events(resumed) == [e for e in events(straight) if e["step"] > 1]
    assert all(np.array_equal(weights(resumed)[k], v) for k, v in weights(straight).items())


def test_a_lower_rate_is_what_the_later_optimizer_steps_take(folder, ran):
    """Of twelve optimizer steps two are at the whole rate, and each of the others at half the one before it."""
    last = weights(folder / "lowered grpo_fsdp")
    start = load_file(folder / "model/model.safetensors")
    moved = max(np.abs(last[k] - v.numpy()).max() for k, v in start.items())
    assert moved <= 3e-4 * 3 * 1.05  # Adam moves a weight by a rate or less


@pytest.mark.parametrize("script", SCRIPTS)
def test_roll_back_is_the_newest_checkpoint_to_the_bit(folder, ran, tmp_path, script):
    """Weights and moments of every part and the KL coefficient; in memory as after a resume."""
    run_dir, straight = folder / f"back {script}", folder / f"back straight {script}"
    assert ran[0][run_dir.name] == ran[0][straight.name] == ""
    assert [e["step"] for e in events(run_dir)] == [e["step"] for e in events(straight)] == [6, 7]
    before, after = (state_of(run_dir / f"checkpoints/step_{step}", tmp_path) for step in (4, 6))
    assert before.keys() == after.keys() and len(before) > 50
    assert all(torch.equal(after[k], v) for k, v in before.items())
    states = [json.loads((run_dir / f"checkpoints/step_{step}/state.json").read_text())["state"] for step in (4, 6)]
    assert states[0] == states[1]
    if script == "ppo_fsdp":
        coefs = {row["step"]: row["policy/kl_coef"] for row in rows(straight)}
        assert coefs[5] == coefs[7] == coefs[8] == states[0]["kl_coef"] != coefs[6]  # what each step was trained with
    assert [row["step"] for row in rows(run_dir)] == list(range(1, 9))
    moved = [np.array_equal(weights(run_dir)[k], v) for k, v in weights(straight).items()]
    assert all(moved)  # step 8, trained after going back in memory, or from what was saved after that
    assert any(not torch.equal(v, before[k]) for k, v in state_of(run_dir / "checkpoints/step_8", tmp_path).items())


def test_roll_back_before_the_first_save_of_a_resumed_run_is_where_it_came_from(folder, ran, tmp_path):
    assert ran[0]["back elsewhere"] == "" and [e["step"] for e in events(folder / "back elsewhere")] == [6]
    names = "back straight grpo_fsdp/checkpoints/step_4", "back elsewhere/checkpoints/step_6"
    before, after = (state_of(folder / name, tmp_path) for name in names)
    assert all(torch.equal(after[k], v) for k, v in before.items())


def test_roll_back_in_the_middle_of_a_batch_leaves_the_rest_out(folder, ran, tmp_path):
    """Every step after the critic's two crosses at its second optimizer step of four; the critic goes back too."""
    assert ran[0]["warm"] == ""
    assert [(e["step"], e["reason"][-16:]) for e in events(folder / "warm")] == [
        (s, "optimizer step 2") for s in (3, 4)
    ]
    before, after = (state_of(folder / f"warm/checkpoints/step_{step}", tmp_path) for step in (2, 4))
    assert all(torch.equal(after[k], v) for k, v in before.items())


def test_roll_back_without_a_checkpoint_ends_the_run(folder, ran):
    line = r"error: --on-max-kl roll-back: .*nowhere holds no whole checkpoint yet at step 1; a smaller --save-every"
    assert re.match(line, ran[0]["nowhere"]), ran[0]["nowhere"]


# ---- numbers that are not finite ----


def test_a_reward_model_that_is_not_finite_stops_with_its_pairs(folder, ran):
    assert "step 1: not finite: loss nan, reward_model gradient norm nan, from rank(s) 0; see" in ran[0]["pairs"]
    dumped = strict(folder / "pairs/nonfinite_step1_rank0.jsonl")
    assert len(dumped) == 16 and dumped[0]["nonfinite"].keys() == {"chosen", "rejected", "loss"}
    assert {len(row["pair"]) for row in dumped} == {2} and dumped[0]["pair"][0]["response_ids"]


def test_one_response_of_one_of_two_ranks(folder):
    """As a user runs it: both ranks end, with one line; only the rank that holds the response leaves its rows."""
    more = ["--replay", folder / "extreme", "--no-scale-advantages", "--save-every", 1]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2]
    command = [*launcher, ROOT / "grpo_fsdp.py", *flags(folder, "grpo_fsdp", "extreme run", 1, *more)]
    result = run(command, timeout=120, OMP_NUM_THREADS="1")
    assert result.returncode != 0
    lines = re.findall("error: .*", result.stderr)
    path = folder / "extreme run/nonfinite_step1_rank1.jsonl"
    assert len(lines) == 1, result.stderr[-3000:]
    assert re.match(
        r"error: step 1: not finite: loss (nan|-?inf), policy gradient norm nan, from rank\(s\) 1; ", lines[0]
    )
    assert f"see {path}; nothing of it was saved" in lines[0]
    assert [p.name for p in (folder / "extreme run").glob("nonfinite*")] == [path.name]
    # of the group that the score is in, those that the first minibatch with any of them holds
    order = np.random.default_rng(seed_for("minibatch", 1, 1, 0)).permutation(16).reshape(2, 8).tolist()
    held = next(sorted({*part} & {12, 13, 14, 15}) for part in order if {*part} & {12, 13, 14, 15})
    recorded, dumped = pq.read_table(folder / "extreme/step_1.parquet").to_pylist(), strict(path)
    assert [(row["uid"], row["sample"]) for row in dumped] == [
        (recorded[i]["uid"], recorded[i]["sample"]) for i in held
    ]
    for row, i in zip(dumped, held, strict=True):
        for name in ("prompt_ids", "response_ids", "score", "finish_reason"):
            assert row[name] == recorded[i][name], name
        assert row["engine_logprobs"] == recorded[i]["logprobs"] and row["advantage"] is None
        assert row["new_logprobs"] == pytest.approx(row["old_logprobs"], abs=1e-4)
        assert len(row["loss"]) == len(row["response_ids"]) and row["loss"][0] is None
        assert row["nonfinite"]["advantage"] == ("inf" if i == 12 else "-inf")
    assert not (folder / "extreme run/checkpoints").exists() and not read_jsonl(folder / "extreme run/metrics.jsonl")
    assert events(folder / "extreme run", "nonfinite")[0]["step"] == 1


def test_two_ranks_end_together(folder):
    """A weight that is not a number: every row of both; no checkpoint to go back to."""
    cases = [("ppo_fsdp", "broken run", 1, "--model", folder / "broken")]
    cases += [("grpo_fsdp", "nowhere 2", 2, *TOUCHY, "--on-max-kl", "roll-back", "--save-every", 9)]
    endings, _ = play(folder, 2, cases)
    assert [ranks[1] for ranks in endings] == ["1", "1"]
    assert "from rank(s) 0, 1; see " in endings[0][0] and "rank0.jsonl and the others" in endings[0][0]
    assert "holds no whole checkpoint yet at step 1" in endings[1][0]
    dumped = [strict(folder / f"broken run/nonfinite_step1_rank{rank}.jsonl") for rank in (0, 1)]
    order = np.random.default_rng(seed_for("minibatch", 1, 1, 0)).permutation(16)[:8]
    assert [len(share) for share in dumped] == [sum(order < 8), sum(order >= 8)]
    assert all(
        {"loss", "value_loss", "new_logprobs", "value"} <= row["nonfinite"].keys() for share in dumped for row in share
    )
