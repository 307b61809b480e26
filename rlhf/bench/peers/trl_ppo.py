"""Program: TRL's PPO trainer on the benchmark's prompts.

Its functions are wrapped to tell rollout, scoring and update apart and to count real tokens; nothing else is changed.
"""

import os
import sys
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
)
from trl.experimental.ppo import PPOConfig, PPOTrainer, ppo_trainer

from rlhf.bench.peers.arguments import parse, read_rows
from rlhf.bench.peers.recorder import Recorder, response_length
from rlhf.bench.peers.trl_common import RecordSteps, check_zero3, trainer_arguments


def main() -> int:
    """Train and record."""
    arguments = parse("rlhf.bench.peers.trl_ppo")
    tokenizer = AutoTokenizer.from_pretrained(arguments.actor, padding_side="left")
    prompts = [{"input_ids": tokenizer(row["prompt"])["input_ids"]} for row in read_rows(arguments.data)]
    settings = dict(trainer_arguments(arguments))
    del settings["max_steps"]
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    settings["per_device_train_batch_size"] = arguments.micro_batch
    settings["gradient_accumulation_steps"] = arguments.rows // arguments.micro_batch
    config = PPOConfig(
        **settings,
        total_episodes=arguments.steps * arguments.rows * world_size,
        num_ppo_epochs=1,
        num_mini_batches=1,
        num_sample_generations=0,
        response_length=arguments.new_tokens,
        temperature=1.0,
        stop_token="eos" if arguments.stop else None,
    )
    recorder = Recorder(arguments.out)
    watch(recorder, pad_id=tokenizer.pad_token_id, stop_id=tokenizer.eos_token_id if arguments.stop else None)
    trainer = PPOTrainer(
        args=config,
        processing_class=tokenizer,
        model=_policy(arguments.actor),
        ref_model=_policy(arguments.actor),
        reward_model=_scorer(arguments.reward),
        value_model=_scorer(arguments.reward),
        train_dataset=Dataset.from_list(prompts),
        eval_dataset=Dataset.from_list(prompts[:1]),
        callbacks=[RecordSteps(recorder)],
    )
    check_zero3(trainer.accelerator, arguments)
    trainer.train()
    recorder.write()
    return 0


def _policy(path: str) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(path)
    return model


def _scorer(path: str) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForSequenceClassification.from_pretrained(path, num_labels=1)
    return model


def watch(recorder: Recorder, *, pad_id: int, stop_id: int | None) -> None:
    """Wrap the trainer's functions: generation is the rollout, forwards without gradients are scoring.

    What follows the first forward with gradients is the update, to the end of the step.
    """
    generate, forward, get_reward = ppo_trainer.batch_generation, ppo_trainer.forward, ppo_trainer.get_reward

    def watched_generation(model: Any, queries: Tensor, *args: Any, **kwargs: Any) -> Any:
        with recorder.phase("rollout"):
            query_responses, logits = generate(model, queries, *args, **kwargs)
        responses = query_responses[:, queries.shape[1] :]
        tokens = int((queries != pad_id).sum()) + sum(response_length(row, stop_id) for row in responses.tolist())
        recorder.count(tokens=tokens, rows=len(queries))
        return query_responses, logits

    def watched_forward(model: Any, query_responses: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            with recorder.phase("score"):
                return forward(model, query_responses, *args, **kwargs)
        recorder.begin_phase("update")
        recorder.count(filled=int((query_responses != pad_id).sum()), positions=query_responses.numel())
        return forward(model, query_responses, *args, **kwargs)

    def watched_reward(*args: Any, **kwargs: Any) -> Any:
        with recorder.phase("score"):
            return get_reward(*args, **kwargs)

    ppo_trainer.batch_generation = watched_generation
    ppo_trainer.forward = watched_forward
    ppo_trainer.get_reward = watched_reward


if __name__ == "__main__":
    sys.exit(main())
