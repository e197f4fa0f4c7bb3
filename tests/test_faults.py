"""Known faults of the field are caught by a test that carries their number.

Each fault is put into a copy of the tree by replacing text, and the tests named after it must fail there.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
from conftest import ROOT

NAMED = [*range(1, 8), *range(9, 13), 15, 16, *range(20, 25), 27, 30, *range(35, 40), 43, 44]  # need a test
LIMIT_S = 600

GRPO, PPO, RM, ENGINE = "grpo_fsdp.py", "ppo_fsdp.py", "reward_model_bt.py", "hybrid_engine.py"
FORWARD, HEAD, PACKING, SCORING = "utils/forward.py", "utils/head.py", "utils/packing.py", "utils/scoring.py"
CHECKPOINT, RUN_FOLDER, DATA, REWARDS = (f"utils/{name}.py" for name in ("checkpoint", "run_folder", "data", "rewards"))
EXPORT = "utils/export.py"

EQUAL, OPTIM = "equivalence/test_equivalence.py", "utils/optim.py"
GRPO_SHARE, PPO_SHARE = ".sum() / num_tokens * world).backward()", "share = world / num_tokens"
PER_SEQUENCE = " / mask_bR.sum(-1, keepdim=True).clamp_min(1)"
CLIP_SHARDS = """\
def _clip_shards(model, most):
    grads = [p.grad.to_local() for p in model.parameters()]
    norm = nn.utils.get_total_norm(grads)
    for grad in grads:
        grad.mul_((most / (norm + 1e-6)).clamp(max=1.0))
    return norm


"""
STD = "        std_P1 = (centred_PG.square().sum(-1, keepdim=True) / (count_P1 - 1).clamp_min(1)).sqrt()\n"
ONE_PASS = """\
        x_PG = scores_PG.float()
        std_P1 = (x_PG.square().mean(-1, keepdim=True) - x_PG.mean(-1, keepdim=True).square()).clamp_min(0).sqrt()
"""
LAST = "last_BR = torch.arange(kl_BR.shape[1], device=kl_BR.device) == lengths_B[:, None]"
NEXT = "torch.where(t_R == lengths_B[:, None] - 1, bootstrap_B[:, None], shifted_BR)"
BOOTSTRAP = "        bootstrap_B = next_values_B * (truncated_B & args.bootstrap_truncated)\n"
LOGITS = "    logits_nV = over_temperature(logits_nV, temperature)\n"
LOGPROBS = "    return logits_nV.gather(-1, target_n[:, None])[:, 0] - lse_n, entropy_n, lse_n\n"
RAW_LOGPROBS = "    return (logits_nV.gather(-1, target_n[:, None])[:, 0] - lse_n) / temperature, entropy_n, lse_n\n"
RAW_ENTROPY = "    entropy_n = torch.distributions.Categorical(logits=logits_nV * temperature).entropy()\n"
NO_GRAD = "forward = rollouts, R, args.temperature, args.max_tokens_per_gpu, device"
SAMPLING = "            temperature=sampling.temperature,\n"
SEED = 'seed_for("sample", self.seed, step, uid, sample)'
KEPT = "        rollouts = [requests[request_id] for request_id in requests if request_id in mine]\n"
ARRIVED = """\
        rollouts = sorted(requests.values(), key=lambda r: len(r.response_ids))
        for slot, r in zip([(r.uid, r.sample, r.prompt_ids) for r in requests.values()], rollouts, strict=True):
            r.uid, r.sample, r.prompt_ids = slot
"""
ENDED = "                rollout.finish_reason = str(output.finish_reason)\n"
APPENDED = f"{ENDED}                rollout.response_ids.append(self.eos_token_ids[0])\n"
GENERATE = (
    "        return self.engine.generate(prompts, uids, n=n, step=step, sampling=sampling, on_finish=on_finish)\n"
)
RETOKENIZED = """\
        rollouts = self.engine.generate(prompts, uids, n=n, step=step, sampling=sampling, on_finish=on_finish)
        for r in rollouts:
            text = self.tokenizer.decode(r.response_ids)
            r.response_ids = self.tokenizer(text, add_special_tokens=False).input_ids[: len(r.logprobs)] or [0]
            r.logprobs = r.logprobs[: len(r.response_ids)]
        return rollouts
