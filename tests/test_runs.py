"""grpo_fsdp.py as a user runs it: the same again, replayed, resumed; a soak; real GSM8K rows."""

import json
import re
import shutil
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import ROOT, SHARED, needs_shared, run, torchrun
from safetensors.numpy import load_file
from test_golden import GOLDEN
from transformers import AutoModelForCausalLM, AutoTokenizer

from utils import tiny

TEMPERATURE = 0.5  # not 1, so that a log-prob of another temperature shows
LR, STEPS, UPDATES = 1e-4, 3, 3 * 2 * 2
SCRIPT = ROOT / "grpo_fsdp.py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A random tiny model, its data, and the straight one-rank run that the others are compared with."""
    folder = tmp_path_factory.mktemp("runs")
    tiny.make_model(folder / "model", seed=3, num_sft_steps=0)
    # sampling values without do_sample: transformers loads such a file, and refuses to save it
    generation = {**json.loads((folder / "model/generation_config.json").read_text()), "temperature": 0.7, "top_p": 0.8}
    (folder / "model/generation_config.json").write_text(json.dumps(generation))
    tiny.make_data(folder / "data")
    straight = [*command(folder, "straight"), "--save-every", 1, "--record", folder / "rollouts", "--verify-sync", 2]
    result = run([sys.executable, *straight])
    assert result.returncode == 0, result.stderr[-4000:]
    (folder / "straight.log").write_text(result.stdout + result.stderr)
    return folder


def command(folder, name):
    """Two epochs of two minibatches a step, with a KL term: every branch of the update that changes numbers."""
    return [
        SCRIPT, "--run-dir", folder / name, "--model", folder / "model", "--train-files", folder / "data/train.parquet",
        "--val-files", folder / "data/val.parquet", "--reward", f"{ROOT}/tests/dense_reward.py:dense",
        "--num-steps", STEPS,
        "--prompts-per-step", 8, "--group-size", 4, "--minibatch-size", 16, "--update-epochs", 2, "--lr", LR,
        "--max-prompt-len", 16, "--max-response-len", 12, "--kl-coef", 0.05, "--kv-cache-gib", 0.125,
        "--max-num-seqs", 64, "--eval-every", 2, "--temperature", TEMPERATURE,
    ]  # fmt: skip


def rows(run_dir):
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def weights(run_dir):
    return load_file(run_dir / "hf" / "model.safetensors")


def same_run(got, expected, exact=False):
    """The figures and weights of two runs, within what float32 summation order allows."""
    skipped = ("time/", "perf/", "mem/")
    for mine, other in zip(rows(got), rows(expected), strict=True):
        numbers = {k: v for k, v in other.items() if not k.startswith(skipped)}
        assert {k: v for k, v in mine.items() if not k.startswith(skipped)} == (
            numbers if exact else {k: pytest.approx(v, rel=2e-4, abs=2e-5) for k, v in numbers.items()}
        )
    differences = []
    for name, tensor in weights(expected).items():
        difference = np.abs(weights(got)[name] - tensor)
        assert difference.max() <= (0 if exact else 0.1 * LR * UPDATES), name
        differences.append(difference.ravel())
    assert exact or np.concatenate(differences).mean() < 1e-2 * LR


