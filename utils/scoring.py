"""Responses and their scores: rollouts from the engine, rules in worker processes, reward models in this process.

A rule starts on a response the moment it ends, while others still generate; a reward model is sharded like the policy
and scores whole batches on the device.
"""

import sys
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from utils.data import PromptData
from utils.dist import all_gather, fail_together, stop
from utils.jsonl import append_jsonl
from utils.metrics import Metrics
from utils.models import (
    ScalarModel,
    check_positions,
    load_config,
    load_scalar,
    load_tokenizer,
    positions_of,
    same_vocabulary,
)
from utils.packing import pack, plan_together, to_device
from utils.preferences import Tokens, encode_response
from utils.prompts import encode_prompt, find_overlong
from utils.reward_pool import RewardPool, check_reward, rules_of
from utils.rewards import parse_rewards

if TYPE_CHECKING:
    from hybrid_engine import HybridEngine, Rollout, Sampling


@dataclass
class RewardModel:
    """One `model:PATH` of --reward."""

    model: ScalarModel
    weight: float
    tokenizer: object  # None where it is the policy's own: then ids pass through
    max_len: int  # positions
    mean: float  # the score is (raw - mean) / std
    std: float


def _models_of(spec: str, flag: str) -> list[tuple[str, float]]:
    """(path, weight) of each `model:PATH`."""
    parts = parse_rewards(spec, flag) if spec else []
    return [(name.removeprefix("model:"), weight) for name, weight in parts if name.startswith("model:")]


def check_reward_models(spec: str, tokenizer, longest: int, normalize: bool = False, flag: str = "--reward") -> list:
    """Refuse reward models that could not score, before anything loads; returns their configs.

    Args: longest: prompt + response, in tokens.
    Raises: ValueError.
    """
    configs = []
    for path, _ in _models_of(spec, flag):
        prefix = f"{flag} model:"
        config, own = load_config(path, prefix, "scalar"), load_tokenizer(path, prefix)
        if _reads_the_same(own, tokenizer):
            check_positions(path, prefix, config, longest)
        elif own.eos_token_id is None:
            rule = "responses are encoded by it and must end in one; set eos_token in its tokenizer_config.json"
            raise ValueError(f"{prefix}{path}: its tokenizer has no end-of-sequence token, {rule}")
        mean, std = (getattr(config, name, None) for name in ("score_mean", "score_std"))
        if normalize and (mean is None or not (std or 0) > 0):
            raise ValueError(
                f"--normalize-scores: {path}/config.json has no score_std above 0 (nor a score_mean); train it with "
                "--val-files, or leave this flag out"
            )
        configs.append(config)
    return configs


def _reads_the_same(own, tokenizer) -> bool:
    """Whether a reward model was trained on ids as the policy's prompts and responses have them."""
    same = own.eos_token_id == tokenizer.eos_token_id and own.chat_template == tokenizer.chat_template
    return same and same_vocabulary(own, tokenizer)


def check_scoring(spec: str, flag: str, tokenizer, data: PromptData, timeout_s: float) -> None:
    """Call the rules on a real row, and encode this rank's share of the prompts for reward models that read other ids.

    Raises: ValueError.
    """
    check_reward(spec, data.row(0), timeout_s, data.flag, flag)
    for path, _ in _models_of(spec, flag):
        own = load_tokenizer(path, f"{flag} model:")
        if not _reads_the_same(own, tokenizer):
            try:
                find_overlong(data, own, sys.maxsize, (dist.get_rank(), dist.get_world_size()))
            except ValueError as error:
                rule = "its tokenizer must encode every prompt; a reward model trained on --model's family works"
                raise ValueError(f"{flag} model:{path}: {rule} ({error})") from error


def check_scorers(flags: dict, tokenizer, data: PromptData, val: PromptData | list) -> None:
    """`check_scoring` of what the run will score: training rows unless replayed, held-out ones if any (collective)."""
    examined = ("eval_reward", "--eval-reward") if flags["eval_reward"] else ("reward", "--reward")
    with fail_together():
        for rows, (name, flag) in ((data if not flags["replay"] else [], ("reward", "--reward")), (val, examined)):
            if rows:
                check_scoring(flags[name], flag, tokenizer, rows, flags["reward_timeout_s"])


