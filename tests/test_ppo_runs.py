"""ppo_fsdp.py and reward_model_bt.py as a user runs them: layouts do not change the numbers; resuming; HH-RLHF rows."""

import json
import re
import shutil
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from conftest import ROOT, SHARED, needs_shared, run
from test_golden import GOLDEN
from test_runs import LR, STEPS, TEMPERATURE, recorded, replay, rows, same_run, weights
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from utils import tiny
from utils.tiny_pairs import make_pairs


def ppo(folder, name):
    """A critic of its own, two epochs of two minibatches, an adaptive KL in the reward, a reward model and a rule."""
    return [
        ROOT / "ppo_fsdp.py", "--run-dir", folder / name, "--model", folder / "model",
        "--train-files", folder / "data/train.parquet", "--val-files", folder / "data/val.parquet",
        "--reward", f"{ROOT}/tests/dense_reward.py:dense,model:{folder}/rm/hf:0.5", "--normalize-scores",
        "--critic-model", folder / "rm/hf", "--num-steps", STEPS, "--prompts-per-step", 8, "--group-size", 4,
        "--minibatch-size", 16, "--update-epochs", 2, "--lr", LR, "--critic-lr", LR, "--max-prompt-len", 16,
        "--max-response-len", 12, "--kl-coef", 0.05, "--kl-controller", "horizon", "--kl-horizon", 100,
        "--kl-target", 0.01, "--entropy-coef", 0.01, "--kv-cache-gib", 0.125, "--max-num-seqs", 64, "--eval-every", 2,
        "--temperature", TEMPERATURE,
    ]  # fmt: skip


def reward_model(folder, name, *more):
    return [
        ROOT / "reward_model_bt.py", "--run-dir", folder / name, "--model", folder / "model",
        "--train-files", folder / "data/train_pairs.parquet", "--val-files", folder / "data/val_pairs.parquet",
        "--num-steps", 12, "--pairs-per-step", 16, "--lr", LR, "--centring-coef", 0.01, "--max-prompt-len", 16,
        "--max-response-len", 12, "--eval-every", 6, *more,
    ]  # fmt: skip