def test_the_straight_run_learned_and_left_a_whole_run_folder(folder):
    straight = folder / "straight"
    files = {"args.json", "command.txt", "env.txt", "code", "metrics.jsonl", "rollouts.jsonl", "curves.png", "hf"}
    assert files <= {p.name for p in straight.iterdir()}
    assert (straight / "code/utils/models.py").read_text() == (ROOT / "utils/models.py").read_text()
    assert [row["step"] for row in rows(straight)] == [0, 1, 2, 3]
    assert [row["step"] for row in rows(straight) if "eval/score" in row] == [0, 2, 3]
    start = load_file(folder / "model/model.safetensors")
    moved = max(np.abs(weights(straight)[name] - tensor).max() for name, tensor in start.items())
    assert 0.5 * LR < moved <= 1.05 * LR * UPDATES
    last = rows(straight)[-1]
    assert last["rollout/logprob_diff_max"] < 1e-4 and last["policy/ratio_max"] > 1 and last["policy/ref_kl_k3"] > 0
    phases = sum(last[f"time/{phase}_s"] for phase in ("rollout", "score", "nograd", "update", "sync"))
    assert 0.8 < phases / last["time/step_s"] <= 1.0
    samples = [json.loads(line) for line in (straight / "rollouts.jsonl").read_text().splitlines()]
    assert {s["step"] for s in samples} == {0, 2, 3} and all("=" in s["prompt"] for s in samples)
    AutoModelForCausalLM.from_pretrained(straight / "hf"), AutoTokenizer.from_pretrained(straight / "hf")
    for name in ("generation_config.json", "config.json"):
        exported, source = (json.loads((path / name).read_text()) for path in (straight / "hf", folder / "model"))
        assert exported == source, name
    log = (folder / "straight.log").read_text()
    assert "straight: mean score" in log and "on 200 held-out prompts" in log


def test_fault_05_the_kl_is_logged_under_the_name_of_its_estimator(folder):
    for row in rows(folder / "straight")[1:]:
        assert [key for key in row if "ref_kl" in key] == ["policy/ref_kl_k3"] and row["policy/ref_kl_k3"] > 0


def test_fault_15_the_log_probs_of_a_run_are_at_its_temperature(folder):
    """Those before the update against the engine's; those of the update, and the reference's, against them."""
    first = rows(folder / "straight")[1]
    assert first["rollout/logprob_diff_max"] < 1e-4
    assert first["policy/approx_kl"] < 0.1 and first["policy/ref_kl_k3"] < 0.1


def test_fault_22_responses_are_trained_as_the_ids_that_were_sampled(folder):
    """A random model's bytes are seldom text: made into text and back, most responses are other ids."""
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    for step in (1, 2, 3):
        recorded = pq.read_table(folder / f"rollouts/step_{step}.parquet").to_pylist()
        ids = [row["response_ids"] for row in recorded]
        again = tokenizer(tokenizer.batch_decode(ids), add_special_tokens=False).input_ids
        assert sum(a != b for a, b in zip(ids, again, strict=True)) > len(ids) / 2
        assert [len(row["logprobs"]) for row in recorded] == [len(i) for i in ids]
        assert rows(folder / "straight")[step]["rollout/logprob_diff_max"] < 1e-4


@pytest.fixture(scope="module")
def by_hand(tmp_path_factory):
    """The figures of one step on responses whose scores are set here; padding is the end of sequence, as often it is.

    One response ends in it, and there alone the engine's log-prob is not the trainer's.
    """
    folder = tmp_path_factory.mktemp("by_hand")
    tiny.make_model(folder / "model", seed=11, num_sft_steps=0)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.save_pretrained(folder / "model")
    tiny.make_data(folder / "data")
    table = pq.read_table(GOLDEN / "rollouts/step_1.parquet")
    responses = table.to_pylist()
    for row, score in zip(responses, [1.0] * 4 + [0.0] * 4 + [-0.5] * 4 + [1.0, 0.0, 0.0, 0.5], strict=True):
        row["score"] = score
    for row in (responses[2], responses[9]):  # 0 in its place would set its group apart
        row["score"], row["judged"] = 0.0, False
    responses[-1]["response_ids"][-1], responses[-1]["logprobs"][-1] = tokenizer.eos_token_id, 0.0
    (folder / "rollouts").mkdir()
    pq.write_table(pa.Table.from_pylist(responses, table.schema), folder / "rollouts/step_1.parquet")
    result = run([
        sys.executable, SCRIPT, "--run-dir", folder / "run", "--model", folder / "model", "--reward", "tiny",
        "--train-files", folder / "data/train.parquet", "--replay", folder / "rollouts", "--num-steps", 1,
        "--prompts-per-step", 4, "--group-size", 4, "--max-prompt-len", 16, "--max-response-len", 12,
        "--save-every", 0, "--export-hf", "off",
    ])  # fmt: skip
    assert result.returncode == 0, result.stderr[-4000:]
    return rows(folder / "run")[0] | {"tokens": sum(row["length"] for row in responses)}


