"""Rules on real answers, and worker processes that are really hung, killed and orphaned."""

import datetime
import json
import re
import signal
import subprocess
import sys
import time
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest

from utils.reward_pool import TIMEOUTS_IN_A_ROW, RewardPool, Score, check_reward, rules_of
from utils.rewards import gsm8k, gsm8k_number, load_reward, parse_rewards, tiny

ROOT = Path(__file__).parents[1]
GSM8K = Path(__file__).parents[2] / "shared/data/gsm8k"
ROW = {"reward_model": {"style": "rule", "ground_truth": "18"}}

USER_FILE = r"""
import os, re, sys, time

def length(response, row): return len(response) / 10
def one(response, row): return 1
def none(response, row): return None
def fails(response, row): raise KeyError("no\nsuch key")
def exits(response, row): sys.exit(3)
def nan(response, row): return float("nan")
def huge(response, row): return 10**400
def text(response, row): return "1.0"
def pair(response, row): return (1.0, 2.0)
def dies(response, row): os._exit(7)
def crashes(response, row): os.kill(os.getpid(), 11)
def prints(response, row):
    print('{"value": 99, "error": null, "message": ""}', flush=True)
    os.write(1, b'{"value": 99, "error": null, "message": ""}\n')
    return 0.5
def reads_stdin(response, row): return float(len(sys.stdin.read()))
def slow_if_asked(response, row):
    if response == "hang":
        time.sleep(1000)
    time.sleep(0.05 * (response == "late"))
    return 0.25
def hang(response, row):
    if response:
        open(response, "w").write(str(os.getpid()))
    while True:
        time.sleep(0.1)
def hang_in_regex(response, row):
    open(response, "w").write(str(os.getpid()))
    return float(bool(re.match(r"(a+)+$", "a" * 60 + "b")))
def forks(response, row):
    pid = os.fork()
    if pid == 0:
        time.sleep(1000)
    open(response, "w").write(str(pid))
    if "dies" in response:
        os._exit(0)
    time.sleep(1000)
def bomb(response, row):
    # 20 sleeping processes, by turns in the worker's session and in one of their own
    files = [f"{response}_{i}" for i in range(20)]
    for i, file in enumerate(files):
        import subprocess
        if i % 4 < 2:
            code = f"import os, time; open({file!r}, 'w').write(str(os.getpid())); time.sleep(1000)"
            subprocess.Popen([sys.executable, "-c", code], start_new_session=i % 2 == 1)
        elif os.fork() == 0:
            if i % 2:
                os.setsid()
            open(file, "w").write(str(os.getpid()))
            time.sleep(1000)
    while not all(os.path.exists(file) and os.path.getsize(file) for file in files):
        time.sleep(0.01)
    return batch("hang", row)
def batch(response, row):
    if response == "hang":
        time.sleep(1000)
    if response == "segfault":
        import ctypes
        ctypes.string_at(0)
    if response == "hog":
        import numpy
        rows = [numpy.empty(2**27) for _ in range(9)]  # of one GiB each, which is not filled
        return float(len(rows))
    if response.startswith("/"):
        return bomb(response, row)
    return 1.0
def pid(response, row): return os.getpid()
def light(response, row): return float(not {"torch", "transformers", "numpy"} & set(sys.modules))
def relative(response, row): return float(os.path.exists("here.txt"))
def echo(response, row): return float(response == "\ud800x" and row["when"] == "2024-01-02" and row["values"] == [1, 2])
not_callable = 3
"""


@pytest.fixture(scope="module")
def user(tmp_path_factory):
    file = tmp_path_factory.mktemp("rewards") / "user.py"
    file.write_text(USER_FILE)
    return str(file)


def score(spec: str, response: str = "", row: dict = ROW, timeout_s: float = 20.0) -> Score:
    with RewardPool(spec, 1, timeout_s) as pool:
        return pool.submit(response, row).result(30)


def wait_for_pid(file: Path, limit_s: float = 15.0) -> int:
    end = time.monotonic() + limit_s
    while not (file.exists() and file.read_text()):
        assert time.monotonic() < end, f"{file} was not written within {limit_s} s"
        time.sleep(0.02)
    return int(file.read_text())


