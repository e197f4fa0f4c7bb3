"""spied_run.py SCRIPT OUT FLAGS...: SCRIPT.main in this process; the rollouts it got are written to OUT."""

import importlib
import json
import sys
from pathlib import Path

import tyro

name, out, sys.argv[1:] = sys.argv[1], sys.argv[2], sys.argv[3:]
script = importlib.import_module(name)
generate, seen = script.HybridEngine.generate, []


def spy(self, *args, **kwargs):
    rollouts = generate(self, *args, **kwargs)
    seen.append({"greedy": kwargs["sampling"].temperature == 0, "rollouts": [vars(r) for r in rollouts]})
    return rollouts


script.HybridEngine.generate = spy
script.main(tyro.cli(script.Args))
Path(out).write_text(json.dumps(seen))
