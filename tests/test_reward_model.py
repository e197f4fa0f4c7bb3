"""The Bradley-Terry loss and its figures by hand; a score does not depend on batch mates, padding or packing."""

import json
import math
import shutil

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import make_model, sequences
from test_algorithm import close
from transformers import AutoModelForSequenceClassification, AutoTokenizer, Qwen2Config

from reward_model_bt import held_out_figures, preference_loss
from utils import tiny
from utils.export import export_hf, set_safe_pad
from utils.metrics import wilson
from utils.models import has_scalar_head, load_config, load_scalar
from utils.packing import pack

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FLOAT32 = {"master_dtype": torch.float32, "compute_dtype": torch.float32}


@pytest.mark.parametrize("margin, centring, expected, mean", [
    ([0.0, 0.0], 0.0, [0.47408, 1.03749], 0.75578),
    ([2 / 3, 0.0], 0.0, [0.77995, 1.03749], 0.90872),
    ([0.0, 0.0], 0.01, [0.47408 + 0.01 * 1.9**2, 1.03749 + 0.01 * 1.2**2], 0.78103),
])  # fmt: skip
def test_preference_loss_golden(margin, centring, expected, mean):
    loss = preference_loss(torch.tensor([1.2, 0.3]), torch.tensor([0.7, 0.9]), torch.tensor(margin), centring)
    close(loss, expected)
    assert loss.mean().item() == pytest.approx(mean, abs=1e-5)


def test_wilson_interval():
    assert wilson(8, 10) == pytest.approx((0.4901625, 0.9433178), abs=1e-6)  # as tabulated for 8 of 10
    low, high = wilson(20, 20)
    assert high == pytest.approx(1.0) and low == pytest.approx(20 / (20 + 1.959964**2))


def test_held_out_figures():
    """Four pairs: two surely right, one surely wrong, one tie, which is wrong."""
    chosen, rejected = np.array([3.0, 2.0, -3.0, 0.5]), np.array([0.0, -1.0, 0.0, 0.5])
    figures = held_out_figures(chosen, rejected)
    sure = 1 / (1 + math.exp(-3))
    assert figures["eval/accuracy"] == 0.5
    assert figures["eval/margin"] == pytest.approx(3 / 4)
    assert figures["eval/loss"] == pytest.approx((3 * math.log(1 + math.exp(-3)) + 3 + math.log(2)) / 4)
    both = np.concatenate([chosen, rejected])
    assert (figures["eval/score_mean"], figures["eval/score_std"]) == pytest.approx((both.mean(), both.std()))
    assert figures["eval/calib_share_90_100"] == 0.75 and figures["eval/calib_share_50_60"] == 0.25
    assert figures["eval/calib_prob_90_100"] == pytest.approx(sure)
    assert figures["eval/calib_acc_90_100"] == pytest.approx(2 / 3) and figures["eval/calib_acc_50_60"] == 0
    assert figures["eval/calib_error"] == pytest.approx(0.75 * abs(sure - 2 / 3) + 0.25 * 0.5)
    assert "eval/calib_acc_70_80" not in figures and figures["eval/calib_share_70_80"] == 0


# ---- scores ----

PROMPTS = [[7, 8, 9], [10], [11, 12, 13, 14, 15]]
RESPONSES = [[20, 21, 5], [22, 5, 5, 23, 24, 25, 5], [5]]  # 5 ends a response; two of them hold it in the middle


@pytest.fixture(scope="module")
def model(process_group, tmp_path_factory):
    path = make_model(tmp_path_factory.mktemp("rm") / "lm", "qwen2")
    return load_scalar(str(path), process_group, flag="--model", head_std=0.5, seed=7, **FLOAT32)


@torch.no_grad()
def scores(model, prompts=PROMPTS, responses=RESPONSES):
    return model(pack(sequences(prompts, responses), DEVICE))


def test_scores_do_not_depend_on_batch_mates(model):
    together = scores(model)[1]
    for i in range(3):
        torch.testing.assert_close(scores(model, PROMPTS[i : i + 1], RESPONSES[i : i + 1])[1], together[i : i + 1])
    torch.testing.assert_close(scores(model, PROMPTS[::-1], RESPONSES[::-1])[1], together.flip(0))
    assert together.unique().numel() == 3


def test_values_and_score_are_the_scalars_of_successive_states(model):
    """The value of the state before token t is the score of the prompt and the t tokens before it."""
    prompt, response = PROMPTS[1], RESPONSES[1]
    values, score = scores(model, [prompt], [response])
    cut = [scores(model, [prompt], [response[:t]])[1] for t in range(1, len(response) + 1)]
    torch.testing.assert_close(values[1:], torch.cat(cut[:-1]))
    torch.testing.assert_close(score, cut[-1])


def test_a_filling_micro_batch_has_a_gradient_of_zero(model):
    values, last = model(pack([], DEVICE))
    assert len(values) == len(last) == 0
    (values.sum() + last.sum()).backward()
    assert all(p.grad is None or p.grad.full_tensor().abs().max() == 0 for p in model.parameters())
    model.zero_grad()