def assert_gone(pid: int, limit_s: float = 5.0) -> None:
    """The process ends within the limit; one that its (foreign) parent has not reaped yet has ended too."""
    end = time.monotonic() + limit_s
    while True:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return
        except (FileNotFoundError, ProcessLookupError):
            return
        assert time.monotonic() < end, f"process {pid} still runs after {limit_s} s"
        time.sleep(0.02)


# ---- rules ----

RIGHT = {
    "18": ["#### 18", "####18", "#### $18", "####  18.", "#### **18**", "#### 18.0", "#### 18%", "#### 18 apples",
           "#### +18", "#### 9\nno:\n#### 18", "#### $\\boxed{18}$", "#### \\$18", "#### `18`", "####\n18\n- 3 left",
           "#### 18, as said", "#### 18\n" + "as I said, " * 100],
    "1000": ["#### 1,000", "#### 1000", "#### $1,000.00", "#### 1,000."],
    "1,000": ["#### 1000"],
    "-5": ["#### -5", "#### -$5", "#### $-5", "#### −5", "#### **-5.00**"],
    "0.5": ["#### .5", "#### 0.50"],
    "0": ["#### -0"],
    "123456789012345678901234567890123": ["#### 123456789012345678901234567890123"],
}  # fmt: skip
WRONG = {
    "18": ["18", "", "#### ", "#### eighteen", "### 18", "#### 18\n#### 19", "#### 18\n#### so it is", "#### -18",
           "#### 18.01", "#### 18/2", "#### 18-20", "#### 18 * 2 = 36", "#### 18k", "#### 18:30", "#### 1 8",
           "#### The answer is 18", "#### 18,5", "#### 18e2", "#### 180"],
    "1": ["#### 1,00", "#### 1,0000", "#### 1.000.000"],
    "5": ["#### -5", "#### - 5"],
    "-123456789012345678901234567890123": ["#### -123456789012345678901234567890124"],
}  # fmt: skip


def test_fault_43_gsm8k_formats():
    for want, table in ((1.0, RIGHT), (0.0, WRONG)):
        for truth, responses in table.items():
            for response in responses:
                got = gsm8k(response, {"reward_model": {"ground_truth": truth}})
                assert got == want, (truth, response, got)
    # more digits than int() accepts, and text that a backtracking expression would be slow on
    assert gsm8k("#### " + "9" * 100_000, ROW) == 0.0
    start = time.perf_counter()
    for char in "# $*(1,.":
        gsm8k("####" + char * 100_000, ROW)
    assert time.perf_counter() - start < 5


def test_fault_43_gsm8k_number_tells_extraction_failures_from_wrong_answers():
    assert gsm8k_number("so\n#### $1,234.50") == Decimal("1234.5")
    assert gsm8k_number("the answer is 7") is None
    with pytest.raises(ValueError, match="ground_truth 'x' is not a number"):
        gsm8k("#### 1", {"reward_model": {"ground_truth": "x"}})


def check_gold_answers(answers: list[str]) -> int:
    for answer in answers:
        truth = answer.split("####")[1].strip()
        row = {"reward_model": {"ground_truth": truth.replace(",", "")}}
        assert gsm8k(answer, row) == 1.0, answer
        changed = f"{answer.split('####')[0]}#### {Decimal(truth.replace(',', '')) + 1}"
        assert gsm8k(changed, row) == 0.0, changed
    return len(answers)


def test_gold_answers_by_hand():
    answers = ["She makes 9 * 2 = $<<9*2=18>>18.\n#### 18", "It costs\n#### 109,200,000", "Less\n#### -3"]
    assert check_gold_answers(answers) == 3


@pytest.mark.skipif(not GSM8K.exists(), reason="needs ../shared/data, absent on a user's machine")
def test_gold_answers_of_gsm8k():
    text = "".join((GSM8K / f"{split}.jsonl").read_text(encoding="utf-8") for split in ("train", "test"))
    assert check_gold_answers([json.loads(line)["answer"] for line in text.split("\n") if line]) == 8792


def test_tiny():
    row = {"reward_model": {"ground_truth": 7}}
    assert [tiny(response, row) for response in ("7", " 7\n", "7.0", "77", "")] == [1.0, 1.0, 0.0, 0.0, 0.0]


# ---- specs ----


