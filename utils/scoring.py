"""Responses and their scores: rollouts from the engine, rules in worker processes, reward models in this process.

A rule starts on a response the moment it ends, while others still generate; a reward model is sharded like the policy
and scores whole batches on the device.
"""

from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from utils.data import PromptData, encode_prompt
from utils.dist import all_gather, stop
from utils.metrics import Metrics, append_jsonl
from utils.models import ScalarModel, has_scalar_head, load_config, load_scalar, load_tokenizer, same_ids
from utils.packing import pack, plan_together, to_device
from utils.preferences import Tokens, encode_response
from utils.reward_pool import RewardPool, Score, rules_of
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


def _models_of(spec: str) -> list[tuple[str, float]]:
    """(path, weight) of each `model:PATH`."""
    parts = parse_rewards(spec) if spec else []
    return [(name.removeprefix("model:"), weight) for name, weight in parts if name.startswith("model:")]


def check_reward_models(spec: str, tokenizer, longest: int, normalize: bool = False, flag: str = "--reward") -> None:
    """Refuse reward models that could not score, before anything loads. Args: longest: prompt + response, in tokens.

    Raises: ValueError.
    """
    for path, _ in _models_of(spec):
        name = f"model:{path}"
        config, own = load_config(path, f"{flag} model:"), load_tokenizer(path, f"{flag} model:")
        if not has_scalar_head(config):
            raise ValueError(
                f"{flag} {name}: must have a scalar head, and is {', '.join(config.architectures or ['unknown'])} with "
                f"{config.num_labels} labels; a folder written by reward_model_bt.py works"
            )
        if same_ids(tokenizer, own) and config.max_position_embeddings < longest:
            raise ValueError(
                f"{flag} {name}: has {config.max_position_embeddings} positions, and --max-prompt-len + "
                f"--max-response-len is {longest}; they must fit"
            )
        if normalize and not getattr(config, "score_std", None):
            raise ValueError(
                f"--normalize-scores: {path}/config.json has no score_mean and score_std; train it with --val-files, "
                "or --no-normalize-scores"
            )


def load_reward_models(
    spec: str, tokenizer, mesh: DeviceMesh, dtype: torch.dtype, normalize: bool
) -> list[RewardModel]:
    """The reward models that a `--reward` value names, frozen and sharded over all ranks (collective).

    Args: normalize: scores less the mean and over the std that the model's config.json records.
    """
    models = []
    for path, weight in _models_of(spec):
        model = load_scalar(
            path, mesh, flag="--reward model:", master_dtype=dtype, compute_dtype=dtype, trainable=False
        )
        config, own = model.lm.config, load_tokenizer(path)
        same = same_ids(tokenizer, own)
        mean, std = (config.score_mean, config.score_std) if normalize else (0.0, 1.0)
        models.append(RewardModel(model, weight, None if same else own, config.max_position_embeddings, mean, std))
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
        self.models = load_reward_models(spec, tokenizer, mesh, dtype, normalize)
        self.pool = RewardPool(spec, workers, timeout_s) if rules_of(spec) else None
        self._futures: dict[int, Future] = {}

    def rollout(self, source: PromptData, uids: list[int], n: int, step: int, sampling: "Sampling") -> list["Rollout"]:
        """`n` responses to each of this rank's prompts; the rules start on each as it ends (collective)."""
        rows = {uid: source.row(uid) for uid in uids}

        def start(rollout: "Rollout") -> None:
            text = self.tokenizer.decode(rollout.response_ids, skip_special_tokens=True)
            self._futures[id(rollout)] = self.pool.submit(text, rows[rollout.uid])

        prompts = [encode_prompt(self.tokenizer, rows[uid]["prompt"]) for uid in uids]
        on_finish = start if self.pool else None
        return self.engine.generate(prompts, uids, n=n, step=step, sampling=sampling, on_finish=on_finish)

    def rule_scores(self, rollouts: list["Rollout"], what: str) -> list[Score]:
        """The rules' weighted sum for each rollout, waited for; 0 where there is no rule (collective).

        Ends the run where not one response of any rank could be judged. `what`: the rollouts' name in that message.
        """
        if self.pool is None:
            return [Score(0.0)] * len(rollouts)
        scores = [self._futures.pop(id(r)).result() for r in rollouts]
        failures = all_gather((len(scores), [s.message for s in scores if s.error is not None]))
        if sum(count for count, _ in failures) == sum(len(messages) for _, messages in failures):
            message = next(messages[0] for _, messages in failures if messages)
            stop(f"{self.flag} {self.spec}: failed on all responses of {what}: {message}")
        return scores

    @torch.no_grad()
    def model_scores(self, rollouts: list["Rollout"], source: PromptData) -> torch.Tensor:
        """The reward models' weighted sum for each rollout, queued on the device and not waited for (collective).

        Not finite where a model could not read the response (re-encoded, it is longer than the model's positions).
        Shapes: [B] float64.
        """
        total_B = torch.zeros(len(rollouts), dtype=torch.float64, device=self.device)
        for reward in self.models:
            sequences, limit = rollouts, min(reward.max_len, self.max_tokens)
            if reward.tokenizer is not None:
                sequences = [self._reencode(reward.tokenizer, r, source.row(r.uid)) for r in rollouts]
            fits = [i for i, s in enumerate(sequences) if len(s.prompt_ids) + len(s.response_ids) <= limit]
            scores_B = torch.full_like(total_B, torch.nan)
            for part in plan_together(sequences, fits, self.max_tokens)[0]:
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
        scores = self.rule_scores(rollouts, f"the evaluation at step {step}")
        assert sum(all_gather(len(scores))) == len(val), "not every held-out prompt was evaluated"
        values = [m + s.value for m, s in zip(self.model_scores(rollouts, val).tolist(), scores, strict=True)]
        judged = [s.error is None and v - v == 0 for s, v in zip(scores, values, strict=True)]
        # DETAIL: a response without a score counts as 0 here, because leaving it out would flatter the policy.
        values = [v if ok else 0.0 for v, ok in zip(values, judged, strict=True)]
        metrics.add("eval/score", sum(values), len(values))
        metrics.add("eval/error_frac", len(judged) - sum(judged), len(judged))
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
                for r, value in list(zip(rollouts, values, strict=True))[:8]
            ]
            append_jsonl(samples, *rows)

    def close(self) -> None:
        """End the rules' worker processes."""
        if self.pool is not None:
            self.pool.close()
