"""Command line that the programs of the peers share. Standard library alone."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path


def parse(prog: str, argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read what rlhf.bench.jobs passes; a program ignores what it has no use for."""
    parser = argparse.ArgumentParser(prog=prog, allow_abbrev=False)
    parser.add_argument("--data", type=Path, required=True, help="JSONL rows")
    parser.add_argument("--out", type=Path, required=True, help="folder of the record")
    parser.add_argument("--model", help="model folder of a rollout")
    parser.add_argument("--actor", help="policy folder")
    parser.add_argument("--reward", help="reward model folder")
    parser.add_argument("--rows", type=int, required=True, help="rows of one step on one rank")
    parser.add_argument("--micro-batch", type=int, help="rows of one forward of PPO's update")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), required=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--new-tokens", type=int, default=0, help="most tokens of a response")
    parser.add_argument("--stop", action="store_true", help="a response may stop before")
    parser.add_argument("--packing", type=int, default=0, metavar="TOKENS", help="pack rows into this many tokens")
    parser.add_argument("--deepspeed", help="DeepSpeed JSON")
    return parser.parse_args(argv)


def read_rows(path: Path) -> list[dict[str, str]]:
    """The rows of a JSONL file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
