"""Reward models score as plain transformers does, in the policy's tokens or in their own, on any number of ranks."""

import json
from functools import cache

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from conftest import ROOT, make_model, torchrun
from transformers import AutoModelForSequenceClassification
from workers.scoring_ranks import Replay

from hybrid_engine import Rollout
from utils import tiny
from utils.data import PromptData
from utils.export import export_hf
from utils.jsonl import read_jsonl
from utils.metrics import Metrics
from utils.models import load_scalar, load_tokenizer, same_vocabulary
from utils.preferences import encode_response
from utils.prompts import encode_prompt
from utils.scoring import Scorer, check_reward_models

USER, ASSISTANT = ({"role": role, "content": "hi"} for role in ("user", "assistant"))
PROMPTS = ["12+3=", "é?", [USER], [USER, ASSISTANT, {"role": "user", "content": "one more"}], [ASSISTANT]]
TEMPLATE = (  # of the other tokenizer
    "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)
# uid, the response's tokens as text, as the reward's text, finish reason
RESPONSES = [
    (0, "15", "15", "stop"),
    (0, "1<|user|>5", "15", "stop"),  # a special token that is no end
    (2, "a longer answer, é, with one more and one more", "a longer answer, é, with one more and one more", "stop"),
    (1, "", "", "stop"),
    (3, "cut of", "cut of", "length"),
    (3, "<|user|>", "", "length"),  # nothing is left of it as text
    (2, "x" * 40, "x" * 40, "stop"),
    (4, "16", "16", "stop"),
]
REWARDS = """
import time
def length(response, row): return None if "cut" in response else float(len(response))
def truth(response, row): return float(row["reward_model"]["ground_truth"])
def slow(response, row): return time.sleep(60) if "cut" in response else 1.0
"""


def close(got, expected):
    torch.testing.assert_close(torch.tensor(got).double(), torch.tensor(expected).double(), atol=1e-5, rtol=0)


def make_reward_model(folder, mesh, tokenizer, seed, **config):
    """A random reward model with a vocabulary of 264 and 512 positions."""
    lm = make_model(folder / "lm", "qwen2", seed=seed, vocab_size=264)
    float32 = {"master_dtype": torch.float32, "compute_dtype": torch.float32}
    model = load_scalar(str(lm), mesh, flag="-", head_std=0.1, seed=seed, **float32)
    for name, value in {"pad_token_id": tokenizer.pad_token_id, **config}.items():
        setattr(model.lm.config, name, value)
    export_hf(folder / "hf", model, tokenizer)
    return str(folder / "hf")


def make_other_tokenizer():
    """One token more, another end of sequence, another chat template."""
    tokenizer = tiny.make_tokenizer()
    tokenizer.add_tokens(["one more"])
    tokenizer.eos_token, tokenizer.chat_template = "<|user|>", TEMPLATE
    return tokenizer


@pytest.fixture(scope="module")
def world(process_group, tmp_path_factory):
    """The rows, their rollouts, three reward models, and a maker of scorers."""

    class World:
        tmp, mesh = tmp_path_factory.mktemp("scoring"), process_group
        tokenizer = load_tokenizer(str(tiny.make_model(tmp / "policy", seed=0, num_sft_steps=0)))
        own = make_reward_model(tmp / "own", mesh, tokenizer, 1, score_mean=0.3, score_std=2.5)
        second = make_reward_model(tmp / "second", mesh, tokenizer, 2)
        other = make_reward_model(tmp / "other", mesh, make_other_tokenizer(), 3)

        def rollout(self, uid, text, finish_reason="stop", sample=0):
            ids = self.tokenizer(text, add_special_tokens=False).input_ids
            end = [self.tokenizer.eos_token_id] if finish_reason == "stop" else []
            prompt_ids = encode_prompt(self.tokenizer, self.data.row(uid)["prompt"])
            return Rollout(uid, sample, prompt_ids, ids + end, [], finish_reason)

        def scorer(self, spec, max_tokens=10_000, rollouts=(), **kwargs):
            how = {"dtype": torch.float32, "workers": 1, "timeout_s": 20.0, "max_tokens": max_tokens}
            return Scorer(spec, Replay(rollouts), self.tokenizer, self.mesh, **how, **kwargs)

    world = World()
    (world.tmp / "rewards.py").write_text(REWARDS)
    for name, prompts in (("a", PROMPTS[:2]), ("b", PROMPTS[2:])):  # strings, and messages: two types, two files
        rows = [{"prompt": p, "reward_model": {"ground_truth": str(len(p))}} for p in prompts]
        pq.write_table(pa.Table.from_pylist(rows), world.tmp / f"{name}.parquet")
    world.data = PromptData(f"{world.tmp}/[ab].parquet")
    world.rollouts = [world.rollout(uid, tokens, finish) for uid, tokens, _, finish in RESPONSES]
    return world


@cache
def plain(folder):
    return AutoModelForSequenceClassification.from_pretrained(folder).eval()


@torch.no_grad()
def plain_score(folder, prompt_ids, response_ids):
    ids = torch.tensor([prompt_ids + response_ids])
    return plain(folder)(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0, 0].item()


def passed_through(world, folder):
    return [plain_score(folder, r.prompt_ids, r.response_ids) for r in world.rollouts]


def reencoded(world):
    """Of world.other, each response as a row of its own training data would be; a truncated one without its end."""
    tokenizer, scores = load_tokenizer(world.other), []
    for uid, _, text, finish in RESPONSES:
        ids = encode_response(tokenizer, text, tokenizer.eos_token_id)
        ids = ids[:-1] if finish == "length" and text else ids
        scores.append(plain_score(world.other, encode_prompt(tokenizer, world.data.row(uid)["prompt"]), ids))
    return scores


# ---- one reward model ----


@pytest.mark.parametrize("max_tokens", [60, 100, 10_000])
def test_the_policys_own_ids_are_scored_as_plain_transformers_does(world, max_tokens):
    """60 tokens hold the longest sequence; every budget gives every response its own score, in the order they came."""
    expected = passed_through(world, world.own)
    assert max(len(r.prompt_ids) + len(r.response_ids) for r in world.rollouts) <= 60
    assert min(abs(a - b) for i, a in enumerate(expected) for b in expected[:i]) > 1e-3  # none may pass for another's
    got = world.scorer(f"model:{world.own}", max_tokens).model_scores(world.rollouts, world.data)
    assert got.dtype == torch.float64 and got.shape == (len(RESPONSES),)
    close(got.tolist(), expected)


@pytest.mark.parametrize("name", ["own", "other"])
def test_a_score_does_not_depend_on_batch_mates_or_their_order(world, name):
    scorer = world.scorer(f"model:{getattr(world, name)}")
    together = scorer.model_scores(world.rollouts, world.data).tolist()
    close(scorer.model_scores(world.rollouts[::-1], world.data).tolist(), together[::-1])
    close([scorer.model_scores([r], world.data).item() for r in world.rollouts], together)
    assert scorer.model_scores([], world.data).tolist() == []


@pytest.mark.parametrize("max_tokens", [1, 60, 10_000])
def test_another_tokenizer_reads_prompt_and_response_as_its_own(world, max_tokens):
    """Through its template and its end of sequence; one that is longer than a micro-batch is scored all the same."""
    expected = reencoded(world)
    got = world.scorer(f"model:{world.other}", max_tokens).model_scores(world.rollouts, world.data)
    close(got.tolist(), expected)
    assert expected[0] == expected[1]  # the special token is no text
    as_ids = passed_through(world, world.other)
    assert min(abs(a - b) for a, b in zip(as_ids, expected, strict=True)) > 1e-3


def test_a_pad_token_of_its_own_does_not_make_another_vocabulary(world, process_group):
    """reward_model_bt.py may have had to add one: ids still pass through, and a critic may start from it."""
    padded = load_tokenizer(world.own)
    padded.add_special_tokens({"pad_token": "<|pad_261|>"})
    wide = load_tokenizer(world.own)
    wide.add_tokens(["<|pad_261|>"])
    for one, same in ((padded, True), (wide, False), (load_tokenizer(world.other), False)):
        assert same_vocabulary(one, world.tokenizer) == same_vocabulary(world.tokenizer, one) == same
    folder = make_reward_model(world.tmp / "padded", process_group, padded, 1)
    assert load_tokenizer(folder).pad_token == "<|pad_261|>"
    scorer = world.scorer(f"model:{folder}")
    assert scorer.models[0].tokenizer is None
    close(scorer.model_scores(world.rollouts, world.data).tolist(), passed_through(world, world.own))


def test_what_is_longer_than_the_models_positions_is_not_judged(world):
    prompt = len(world.rollout(2, "").prompt_ids)
    responses = ["y" * (512 - prompt - 1), "y" * (512 - prompt), "short", "one more" * 64]
    rollouts = [world.rollout(2, text) for text in responses]
    assert [len(r.prompt_ids) + len(r.response_ids) for r in rollouts][:2] == [512, 513]
    own = world.scorer(f"model:{world.own}").model_scores(rollouts, world.data)
    other = world.scorer(f"model:{world.other}").model_scores(rollouts, world.data)
    assert own.isfinite().tolist() == [True, False, True, False]
    # counted in the tokens that it reads: its template is longer, and "one more" is one token
    assert other.isfinite().tolist() == [False, False, True, True]
    close(own[2].item(), plain_score(world.own, rollouts[2].prompt_ids, rollouts[2].response_ids))


def test_a_folder_that_could_not_score_is_refused_before_it_loads(world):
    longest = {"tokenizer": world.tokenizer, "longest": 512}
    for folder in (world.own, world.second, world.other):
        check_reward_models(f"model:{folder}:0.5,tiny", **longest)
    check_reward_models("tiny", **longest)
    check_reward_models(f"model:{world.other}", world.tokenizer, 513)  # in its own tokens they may fit
    check_reward_models(f"model:{world.own}", **longest, normalize=True)
    for spec, kwargs, message in (
        (f"model:{world.own}", {"longest": 513}, r"^--reward model:.*own/hf: has 512 positions.* 513 or more works"),
        (
            f"model:{world.second}",
            {"normalize": True},
            r"^--normalize-scores: .*second/hf/config.json has no score_std",
        ),
        (f"model:{world.tmp}/policy", {"flag": "--eval-reward"}, r"^--eval-reward model:.*must have a scalar head"),
    ):
        with pytest.raises(ValueError, match=message):
            check_reward_models(spec, **{**longest, **kwargs})


# ---- several ----


def test_scores_of_models_add_up_with_their_weights(world):
    a, b, c = passed_through(world, world.own), passed_through(world, world.second), reencoded(world)
    scorer = world.scorer(f"model:{world.own}:0.5,model:{world.second}:-2,model:{world.other}")
    expected = [0.5 * x - 2 * y + z for x, y, z in zip(a, b, c, strict=True)]
    close(scorer.model_scores(world.rollouts, world.data).tolist(), expected)


def test_scores_are_brought_to_the_scale_that_config_json_records(world):
    raw = passed_through(world, world.own)
    scorer = world.scorer(f"model:{world.own}:3", normalize=True)
    close(scorer.model_scores(world.rollouts, world.data).tolist(), [3 * (x - 0.3) / 2.5 for x in raw])


def test_timeouts_are_counted_among_the_errors(world):
    scorer = world.scorer(f"{world.tmp}/rewards.py:slow", rollouts=world.rollouts)
    scorer.pool.timeout_s = 2.0
    for uids, number in (([0, 2, 3], 1), ([0], 0)):  # of the last call alone
        rollouts = scorer.rollout(world.data, uids, 2, 1, None)
        scores = scorer.rule_scores(rollouts, "step 1")
        assert scores.isnan().sum() == scorer.num_timeouts == number
    scorer.close()


def test_fault_23_rules_are_summed_apart_from_models_and_go_with_their_response(world):
    file = f"{world.tmp}/rewards.py"
    spec = f"{file}:length:0.5,model:{world.own}:2,{file}:truth:10"
    scorer = world.scorer(spec, rollouts=world.rollouts)
    uids = [0, 2, 3]
    rollouts = scorer.rollout(world.data, uids, 2, 1, None)
    texts = [(uid, text) for k in uids for uid, _, text, _ in RESPONSES if uid == k]
    assert [r.uid for r in rollouts] == [uid for uid, _ in texts] == [0, 0, 2, 2, 3, 3]
    scores = scorer.rule_scores(rollouts, "step 1")
    expected = [None if "cut" in text else 0.5 * len(text) + 10 * len(PROMPTS[uid]) for uid, text in texts]
    assert [None if s != s else s for s in scores.tolist()] == expected and expected[4] is None
    models = [2 * plain_score(world.own, r.prompt_ids, r.response_ids) for r in rollouts]
    close(scorer.model_scores(rollouts, world.data).tolist(), models)
    scorer.close()
    without = world.scorer("tiny", rollouts=world.rollouts)
    assert without.models == [] and without.model_scores(world.rollouts, world.data).tolist() == [0.0] * len(RESPONSES)
    without.close()
    no_rule = world.scorer(f"model:{world.own}").rule_scores(world.rollouts, "")
    assert no_rule.tolist() == [0.0] * len(RESPONSES)


# ---- evaluation ----


@pytest.fixture(scope="module")
def evaluated(world):
    """One response to each of the rows: the figures, the samples, and what each should have got."""
    answers = [world.rollout(*case) for case in [(0, "15"), (1, "cut", "length"), (2, "y" * 520), (3, "four"), (4, "")]]
    rule = f"{world.tmp}/rewards.py:length"
    scorer = world.scorer(f"{rule},model:{world.own}:2", rollouts=answers)
    metrics = Metrics()
    scorer.evaluate(world.data, 7, None, metrics, world.tmp / "samples.jsonl")
    scorer.close()
    ends = {i: 2 * plain_score(world.own, answers[i].prompt_ids, answers[i].response_ids) for i in (0, 3, 4)}
    return (
        answers,
        metrics.reduce(),
        read_jsonl(world.tmp / "samples.jsonl"),
        [2 + ends[0], 0.0, 0.0, 4 + ends[3], ends[4]],
    )


def test_fault_35_an_evaluation_counts_every_row_and_no_score_as_0(evaluated):
    answers, figures, _, expected = evaluated
    assert figures["eval/score"] == pytest.approx(sum(expected) / 5, abs=1e-5)
    assert figures["eval/error_frac"] == 0.4 and figures["eval/truncated_frac"] == 0.2
    assert figures["eval/response_len"] == sum(len(r.response_ids) for r in answers) / 5


def test_an_evaluation_in_which_the_judge_fails_has_no_score_and_ends_no_run_that_trained(world, capsys):
    answers = [world.rollout(uid, "cut") for uid in range(5)]
    scorer, metrics = world.scorer(f"{world.tmp}/rewards.py:length", rollouts=answers), Metrics()
    scorer.evaluate(world.data, 7, None, metrics, world.tmp / "failed.jsonl")
    figures = metrics.reduce()
    assert figures["eval/error_frac"] == 1 and "eval/score" not in figures
    assert "failed on all responses of the evaluation at step 7" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="failed on all responses of the evaluation at step 0"):
        scorer.evaluate(world.data, 0, None, metrics, world.tmp / "failed.jsonl")
    scorer.close()


