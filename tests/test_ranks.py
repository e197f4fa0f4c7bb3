"""One rank, two replicas, one tensor-parallel group of two: the same weights, log-probs and samples."""

import json

import pytest
from conftest import ROOT, make_model, torchrun

LAYOUTS = {"one rank": (1, 1), "two replicas": (2, 1), "tensor parallel": (2, 2)}


@pytest.fixture(scope="module", params=[("qwen2", True), ("llama", False)], ids=["qwen2-tied", "llama-untied"])
def layouts(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    path = make_model(folder / "m", *request.param)
    results = {}
    for name, (ranks, tp) in LAYOUTS.items():
        out = folder / f"{ranks}_{tp}.json"
        torchrun(ranks, ROOT / "tests/workers/engine_ranks.py", path, tp, out)
        results[name] = json.loads(out.read_text())
    return results


@pytest.mark.parametrize("layout", LAYOUTS)
def test_after_a_sync_every_rank_holds_its_slice_of_the_trainers_weights(layouts, layout):
    for rank in layouts[layout]:
        assert rank["after"] == []
        assert len(rank["before"]) == rank["num_params"], (
            "a parameter was right before the sync: the test is blind to it"
        )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_sync_proof_names_what_one_rank_alone_holds_stale(layouts, layout):
    ranks = layouts[layout]
    last = len(ranks) - 1
    expected = f"rank {last} still held other weights than the trainer in model.layers.1.mlp.down_proj.weight (1 of"
    assert expected in ranks[0]["proof"]
    assert all(rank["proof"] == "1" for rank in ranks[1:])  # they end with it, silently


@pytest.mark.parametrize("layout", LAYOUTS)
def test_engine_logprobs_are_the_trainers(layouts, layout):
    assert all(rank["difference"] < 1e-4 for rank in layouts[layout])
    assert [rank["empty"] for rank in layouts[layout]] == [1, 0][: len(layouts[layout])]


def test_fault_24_the_samples_are_the_same_in_every_layout(layouts):
    merged = {
        name: {key: value for rank in ranks for key, value in rank["samples"].items()}
        for name, ranks in layouts.items()
    }
    one = merged["one rank"]
    assert len(one) == 18
    for name, tolerance in (("two replicas", 0.0), ("tensor parallel", 1e-5)):
        assert merged[name].keys() == one.keys()
        for key, (ids, logprobs) in one.items():
            assert merged[name][key][0] == ids, (name, key)
            assert merged[name][key][1] == pytest.approx(logprobs, abs=tolerance, rel=0), (name, key)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_fault_24_no_two_ranks_repeat_each_others_samples(layouts, layout):
    responses = [tuple(ids) for rank in layouts[layout] for ids in rank["same_prompt"]]
    assert len(responses) == 4 * len(layouts[layout]) == len(set(responses))
