"""The embedded default: a tiny model, its tokenizer and an arithmetic task, made on the spot.

`--model tiny` needs no download. About 0.6 million parameters are drawn from the seed, taught sums such as
"347+8=" -> "355" for a few supervised steps, and stopped while they still get many of them wrong; reinforcement
learning from the rule reward (the response text is the right answer, or it is not) does the rest. The 200 sums of the
validation file are met by neither: `grep -n DETAIL` shows every choice that moves the numbers.

    ensure(root, seed)   model folder and parquet files, made if missing     make_model, make_data   one of the two
    DEFAULTS             flag values that `--model tiny` lays over the flags still at their default
"""

import hashlib
import os
import random
import shutil
import tempfile
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

DEFAULTS = {
    "num_steps": 160,
    "eval_every": 10,
    "save_every": 80,
    "max_prompt_len": 16,
    "max_response_len": 6,
    "prompts_per_step": 64,
    "group_size": 8,
    "temperature": 1.0,
    "kv_cache_gib": 0.25,
    "max_num_seqs": 256,
    "reward": "tiny",
    "update_epochs": 1,
    "lr": 6e-4,
    "lr_schedule": "cosine",
    "warmup_steps": 20,
    "weight_decay": 0.0,
    "max_grad_norm": 1.0,
    "max_tokens_per_gpu": 4096,
}

EOS, PAD, USER, ASSISTANT = "<|eos|>", "<|pad|>", "<|user|>", "<|assistant|>"
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|assistant|>' if m['role'] == 'assistant' else '<|user|>' }}{{ m['content'] }}"
    "{% if m['role'] == 'assistant' %}{{ '<|eos|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
NUM_VAL = 200
PROMPT_LEN, ANSWER_LEN = 6, 4  # "347+8=" and "355" with its end-of-sequence token
MAX_SFT_STEPS, SFT_BATCH, SFT_LR, SFT_WARMUP = 600, 32, 1e-3, 20
CARRY_WEIGHT = 1.6
PROBE_EVERY, PROBE_SIZE, PROBE_STOP = 10, 128, 0.4

