"""Program: TRL's RewardTrainer on the benchmark's pairs."""

import sys

from datasets import Dataset
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from trl import RewardConfig, RewardTrainer

from rlhf.bench.peers.arguments import parse, read_rows
from rlhf.bench.peers.trl_common import train_and_record, trainer_arguments


def main() -> int:
    """Train and record."""
    arguments = parse("rlhf.bench.peers.trl_reward")
    rows = [
        {"prompt": row["prompt"], "chosen": " " + row["chosen"], "rejected": " " + row["rejected"]}
        for row in read_rows(arguments.data)
    ]
    trainer = RewardTrainer(
        model=AutoModelForSequenceClassification.from_pretrained(arguments.reward, num_labels=1),
        args=RewardConfig(**trainer_arguments(arguments)),
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(arguments.reward),
    )
    train_and_record(trainer, arguments, len)
    return 0


if __name__ == "__main__":
    sys.exit(main())