def test_a_judge_that_stalled_for_one_batch_judges_the_next(world):
    scorer = world.scorer(f"{world.tmp}/rewards.py:length", rollouts=world.rollouts)
    scorer.pool._timeouts = 10**6  # in a row: no call is made
    with pytest.raises(SystemExit, match=r"failed on all responses of step 1: .* calls in a row timed out"):
        scorer.rule_scores(scorer.rollout(world.data, [0], 2, 1, None), "step 1")
    assert scorer.rule_scores(scorer.rollout(world.data, [0], 2, 2, None), "step 2").isfinite().all()
    scorer.close()


def test_its_samples_are_the_responses_with_their_scores(evaluated, world):
    answers, _, samples, expected = evaluated
    assert [row["score"] for row in samples] == pytest.approx(expected, abs=1e-5)
    for row, answer in zip(samples, answers, strict=True):
        assert row["step"] == 7 and (row["uid"], row["finish_reason"]) == (answer.uid, answer.finish_reason)
        assert row["response"] == world.tokenizer.decode(answer.response_ids)
    assert samples[2]["prompt"] == "<|user|>hi<|assistant|>" and samples[0]["response"] == "15<|eos|>"


# ---- ranks ----


def test_fault_35_two_ranks_score_every_row_as_one_does(world):
    """Whatever each of them holds, nothing included: the reward model's collectives must match."""
    spec = f"model:{world.own}:0.5,model:{world.other}"
    given = {"spec": spec, "policy": str(world.tmp / "policy"), "max_tokens": 60, "counts": [8, 0, 1, 4]}
    given |= {"rows": f"{world.tmp}/[ab].parquet", "rollouts": [vars(r) for r in world.rollouts]}
    pq.write_table(pq.read_table(world.tmp / "a.parquet").slice(0, 1), world.tmp / "single.parquet")
    given |= {
        "evaluations": [given["rows"], str(world.tmp / "single.parquet")]
    }  # three rows and two; one row, and none
    (world.tmp / "given.json").write_text(json.dumps(given))
    torchrun(2, ROOT / "tests/workers/scoring_ranks.py", world.tmp / "given.json", world.tmp / "out.json")
    scores, figures = json.loads((world.tmp / "out.json").read_text())
    expected = [0.5 * a + b for a, b in zip(passed_through(world, world.own), reencoded(world), strict=True)]
    for count, shares in zip(given["counts"], scores, strict=True):
        assert [len(share) for share in shares] == [count, 8 - count]
        close(shares[0] + shares[1], expected)
    first = [next(i for i, case in enumerate(RESPONSES) if case[0] == uid) for uid in range(5)]
    for figure, uids in zip(figures, ([0, 1, 2, 3, 4], [0]), strict=True):
        assert figure["eval/score"] == pytest.approx(sum(expected[first[uid]] for uid in uids) / len(uids), abs=1e-5)
        assert figure["eval/error_frac"] == 0