Sum = tuple[int, int]


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte (any text, any language, nothing unknown), four special tokens and a short chat template.

    Shapes: 256 bytes + 4 special tokens = 260 ids.
    """
    # DETAIL: sorted, because the order in which the library lists the alphabet differs from process to process
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    # DETAIL: pad differs from eos, so that nothing that looks for padding can take the end of a response for it
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=EOS,
        pad_token=PAD,
        additional_special_tokens=[USER, ASSISTANT],
        clean_up_tokenization_spaces=False,
        model_max_length=2048,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def splits() -> tuple[list[Sum], list[Sum]]:
    """Train and held-out sums, a three-digit number plus one digit that leaves its hundreds; the same in every run.

    Held-out sums are in no training set, supervised or reinforced. The commuted form ("8+347=") is not in the task.
    """
    sums = [(a, b) for a in range(100, 1000) for b in range(1, 10) if a % 100 + b < 100]
    random.Random(0).shuffle(sums)  # DETAIL: fixed and not the run's seed, so that "held-out" means one thing
    return sums[NUM_VAL:], sums[:NUM_VAL]


def make_data(path: str | Path) -> tuple[Path, Path]:
    """Write `train.parquet` and `val.parquet` in the prompt-row contract into folder `path`; return both paths."""
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    for name, sums in zip(("train", "val"), splits(), strict=True):
        rows = [
            {
                "data_source": "tiny",
                "prompt": f"{a}+{b}=",  # DETAIL: a string is raw text, so no chat template comes between
                "ability": "arithmetic",
                "reward_model": {"style": "rule", "ground_truth": str(a + b)},
                "extra_info": {"split": name, "index": i},
            }
            for i, (a, b) in enumerate(sums)
        ]
        pq.write_table(pa.Table.from_pylist(rows), path / f"{name}.parquet")
    return path / "train.parquet", path / "val.parquet"


def encode(sums: list[Sum], tokenizer: PreTrainedTokenizerFast) -> torch.Tensor:
    """Prompt, answer and end-of-sequence ids of sums that are all equally long. Shapes: [len(sums), 10]."""
    return torch.tensor(tokenizer([f"{a}+{b}={a + b}{EOS}" for a, b in sums])["input_ids"])


@torch.no_grad()
def accuracy(model: Qwen2ForCausalLM, ids: torch.Tensor) -> float:
    """Share of rows of `encode` whose greedy response is the whole right answer, end of sequence included."""
    x = ids[:, :PROMPT_LEN]
    for _ in range(ANSWER_LEN):
        logits = model(input_ids=x, use_cache=False, logits_to_keep=1).logits[:, -1]
        x = torch.cat([x, logits.argmax(-1, keepdim=True)], 1)
    return (x == ids).all(1).float().mean().item()


def teach(model: Qwen2ForCausalLM, sums: list[Sum], ids: torch.Tensor, max_steps: int, seed: int) -> int:
    """Take supervised steps, in place, until two in five sums of either kind come out right; return their number.

    Seeds differ in how long they take to find out about carrying, so a fixed number of steps would start some runs
    from nothing and others from almost everything.
    """
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=SFT_LR, weight_decay=0.0)
    # DETAIL: sums that carry are drawn more often, and it stops when both kinds are half known: a kind that is nearly
    # always answered wrong gives reinforcement learning nothing to reinforce
    carries = torch.tensor([a % 10 + b > 9 for a, b in sums])
    weights = torch.where(carries, CARRY_WEIGHT, 1.0)
    # DETAIL: the probes are *training* sums: the held-out ones must not steer anything, not even when to stop
    probes = [ids[carries == kind][:PROBE_SIZE] for kind in (False, True)]
    for step in range(1, max_steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = SFT_LR * min(1.0, step / SFT_WARMUP)
        batch = ids[torch.multinomial(weights, SFT_BATCH, replacement=True, generator=generator)]
        hidden = model.model(input_ids=batch[:, :-1], use_cache=False).last_hidden_state[:, PROMPT_LEN - 1 :]
        # DETAIL: loss on answer and end of sequence only, the prompt's digits are random
        loss = F.cross_entropy(model.lm_head(hidden).flatten(0, 1), batch[:, PROMPT_LEN:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % PROBE_EVERY == 0 and min(accuracy(model, probe) for probe in probes) >= PROBE_STOP:
            return step
    return max_steps


def make_model(
    path: str | Path,
    seed: int,
    num_sft_steps: int = MAX_SFT_STEPS,
    hidden_size: int = 128,
    num_layers: int = 3,
    tie: bool = True,
) -> Path:
    """Build, teach and save model and tokenizer as a Hugging Face folder at `path`, a pure function of the arguments.

    `num_sft_steps` is the most that are taken; 0 saves the random model at once. The folder loads with
    `AutoModelForCausalLM.from_pretrained` and in vLLM. Bit for bit the same needs the same number of threads.

    Raises: ValueError if `hidden_size` is not a positive multiple of 128, or a count is out of range.
    """
    if hidden_size < 128 or hidden_size % 128:
        raise ValueError(f"hidden_size={hidden_size}: must be a positive multiple of 128 (4 heads of 32), such as 128")
    if num_layers < 1 or num_sft_steps < 0:
        raise ValueError(f"num_layers={num_layers}, num_sft_steps={num_sft_steps}: at least 1 and 0, such as 3 and 0")
    start = time.perf_counter()
    tokenizer = make_tokenizer()
    config = Qwen2Config(
        vocab_size=len(tokenizer) + len(tokenizer) % 2,  # DETAIL: even, so that two tensor-parallel ranks share it
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=hidden_size // 4,  # 32: vLLM's CPU attention does not take 16
        max_position_embeddings=2048,
        tie_word_embeddings=tie,
        initializer_range=0.05,  # DETAIL: 0.02 is for wide models; at width 128 it learns to carry far later
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(config).float()
    train, val = splits()
    steps = 0
    if num_sft_steps:
        steps = teach(model, train, encode(train, tokenizer), num_sft_steps, seed)
    score = accuracy(model, encode(val, tokenizer))
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    print(
        f"tiny model: {model.num_parameters() / 1e6:.2f} M parameters, seed {seed}, {steps} supervised steps, "
        f"held-out greedy accuracy {score:.3f} on {NUM_VAL} sums, {time.perf_counter() - start:.1f} s"
    )
    return Path(path)


def ensure(root: str | Path, seed: int) -> dict[str, str]:
    """Model and data of this recipe and seed under `root`, made where missing: the three path flags of a tiny run.

    Call it on one rank and let the others wait; a second process that makes the same folder meanwhile does no harm.
    """
    # DETAIL: the recipe is this file's text, so an edit here never meets a model made by the text before it
    recipe = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:12]
    folder = Path(root) / f"tiny-{recipe}-seed{seed}"
    if not folder.exists():
        Path(root).mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(dir=root, prefix=".tiny-"))  # renamed when whole: killed runs leave no half
        try:
            make_model(aside / "model", seed)
            make_data(aside / "data")
            aside.chmod(0o755)
            try:
                os.rename(aside, folder)
            except OSError:
                if not folder.exists():  # else another process was first, with the same bytes
                    raise
        finally:
            shutil.rmtree(aside, ignore_errors=True)
    return {
        "model": str(folder / "model"),
        "train_files": str(folder / "data" / "train.parquet"),
        "val_files": str(folder / "data" / "val.parquet"),
    }


def flags(given: dict, default: dict, made: dict[str, str], own: dict, show: bool) -> dict:
    """What `--model tiny` sets, printed too: the paths of `ensure`, and DEFAULTS where a flag has its default.

    Args: own: the script's own values, over DEFAULTS.
    """
    table = {k: v for k, v in {**DEFAULTS, **own, **made}.items() if k in given}
    dropped = []
    # other rows than this task's: its held-out sums, its reward, its steps do not belong to them
    if given["train_files"]:
        dropped += ["val_files", "reward", "num_steps", "num_epochs", "eval_every"]
    if given["num_epochs"] != default["num_epochs"]:
        dropped.append("num_steps")
    if given["num_steps"] != default["num_steps"]:
        dropped.append("num_epochs")
    table = {k: v for k, v in table.items() if k not in dropped}
    laid = {k: v for k, v in table.items() if k == "model" or given[k] == default[k]}
    if show:
        print("--model tiny sets: " + " ".join(f"--{k.replace('_', '-')} {v}" for k, v in laid.items()))
    return laid
