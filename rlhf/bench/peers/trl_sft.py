"""Program: TRL's SFTTrainer on the benchmark's demonstrations.

Padded batches are its default; --packing is its best setting, rows filled by best-fit-decreasing.
"""

import sys

from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

from rlhf.bench.peers.arguments import parse, read_rows
from rlhf.bench.peers.trl_common import train_and_record, trainer_arguments


def main() -> int:
    """Train and record."""
    arguments = parse("rlhf.bench.peers.trl_sft")
    # Words are apart by spaces, and the stop token is one: the ids are those that our stage has.
    rows = [{"prompt": row["prompt"], "completion": " " + row["response"]} for row in read_rows(arguments.data)]
    settings = dict(trainer_arguments(arguments))
    if arguments.packing:
        # One full row a forward, and as many forwards a step as hold about the batch's sequences.
        mean_length = sum(len(row["prompt"].split()) + len(row["completion"].split()) + 1 for row in rows) / len(rows)
        settings["per_device_train_batch_size"] = 1
        settings["gradient_accumulation_steps"] = max(1, round(arguments.rows * mean_length / arguments.packing))
        settings.update(packing=True, max_length=arguments.packing)
    config = SFTConfig(**settings)
    trainer = SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(arguments.actor),
        args=config,
        # Packing leaves few rows; a step must not come to the end of them.
        train_dataset=Dataset.from_list(rows * (4 if arguments.packing else 1)),
        processing_class=AutoTokenizer.from_pretrained(arguments.actor),
    )
    train_and_record(
        trainer, arguments, lambda examples: sum(len(example.get("seq_lengths") or (0,)) for example in examples)
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
