"""runs.py CASES [under torchrun]: main() of the scripts, one case after another; prints how each ended, as JSON.

CASES: a JSON file, a list of [script, flags]. An ending is "" or what the run was ended with, on each rank.
"""

import importlib
import json
import sys
from pathlib import Path

import torch.distributed as dist
import tyro

from utils.dist import all_gather, init_distributed

init_distributed()  # once: the scripts' own calls find the group as it is, and leave it
end = dist.destroy_process_group
dist.init_process_group = dist.destroy_process_group = lambda *args, **kwargs: None
endings = []
for script, flags in json.loads(Path(sys.argv[1]).read_text()):
    module, ending = importlib.import_module(script), ""
    try:
        module.main(tyro.cli(module.Args, args=flags))
    except SystemExit as stop:
        ending = str(stop.code)
    endings.append(all_gather(ending))
if dist.get_rank() == 0:
    print(json.dumps(endings))
end()
