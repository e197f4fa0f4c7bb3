"""The run folder: what a resume takes, keeps and puts aside."""

import json
import re
import resource
from contextlib import contextmanager

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from conftest import ROOT, make_model
from transformers import AutoModelForCausalLM, GenerationConfig

from hybrid_engine import Rollout
from utils import tiny
from utils.checkpoint import save_checkpoint
from utils.export import export_hf
from utils.jsonl import append_jsonl, read_jsonl
from utils.models import load_policy, load_tokenizer
from utils.replay import check_replayed, cut_record, open_record, record_rollouts
from utils.run_folder import _write_whole, find_checkpoint, open_run

ARGS = {"lr": 0.1, "seed": 1, "train_files": "a.parquet", "num_steps": 4, "max_tokens_per_gpu": 10}
ARGS |= {"max_kl": 0.2, "min_entropy": 0.1}
DATA = {"train-files": "abc"}


@pytest.fixture
def run_dir(tmp_path, process_group):
    """A run logged up to step 11, with checkpoints at 2, 4 and 10, and one that a kill cut off."""
    for step in (2, 4, 10):
        folder = tmp_path / f"checkpoints/step_{step}"
        folder.mkdir(parents=True)
        (folder / "state.json").write_text(
            json.dumps({"step": step, "args": ARGS, "data": DATA, "parts": ["policy"], "files": {}})
        )
    (tmp_path / "checkpoints/step_11.tmp").mkdir()
    lines = [json.dumps({"step": step, "x": step}) for step in range(12)]
    for name in ("metrics.jsonl", "events.jsonl"):
        (tmp_path / name).write_text("\n".join(lines) + '\n{"step": 12, "x')
    return tmp_path


def reopen(run_dir, resume, args=ARGS, data=DATA, num_steps=20, parts=("policy",)):
    found = find_checkpoint(run_dir, resume, num_steps, parts, args, data)
    open_run(run_dir, *found, args, str(ROOT / "grpo_fsdp.py"))
    return found


def test_auto_takes_the_newest_whole_checkpoint_and_cuts_the_log_back(run_dir):
    assert reopen(run_dir, "auto") == (run_dir / "checkpoints/step_10", 10)  # by number, not by name
    for name in ("metrics.jsonl", "events.jsonl"):
        assert [row["step"] for row in read_jsonl(run_dir / name)] == list(range(11))


def test_resuming_an_earlier_one_puts_the_later_ones_aside(run_dir):
    earlier = run_dir / "checkpoints/step_2"
    assert reopen(run_dir, str(earlier)) == (earlier, 2)
    assert reopen(run_dir, "auto") == (earlier, 2)  # not step_10 of the branch that was left
    assert (run_dir / "checkpoints/step_10.old/state.json").exists()  # nothing is lost


def test_a_resume_that_is_refused_changes_nothing(run_dir):
    def files():
        return {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}

    before, earlier = files(), str(run_dir / "checkpoints/step_4")
    refused = {
        "--num-steps 3: ": {"num_steps": 3},
        "--lr 1.0: ": {"args": ARGS | {"lr": 1.0}},
        "--train-files a.parquet: ": {"data": dict.fromkeys(DATA, "other")},
        "--resume .*: holds policy, and must hold policy and critic": {"parts": ("policy", "critic")},
    }
    for words, more in refused.items():
        with pytest.raises(ValueError, match=words):
            reopen(run_dir, earlier, **more)
    assert files() == before


