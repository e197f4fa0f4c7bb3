"""One shape through TRL's GRPOTrainer with colocated vLLM; prints the seconds of all steps so far after each, as JSON.

python -m benchmarks.trl_grpo '{"model": ..., "prompts": ..., ...}'                  (benchmarks.step calls it)
Settings: bfloat16 autocast over float32 weights, Liger kernels, no gradient checkpointing, no KL, as fast as it goes.
"""

import json
import os
import sys
import time

import pyarrow.parquet as pq

os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "29731"}


def main(model, prompts, batch, responses, group, response_len, longest, steps) -> None:
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    class Clock(TrainerCallback):
        seconds: list[float] = []  # noqa: RUF012

        def on_step_begin(self, *args, **kwargs):
            self.began = getattr(self, "ended", time.perf_counter())

        def on_step_end(self, *args, **kwargs):
            self.ended = time.perf_counter()
            self.seconds.append(self.ended - self.began)
            print(json.dumps(self.seconds), flush=True)

    config = GRPOConfig(
        output_dir="runs/.bench/trl", use_vllm=True, vllm_mode="colocate", vllm_gpu_memory_utilization=0.3,
        vllm_max_model_length=longest, per_device_train_batch_size=batch,
        gradient_accumulation_steps=responses // batch, num_generations=group, max_completion_length=response_len,
        bf16=True, gradient_checkpointing=False, use_liger_kernel=True, max_steps=steps, logging_steps=1, beta=0.0,
        learning_rate=1e-6, report_to=[], save_strategy="no", model_init_kwargs={"dtype": "float32"}, disable_tqdm=True,
    )  # fmt: skip
    dataset = Dataset.from_dict({"prompt": pq.read_table(prompts)["prompt"].to_pylist()})

    def reward(completions, **kwargs):
        return [len(text) / 100 for text in completions]

    trainer = GRPOTrainer(model, reward_funcs=reward, args=config, train_dataset=dataset, callbacks=[Clock()])
    trainer.train()


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