def test_parse_rewards():
    assert parse_rewards("gsm8k") == [("gsm8k", 1.0)]
    assert parse_rewards("gsm8k:0.5, a/format.py:f:-0.2,b.py:g") == [
        ("gsm8k", 0.5),
        ("a/format.py:f", -0.2),
        ("b.py:g", 1),
    ]
    assert parse_rewards("model:runs/rm/hf") == [("model:runs/rm/hf", 1.0)]
    assert parse_rewards("tiny,model:/a.py/b:2") == [("tiny", 1.0), ("model:/a.py/b", 2.0)]
    assert rules_of("model:x:2,tiny:3") == [("tiny", 3.0)]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("gsm9k", r"--reward gsm9k: unknown reward; use one of gsm8k, tiny, path/to/file\.py:function"),
        ("a.py", r"unknown reward; use .*path/to/file\.py:function"),
        ("gsm8k,,tiny", "--reward .*without a name"),
        ("", "--reward '': a part without a name"),
        ("a.py:", "--reward 'a.py:': a part without a name"),
        ("gsm8k:nan", "--reward gsm8k:nan: the weight must be a finite number; gsm8k:1.0 works"),
        ("a.py:f:inf", "finite number; a.py:f:1.0 works"),
        ("gsm8k:much", "finite number"),
        ("model:", "--reward 'model:': a part without a name"),
        ("model:/path:x", "finite number; model:/path:1.0 works"),
    ],
)
def test_parse_rewards_errors(spec, message):
    with pytest.raises(ValueError, match=message):
        parse_rewards(spec)
    with pytest.raises(ValueError, match=message):
        check_reward(spec, ROW, 5.0)


def test_load_reward(user, tmp_path, monkeypatch):
    assert load_reward("gsm8k") is gsm8k
    assert load_reward(f"{user}:length")("12345", ROW) == 0.5
    monkeypatch.chdir(Path(user).parent)
    assert load_reward("user.py:one")("", ROW) == 1
    (tmp_path / "broken.py").write_text("x = 1\ndef f(:\n")
    (tmp_path / "raises.py").write_text("import no_such_module_at_all")
    (tmp_path / "neighbour_of_uses.py").write_text("VALUE = 3.0")
    (tmp_path / "uses.py").write_text("from neighbour_of_uses import VALUE\ndef f(response, row): return VALUE")
    assert load_reward(f"{tmp_path}/uses.py:f")("", ROW) == 3.0
    for spec, message in (
        ("nope.py:f", r"--reward nope\.py:f: there is no file /.*nope\.py"),
        ("gsm9k", "--reward gsm9k: unknown reward"),
        (f"{user}:gone", r"--reward .*has no function gone; it has length, one,"),
        (f"{user}:not_callable", "--reward .*cannot be called"),
        (f"{tmp_path}/broken.py:f", "--reward .*broken.py.*SyntaxError"),
        (f"{tmp_path}/raises.py:f", r"--reward .*ModuleNotFoundError.*no_such_module_at_all.*raises\.py:1"),
    ):
        with pytest.raises(ValueError, match=message) as caught:
            load_reward(spec)
        assert "\n" not in str(caught.value)


# ---- the pool ----


def test_scores_come_back_in_their_own_futures(user):
    with RewardPool(f"gsm8k:2,{user}:length:0.5", 2, 20.0) as pool:
        responses = ["#### 18" + "x" * 3, "", "#### 18"] + ["." * i for i in range(50)]
        futures = [pool.submit(response, ROW) for response in responses]
        got = [future.result(20).value for future in futures]
    want = [2.0 * gsm8k(response, ROW) + 0.05 * len(response) for response in responses]
    assert got == pytest.approx(want) and want[2] == 2.35


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("none", "unjudged", "user.py:none: returned None"),
        ("fails", "exception", r"user.py:fails: KeyError: 'no\\nsuch key' \(user.py:7\)"),
        ("exits", "exception", "SystemExit: 3"),
        ("nan", "nonfinite", "returned nan"),
        ("huge", "nonfinite", "returned inf"),
        ("text", "type", "returned str, not a number"),
        ("pair", "type", "returned tuple"),
        ("dies", "died", "ended with status 7"),
        ("crashes", "died", "ended with status -11"),
    ],
)
def test_errors_are_told_apart_and_score_zero(user, name, error, message):
    with RewardPool(f"tiny,{user}:{name}", 1, 20.0) as pool:
        for _ in range(2):  # and the worker, or its successor, goes on
            got = pool.submit("18", ROW).result(30)
            assert (got.value, got.error) == (0.0, error), got
            assert re.search(message, got.message), got


