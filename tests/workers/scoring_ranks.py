"""torchrun --nproc-per-node 2 tests/workers/scoring_ranks.py GIVEN OUT: scores of rollouts that are dealt unevenly."""

import json
import sys
from pathlib import Path

import torch

from hybrid_engine import Rollout
from utils.data import PromptData
from utils.dist import all_gather, init_distributed, world_mesh
from utils.metrics import Metrics
from utils.models import load_tokenizer
from utils.scoring import Scorer


class Replay:
    """In the engine's place: hands out responses that are there already, as if the last had ended first."""

    def __init__(self, rollouts: list[Rollout]):
        self.rollouts = rollouts

    def generate(self, prompts, uids, *, n, step, sampling, on_finish):
        mine = [rollout for uid in uids for rollout in [r for r in self.rollouts if r.uid == uid][:n]]
        assert [rollout.prompt_ids for rollout in mine] == [ids for ids in prompts for _ in range(n)]
        for rollout in mine[::-1]:
            if on_finish:
                on_finish(rollout)
        return mine


def main(given: dict, out: Path) -> None:
    mesh = world_mesh(init_distributed())
    rollouts, data = [Rollout(**rollout) for rollout in given["rollouts"]], PromptData(given["rows"])
    how = {"dtype": torch.float32, "workers": 1, "timeout_s": 20.0, "max_tokens": given["max_tokens"]}
    scorer = Scorer(given["spec"], Replay(rollouts), load_tokenizer(given["policy"]), mesh, **how)
    scores = []
    for count in given["counts"]:  # of the first rank; the second has the others
        mine = rollouts[:count] if mesh.get_rank() == 0 else rollouts[count:]
        scores.append(all_gather(scorer.model_scores(mine, data).tolist()))
    figures = []
    for rows in given["evaluations"]:
        metrics = Metrics()
        scorer.evaluate(PromptData(rows), 0, None, metrics, out.with_suffix(".jsonl"))
        figures.append(metrics.reduce())
    scorer.close()
    if mesh.get_rank() == 0:
        out.write_text(json.dumps([scores, figures]))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
