"""bad_inputs.py SCRIPT LISTS: `main` of that script on each argument list of a JSON file, in one process.

Prints how each ended, as JSON: its exit status or the text of it, that a model was about to load, or a traceback.
"""

import contextlib
import importlib
import io
import json
import os
import sys
import traceback
from pathlib import Path

import torch.distributed as dist
import tyro

import hybrid_engine
import utils.models


class ModelLoads(Exception):
    pass


def trap(*args, **kwargs):
    raise ModelLoads


hybrid_engine._import_vllm = utils.models._load = trap
script = importlib.import_module(sys.argv[1])
endings = []
for argv in json.loads(Path(sys.argv[2]).read_text()):
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            script.main(tyro.cli(script.Args, args=argv))
        endings.append("it ran")
    except SystemExit as ending:
        endings.append(ending.code)
    except Exception as error:
        endings.append("a model loads" if isinstance(error, ModelLoads) else traceback.format_exc())
        dist.destroy_process_group()
assert "vllm" not in sys.modules, "vllm was imported before the mistake was found"
print(json.dumps(endings), flush=True)
os._exit(0)  # every `main` has left a full garbage collection for the exit