def test_user_output_and_input_leave_the_protocol_alone(user):
    assert score(f"{user}:prints") == Score(0.5)
    assert score(f"{user}:reads_stdin") == Score(0.0)


def test_rows_and_responses_survive_the_pipe(user):
    row = {"when": datetime.date(2024, 1, 2), "values": np.array([1, 2]), "raw": b"\xff", "price": Decimal("1.5")}
    assert score(f"{user}:echo", "\ud800x", row) == Score(1.0)
    assert score(f"{user}:length", "x" * 1_000_000) == Score(100_000.0)


def test_worker_starts_light_and_in_the_callers_folder(user, tmp_path, monkeypatch):
    assert score(f"{user}:light") == Score(1.0)
    monkeypatch.chdir(tmp_path)
    Path("here.txt").touch()
    Path("mine.py").write_text(USER_FILE)
    assert score("mine.py:relative") == Score(1.0)


def test_hang_is_cut_off_and_the_others_go_on(user):
    with RewardPool(f"{user}:slow_if_asked", 2, 1.0) as pool:
        start = time.monotonic()
        futures = [pool.submit(response, ROW) for response in ("hang", "late", "", "", "", "hang", "")]
        got = [future.result(20) for future in futures]
        assert time.monotonic() - start < 6
    assert [item.error for item in got] == ["timeout", None, None, None, None, "timeout", None]
    assert [item.value for item in got] == [0.0, 0.25, 0.25, 0.25, 0.25, 0.0, 0.25]
    assert "no answer within 1 s" in got[0].message


def test_hang_that_holds_the_interpreter_is_cut_off(user, tmp_path):
    assert score(f"{user}:hang_in_regex", str(tmp_path / "pid"), timeout_s=1.0).error == "timeout"
    assert_gone(wait_for_pid(tmp_path / "pid"))


@pytest.mark.parametrize(("file", "error"), [("hangs", "timeout"), ("dies", "died")])
def test_what_a_reward_forked_is_killed_too(user, tmp_path, file, error):
    with RewardPool(f"{user}:forks", 1, 1.0 if error == "timeout" else 20.0) as pool:
        assert pool.submit(str(tmp_path / file), ROW).result(10).error == error
        assert_gone(wait_for_pid(tmp_path / file))


def test_a_batch_goes_on_whatever_single_calls_do(user, tmp_path):
    responses = ["", "hang", "segfault", "", "hog", "", str(tmp_path / "bomb"), "", ""]
    with RewardPool(f"{user}:batch", 2, 5.0) as pool:
        scores = [future.result(60) for future in [pool.submit(response, ROW) for response in responses]]
        errors = ["timeout", "died", "exception", "timeout"]
        assert [score.error for score in scores if score.error] == errors, scores
        assert [score.value for score in scores] == [float(response == "") for response in responses]
        assert "status -11" in scores[2].message and "MemoryError" in scores[4].message
        for i in range(20):
            assert_gone(wait_for_pid(tmp_path / f"bomb_{i}"))


def test_close_kills_everything_and_leaves_no_zombie(user, tmp_path):
    pool = RewardPool(f"{user}:hang", 1, 600.0)
    running, waiting = pool.submit(str(tmp_path / "pid"), ROW), pool.submit(str(tmp_path / "pid2"), ROW)
    pid = wait_for_pid(tmp_path / "pid")
    pool.close()
    assert not Path(f"/proc/{pid}").exists()
    assert waiting.cancelled()
    with pytest.raises(RuntimeError, match="closed before"):
        running.result(5)
    with pytest.raises(RuntimeError, match="pool is closed"):
        pool.submit("", ROW)
    pool.close()  # again is fine


def test_healthy_worker_is_kept(user):
    with RewardPool(f"{user}:pid", 1, 20.0) as pool:
        assert len({pool.submit("", ROW).result(20).value for _ in range(5)}) == 1


def test_file_that_stops_loading_is_an_error_not_a_score(tmp_path):
    (tmp_path / "late.py").write_text("raise OSError('gone')")
    with RewardPool(f"{tmp_path}/late.py:f", 1, 5.0) as pool:
        future = pool.submit("", ROW)
        with pytest.raises(ValueError, match=r"--reward .*OSError: gone"):
            future.result(30)


