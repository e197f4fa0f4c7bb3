"""torchrun --nproc-per-node N tests/equivalence/worker.py CASES: main() of the scripts, one case after another.

CASES: JSON, a list of {script, flags, out}. Written to each `out`: the gradients of the first optimizer step, before
clipping, and the weights after the last one, all gathered; and how many sequences each micro-batch of each rank held.
"""

import importlib
import json
import sys
from pathlib import Path

import torch.distributed as dist
import tyro
from safetensors.torch import save_file

from utils.dist import all_gather, init_distributed
from utils.models import hf_name

init_distributed()  # once: the scripts' own calls find the group as it is, and leave it
end = dist.destroy_process_group
dist.init_process_group = dist.destroy_process_group = lambda *args, **kwargs: None


def run(script: str, flags: list[str], out: str) -> None:
    module, tensors, held = importlib.import_module(script), {}, []
    step, plan, back = module.optimizer_step, module.plan_together, getattr(module, "roll_back", None)

    def keep_weights(parts):
        for part, (model, _) in parts.items():
            for name, p in model.named_parameters():
                tensors[f"weight/{part}/{hf_name(name)}"] = p.detach().full_tensor().clone()

    def spied_step(parts, *args):
        for part, (model, _) in parts.items():
            for name, p in model.named_parameters():
                if (key := f"gradient/{part}/{hf_name(name)}") not in tensors:
                    tensors[key] = p.grad.full_tensor().clone()
        norms = step(parts, *args)
        keep_weights(parts)
        return norms

    def spied_back(run_dir, resumed, parts, step):
        state = back(run_dir, resumed, parts, step)
        keep_weights(parts)
        return state

    def spied_plan(*args):
        parts, tokens = plan(*args)
        held.append([len(part) for part in parts])
        return parts, tokens

    module.optimizer_step, module.plan_together, module.roll_back = spied_step, spied_plan, spied_back
    module.main(tyro.cli(module.Args, args=flags))
    module.optimizer_step, module.plan_together, module.roll_back = step, plan, back
    everyone = all_gather(held)
    if dist.get_rank() == 0:
        save_file(tensors, out)
        Path(out).with_suffix(".json").write_text(json.dumps(everyone))


for case in json.loads(Path(sys.argv[1]).read_text()):
    run(case["script"], case["flags"], case["out"])
if dist.is_initialized():  # a vLLM on CPU has ended it
    dist.barrier()
    end()
