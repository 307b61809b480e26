"""Flags of `rlhf bench` and its sub-commands. No torch."""

import argparse
from collections.abc import Callable
from pathlib import Path

STEPS = ("step1", "step2", "step3")
_OVERRIDES = "Any key of a stage's config can be set with --sft.KEY, --reward.KEY or --ppo.KEY."


def add_arguments(parser: argparse.ArgumentParser, add_where: Callable[[argparse.ArgumentParser], None]) -> None:
    """The flags of `rlhf bench peers`, `machine`, `step1`, `step2`, `step3`, `compare`, `scale` and `strategies`.

    Args:
        parser: of `rlhf bench`.
        add_where: adds the flags of the launcher that say on which ranks.
    """
    commands = parser.add_subparsers(dest="bench_command", required=True, metavar="COMMAND")

    def add(name: str, text: str, *, overrides: bool = False) -> argparse.ArgumentParser:
        return commands.add_parser(name, help=text, allow_abbrev=False, epilog=_OVERRIDES if overrides else None)

    _add_peers(add("peers", "beside other trainers and engines, on the same model and rows"))
    _add_machine(add("machine", "what this machine can do, as a hardware YAML for `rlhf plan`"))
    for name, stage in zip(STEPS, ("SFT", "reward model", "PPO"), strict=True):
        step = add(name, f"a recipe's {stage} step: speed, memory, utilisation, beside the plan", overrides=True)
        _add_measured(step, add_where)
        step.add_argument("--json", type=Path, metavar="FILE", help="put the result into this file")
    compare = add("compare", "results of two machines side by side")
    compare.add_argument("first", type=Path, metavar="A.json", help="of `rlhf bench step1|step2|step3 --json`")
    compare.add_argument("second", type=Path, metavar="B.json", help="of another machine, or another setting")
    compare.add_argument("--plot", type=Path, metavar="FILE", help="draw the rates as .png, .svg or .html")
    compare.add_argument("--json", type=Path, metavar="FILE", help="write the comparison as JSON too")
    scale = add("scale", "weak and strong scaling over ranks, beside the plan's curve", overrides=True)
    scale.add_argument("--step", type=int, choices=(1, 2, 3), default=1, help="which of the three steps (1)")
    scale.add_argument("--ranks", default="1,2", metavar="N,N", help="numbers of ranks, ascending (1,2)")
    _add_measured(scale, add_where)
    scale.add_argument("--plot", type=Path, metavar="FILE", help="draw the curves as .png, .svg or .html")
    scale.add_argument("--json", type=Path, metavar="FILE", help="write the curves as JSON too")
    ways = add("strategies", "one step under each ZeRO stage, offload, recomputation, compile", overrides=True)
    ways.add_argument("--step", type=int, choices=(1, 2, 3), default=1, help="which of the three steps (1)")
    ways.add_argument("--only", default="", metavar="NAMES", help="only these, as the table names them, ; between")
    ways.add_argument("--rounds", type=int, default=3, metavar="N", help="runs of each, in turns (3)")
    _add_measured(ways, add_where)
    ways.add_argument("--json", type=Path, metavar="FILE", help="write the table as JSON too")
    ways.add_argument("--write", type=Path, metavar="FILE", help="page whose section the table replaces")


def _add_measured(parser: argparse.ArgumentParser, add_where: Callable[[argparse.ArgumentParser], None]) -> None:
    parser.add_argument("--recipe", required=True, metavar="NAME|PATH", help="recipe, its folder or its pipeline.yaml")
    parser.add_argument("--models", type=Path, metavar="DIR",
                        help="folder of an `rlhf run` whose models the step reads; default: new ones")  # fmt: skip
    parser.add_argument("--warmup", type=int, default=3, metavar="N", help="steps before the measured ones (3)")
    parser.add_argument("--steps", type=int, default=10, metavar="N", help="measured steps (10)")
    parser.add_argument("--profile", type=int, default=2, metavar="N",
                        help="steps after them under torch's profiler, for the share of communication (2)")  # fmt: skip
    parser.add_argument("--hardware", type=Path, metavar="FILE", help="YAML of `rlhf bench machine`, or one's own")
    parser.add_argument("--gpu", metavar="NAME", help="device to plan for (default: the one of --hardware)")
    parser.add_argument("--data", metavar="PATH", help="data.root of every stage")
    parser.add_argument("--no-check", action="store_true", help="do not check the machines of the hostfile first")
    parser.add_argument("--work", type=Path, default=Path("runs/bench_step"), metavar="DIR",
                        help="folder of the run (default: runs/bench_step)")  # fmt: skip
    parser.add_argument("--timeout", type=float, default=7200, metavar="S", help="limit of one run (7200)")
    add_where(parser)


def _add_machine(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--name", required=True, help="of the device in the YAML")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="YAML to write")
    parser.add_argument("--num_gpus", type=int, default=1, metavar="N", help="ranks on this machine (1)")
    parser.add_argument("--disk", type=Path, metavar="DIR", help="folder to time writing and reading in")
    parser.add_argument("--hostfile", type=Path, metavar="FILE", help="machines to time ssh to, from this one")
    parser.add_argument("--seconds", type=float, default=0.3, metavar="S", help="of each timing (0.3)")
    parser.add_argument("--timeout", type=float, default=1800, metavar="S", help="limit of each program (1800)")


def _add_peers(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--lines", default="", metavar="NAMES", help="only these, with commas between; a start is enough: sft,ppo_fp32"
    )
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="runs of each contestant (default: 5)")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, one round: does everything work here?")
    parser.add_argument("--work", type=Path, default=Path("runs/bench"), metavar="DIR", help="default: runs/bench")
    parser.add_argument("--json", type=Path, metavar="FILE", help="results (default: peers.json in --work)")
    parser.add_argument("--write", type=Path, metavar="FILE", help="page whose section the table replaces")
    parser.add_argument("--resume", action="store_true", help="keep the finished lines of --json")
    parser.add_argument("--timeout", type=float, default=3600, metavar="S", help="limit of one run (default: 3600)")
    parser.add_argument("--trl-python", metavar="PATH", help="interpreter that has TRL (default: this one)")
    parser.add_argument("--vllm-python", metavar="PATH", help="interpreter that has vLLM (default: this one)")
    parser.add_argument(
        "--set", action="append", default=[], metavar="STAGE.KEY=VALUE",
        help="a setting of our stages, for example sft.data.packing=off",
    )  # fmt: skip