@pytest.mark.parametrize("function", ["hang", "hang_in_regex"])
@pytest.mark.parametrize("how", ["killed", "fails"])
def test_worker_ends_with_its_parent(user, tmp_path, function, how):
    script = f"""
import sys, time
from utils.reward_pool import RewardPool
pool = RewardPool({user + ":" + function!r}, 1, 600.0)
futures = [pool.submit({str(tmp_path / "pid")!r}, {{}}) for _ in range(3)]
while not open({str(tmp_path / "go")!r}).read(): time.sleep(0.02)
raise RuntimeError("the trainer fails")
"""
    (tmp_path / "go").write_text("")
    parent = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stderr=subprocess.DEVNULL)
    try:
        pid = wait_for_pid(tmp_path / "pid")
        if how == "killed":
            parent.send_signal(signal.SIGKILL)
        else:
            (tmp_path / "go").write_text("go")
        assert parent.wait(10) == (-signal.SIGKILL if how == "killed" else 1)
        assert_gone(pid)
    finally:
        parent.kill()
        parent.wait()


def test_check_reward(user, tmp_path):
    (tmp_path / "exits.py").write_text("import os\nos._exit(4)")
    check_reward(f"gsm8k,{user}:one:0.1", ROW, 20.0)
    check_reward(f"{user}:none", ROW, 20.0)
    rule = "a reward must return a finite float or None for any string within"
    for spec, message in (
        (f"{user}:fails", f"KeyError.*no.*such key.*{rule} 20 s"),
        (f"{user}:nan", f"returned nan.*{rule}"),
        (f"{user}:text", f"returned str.*{rule}"),
        (f"{user}:dies", f"status 7.*{rule}"),
        (f"{user}:gone", "has no function gone"),
        (f"{tmp_path}/exits.py:f", r"ended its process while loading \(status 4\)"),
    ):
        with pytest.raises(ValueError, match=message) as caught:
            check_reward(spec, ROW, 20.0)
        assert str(caught.value).startswith(f"--reward {spec}:") and "\n" not in str(caught.value)
    with pytest.raises(ValueError, match=f"no answer within 1 s.*{rule} 1 s"):
        check_reward(f"{user}:hang", ROW, 1.0)


def test_a_judge_that_stalled_is_asked_again_for_the_next_batch(tmp_path):
    source = "import time\ndef f(response, row): return time.sleep(60 * (response == 'slow')) or 1"
    (tmp_path / "stalls.py").write_text(source)
    with RewardPool(f"{tmp_path}/stalls.py:f", 1, 0.1) as pool:
        for response in ["slow"] * TIMEOUTS_IN_A_ROW + ["quick"]:
            assert pool.submit(response, ROW).result(60).error == "timeout"  # the quick one too: it was not asked
        pool.ask_again()
        assert pool.submit("quick", ROW).result(60).value == 1


def test_a_worker_that_cannot_load_again_is_an_answer_without_a_score(tmp_path):
    source = f"import time\nopen('{tmp_path}/starts', 'a').write('x')\nopen('{tmp_path}/server')\n"
    source += "def f(response, row): return time.sleep(60 * (response == 'slow')) or 1"
    (tmp_path / "loads.py").write_text(source)
    (tmp_path / "server").touch()
    with RewardPool(f"{tmp_path}/loads.py:f", 1, 0.2) as pool:
        assert pool.submit("quick", ROW).result(60).value == 1
        (tmp_path / "server").unlink()
        errors = [pool.submit("slow", ROW).result(60).error for _ in range(2 * TIMEOUTS_IN_A_ROW)]
        assert errors[:2] == ["timeout", "died"] and all(errors)
        assert len((tmp_path / "starts").read_text()) == TIMEOUTS_IN_A_ROW  # not one for every response
        (tmp_path / "server").touch()
        pool.ask_again()
        assert pool.submit("quick", ROW).result(60).value == 1


def test_a_reward_that_always_hangs_is_not_waited_for_on_every_response(tmp_path):
    (tmp_path / "hang.py").write_text("import time\ndef f(response, row): time.sleep(60)")
    start = time.monotonic()
    with RewardPool(f"{tmp_path}/hang.py:f", 2, 0.1) as pool:
        scores = [future.result(60) for future in [pool.submit("x", ROW) for _ in range(400)]]
    assert {score.error for score in scores} == {"timeout"}
    assert time.monotonic() - start < 20  # 400 calls of 0.1 s and a new worker each would be minutes
