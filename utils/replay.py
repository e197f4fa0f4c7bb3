"""Record each step's rollouts and scores as parquet, and train from them later without any vLLM.

grpo_fsdp.py --record runs/a/rollouts ...            writes step_N.parquet, one row per response
grpo_fsdp.py --replay runs/a/rollouts ...            the same run from the files: two losses on the same data
"""

import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch.distributed as dist

from hybrid_engine import Rollout, Sampling, SyncReport
from utils.data import PromptData
from utils.dist import all_gather, broadcast, stop
from utils.run_folder import run_id

COLUMNS = pa.schema([
    ("uid", pa.int64()), ("sample", pa.int64()), ("prompt_ids", pa.list_(pa.int64())),
    ("response_ids", pa.list_(pa.int64())), ("logprobs", pa.list_(pa.float32())), ("finish_reason", pa.string()),
    ("length", pa.int64()), ("score", pa.float64()), ("judged", pa.bool_()),
])  # fmt: skip


def _steps_in(folder: Path) -> dict[int, Path]:
    numbers = {path.stem.removeprefix("step_"): path for path in folder.glob("step_*.parquet")}
    return {int(number): path for number, path in numbers.items() if number.isdigit()}


def open_record(folder: str, run_dir: Path) -> None:
    """A folder to record to. Raises: ValueError where it cannot be written, or holds another run's steps."""
    if not folder or dist.get_rank():
        return
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--record {folder}: cannot be written ({error}); give a folder of yours") from error
    for path in _steps_in(Path(folder)).values():
        if _run_of(path) != run_id(run_dir):
            raise ValueError(f"--record {folder}: holds an earlier run's rollouts ({path.name}); give a new folder")


def cut_record(folder: str, done: int) -> None:
    """What this run recorded beyond the step that it goes on from goes, as the log's lines do."""
    for step, path in _steps_in(Path(folder)).items() if folder and dist.get_rank() == 0 else []:
        if step > done:
            path.unlink()


def _run_of(path: Path) -> str:
    """The id of the run that wrote this file."""
    try:
        return (pq.read_schema(path).metadata or {}).get(b"run", b"").decode()
    except (pa.ArrowException, OSError):  # not parquet
        return ""


def record_rollouts(
    folder: str,
    run_dir: Path,
    step: int,
    rollouts: list[Rollout],
    scores_B: torch.Tensor,
    judged_B: torch.Tensor,
    temperature: float,
) -> None:
    """Write all ranks' responses of a step, with the scores they were trained by, to step_N.parquet (collective)."""
    mine = [
        {**vars(r), "length": len(r.response_ids), "score": score, "judged": judged}
        for r, score, judged in zip(rollouts, scores_B.tolist(), judged_B.tolist(), strict=True)
    ]
    shares, error = all_gather(mine), ""
    if dist.get_rank() == 0:
        path = Path(folder) / f"step_{step}.parquet"
        table = pa.Table.from_pylist([row for share in shares for row in share], COLUMNS)
        try:
            about = {"temperature": repr(temperature), "run": run_id(run_dir)}
            pq.write_table(table.replace_schema_metadata(about), f"{path}.part")
            os.replace(f"{path}.part", path)
        except OSError as caught:  # a full disk
            error = str(caught)
    if error := broadcast(error):
        stop(f"--record {folder}: step {step} could not be written ({error}); make room, and go on with --resume auto")


def check_replay(folder: str) -> None:
    """Raises: ValueError where the folder of --replay holds no recorded step, or a file that is not one."""
    works = "a folder that --record wrote works"
    steps = _steps_in(Path(folder)) if folder else {}
    if folder and not steps:
        raise ValueError(f"--replay {folder}: must hold step_N.parquet files; {works}")
    for path in steps.values():
        try:
            schema = pq.read_schema(path)
        except (pa.ArrowException, OSError) as error:
            reason = str(error).splitlines()[0]
            raise ValueError(f"--replay {path}: cannot be read as parquet ({reason}); {works}") from error
        if not schema.remove_metadata().equals(COLUMNS) or b"temperature" not in (schema.metadata or {}):
            raise ValueError(f"--replay {path}: has other columns than --record writes; {works}")


def check_replayed(folder: str, steps: range, temperature: float) -> None:
    """Raises: ValueError where a step that is to be replayed was not recorded, or at another temperature."""
    recorded = _steps_in(Path(folder)) if folder else {}
    for step in steps if folder else []:
        if step not in recorded:
            works = f"--num-steps {step - 1} works" if step > steps.start else "a folder that holds it works"
            raise ValueError(f"--replay {folder}: step {step} was not recorded; {works}")
        at = float(pq.read_schema(recorded[step]).metadata[b"temperature"])
        if at != temperature:
            raise ValueError(f"--temperature {temperature}: must be the recorded run's, {at}")


class Replay:
    """Recorded rollouts in place of engine and scorer: their calls, those that a training step makes.

    Any number of ranks may replay what any number recorded: a response is found by its uid and sample.
    """

    def __init__(self, folder: str, device: torch.device):
        self.folder, self.device = Path(folder), device
        self._scores: dict[int, float] = {}
        self.num_timeouts = 0  # why a recorded response has no score is not recorded

    def rollout(self, source: PromptData, uids: list[int], n: int, step: int, sampling: Sampling) -> list[Rollout]:
        """The responses that were recorded for these prompts at this step."""
        self._scores, rollouts = {}, []
        table = pq.read_table(self.folder / f"step_{step}.parquet")
        rows = {(row["uid"], row["sample"]): row for row in table.to_pylist()}
        missing = [key for key in ((uid, i) for uid in uids for i in range(n)) if key not in rows]
        if anywhere := [key for share in all_gather(missing) for key in share]:
            stop(
                f"--replay {self.folder}: step {step} holds no response to uid {anywhere[0][0]}, sample "
                f"{anywhere[0][1]}; --seed, --train-files and the batch sizes must be the recorded run's"
            )
        for key in ((uid, i) for uid in uids for i in range(n)):
            row = rows[key]
            rollout = Rollout(*(row[name] for name in Rollout.__dataclass_fields__))
            self._scores[id(rollout)] = row["score"] if row["judged"] else torch.nan
            rollouts.append(rollout)
        return rollouts

    def rule_scores(self, rollouts: list[Rollout], what: str) -> torch.Tensor:
        """The recorded scores, NaN where there was none. Shapes: [B] float64."""
        return torch.tensor([self._scores[id(r)] for r in rollouts], dtype=torch.float64, device=self.device)

    def model_scores(self, rollouts: list[Rollout], source: PromptData) -> torch.Tensor:
        """Zeros: what reward models said is in the recorded scores. Shapes: [B] float64."""
        return torch.zeros(len(rollouts), dtype=torch.float64, device=self.device)

    def memory(self) -> dict[str, float]:
        """Nothing: there is no engine."""
        return {}

    def sync_weights(self, policy: torch.nn.Module) -> SyncReport:
        """Nothing: there is no engine to bring up to date."""
        return SyncReport(0.0, 0.0, 0, 0)

    def verify_sync(self, policy: torch.nn.Module) -> float:
        """Nothing to prove."""
        return 0.0

    def sleep(self, what: str) -> float:
        """Nothing to give back."""
        return 0.0

    def wake(self) -> None:
        """Nothing to take back."""

    def close(self) -> None:
        """End the process group, which the engine does in a run that has one."""
        if dist.is_initialized():
            dist.destroy_process_group()