def test_auto_without_a_checkpoint_starts_afresh(tmp_path, process_group):
    for _ in range(2):  # and a second time, where the first was killed before its first save
        (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n')
        assert reopen(tmp_path, "auto", {**ARGS, "resume": "auto"}) == (None, 0)
        assert read_jsonl(tmp_path / "metrics.jsonl") == []


def test_fault_44_what_may_change_and_what_may_not(run_dir):
    assert reopen(run_dir, "auto", {**ARGS, "num_steps": 9, "max_tokens_per_gpu": 99})[1] == 10
    assert reopen(run_dir, "auto", {**ARGS, "min_entropy": 0.3})[1] == 10  # an event more or less
    with pytest.raises(ValueError, match=r"--max-kl 0.1: differs from the resumed run's 0.2"):
        reopen(run_dir, "auto", {**ARGS, "max_kl": 0.1})
    with pytest.raises(ValueError, match=r"--seed 2: differs from the resumed run's 1"):
        reopen(run_dir, "auto", {**ARGS, "seed": 2})
    with pytest.raises(ValueError, match=r"--num-steps 9: differs"):  # it would bend the schedule
        reopen(run_dir, "auto", {**ARGS, "num_steps": 9, "lr_schedule": "cosine"})
    with pytest.raises(ValueError, match=r"--train-files a.parquet: holds other rows"):
        reopen(run_dir, "auto", data={"train-files": "abd"})
    with pytest.raises(ValueError, match=r"holds an earlier run; use --resume auto"):
        reopen(run_dir, "")
    assert len(read_jsonl(run_dir / "metrics.jsonl")) == 11, "a refused resume has changed the folder"


def test_another_runs_checkpoint_does_not_cut_this_runs_log(run_dir, tmp_path_factory):
    other = tmp_path_factory.mktemp("other")
    (other / "metrics.jsonl").write_text('{"step": 0}\n')
    with pytest.raises(ValueError, match="holds another run than the one resumed"):
        reopen(other, str(run_dir / "checkpoints/step_4"))
    assert len(read_jsonl(other / "metrics.jsonl")) == 1


def test_a_run_that_began_from_anothers_checkpoint_goes_on_from_it_until_it_has_its_own(run_dir, tmp_path_factory):
    fork, start = tmp_path_factory.mktemp("fork"), run_dir / "checkpoints/step_4"
    assert reopen(fork, str(start), {**ARGS, "resume": str(start)}) == (start, 4)
    for _ in range(2):  # killed before its first save, twice
        append_jsonl(fork / "metrics.jsonl", {"step": 5})
        assert reopen(fork, "auto", {**ARGS, "resume": "auto"}) == (start, 4)
        assert read_jsonl(fork / "metrics.jsonl") == []
    own = fork / "checkpoints/step_6"
    own.mkdir(parents=True)
    (own / "state.json").write_text((start / "state.json").read_text().replace('"step": 4', '"step": 6'))
    assert reopen(fork, "auto", {**ARGS, "resume": "auto"}) == (own, 6)


def test_a_fork_whose_start_is_gone_does_not_start_from_the_base_model(run_dir, tmp_path_factory, monkeypatch):
    fork, start = tmp_path_factory.mktemp("fork"), run_dir / "checkpoints/step_4"
    monkeypatch.chdir(run_dir)
    reopen(fork, "checkpoints/step_4", {**ARGS, "resume": "checkpoints/step_4"})
    monkeypatch.chdir(fork)
    assert reopen(fork, "auto", {**ARGS, "resume": "auto"}) == (start, 4)
    start.rename(run_dir / "elsewhere")
    with pytest.raises(ValueError, match=r"--resume auto: .* began from .*step_4, which is gone; .* a new folder"):
        reopen(fork, "auto", {**ARGS, "resume": "auto"})
    (fork / "args.json").write_text("")
    with pytest.raises(ValueError, match=r"--resume auto: .*args.json does not read .*; .* a new folder"):
        reopen(fork, "auto", {**ARGS, "resume": "auto"})


def test_what_a_run_recorded_goes_with_its_log_and_anothers_stays(process_group, tmp_path):
    folder, mine, other = tmp_path / "rollouts", tmp_path / "a", tmp_path / "b"

    def held():
        return sorted(path.name for path in folder.iterdir())

    rollout, one = Rollout(7, 0, [1], [2, 3], [-0.5, -0.25], "stop"), torch.ones(1)
    open_record(str(folder), mine)
    for run_dir in (mine, other):
        reopen(run_dir, "auto")
    for step in (1, 2, 3):
        record_rollouts(str(folder), mine, step, [rollout], one, one.bool(), 1.0)
    moved = mine.rename(tmp_path / "moved")
    for run_dir in (other, mine):  # mine: a new one in the old one's place
        with pytest.raises(ValueError, match=r"--record .*: holds an earlier run's rollouts .*; give a new folder"):
            open_record(str(folder), run_dir)
        assert len(held()) == 3
    for done in (2, 0):  # 0: killed before its first save
        open_record(str(folder), moved)
        reopen(moved, "auto")
        cut_record(str(folder), done)
        assert held() == ["step_1.parquet", "step_2.parquet"][:done]


@pytest.mark.parametrize("parquet", [True, False])
def test_a_recording_without_a_run_id_is_not_a_new_runs(tmp_path, process_group, parquet):
    path = tmp_path / "rollouts/step_1.parquet"
    path.parent.mkdir()
    if parquet:
        pq.write_table(pa.table({"uid": [1]}), path)
    else:
        path.write_text("no parquet")
    with pytest.raises(
        ValueError, match=r"--record .*: holds an earlier run's rollouts \(step_1.parquet\); give a new"
    ):
        open_record(str(path.parent), tmp_path / "new")


def test_only_steps_to_come_must_be_recorded(tmp_path):
    for step in (2, 3):
        table = pa.table({"uid": [1]}).replace_schema_metadata({"temperature": "0.5"})
        pq.write_table(table, tmp_path / f"step_{step}.parquet")
    check_replayed(str(tmp_path), range(2, 4), 0.5)
    for steps, said in (
        (range(2, 6), "step 4 was not recorded; --num-steps 3 works"),
        (range(1, 4), "step 1 was not recorded; a folder that holds it works"),
    ):
        with pytest.raises(ValueError, match=said):
            check_replayed(str(tmp_path), steps, 0.5)
    with pytest.raises(ValueError, match=r"--temperature 0.6: must be the recorded run's, 0.5"):
        check_replayed(str(tmp_path), range(3, 4), 0.6)


@pytest.fixture
def parts(process_group, tmp_path):
    how = {"master_dtype": torch.float32, "compute_dtype": torch.float32}
    policy = load_policy(str(make_model(tmp_path / "m")), process_group, **how)
    return {"policy": (policy, torch.optim.AdamW(policy.parameters(), lr=1e-3))}


def save(run_dir, step, parts, keep=0, checksums=False):
    args = {**ARGS, "keep_checkpoints": keep, "checksums": checksums}
    return save_checkpoint(run_dir, step, parts, args, DATA)


def saved(run_dir):
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


@pytest.mark.parametrize("checksums", [False, True])
def test_a_checkpoint_that_is_not_what_was_written_is_refused_and_an_earlier_one_offered(tmp_path, parts, checksums):
    folders = [save(tmp_path, step, parts, checksums=checksums) for step in (1, 2, 3)]
    assert reopen(tmp_path, "auto") == (folders[2], 3)
    shard = max((p for p in folders[2].iterdir()), key=lambda p: p.stat().st_size)
    whole, offered = shard.read_bytes(), "--resume .*step_2 works"
    shard.write_bytes(whole[:-100])
    with pytest.raises(ValueError, match=rf"step_3 is damaged, {shard.name} has \d+ bytes, .* {len(whole)}; {offered}"):
        reopen(tmp_path, "auto")
    shard.write_bytes(whole[:-100] + bytes(100))
    if checksums:
        with pytest.raises(ValueError, match=rf"step_3 is damaged, {shard.name} has another checksum .*; {offered}"):
            reopen(tmp_path, str(folders[2]))
    else:
        assert reopen(tmp_path, "auto") == (folders[2], 3)  # a file of that size: only a checksum sees it
    (folders[2] / "state.json").write_text('{"step": 3, "ar')
    (folders[1] / shard.name).unlink()
    with pytest.raises(
        ValueError, match=r"step_3 is damaged, its state.json does not read .*; --resume .*step_1 works"
    ):
        reopen(tmp_path, "auto")
    (folders[0] / "state.json").unlink()
    with pytest.raises(ValueError, match="no other checkpoint of the run is whole"):
        reopen(tmp_path, "auto")


def test_only_the_newest_are_kept(tmp_path, parts):
    (tmp_path / "checkpoints/step_9.tmp").mkdir(parents=True)  # of a save that was killed
    for step in (1, 2, 10, 11):
        save(tmp_path, step, parts, keep=2)
    assert saved(tmp_path) == ["step_10", "step_11"]
    for step in (12, 13, 14, 15):
        save(tmp_path, step, parts, keep=5)
    assert saved(tmp_path) == [f"step_{step}" for step in range(11, 16)]
    save(tmp_path, 16, parts)
    assert saved(tmp_path) == [f"step_{step}" for step in range(11, 17)]


@contextmanager
def full_disk(size: int):
    """A limit on the size of files stands in for it: a write fails half way."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_keeps_the_old_checkpoint_and_says_so(tmp_path, parts, capsys):
    save(tmp_path, 1, parts, keep=1)
    with full_disk(100_000):
        assert save(tmp_path, 2, parts, keep=1) is None
    assert re.search(r"step 2: NOT WRITTEN \(.*GiB are free there\).*whole one is .*step_1", capsys.readouterr().out)
    assert saved(tmp_path) == ["step_1"] and reopen(tmp_path, "auto")[1] == 1
    assert save(tmp_path, 3, parts, keep=1) and saved(tmp_path) == ["step_3"]


def test_a_full_disk_leaves_the_flags_as_they_were(tmp_path):
    file = tmp_path / "args.json"
    file.write_text("before")
    with full_disk(4096), pytest.raises(OSError):
        _write_whole(file, "x" * 10_000)
    assert file.read_text() == "before"


def test_a_full_disk_leaves_no_half_an_export_and_says_so(tmp_path, parts, capsys):
    policy, tokenizer = parts["policy"][0], tiny.make_tokenizer()
    save(tmp_path, 1, parts)
    assert export_hf(tmp_path / "hf", policy, tokenizer)
    before = {path.name: path.read_bytes() for path in (tmp_path / "hf").iterdir()}
    with full_disk(100_000):
        assert not export_hf(tmp_path / "hf", policy, tokenizer)
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 1 and re.search(r"hf: NOT WRITTEN \(.*GiB are free there\); checkpoints stay", said[0])
    assert {path.name: path.read_bytes() for path in (tmp_path / "hf").iterdir()} == before
    assert not (tmp_path / "hf.tmp").exists() and reopen(tmp_path, "auto")[1] == 1
    assert export_hf(tmp_path / "hf", policy, tokenizer)


def test_a_full_disk_loses_no_line_of_the_log(tmp_path, capsys):
    log = tmp_path / "metrics.jsonl"
    append_jsonl(log, {"step": 1})
    with full_disk(20):
        append_jsonl(log, {"step": 2, "x": 0.5})
        append_jsonl(log, {"step": 3})
    assert read_jsonl(log) == [{"step": 1}] and log.read_text().endswith("}\n"), "half a line is left"
    said = capsys.readouterr().out.splitlines()
    assert [re.search(r"metrics.jsonl: (\d) line\(s\) NOT WRITTEN \(", line)[1] for line in said] == ["1", "2"]
    append_jsonl(log, {"step": 4})
    assert [row["step"] for row in read_jsonl(log)] == [1, 2, 3, 4] and not capsys.readouterr().out


def test_export_keeps_what_the_folder_had(process_group, tmp_path):
    path = make_model(tmp_path / "m")
    AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).save_pretrained(path)
    GenerationConfig(eos_token_id=[5, 6, 7], top_k=3, do_sample=True).save_pretrained(path)
    policy = load_policy(str(path), process_group, master_dtype=torch.float32, compute_dtype=torch.float32)
    export_hf(tmp_path / "hf", policy, tiny.make_tokenizer())
    assert GenerationConfig.from_pretrained(tmp_path / "hf").eos_token_id == [5, 6, 7]
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert exported.dtype == torch.bfloat16
    for name, tensor in AutoModelForCausalLM.from_pretrained(path).state_dict().items():
        assert torch.equal(exported.state_dict()[name], tensor), name
    assert load_tokenizer(str(tmp_path / "hf")).chat_template == tiny.CHAT_TEMPLATE
