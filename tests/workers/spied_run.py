"""spied_run.py OUT FLAGS...: grpo_fsdp.main in this process; the training rollouts it got are written to OUT."""

import json
import sys
from pathlib import Path

import tyro

import grpo_fsdp

out, sys.argv[1:] = sys.argv[1], sys.argv[2:]
generate, seen = grpo_fsdp.HybridEngine.generate, []


def spy(self, *args, **kwargs):
    rollouts = generate(self, *args, **kwargs)
    seen.append({"greedy": kwargs["sampling"].temperature == 0, "rollouts": [vars(r) for r in rollouts]})
    return rollouts


grpo_fsdp.HybridEngine.generate = spy
grpo_fsdp.main(tyro.cli(grpo_fsdp.Args))
Path(out).write_text(json.dumps(seen))