def test_fault_06_groups_without_a_gradient_are_told_apart(by_hand):
    shares = [by_hand[f"reward/{name}_frac"] for name in ("zero_std", "all_right", "all_wrong")]
    assert shares == [0.75, 0.25, 0.5]
    spread = np.std([1.0, 0.0, 0.0, 0.5], ddof=1)  # of the last group; those of the others are 0
    assert by_hand["reward/score_std"] == pytest.approx(spread / 4)


def test_fault_38_the_end_of_sequence_is_trained_though_it_is_the_padding_too(by_hand):
    assert by_hand["optim/num_tokens"] == by_hand["tokens"]
    assert by_hand["rollout/logprob_diff_max"] > 3  # of the one token that is off, so the mask holds it
    mean = by_hand["rollout/logprob_diff_max"] / by_hand["tokens"]
    assert by_hand["rollout/logprob_diff_mean"] == pytest.approx(mean, rel=1e-4)  # and holds no padding


def test_the_same_flags_give_the_same_numbers(folder):
    result = run([sys.executable, *command(folder, "again")])
    assert result.returncode == 0, result.stderr[-4000:]
    same_run(folder / "again", folder / "straight", exact=True)


def test_with_nothing_learned_the_engine_does_not_drift(folder):
    """Fifty syncs of unchanged weights: the mismatch of the last ten steps is that of the first ten."""
    soak = [*command(folder, "soak"), "--lr", 0, "--num-steps", 50, "--update-epochs", 1, "--kl-coef", 0]
    result = run([sys.executable, *soak, "--eval-every", 50])
    assert result.returncode == 0, result.stderr[-4000:]
    means = [row["rollout/logprob_diff_mean"] for row in rows(folder / "soak")[1:]]
    assert len(means) == 50 and max(means) < 1e-5
    assert np.mean(means[-10:]) < 1.2 * np.mean(means[:10])
    start = load_file(folder / "model/model.safetensors")
    assert all(np.array_equal(tensor, start[name]) for name, tensor in weights(folder / "soak").items())


def replay(folder, name, command, ranks=1):
    """The recorded run again, on a machine without vLLM: importing it fails. Its held-out prompts are left out."""
    (folder / "no_vllm/vllm").mkdir(parents=True, exist_ok=True)
    (folder / "no_vllm/vllm/__init__.py").write_text("raise ImportError('a replay has no engine')")
    command = [*command(folder, name), "--replay", folder / "rollouts"]
    env = {"PYTHONPATH": f"{folder}/no_vllm:{ROOT}"}
    result = run([sys.executable, *command], **env) if ranks == 1 else torchrun(ranks, *command, **env)
    assert result.returncode == 0, result.stderr[-4000:]


def recorded(run_dir):
    """The figures of each training step that a replay has too."""
    kept = [{k: v for k, v in row.items() if not k.startswith(("time/", "perf/", "eval/"))} for row in rows(run_dir)]
    return [row for row in kept if row["step"] > 0]


