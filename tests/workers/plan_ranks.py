"""torchrun --nproc-per-node 3 tests/workers/plan_ranks.py OUT: plans of ranks that hold 3, 1 and 0 responses."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import torch.distributed as dist

from utils.dist import all_gather, init_distributed
from utils.packing import plan_together

init_distributed()
held = [3, 1, 0][dist.get_rank()]
responses = [SimpleNamespace(prompt_ids=[1] * 4, response_ids=[2] * (i + 1)) for i in range(held)]
everyone = all_gather(plan_together(responses, range(held), 8))
Path(sys.argv[1]).write_text(json.dumps(everyone))
dist.destroy_process_group()