def start(*command):
    result = run([sys.executable, *command])
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]
    return result


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A random model, a reward model trained on it for a few steps, and the straight PPO run on one rank."""
    folder = tmp_path_factory.mktemp("ppo_runs")
    tiny.make_model(folder / "model", seed=3, num_sft_steps=0)
    tiny.make_data(folder / "data")
    make_pairs(folder / "data")
    start(*reward_model(folder, "rm", "--save-every", 6))
    start(*ppo(folder, "straight"), "--save-every", 1, "--record", folder / "rollouts")
    return folder


def state_of(checkpoint, tmp_path) -> dict[str, torch.Tensor]:
    """Every tensor of a sharded checkpoint: weights and moments of policy and critic."""
    dcp_to_torch_save(checkpoint, tmp_path / "state.pt")
    flat = {}

    def walk(prefix, value):
        if isinstance(value, dict):
            for key, inner in value.items():
                walk(f"{prefix}.{key}", inner)
        elif isinstance(value, torch.Tensor):
            flat[prefix] = value

    walk("", torch.load(tmp_path / "state.pt", weights_only=False))
    return flat


# ---- PPO ----


def test_the_straight_run_trained_both_models_and_steered_the_kl(folder):
    log = rows(folder / "straight")
    assert [row["step"] for row in log] == [0, 1, 2, 3]
    assert log[2]["value/loss"] != log[1]["value/loss"] and log[1]["optim/critic_grad_norm"] > 0
    state = json.loads((folder / "straight/checkpoints/step_3/state.json").read_text())["state"]
    coefs = [0.05, *(row["policy/kl_coef"] for row in log[2:]), state["kl_coef"]]
    assert log[1]["policy/kl_coef"] == pytest.approx(0.05)
    for row, before, after in zip(log[1:], coefs, coefs[1:], strict=False):
        error = min(max(row["policy/ref_kl_response"] / 0.01 - 1, -0.2), 0.2)
        assert after == pytest.approx(before * (1 + 32 / 100 * error))
    last = log[-1]
    assert last["rollout/logprob_diff_max"] < 1e-4 and last["policy/ratio_max"] > 1
    phases = sum(last[f"time/{phase}_s"] for phase in ("rollout", "score", "nograd", "update", "sync"))
    assert 0.8 < phases / last["time/step_s"] <= 1.0


def test_fault_05_the_kl_is_logged_under_the_names_of_its_estimators(folder):
    """k1 may be below 0, k2 and k3 may not; the controller steers by k1 summed over each response."""
    for row in rows(folder / "straight")[2:]:
        keys = {key for key in row if "ref_kl" in key}
        assert keys == {"policy/ref_kl_k1", "policy/ref_kl_k2", "policy/ref_kl_k3", "policy/ref_kl_response"}
        tokens = row["rollout/response_len"]
        assert row["policy/ref_kl_k1"] * tokens == pytest.approx(row["policy/ref_kl_response"], rel=1e-4)
        assert row["policy/ref_kl_k2"] > 0 and row["policy/ref_kl_k3"] > 0
        assert row["policy/ref_kl_k2"] == pytest.approx(row["policy/ref_kl_k3"], rel=0.5)  # alike for a small KL


def test_fault_15_the_log_probs_of_a_run_are_at_its_temperature(folder):
    first = rows(folder / "straight")[1]
    assert first["rollout/logprob_diff_max"] < 1e-4
    assert first["policy/approx_kl"] < 0.1 and first["policy/ref_kl_k2"] == 0  # the reference is the first policy


def test_fault_09_the_end_of_a_response_is_worth_nothing(tmp_path):
    """At lambda 1 a token's return is the score, and where a response was cut off, the value of that state."""
    tiny.make_model(tmp_path / "model", seed=11, num_sft_steps=0)
    tiny.make_data(tmp_path / "data")
    config = AutoConfig.from_pretrained(tmp_path / "model", num_labels=1)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        critic = AutoModelForSequenceClassification.from_config(config)
        critic.score.weight.data.normal_()
    critic.save_pretrained(tmp_path / "critic")
    AutoTokenizer.from_pretrained(tmp_path / "model").save_pretrained(tmp_path / "critic")
    table = pq.read_table(GOLDEN / "rollouts/step_1.parquet")
    responses = table.to_pylist()
    for i, row in enumerate(responses):
        row["finish_reason"] = ("stop", "length")[i % 2]
        row["judged"] = i not in (3, 6)  # these are left out of everything
    (tmp_path / "rollouts").mkdir()
    pq.write_table(pa.Table.from_pylist(responses, table.schema), tmp_path / "rollouts/step_1.parquet")
    start(
        ROOT / "ppo_fsdp.py", "--run-dir", tmp_path / "run", "--model", tmp_path / "model", "--reward", "tiny",
        "--train-files", tmp_path / "data/train.parquet", "--replay", tmp_path / "rollouts", "--num-steps", 1,
        "--critic-model", tmp_path / "critic", "--prompts-per-step", 4, "--group-size", 4, "--minibatch-size", 16,
        "--update-epochs", 1, "--kl-coef", 0, "--gae-lambda", 1, "--value-clip", 0, "--bootstrap-truncated",
        "--max-prompt-len", 16, "--max-response-len", 12, "--save-every", 0, "--export-hf", "off",
    )  # fmt: skip
    errors, before, scores = [], [], []
    for row in (row for row in responses if row["judged"]):
        with torch.no_grad():
            hidden = critic.base_model(torch.tensor([row["prompt_ids"] + row["response_ids"]])).last_hidden_state[0]
        values = critic.score(hidden)[len(row["prompt_ids"]) - 1 :, 0]
        end = values[-1] if row["finish_reason"] == "length" else 0.0
        errors.append(values[:-1] - (row["score"] + end))
        before.append(values[:-1])
        scores.append(row["score"])
    figures, errors_N, before_N = rows(tmp_path / "run")[0], torch.cat(errors), torch.cat(before)
    assert figures["value/loss"] == pytest.approx(0.5 * errors_N.square().mean().item(), rel=1e-4)
    assert figures["value/mean"] == pytest.approx(before_N.mean().item(), rel=1e-4)
    explained = 1 - (errors_N.var() / (before_N - errors_N).var()).item()
    assert figures["value/explained_var"] == pytest.approx(explained, rel=1e-3)
    assert figures["reward/return"] == pytest.approx(np.mean(scores), rel=1e-4)


