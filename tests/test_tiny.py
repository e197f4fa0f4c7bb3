"""The embedded default: tokenizer, model folder, task and the folder that `ensure` makes."""

import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from utils import tiny


def weights(path):
    return AutoModelForCausalLM.from_pretrained(path).state_dict()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.make_model(tmp_path_factory.mktemp("model"), seed=3, num_sft_steps=0)


def test_tokenizer_round_trips_any_text():
    tokenizer = tiny.make_tokenizer()
    texts = ["347+8=", "  two  spaces\n\ttab ", "naïve 数学 🙂 e\u0301", "".join(map(chr, range(1, 0x250))), "can't ,"]
    for text in texts:
        ids = tokenizer.encode(text)
        assert len(ids) == len(text.encode()) and tokenizer.decode(ids) == text
    assert len(tokenizer) == 260 and len(set(tokenizer.get_vocab().values())) == 260
    assert tokenizer.pad_token_id != tokenizer.eos_token_id
    assert tokenizer.decode([*tokenizer.encode("355"), tokenizer.eos_token_id], skip_special_tokens=True) == "355"


def test_chat_template_marks_turns():
    tokenizer = tiny.make_tokenizer()
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}, {"role": "user", "content": "?"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text == "<|user|>hi<|assistant|>yo<|eos|><|user|>?<|assistant|>"
    assert len(tokenizer.encode(text)) == 5 + 5  # five bytes, five special tokens


def test_folder_loads_with_the_same_logits(folder):
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    plain = tiny.make_tokenizer()
    assert tokenizer.encode("12 ü<|eos|>") == plain.encode("12 ü<|eos|>")
    assert tokenizer.chat_template == plain.chat_template
    assert model.generation_config.eos_token_id == plain.eos_token_id == model.config.eos_token_id
    assert model.dtype == torch.float32 and model.config.vocab_size % 2 == 0 and model.num_parameters() < 1.2e6
    assert model.model.embed_tokens.weight is model.lm_head.weight
    ids = tiny.encode([(347, 8), (991, 8)], plain)
    again = AutoModelForCausalLM.from_pretrained(folder)
    assert torch.equal(model(ids).logits, again(ids).logits)


def test_saved_weights_are_the_taught_ones(tmp_path, monkeypatch):
    taught = []
    monkeypatch.setattr(tiny, "accuracy", lambda model, ids: taught.append(model) or 0.0)
    tiny.make_model(tmp_path, seed=0, num_sft_steps=2)
    ids = tiny.encode([(347, 8), (991, 8)], tiny.make_tokenizer())
    with torch.no_grad():
        assert torch.equal(taught[-1](ids).logits, AutoModelForCausalLM.from_pretrained(tmp_path)(ids).logits)


def test_seed_decides_every_bit(tmp_path):
    torch.manual_seed(11)
    state = torch.random.get_rng_state()
    paths = [tiny.make_model(tmp_path / str(i), seed, num_sft_steps=3) for i, seed in enumerate((5, 5, 6))]
    assert torch.equal(state, torch.random.get_rng_state())  # the caller's generator is left alone
    first, same, other = map(weights, paths)
    assert all(torch.equal(first[k], same[k]) for k in first)
    assert not torch.equal(first["model.norm.weight"], other["model.norm.weight"])
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])


def test_teaching_lowers_the_loss(folder, tmp_path):
    ids = tiny.encode(tiny.splits()[1], tiny.make_tokenizer())
    losses = []
    for path in (folder, tiny.make_model(tmp_path, seed=3, num_sft_steps=30)):
        with torch.no_grad():
            logits = AutoModelForCausalLM.from_pretrained(path)(ids[:, :-1]).logits[:, 5:]
        losses.append(torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 6:].flatten()).item())
    assert losses[0] > 4 and losses[1] < 2


def test_sizes_can_be_overridden(tmp_path):
    model = AutoModelForCausalLM.from_pretrained(
        tiny.make_model(tmp_path, 0, num_sft_steps=0, hidden_size=256, num_layers=1, tie=False)
    )
    assert (model.config.hidden_size, model.config.num_hidden_layers, model.config.head_dim) == (256, 1, 64)
    assert model.model.embed_tokens.weight is not model.lm_head.weight
    with pytest.raises(ValueError, match="hidden_size=64"):
        tiny.make_model(tmp_path, 0, num_sft_steps=0, hidden_size=64)


def test_splits_are_disjoint_and_fixed():
    train, val = tiny.splits()
    assert len(val) == len(set(val)) == tiny.NUM_VAL == 200 and len(train) == len(set(train)) > 5000
    both_ways = {pair for a, b in train for pair in ((a, b), (b, a))}
    assert not both_ways & set(val)
    assert tiny.splits() == (train, val)


def test_parquet_rows(tmp_path):
    for path, sums in zip(tiny.make_data(tmp_path), tiny.splits(), strict=True):
        table = pq.read_table(path)
        assert table.column_names == ["data_source", "prompt", "ability", "reward_model", "extra_info"]
        rows = table.to_pylist()
        assert len(rows) == len(sums)
        for row in rows:
            a, b = map(int, row["prompt"].removesuffix("=").split("+"))
            assert row["reward_model"] == {"style": "rule", "ground_truth": str(a + b)}
            assert row["data_source"] == "tiny" and row["ability"] == "arithmetic"


def test_ensure_makes_once_and_leaves_no_half(tmp_path, monkeypatch):
    whole = tiny.make_model

    def killed(path, seed):
        whole(path, seed, num_sft_steps=0)
        raise KeyboardInterrupt

    monkeypatch.setattr(tiny, "make_model", killed)
    with pytest.raises(KeyboardInterrupt):
        tiny.ensure(tmp_path, 1)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(tiny, "make_model", lambda path, seed: whole(path, seed, num_sft_steps=0))
    made = tiny.ensure(tmp_path, 1)
    assert set(made) == {"model", "train_files", "val_files"} and weights(made["model"])
    assert pq.read_table(made["val_files"]).num_rows == 200
    monkeypatch.setattr(tiny, "make_model", killed)
    assert tiny.ensure(tmp_path, 1) == made and len(list(tmp_path.iterdir())) == 1
    with pytest.raises(KeyboardInterrupt):  # another seed is another folder
        tiny.ensure(tmp_path, 2)