def load_reward_models(
    spec: str, tokenizer, mesh: DeviceMesh, dtype: torch.dtype, normalize: bool, flag: str = "--reward"
) -> list[RewardModel]:
    """The reward models that a `--reward` value names, frozen and sharded over all ranks (collective).

    Args: normalize: scores less the mean and over the std that the model's config.json records.
    """
    models = []
    for path, weight in _models_of(spec, flag):
        model = load_scalar(path, mesh, flag=f"{flag} model:", master_dtype=dtype, compute_dtype=dtype, trainable=False)
        config, own = model.lm.config, load_tokenizer(path)
        same = _reads_the_same(own, tokenizer)
        mean, std = (config.score_mean, config.score_std) if normalize else (0.0, 1.0)
        models.append(RewardModel(model, weight, None if same else own, positions_of(config), mean, std))
    return models


class Scorer:
    """Rollouts of one engine, scored by one `--reward` value.

    Args: max_tokens: packed tokens of a reward model's micro-batch; normalize: see `load_reward_models`.
    """

    def __init__(
        self,
        spec: str,
        engine: "HybridEngine",
        tokenizer,
        mesh: DeviceMesh,
        *,
        dtype: torch.dtype,
        workers: int,
        timeout_s: float,
        max_tokens: int,
        normalize: bool = False,
        flag: str = "--reward",
    ):
        self.spec, self.engine, self.tokenizer, self.flag, self.max_tokens = spec, engine, tokenizer, flag, max_tokens
        self.device = torch.device(mesh.device_type)
        self.models = load_reward_models(spec, tokenizer, mesh, dtype, normalize, flag)
        self.pool = RewardPool(spec, workers, timeout_s, flag) if rules_of(spec, flag) else None
        self._futures: dict[int, Future] = {}
        self.num_timeouts = 0  # among the rollouts of the last `rule_scores`

    def rollout(self, source: PromptData, uids: list[int], n: int, step: int, sampling: "Sampling") -> list["Rollout"]:
        """`n` responses to each of this rank's prompts; the rules start on each as it ends (collective)."""
        rows = {uid: source.row(uid) for uid in uids}

        def start(rollout: "Rollout") -> None:
            text = self.tokenizer.decode(rollout.response_ids, skip_special_tokens=True)
            self._futures[id(rollout)] = self.pool.submit(text, rows[rollout.uid])

        prompts = [encode_prompt(self.tokenizer, rows[uid]["prompt"]) for uid in uids]
        on_finish = start if self.pool else None
        return self.engine.generate(prompts, uids, n=n, step=step, sampling=sampling, on_finish=on_finish)

    def rule_scores(self, rollouts: list["Rollout"], what: str, needed: bool = True) -> torch.Tensor:
        """The rules' weighted sum for each rollout, waited for; 0 without a rule, NaN where one could not judge.

        Where not one response of any rank could be judged it says why and, if they are needed, ends the run; `what`
        names them (collective). Shapes: [B] float64.
        """
        self.num_timeouts = 0
        if self.pool is None:
            return torch.zeros(len(rollouts), dtype=torch.float64, device=self.device)
        scores = [self._futures.pop(id(r)).result() for r in rollouts]
        self.pool.ask_again()  # a judge that stalled for one batch may be back for the next
        self.num_timeouts = sum(s.error == "timeout" for s in scores)
        failures = all_gather((len(scores), [s.message for s in scores if s.error is not None]))
        if sum(count for count, _ in failures) == sum(len(messages) for _, messages in failures):
            reason = next(messages[0] for _, messages in failures if messages)
            message = f"{self.flag} {self.spec}: failed on all responses of {what}: {reason}"
            if needed:
                stop(message)
            if dist.get_rank() == 0:
                print(message, file=sys.stderr)
        values = [s.value if s.error is None else torch.nan for s in scores]
        return torch.tensor(values, dtype=torch.float64, device=self.device)

    @torch.no_grad()
    def model_scores(self, rollouts: list["Rollout"], source: PromptData) -> torch.Tensor:
        """The reward models' weighted sum for each rollout, queued on the device and not waited for (collective).

        Not finite where a model could not read the response (re-encoded, it is longer than the model's positions).
        Shapes: [B] float64.
        """
        total_B = torch.zeros(len(rollouts), dtype=torch.float64, device=self.device)
        for reward in self.models:
            sequences = rollouts
            if reward.tokenizer is not None:
                sequences = [self._reencode(reward.tokenizer, r, source.row(r.uid)) for r in rollouts]
            lengths = [len(s.prompt_ids) + len(s.response_ids) for s in sequences]
            fits = [i for i, length in enumerate(lengths) if length <= reward.max_len]
            # re-encoded, one may be longer than a micro-batch: it gets one of its own, the numbers stay the same
            budget = max([self.max_tokens, *(lengths[i] for i in fits)])
            scores_B = torch.full_like(total_B, torch.nan)
            for part in plan_together(sequences, fits, budget)[0]:
                packed = pack([sequences[i] for i in part], self.device)
                scores_B[to_device(part, self.device)] = reward.model(packed)[1].double()
            total_B += reward.weight * (scores_B - reward.mean) / reward.std
        return total_B

    def _reencode(self, tokenizer, rollout: "Rollout", row: dict) -> Tokens:
        """The same prompt and response in a reward model's own chat template and tokens."""
        text = self.tokenizer.decode(rollout.response_ids, skip_special_tokens=True)
        response_ids = encode_response(tokenizer, text, tokenizer.eos_token_id)
        # DETAIL: a truncated response gets no end-of-sequence token, because the policy did not write one.
        if rollout.finish_reason == "length" and len(response_ids) > 1:
            response_ids = response_ids[:-1]
        return Tokens(encode_prompt(tokenizer, row["prompt"]), response_ids)

    def evaluate(self, val: PromptData, step: int, sampling: "Sampling", metrics: Metrics, samples: Path) -> None:
        """One response to every held-out prompt, each rank its share; a few whole samples are appended to `samples`."""
        rank = dist.get_rank()
        share = list(range(rank, len(val), dist.get_world_size()))
        rollouts = self.rollout(val, share, 1, step, sampling)
        # A judge that fails at the start is wrong; one that fails later must not cost the step, which is not saved yet.
        rule_scores_B = self.rule_scores(rollouts, f"the evaluation at step {step}", needed=step == 0)
        scores_B = rule_scores_B + self.model_scores(rollouts, val)
        assert sum(all_gather(len(scores_B))) == len(val), "not every held-out prompt was evaluated"
        # DETAIL: a response without a score counts as 0 in evaluation, because leaving it out would flatter the policy.
        judged_B = scores_B.isfinite()
        scores_B = torch.where(judged_B, scores_B, 0.0)
        if any(all_gather(bool(judged_B.any()))):  # else 0 would be no score of anything
            metrics.add("eval/score", scores_B.sum(), len(rollouts))
        metrics.add("eval/error_frac", (~judged_B).sum(), len(rollouts))
        metrics.add("eval/response_len", sum(len(r.response_ids) for r in rollouts), len(rollouts))
        metrics.add("eval/truncated_frac", sum(r.finish_reason == "length" for r in rollouts), len(rollouts))
        if rank == 0:
            rows = [
                {
                    "step": step,
                    "uid": r.uid,
                    "prompt": self.tokenizer.decode(r.prompt_ids),
                    "response": self.tokenizer.decode(r.response_ids),
                    "score": value,
                    "finish_reason": r.finish_reason,
                }
                for r, value in zip(rollouts[:8], scores_B[:8].tolist(), strict=True)
            ]
            append_jsonl(samples, *rows)

    def close(self) -> None:
        """End the rules' worker processes."""
        if self.pool is not None:
            self.pool.close()


def open_scorers(
    flags: dict, engine: "HybridEngine", tokenizer, mesh: DeviceMesh, dtype: torch.dtype, evaluating: bool
) -> tuple:
    """What samples and scores training responses, and what evaluates: of a replay its records (collective)."""
    how = {"dtype": dtype, "workers": flags["reward_workers"], "timeout_s": flags["reward_timeout_s"]}
    how |= {"max_tokens": flags["max_tokens_per_gpu"], "normalize": flags.get("normalize_scores", False)}
    scorer = engine if flags["replay"] else Scorer(flags["reward"], engine, tokenizer, mesh, **how)
    if not (flags["eval_reward"] and evaluating):
        return scorer, scorer
    return scorer, Scorer(flags["eval_reward"], engine, tokenizer, mesh, **how, flag="--eval-reward")
