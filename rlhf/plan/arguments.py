"""Flags of `rlhf plan` and its sub-commands. No torch."""

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `rlhf plan`, `rlhf plan compare`, `rlhf plan scale` and `rlhf plan validate`."""
    _add_work(parser)
    _add_gpu(parser)
    parser.add_argument("--search", action="store_true", help="rank the layouts of step 1")
    parser.add_argument("--emit", type=Path, metavar="DIR", help="write the plan as a recipe, changed so that it fits")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the plan as JSON too")
    commands = parser.add_subparsers(dest="plan_command", metavar="compare | scale | validate")
    compare = commands.add_parser("compare", help="the same work on two devices", allow_abbrev=False)
    compare.add_argument("gpu", metavar="FIRST", help="device")
    compare.add_argument("second", metavar="SECOND", help="another one")
    _add_work(compare)
    compare.add_argument("--json", type=Path, metavar="FILE", help="write the comparison as JSON too")
    scale = commands.add_parser("scale", help="weak and strong scaling, and what is lost to what", allow_abbrev=False)
    _add_work(scale)
    _add_gpu(scale)
    scale.add_argument("--from", dest="smallest", type=int, default=1, metavar="N", help="fewest devices (1)")
    scale.add_argument("--to", dest="largest", type=int, required=True, metavar="N", help="most devices")
    scale.add_argument(
        "--jitter", type=float, default=0.01, metavar="SHARE",
        help="standard deviation of a rank's step, as a share of it (0.01)",
    )  # fmt: skip
    scale.add_argument("--plot", type=Path, metavar="FILE", help="draw the curves as .png, .svg or .html")
    scale.add_argument("--json", type=Path, metavar="FILE", help="write the curves as JSON too")
    _add_validate(commands.add_parser("validate", help="the plan against published figures", allow_abbrev=False))


def _add_gpu(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--gpu", metavar="NAME", help="device: a100-80, h100-sxm, mi250x-gcd, ...")


def _add_work(parser: argparse.ArgumentParser) -> None:
    """What is run, on how many devices."""
    parser.add_argument("--recipe", metavar="NAME|PATH", help="models, lengths, batches and ZeRO of a recipe")
    parser.add_argument("--actor", metavar="MODEL", help="name (opt-13b, llama3-8b, gpt-1t), folder or config.json")
    parser.add_argument("--reward", default="opt-350m", metavar="MODEL", help="reward model and critic (opt-350m)")
    parser.add_argument("--gpus", type=int, metavar="N", help="devices in all (default: the recipe's)")
    parser.add_argument("--hardware", type=Path, metavar="FILE", help="YAML that adds devices or replaces some")
    parser.add_argument("--steps", metavar="N,N", help="which of the three steps (default: all there are)")
    group = parser.add_argument_group("with --actor")
    group.add_argument("--prompt", type=int, default=256, metavar="N", help="tokens of a prompt (256)")
    group.add_argument("--response", type=int, default=256, metavar="N", help="tokens of a response (256)")
    group.add_argument("--zero", type=int, choices=(0, 1, 2, 3), help="default: 3 on many devices, 1 with --pipeline")
    group.add_argument("--micro-batch", type=int, default=4, metavar="N", help="sequences of a device at once (4)")
    group.add_argument("--global-batch", type=int, default=64, metavar="N", help="sequences of an update (64)")
    group.add_argument("--recompute", choices=("none", "selective", "full"), help="default: full from 3B parameters")
    group.add_argument(
        "--recompute-budget", type=float, default=0.0, metavar="SHARE", help="of the layers is kept all the same (0)"
    )
    group.add_argument("--dtype", choices=("bf16", "fp16", "fp32", "fp8"), default="bf16", help="default: bf16")
    group.add_argument("--lora", type=int, default=0, metavar="RANK", help="train adapters of this rank alone")
    group.add_argument("--tensor", type=int, default=1, metavar="N", help="tensor parallelism of the actor")
    group.add_argument("--pipeline", type=int, default=1, metavar="N", help="pipeline stages of the actor")
    group.add_argument("--virtual", type=int, default=1, metavar="N", help="pieces a stage: interleaved 1F1B")
    group.add_argument("--sp", type=int, default=1, metavar="N", help="ranks that share each row's tokens (1)")
    group.add_argument("--offload", action="store_true", help="optimiser, under ZeRO-3 weights too, in host memory")
    group.add_argument("--offload-activations", action="store_true", help="what layers save, in host memory")
    group = parser.add_argument_group("how much")
    group.add_argument("--demonstrations", type=float, default=58_880, metavar="N", help="rows of step 1 (58880)")
    group.add_argument("--pairs", type=float, default=117_760, metavar="N", help="of step 2 (117760)")
    group.add_argument("--prompts", type=float, default=264_292, metavar="N", help="of step 3 with --actor (264292)")


def _add_validate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tables", type=Path, metavar="FILE", help="figures to compare with (default: the package's)")
    parser.add_argument("--hardware", type=Path, metavar="FILE", help="YAML that adds devices or replaces some")
    parser.add_argument("--groups", action="store_true", help="groups and sweeps alone, not every figure")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure as JSON too")
    parser.add_argument("--write", type=Path, metavar="FILE", help="page whose section the tables replace")
