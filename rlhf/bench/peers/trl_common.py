"""What the programs that run TRL share: its callback and collator with a recorder, and arguments of its trainers."""

import argparse
import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from transformers import TrainerCallback

from rlhf.bench.peers.recorder import Recorder

Collator = Callable[[list[Any]], dict[str, Any]]


class Counting:
    """A collator that counts its batches. The loader collates ahead, so a batch is counted when its step takes it."""

    def __init__(self, collate: Collator, rows_of: Callable[[Sequence[Any]], int]) -> None:
        """Wrap `collate`; `rows_of` says how many rows some examples hold."""
        self.collate = collate
        self.rows_of = rows_of
        self.batches: deque[dict[str, int]] = deque()

    def __call__(self, examples: list[Any]) -> dict[str, Any]:
        """Collate and note the counts."""
        rows = self.rows_of(examples)
        batch = self.collate(examples)
        positions = int(batch["input_ids"].numel())
        filled = int(batch["attention_mask"].sum()) if "attention_mask" in batch else positions
        self.batches.append({"tokens": filled, "rows": rows, "filled": filled, "positions": positions})
        return batch


class RecordSteps(TrainerCallback):
    """Feeds the recorder at the end of each optimiser step, with the batches that the step took."""

    def __init__(self, recorder: Recorder, counting: Counting | None = None) -> None:
        """Record with `recorder`; without a collator somebody else counts."""
        self.recorder = recorder
        self.counting = counting

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Start the clock."""
        self.recorder.start()

    def on_step_end(self, args: Any, *_: Any, **__: Any) -> None:
        """End the step."""
        if self.counting is not None:
            for _number in range(args.gradient_accumulation_steps):
                self.recorder.count(**self.counting.batches.popleft())
        self.recorder.end_step()


def trainer_arguments(arguments: argparse.Namespace) -> Mapping[str, Any]:
    """Arguments of every trainer: what ours does too, or what would only disturb the clock.

    DeepSpeed and the PPO trainer's type are set as `accelerate launch` sets them, by environment variables: with the
    trainers' own `deepspeed` argument ranks on CPUs do not see one another, and PPO's own Accelerator ignores `bf16`.
    """
    os.environ["ACCELERATE_MIXED_PRECISION"] = "bf16" if arguments.dtype == "bf16" else "no"
    if arguments.deepspeed:
        os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
        os.environ["ACCELERATE_DEEPSPEED_CONFIG_FILE"] = arguments.deepspeed
    return {
        "output_dir": str(arguments.out / "trl"),
        "per_device_train_batch_size": arguments.rows,
        "max_steps": arguments.steps,
        "learning_rate": 1e-7,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 1.0,
        "seed": arguments.seed,
        # Told to use the CPU, accelerate takes no notice of DeepSpeed; without a backend named, it sees one rank.
        "use_cpu": not arguments.deepspeed,
        "ddp_backend": "gloo" if arguments.deepspeed else None,
        "bf16": arguments.dtype == "bf16",
        # TRL's default recomputes every activation; ours does not.
        "gradient_checkpointing": False,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }


def check_zero3(accelerator: Any, arguments: argparse.Namespace) -> None:
    """Make sure that the trainer runs as it was asked to: its set-up drops settings without a word.

    Raises:
        RuntimeError: it does not.
    """
    plugin = accelerator.state.deepspeed_plugin
    stage = plugin.zero_stage if plugin else 0
    if stage != (3 if arguments.deepspeed else 0):
        raise RuntimeError(f"TRL runs at ZeRO stage {stage} with deepspeed={arguments.deepspeed}.")


def train_and_record(trainer: Any, arguments: argparse.Namespace, rows_of: Callable[[Sequence[Any]], int]) -> None:
    """Train, with every step and the batches it took on record.

    Args:
        trainer: of TRL, ready to train.
        arguments: of the program.
        rows_of: how many rows some examples hold.
    """
    check_zero3(trainer.accelerator, arguments)
    recorder = Recorder(arguments.out)
    trainer.data_collator = counting = Counting(trainer.data_collator, rows_of)
    trainer.add_callback(RecordSteps(recorder, counting))
    trainer.train()
    recorder.write()