def test_fault_24_two_seeds_sample_other_responses_to_the_same_prompts(folder):
    """Eight rows, all of them in the first batch: their order differs too, their uids do not."""
    table = pq.read_table(folder / "data/train.parquet")[:8]
    pq.write_table(table, folder / "eight.parquet")
    sampled = {}
    for seed in (1, 2):
        line = [*command(folder, f"seed_{seed}"), "--seed", seed, "--train-files", folder / "eight.parquet"]
        line += ["--num-steps", 1, "--record", folder / f"sampled_{seed}", "--eval-every", 0, "--save-every", 0]
        result = run([sys.executable, *line, "--export-hf", "off"])
        assert result.returncode == 0, result.stderr[-4000:]
        recorded = pq.read_table(folder / f"sampled_{seed}/step_1.parquet").to_pylist()
        sampled[seed] = {(row["uid"], row["sample"]): row["response_ids"] for row in recorded}
    assert len(sampled[1]) == 32 and sampled[1].keys() == sampled[2].keys()
    assert all(ids != sampled[2][key] for key, ids in sampled[1].items())


def test_replayed_is_recorded_to_the_bit(folder):
    replay(folder, "replayed", command)
    assert recorded(folder / "replayed") == recorded(folder / "straight")
    straight, replayed = weights(folder / "straight"), weights(folder / "replayed")
    assert all(np.array_equal(replayed[name], straight[name]) for name in straight)
    assert "time/verify_s" in rows(folder / "straight")[2] and "time/verify_s" not in rows(folder / "straight")[1]


def test_a_replay_that_is_not_of_the_recorded_run_says_so(folder):
    for flags, message in (
        (["--seed", 2], r"error: --replay .*rollouts: step 1 holds no response to uid \d+, sample 0; --seed"),
        (["--num-steps", 4], r"error: --replay .*rollouts: step 4 was not recorded; --num-steps 3 works"),
        (["--temperature", 0.9], rf"error: --temperature 0.9: must be the recorded run's, {TEMPERATURE}"),
        (["--replay", folder / "data"], r"error: --replay .*data: must hold step_N.parquet files"),
        (["--record", folder / "x"], r"error: --record .*x: has no effect with --replay"),
    ):
        name = f"other{flags[0]}{flags[1]}".replace("/", "_")
        result = run([sys.executable, *command(folder, name), "--replay", folder / "rollouts", *flags])
        assert result.returncode == 1 and re.search(message, result.stderr), result.stderr[-2000:]
        assert "Traceback" not in result.stderr
        assert not (folder / name / "metrics.jsonl").exists()  # before anything was trained


@pytest.mark.slow
def test_a_resumed_replay_needs_only_the_steps_to_come(folder):
    shutil.copytree(folder / "rollouts", folder / "later")
    (folder / "later/step_1.parquet").unlink()
    line = [*command(folder, "later run"), "--replay", folder / "later"]
    result = run([sys.executable, *line, "--resume", folder / "straight/checkpoints/step_1"])
    assert result.returncode == 0, result.stderr[-4000:]
    straight = weights(folder / "straight")
    assert all(np.array_equal(tensor, straight[name]) for name, tensor in weights(folder / "later run").items())


@pytest.mark.slow
def test_a_judge_that_is_gone_at_the_last_evaluation_ends_no_run(folder):
    log = folder / "judge gone/metrics.jsonl"
    (folder / "judge.py").write_text(
        f"from pathlib import Path\ndef f(response, row):\n    log = Path({str(log)!r})\n"
        "    assert not (log.exists() and '\"step\": 1' in log.read_text()), 'gone'\n    return 1.0\n"
    )
    line = [*command(folder, "judge gone"), "--num-steps", 2, "--eval-reward", f"{folder}/judge.py:f"]
    result = run([sys.executable, *line, "--export-hf", "off", "--save-every", 0])
    assert result.returncode == 0, result.stderr[-4000:]
    assert "failed on all responses of the evaluation at step 2" in result.stderr
    assert "mean score 1.00 -> nan on 200 held-out prompts" in result.stdout
    assert "eval/score" not in rows(folder / "judge gone")[-1]


