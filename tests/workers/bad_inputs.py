"""Runs grpo_fsdp.main on each argument list of a JSON file, in one process; prints how each ended, as JSON."""

import contextlib
import io
import json
import sys
from pathlib import Path

import tyro

import grpo_fsdp

endings = []
for argv in json.loads(Path(sys.argv[1]).read_text()):
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            grpo_fsdp.main(tyro.cli(grpo_fsdp.Args, args=argv))
        endings.append("ran")
    except SystemExit as ending:
        endings.append(ending.code)
assert "vllm" not in sys.modules, "an engine was built before the mistake was found"
print(json.dumps(endings))