def test_replayed_is_recorded_to_the_bit(folder):
    replay(folder, "replayed", ppo)
    assert recorded(folder / "replayed") == recorded(folder / "straight")
    straight, replayed = weights(folder / "straight"), weights(folder / "replayed")
    assert all(np.array_equal(replayed[name], straight[name]) for name in straight)


def test_critic_warmup(folder):
    """The first step trains the critic alone; saved then, before the policy's optimizer has made a step."""
    warm = ["--critic-warmup-steps", 1, "--replay", folder / "rollouts"]
    start(*ppo(folder, "unsaved"), *warm)
    start(*ppo(folder, "saved"), *warm, "--save-every", 1)
    same_run(folder / "saved", folder / "unsaved", exact=True)
    assert json.loads((folder / "saved/checkpoints/step_3/state.json").read_text())["state"]["kl_coef"] != 0.05
    start(*ppo(folder, "warm"), *warm, "--resume", folder / "saved/checkpoints/step_1")
    assert all(np.array_equal(weights(folder / "warm")[k], v) for k, v in weights(folder / "saved").items())
    first, second = rows(folder / "saved")[:2]
    assert [row["policy/kl_coef"] for row in (first, second)] == [0.05, 0.05]
    assert "policy/loss" not in first and first["optim/critic_grad_norm"] > 0
    assert first["policy/ref_kl_k1"] == 0 and second["policy/ref_kl_k1"] == 0


def test_fault_44_resumed_is_straight_to_the_bit(folder, tmp_path):
    """Policy, critic, both optimizers and the KL controller."""
    start(*ppo(folder, "resumed"), "--resume", folder / "straight/checkpoints/step_1", "--save-every", 1)
    for mine, other in zip(rows(folder / "resumed"), rows(folder / "straight")[2:], strict=True):
        numbers = {k: v for k, v in other.items() if not k.startswith(("time/", "perf/"))}
        assert {k: v for k, v in mine.items() if not k.startswith(("time/", "perf/"))} == numbers
    got, expected = (state_of(folder / name / "checkpoints/step_3", tmp_path) for name in ("resumed", "straight"))
    assert got.keys() == expected.keys() and any("critic" in key and "exp_avg_sq" in key for key in got)
    assert all(torch.equal(got[key], expected[key]) for key in got)
    assert all(np.array_equal(weights(folder / "resumed")[k], v) for k, v in weights(folder / "straight").items())


# ---- reward model ----


def test_reward_model_run_folder(folder):
    log, run_dir = rows(folder / "rm"), folder / "rm"
    files = {"args.json", "command.txt", "env.txt", "code", "metrics.jsonl", "curves.png", "hf", "checkpoints"}
    assert files <= {p.name for p in run_dir.iterdir()}
    assert [row["step"] for row in log if "eval/accuracy" in row] == [0, 6, 12]
    assert log[-1]["eval/accuracy_low"] < log[-1]["eval/accuracy"] < log[-1]["eval/accuracy_high"]
    model = AutoModelForSequenceClassification.from_pretrained(run_dir / "hf")
    tokenizer = AutoTokenizer.from_pretrained(run_dir / "hf")
    assert model.config.num_labels == 1 and model.config.pad_token_id == tokenizer.pad_token_id
    assert model.config.score_mean == log[-1]["eval/score_mean"]
    assert model.config.score_std == log[-1]["eval/score_std"]