@pytest.mark.slow
def test_a_resumed_run_cuts_its_own_record_and_another_run_may_not_use_it(folder):
    kept, quick = folder / "kept", ["--num-steps", 1, "--eval-every", 0, "--export-hf", "off"]
    line = [*command(folder, "cut"), "--record", kept, *quick]
    result = run([sys.executable, *line, "--save-every", 1])
    assert result.returncode == 0, result.stderr[-3000:]
    shutil.copyfile(kept / "step_1.parquet", kept / "step_9.parquet")  # beyond the checkpoint
    result = run([sys.executable, *line, "--resume", "auto"])
    assert result.returncode == 0, result.stderr[-3000:]
    assert [path.name for path in kept.iterdir()] == ["step_1.parquet"]
    result = run([sys.executable, *command(folder, "fresh"), "--record", kept])
    assert result.returncode == 1 and re.search(r"error: --record .*: holds an earlier run's rollouts", result.stderr)
    assert not (folder / "fresh").exists()


def test_fault_44_resumed_is_straight_to_the_bit(folder):
    checkpoint = folder / "straight/checkpoints/step_1"
    result = run([sys.executable, *command(folder, "resumed"), "--resume", checkpoint])
    assert result.returncode == 0, result.stderr[-4000:]
    assert [row["step"] for row in rows(folder / "resumed")] == [2, 3]
    straight, resumed = weights(folder / "straight"), weights(folder / "resumed")
    assert all(np.array_equal(resumed[name], straight[name]) for name in straight)


def test_a_run_that_is_done_is_exported_into_another_folder(folder):
    done = folder / "straight/checkpoints/step_3"
    result = run([sys.executable, *command(folder, "elsewhere"), "--resume", done])
    assert result.returncode == 0 and "curves: none" in result.stdout, result.stderr[-4000:]
    straight = weights(folder / "straight")
    assert all(np.array_equal(tensor, straight[name]) for name, tensor in weights(folder / "elsewhere").items())


def test_fault_44_resume_auto_cuts_the_log_back_and_goes_on(folder):
    """A run killed after step 2 was logged but before it was saved."""
    stopped = folder / "stopped"
    result = run([sys.executable, *command(folder, "stopped"), "--save-every", 1, "--num-steps", 1])
    assert result.returncode == 0, result.stderr[-4000:]
    (stopped / "metrics.jsonl").open("a").write('{"step": 2, "reward/score": 0.5}\n{"step": 3, "rew')
    (stopped / "checkpoints/step_2.tmp").mkdir()  # a save that never finished
    torchrun(2, *command(folder, "stopped"), "--resume", "auto")
    assert [row["step"] for row in rows(stopped)] == [0, 1, 2, 3]
    # the one-step run evaluated at its end, which the straight run did not
    one = {k: v for k, v in rows(stopped)[1].items() if not k.startswith("eval/")}
    assert one["reward/score"] == rows(folder / "straight")[1]["reward/score"]
    for name, tensor in weights(folder / "straight").items():
        assert np.abs(weights(stopped)[name] - tensor).max() <= 0.1 * LR * UPDATES, name


@needs_shared
def test_real_gsm8k_rows_run_two_steps(folder):
    made = run(
        [sys.executable, "-m", "utils.data", "gsm8k", "--source", SHARED / "data/gsm8k", "--out", folder / "gsm8k"]
    )
    assert made.returncode == 0, made.stderr
    result = run([
        sys.executable, SCRIPT, "--run-dir", folder / "gsm", "--model", folder / "model", "--reward", "gsm8k",
        "--train-files", folder / "gsm8k/train.parquet", "--num-steps", 2, "--prompts-per-step", 4, "--group-size", 2,
        "--max-prompt-len", 1200, "--max-response-len", 32, "--kv-cache-gib", 0.25, "--export-hf", "off",
        "--save-every", 0,
    ])  # fmt: skip
    assert result.returncode == 0, result.stderr[-4000:]
    assert [row["step"] for row in rows(folder / "gsm")] == [1, 2]
    assert (
        "7473 training" in result.stdout
        and not (folder / "gsm/hf").exists()
        and not (folder / "gsm/checkpoints").exists()
    )