def test_fault_38_the_exported_folder_gives_the_same_scores_in_plain_transformers(model, tmp_path):
    """Right-padded batches, rows that end in and hold the end-of-sequence token: pad must not be taken for an end."""
    tokenizer = tiny.make_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token  # as many base models come
    model.lm.config.pad_token_id = set_safe_pad(tokenizer, model.lm.config, [5, 6, tokenizer.eos_token_id])
    export_hf(tmp_path / "hf", model, tokenizer)
    assert has_scalar_head(load_config(str(tmp_path / "hf"), head="scalar"))
    plain = AutoModelForSequenceClassification.from_pretrained(tmp_path / "hf").eval()
    loaded = AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert plain.config.pad_token_id == loaded.pad_token_id not in {5, 6, loaded.eos_token_id}
    assert plain.config.num_labels == 1
    rows = [p + r for p, r in zip(PROMPTS, RESPONSES, strict=True)]
    ids = torch.full((3, 12), loaded.pad_token_id)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = torch.tensor(row)
    with torch.no_grad():
        got = plain(input_ids=ids, attention_mask=(ids != loaded.pad_token_id).long()).logits[:, 0]
    torch.testing.assert_close(got, scores(model)[1].cpu(), atol=1e-5, rtol=0)


def test_the_pad_is_its_own_a_reserved_token_a_free_id_or_an_error():
    size = len(tiny.make_tokenizer())

    def pad(own: bool, template: str, vocab_size: int) -> int:
        tokenizer = tiny.make_tokenizer()
        pad_id = tokenizer.pad_token_id
        if not own:
            tokenizer.pad_token = tokenizer.eos_token
        tokenizer.chat_template += template
        chosen = set_safe_pad(tokenizer, Qwen2Config(vocab_size=vocab_size), [tokenizer.eos_token_id])
        assert chosen == tokenizer.pad_token_id != tokenizer.eos_token_id
        return chosen - pad_id if chosen < size else chosen

    assert pad(own=True, template="", vocab_size=size) == 0
    assert pad(own=False, template="", vocab_size=size) == 0  # "<|pad|>" is no end and in no template
    assert pad(own=False, template="<|pad|>", vocab_size=size + 1) == size
    with pytest.raises(ValueError, match=r"--model .*: its pad token \(<\|eos\|>\) may end a response"):
        pad(own=False, template="<|pad|>", vocab_size=size)


def test_the_gradient_is_plain_autograds(model, tmp_path):
    """Loss and gradient of a pair against transformers on the same weights."""
    tokenizer = tiny.make_tokenizer()
    model.lm.config.pad_token_id = tokenizer.pad_token_id
    export_hf(tmp_path / "hf", model, tokenizer)
    plain = AutoModelForSequenceClassification.from_pretrained(tmp_path / "hf")
    rows = [torch.tensor([p + r]) for p, r in zip(PROMPTS[:2], RESPONSES[:2], strict=True)]
    a, b = (plain(input_ids=row, attention_mask=torch.ones_like(row)).logits[0, 0] for row in rows)
    F.softplus(-(a - b - 0.3)).backward()
    chosen, rejected = model(pack(sequences(PROMPTS[:2], RESPONSES[:2]), DEVICE))[1]
    preference_loss(chosen, rejected, torch.tensor(0.3), 0.0).backward()
    got = {name.removeprefix("lm."): p.grad.full_tensor() for name, p in model.named_parameters()}
    for name, p in plain.named_parameters():
        torch.testing.assert_close(got[name].cpu(), p.grad, atol=1e-5 * p.grad.abs().max().item(), rtol=1e-4)
    model.zero_grad()


def test_a_new_head_follows_the_seed_and_an_old_one_is_read(process_group, model, tmp_path):
    path = make_model(tmp_path / "lm", "qwen2")
    heads = [
        load_scalar(
            str(path), process_group, flag="-", head_std=std, seed=seed, **FLOAT32
        ).lm.score.weight.full_tensor()
        for std, seed in ((0.5, 7), (0.5, 8), (0.0, 7))
    ]
    torch.testing.assert_close(heads[0], model.lm.score.weight.full_tensor())
    assert not torch.equal(heads[0], heads[1]) and heads[2].abs().max() == 0
    assert heads[0].std().item() == pytest.approx(0.5, rel=0.2)
    export_hf(tmp_path / "hf", model, tiny.make_tokenizer())
    for head_std in (None, 0.0):
        again = load_scalar(str(tmp_path / "hf"), process_group, flag="-", head_std=head_std, **FLOAT32)
        torch.testing.assert_close(scores(again), scores(model))
    config = tmp_path / "lm/config.json"  # that says there is a head, where the weights have none
    claims = json.loads(config.read_text()) | {"architectures": ["Qwen2ForSequenceClassification"]}
    shutil.copytree(tmp_path / "lm", tmp_path / "headless")
    (tmp_path / "headless/config.json").write_text(json.dumps(claims | {"id2label": {"0": "LABEL_0"}}))
    with pytest.raises(ValueError, match=r"headless: weights missing from the folder, \['score.weight'\]"):
        load_scalar(str(tmp_path / "headless"), process_group, flag="-", head_std=0.0, **FLOAT32)
    with pytest.raises(ValueError, match=r"--reward model:.*: must have a scalar head, and is Qwen2ForCausalLM"):
        load_scalar(str(path), process_group, flag="--reward model:", **FLOAT32)