def test_fault_35_held_out_figures_are_of_every_pair(folder):
    """The last accuracy and mean again, in plain transformers, in padded batches."""
    log, run_dir = rows(folder / "rm"), folder / "rm"
    model = AutoModelForSequenceClassification.from_pretrained(run_dir / "hf")
    tokenizer = AutoTokenizer.from_pretrained(run_dir / "hf")
    pairs = pq.read_table(folder / "data/val_pairs.parquet").to_pylist()
    scores = []
    for kind in ("chosen", "rejected"):
        texts = [row["prompt"] + row[kind] + tokenizer.eos_token for row in pairs]
        with torch.no_grad():
            scores.append(model(**tokenizer(texts, padding=True, return_tensors="pt")).logits[:, 0])
    assert (scores[0] > scores[1]).double().mean().item() == pytest.approx(log[-1]["eval/accuracy"])
    assert torch.cat(scores).mean().item() == pytest.approx(log[-1]["eval/score_mean"], abs=1e-5)


def test_fault_44_reward_model_resumed_is_straight_to_the_bit(folder):
    start(*reward_model(folder, "rm_resumed", "--resume", folder / "rm/checkpoints/step_6"))
    assert [row["step"] for row in rows(folder / "rm_resumed")] == list(range(7, 13))
    straight, resumed = weights(folder / "rm"), weights(folder / "rm_resumed")
    assert straight.keys() == resumed.keys() and all(np.array_equal(resumed[k], v) for k, v in straight.items())


def test_a_reward_model_that_is_done_is_exported_once_more(folder):
    """As after a kill between the last save and the export; into the run's folder, and into another."""
    again = folder / "rm_done"
    shutil.copytree(folder / "rm", again)
    shutil.rmtree(again / "hf")
    start(*reward_model(folder, "rm_done", "--resume", "auto"))
    start(*reward_model(folder, "rm_elsewhere", "--resume", folder / "rm/checkpoints/step_12"))
    assert rows(again) == rows(folder / "rm")
    for name in ("rm_done", "rm_elsewhere"):
        exported, config = weights(folder / name), json.loads((folder / name / "hf/config.json").read_text())
        assert all(np.array_equal(exported[k], v) for k, v in weights(folder / "rm").items())
        assert config["score_std"] == rows(folder / "rm")[-1]["eval/score_std"]


@needs_shared
@pytest.mark.parametrize("steps", [2, pytest.param(0, marks=pytest.mark.slow)])
def test_real_hh_rlhf_pairs(tmp_path, steps):
    """The real file, made into rows by the command of the README; two steps, or a whole epoch."""
    start("-m", "utils.data", "hh-rlhf", "--source", SHARED / "data/hh_rlhf", "--out", tmp_path / "hh")
    result = start(
        ROOT / "reward_model_bt.py", "--train-files", tmp_path / "hh/train.parquet", "--run-dir", tmp_path / "run",
        *(["--val-files", tmp_path / "hh/test.parquet"] if not steps else []),
        "--num-steps", steps, "--warmup-steps", 5, "--max-prompt-len", 640, "--max-response-len", 320,
        "--overlong", "drop", "--max-tokens-per-gpu", 8192, *(["--eval-every", 1000] if not steps else []),
    )  # fmt: skip
    kept, dropped = re.search(r"(\d+) training and \d+ held-out pairs \((\d+) more dropped", result.stdout).groups()
    assert 1000 < int(kept) < 2073 and int(dropped) >= 2073 - int(kept)
    log = rows(tmp_path / "run")
    assert log[-1]["rm/loss"] < 1.5
    assert steps or (len(log) == 1 + -(-int(kept) // 64) and "eval/accuracy" in log[-1])
