"""Shared by the tests: small real models made on the spot, and runs of the scripts as a user would start them."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

ROOT = Path(__file__).resolve().parents[1]
SHARED = ROOT.parent / "shared"
needs_shared = pytest.mark.skipif(not SHARED.exists(), reason="needs ../shared/data, absent on a user's machine")


def make_model(folder: Path, family: str = "qwen2", tie: bool = True, seed: int = 0, **sizes) -> Path:
    """A random small model saved as a Hugging Face folder: 4 heads over 2 key-value heads of 32."""
    config_class, model_class = {
        "qwen2": (Qwen2Config, Qwen2ForCausalLM),
        "llama": (LlamaConfig, LlamaForCausalLM),
        "phi": (PhiConfig, PhiForCausalLM),
        "gpt2": (GPT2Config, GPT2LMHeadModel),
        "opt": (OPTConfig, OPTForCausalLM),
        "mixtral": (MixtralConfig, MixtralForCausalLM),
    }[family]
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 261, **sizes}
    config = config_class(
        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=tie, eos_token_id=[5, 6], bos_token_id=None,
        pad_token_id=None, max_position_embeddings=512, **sizes,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = model_class(config)
        for param in model.parameters():  # biases and norms too: zeros and ones would hide a missed copy
            param.data.add_(torch.randn_like(param) * 0.1)
    model.save_pretrained(folder)
    return folder


def sequences(prompts, responses) -> list[SimpleNamespace]:
    """Prompts and responses as `pack` takes them."""
    return [SimpleNamespace(prompt_ids=p, response_ids=r) for p, r in zip(prompts, responses, strict=True)]


def user_env(**env) -> dict[str, str]:
    """The environment of a user's shell, in the repository root: without this process's place in a group."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    env = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", **env}
    return {k: v for k, v in env.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")}


def run(command: list, timeout: float = 300, **env) -> subprocess.CompletedProcess:
    """Run from the repository root as a user would; the output of both streams as text."""
    return subprocess.run(
        [str(part) for part in command], cwd=ROOT, env=user_env(**env), capture_output=True, text=True, timeout=timeout
    )


def torchrun(num_ranks: int, *command, **kwargs) -> subprocess.CompletedProcess:
    """`torchrun --nproc-per-node num_ranks ...` on a free port; asserts that it succeeded."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", num_ranks]
    result = run([*launcher, *command], OMP_NUM_THREADS="1", **kwargs)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-6000:]
    return result


def pytest_collection_modifyitems(items):
    """Fast files first: those that start whole runs come last."""
    last = ["malformed", "decode_scheduler", "engine", "bad_input", "guards", "ranks", "survive", "demo"]
    last += ["equivalence", "runs", "ppo_runs", "soak", "faults"]
    place = {f"test_{name}": k for k, name in enumerate(last)}
    items.sort(key=lambda item: place.get(item.path.stem, -1))


@pytest.fixture(scope="session")
def process_group():
    """This test process as a world of one."""
    from utils.dist import init_distributed, world_mesh

    return world_mesh(init_distributed())