"""
LLM = "            self.llm = self.vllm.LLM(**{**settings, **vllm_args})\n"
CLONED_HEAD = f"""{LLM}\
            import copy
            self.model().lm_head = copy.deepcopy(self.model().model.embed_tokens)
"""
UNWRITTEN = "if written.get(param.untyped_storage().data_ptr(), 0) < param.numel():"
SHARE = "list(range(rank, len(val), dist.get_world_size()))"
ALL_EVALUATED = '        assert sum(all_gather(len(scores_B))) == len(val), "not every held-out prompt was evaluated"\n'
LENGTH, REAL = "[len(r.response_ids) for r in rollouts]", "[sum(i != PAD for i in r.response_ids) for r in rollouts]"
MASK = "        mask_BR = mask_from_lengths(lengths_B, R)\n"
MASK_BY_VALUE = f"""{MASK}\
        ids_BR = pad_rows([r.response_ids for r in rollouts], torch.long, R).to(device)
        mask_BR = mask_BR & (ids_BR != tokenizer.pad_token_id)
"""
MARKUP = """[\\s$€£*_`"'(\\[]*+(?:\\\\boxed\\{|\\\\\\(|\\\\\\$)?+[\\s$]*+\n"""
UIDS = "step_uids(len(data), args.seed, step, args.prompts_per_step)[rank * P"
LOAD = "dcp.load(_state_of(parts), "
LOAD_WEIGHTS = 'dcp.load({name: {"model": state["model"]} for name, state in _state_of(parts).items()}, '
STATE = "state |= load_checkpoint(checkpoint, parts)"

# number -> ways to put the fault in: the test file that must see it, then replacements (file, old, new)
FAULTS: dict[int, list[tuple]] = {
    1: [
        (EQUAL, (GRPO, GRPO_SHARE, ".sum() / max(1, tokens) / len(plan) * world).backward()")),
        (EQUAL, (PPO, PPO_SHARE, "share = world / max(1, tokens) / len(plan)")),
        (EQUAL, (RM, "loss_b.sum() / args.pairs_per_step", "loss_b.sum() / max(1, len(part)) / len(plan)")),
    ],
    2: [
        (EQUAL, (GRPO, GRPO_SHARE, ".sum() / num_tokens / len(plan) * world).backward()")),
        (EQUAL, (PPO, PPO_SHARE, "share = world / num_tokens / len(plan)")),
    ],
    3: [
        (EQUAL, (GRPO, "+ args.kl_coef * kl_bR", f"+ args.kl_coef * kl_bR{PER_SEQUENCE}")),
        (EQUAL, (PPO, "+ kl_coef * kl_bR", f"+ kl_coef * kl_bR{PER_SEQUENCE}")),
    ],
    4: [
        ("test_algorithm.py", (GRPO, "}[estimator].detach()", "}[estimator]"),
                              (GRPO, "return value_BR + path_BR - path_BR.detach()", "return value_BR")),
        ("test_algorithm.py", (GRPO, "path_BR = ratio_BR * d_BR.square() / 2", "path_BR = d_BR.square() / 2")),
        ("test_ppo_algorithm.py", (PPO, "return -kl_coef * kl_BR +", "return -kl_coef * kl_BR.square() / 2 +")),
    ],
    5: [
        ("test_runs.py", (GRPO, 'f"policy/ref_kl_{args.kl_estimator}"', '"policy/ref_kl"')),
        ("test_ppo_runs.py", (PPO, '("k3", (-kl_BR).exp() - 1 + kl_BR)', '("k3", kl_BR)')),
    ],
    6: [
        ("test_runs.py", (GRPO, "(equal_P & right_P).sum()", "right_P.sum()")),
        ("test_runs.py", (GRPO, "(equal_P & ~right_P).sum()", "equal_P.sum()")),
        ("test_algorithm.py", (GRPO, "std_P1.clamp_min(1e-3)", "std_P1")),
    ],
    7: [
        ("test_algorithm.py", (GRPO, "std_P1.clamp_min(1e-3)", "(std_P1 + 1e-6)")),
        ("test_algorithm.py", (GRPO, STD, ONE_PASS)),
    ],
    9: [
        ("test_ppo_algorithm.py", (PPO, f"{LAST} - 1", LAST)),
        ("test_ppo_algorithm.py", (PPO, NEXT, "shifted_BR")),
        ("test_ppo_runs.py", (PPO, BOOTSTRAP, "        bootstrap_B = next_values_B\n")),
    ],
    10: [(EQUAL, (PPO, "whiten(raw_advantages_BR, trained_BR, sum_over_ranks)",
                  "whiten(raw_advantages_BR, trained_BR, lambda x: x)"))],
    11: [(EQUAL, (GRPO, GRPO_SHARE, ".sum() / tokens * world).backward()"))],
    12: [(EQUAL, (OPTIM, "nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm).full_tensor()",
                  "_clip_shards(model, max_grad_norm)"),
                 (OPTIM, "def optimizer_step(", f"{CLIP_SHARDS}def optimizer_step("))],
    15: [
        ("test_engine.py", (ENGINE, '"logprobs_mode": "processed_logprobs"', '"logprobs_mode": "raw_logprobs"')),
        ("test_models.py", (HEAD, LOGITS, "    logits_nV = logits_nV.float()\n"), (HEAD, LOGPROBS, RAW_LOGPROBS)),
        ("test_models.py", (HEAD, LOGPROBS, f"{RAW_ENTROPY}{LOGPROBS}")),
        ("test_models.py", (HEAD, "over_temperature(grad_nV, temperature)", "grad_nV")),
        ("test_runs.py", (GRPO, NO_GRAD, NO_GRAD.replace("args.temperature", "1.0"))),
        ("test_runs.py", (GRPO, "policy(packed, args.temperature)", "policy(packed, 1.0)")),
        ("test_runs.py", (GRPO, "(reference, *forward)", "(reference, *forward[:2], 1.0, *forward[3:])")),
        ("test_ppo_runs.py", (PPO, "policy(packed, args.temperature, ", "policy(packed, 1.0, ")),
    ],
    16: [
        ("test_engine.py", (ENGINE, SAMPLING, f"{SAMPLING}            top_p=0.95,\n")),
        ("test_engine.py", (ENGINE, SAMPLING,
                            f"{SAMPLING}            top_p=self.llm.get_default_sampling_params().top_p,\n")),
        ("test_bad_input.py", (GRPO, "    temperature: float = 1.0\n",
                               "    top_p: float = 1.0\n    temperature: float = 1.0\n")),
    ],
    20: [("test_engine.py", (ENGINE, "assert self.llm.reset_prefix_cache(), ", "assert self.llm, "))],
    21: [
        ("test_engine.py", (ENGINE, ENDED, APPENDED)),
        ("test_engine.py", (ENGINE, ENDED, f"{APPENDED}                rollout.logprobs.append(0.0)\n")),
    ],
    22: [("test_runs.py", (SCORING, GENERATE, RETOKENIZED))],
    23: [
        ("test_engine.py", (ENGINE, KEPT, ARRIVED)),
        ("test_scoring.py", (SCORING, "[self._futures.pop(id(r)).result() for r in rollouts]",
                             "[self._futures.pop(next(iter(self._futures))).result() for _ in rollouts]")),
    ],
    24: [
        ("test_engine.py", (ENGINE, SEED, 'seed_for("sample", step, uid, sample)')),
        ("test_engine.py", (ENGINE, SEED, 'seed_for("sample", self.seed, step, uid)')),
        ("test_ranks.py", (ENGINE, SEED, 'seed_for("sample", self.seed, step, len(requests))')),
        ("test_runs.py", (GRPO, "seed=args.seed,", "seed=1,")),
    ],
    27: [
        ("test_engine.py", (ENGINE, "self._asleep, self.synced = what, False", "self._asleep = what")),
        ("test_engine.py", (ENGINE, "self.synced = False  # weights", "self.synced = True  # weights")),
    ],
    30: [
        ("test_engine.py", (ENGINE, LLM, CLONED_HEAD)),
        ("test_engine.py", (ENGINE, LLM, CLONED_HEAD),
                           ("utils/reshard.py", UNWRITTEN, f'if name != "lm_head.weight" and {UNWRITTEN[3:]}')),
    ],
    35: [
        ("test_scoring.py", (SCORING, SHARE, f"{SHARE}[: len(val) // 4 * 4]"), (SCORING, ALL_EVALUATED, "")),
        ("test_scoring.py", (SCORING, SHARE, f"{SHARE}[: len(val) // dist.get_world_size()]"),
                            (SCORING, ALL_EVALUATED, "")),
        ("test_ppo_runs.py", (RM, "range(rank, len(val), world)]", "range(rank, len(val) // 64 * 64, world)]"),
                             (RM, "for i in range(len(val))])", "for i in range(len(val) // 64 * 64)])")),
    ],
    36: [("test_packing.py", (PACKING, "    plan += [[]] * (max(count for count, _ in gathered) - len(plan))\n", ""))],
    37: [
        ("test_bad_input.py", (GRPO, "    check_minibatch(flags)\n", "")),
        ("test_bad_input.py", (PPO, "    check_minibatch(flags)\n", "")),
        ("test_bad_input.py", ("utils/preflight.py", "lower = flags[name] // world_size * world_size",
                               "lower = world_size - 1")),
    ],
    38: [
        ("test_runs.py", (GRPO, MASK, MASK_BY_VALUE)),
        ("test_runs.py", (GRPO, LENGTH, REAL.replace("PAD", "tokenizer.pad_token_id"))),
        ("test_reward_model.py", (EXPORT, "tokenizer.pad_token_id is None or tokenizer.pad_token_id in ends:",
                                  "tokenizer.pad_token_id is None:")),
    ],
    39: [
        ("test_models.py", (PACKING, "to_device(positions_T, device)", "to_device(np.arange(len(ids_T)), device)")),
        ("test_models.py", (FORWARD, "        position_ids=packed.position_ids_T[None],\n", "")),
        ("test_models.py", (FORWARD, "cu_seq_lens_q=packed.cu_seqlens,", "cu_seq_lens_q=packed.cu_seqlens[[0, -1]],"),
                           (FORWARD, "max_length_q=packed.max_seqlen,", "max_length_q=len(packed.input_ids_T),")),
    ],
    43: [
        ("test_rewards.py", (REWARDS, 'response.rpartition("####")', 'response[-300:].rpartition("####")')),
        ("test_rewards.py", (REWARDS, "gsm8k_number(response) == gold", "str(gsm8k_number(response)) == truth")),
        ("test_rewards.py", (REWARDS, MARKUP, "[ ]\n")),
    ],
    44: [
        ("test_runs.py", (GRPO, UIDS, UIDS.replace("step,", "step - bool(done),"))),
        ("test_runs.py", (GRPO, UIDS, UIDS.replace("step,", "step - done,"))),
        ("test_runs.py", (CHECKPOINT, LOAD, LOAD_WEIGHTS)),
        ("test_ppo_runs.py", (PPO, STATE, "load_checkpoint(checkpoint, parts)")),
        ("test_data.py", (DATA, 'np.random.default_rng(seed_for("epoch_order", seed, epoch))', "np.random")),
        ("test_data.py", (DATA, "[int(epoch_order(n, seed, i // n)[i % n])",
                          "[int(epoch_order(n, seed, start // n)[i % n])")),
        ("test_checkpoint.py", (RUN_FOLDER, 'state["data"].get(name, fingerprint) != fingerprint', "False")),
    ],
}  # fmt: skip
NUMBERS: dict[str, list[int]] = {}  # of each test file
for number, ways in FAULTS.items():
    for file in sorted({way[0] for way in ways}):  # the same order in every test process
        NUMBERS.setdefault(file, []).append(number)
CASES = [(number, k) for number, ways in FAULTS.items() for k in range(len(ways))]


@cache
def named_tests() -> dict[int, set[str]]:
    """The files, under tests/, that hold tests of each number."""
    found: dict[int, set[str]] = {}
    for path in (ROOT / "tests").rglob("test_*.py"):
        names = re.findall(r"^def (test_\w*fault_\w+)", path.read_text(), re.MULTILINE)
        for number in re.findall(r"fault_(\d\d)_", " ".join(names)):
            found.setdefault(int(number), set()).add(str(path.relative_to(ROOT / "tests")))
    return found


def replaced(text: str, old: str, new: str) -> str:
    assert text.count(old) == 1, f"stands {text.count(old)} times: {old!r}"
    return text.replace(old, new)


def test_every_fault_has_its_test():
    missing = set(NAMED) - named_tests().keys()
    assert not missing, f"no test_fault_NN of {sorted(missing)}"


@pytest.mark.parametrize("number", FAULTS)
def test_the_text_that_a_fault_replaces_is_there(number):
    for file, *changes in FAULTS[number]:
        assert file in named_tests()[number], f"{file} has no test of fault {number}"
        texts = {path: (ROOT / path).read_text() for path, _, _ in changes}
        for path, old, new in changes:
            texts[path] = replaced(texts[path], old, new)
            if path.endswith(".py"):
                compile(texts[path], path, "exec")


@pytest.mark.slow
@pytest.mark.parametrize(("file", "numbers"), NUMBERS.items(), ids=NUMBERS)
def test_without_a_fault_they_pass(tmp_path, file, numbers):
    """In such a copy too: else a fault would be "caught" by what else is missing there."""
    result = run_tests(copy_of_the_tree(tmp_path), f"tests/{file}", " or ".join(f"fault_{n:02}" for n in numbers))
    assert result is not None and result[0] == 0, result


@pytest.mark.slow
@pytest.mark.parametrize(("number", "way"), CASES, ids=[f"{number:02}-{way}" for number, way in CASES])
def test_the_fault_is_caught(tmp_path, number, way):
    tree = copy_of_the_tree(tmp_path)
    file, *changes = FAULTS[number][way]
    for path, old, new in changes:
        (tree / path).write_text(replaced((tree / path).read_text(), old, new))
    result = run_tests(tree, f"tests/{file}", f"fault_{number:02}")
    assert result is not None, f"still running after {LIMIT_S} s"
    code, output = result
    assert code == 1 and Counter(re.findall(r"^(FAILED|ERROR) ", output, re.MULTILINE))["FAILED"], output[-3000:]


def copy_of_the_tree(tmp_path: Path) -> Path:
    tree = tmp_path / "tree"
    tree.mkdir()
    ignored = shutil.ignore_patterns("__pycache__")
    for part in [*ROOT.glob("*.py"), ROOT / "utils", ROOT / "tests", ROOT / "pyproject.toml", ROOT / "README.md"]:
        copy = shutil.copytree if part.is_dir() else shutil.copyfile
        copy(part, tree / part.name, **({"ignore": ignored} if part.is_dir() else {}))
    return tree


def run_tests(tree: Path, file: str, name: str) -> tuple[int, str] | None:
    """Status and output of pytest in the copy; None where it was still running at the limit, and was ended."""
    env = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-k", name, "-m", "not slow", "--basetemp", tree.parent / "pytest"]
    process = subprocess.Popen(
        [*command, file], cwd=tree, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=LIMIT_S)
        return process.returncode, output
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGTERM)  # torchrun then ends its ranks
        try:
            process.communicate(timeout=20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
        return None
