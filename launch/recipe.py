"""Read a recipe folder and resolve it: pipeline.yaml, one YAML per stage, overrides, and what feeds what. No torch."""

import contextlib
import dataclasses
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeVar

import yaml

from rlhf.config import ModelConfig, parse_config, to_dict
from step1_sft.config import SFTConfig
from step2_reward.config import RewardConfig
from step3_ppo.config import PPOConfig

RECIPES = Path(__file__).parent / "recipes"
STAGES = ("sft", "reward", "ppo")
FOLDERS = {"sft": "step1_sft", "reward": "step2_reward", "ppo": "step3_ppo"}
"""Stage -> its package, and the name of its folder in a run."""

StageConfig = SFTConfig | RewardConfig | PPOConfig
_CONFIG_CLASSES: dict[str, type[StageConfig]] = {"sft": SFTConfig, "reward": RewardConfig, "ppo": PPOConfig}
_PLACEHOLDER = re.compile(r"\{(\w*)\}")
_Config = TypeVar("_Config")


class RecipeError(ValueError):
    """A recipe, or an override of it, that cannot be used."""


@dataclass(frozen=True, kw_only=True)
class StageEntry:
    """One stage of a recipe."""

    config: str
    """The stage's YAML, relative to pipeline.yaml."""
    feeds: dict[str, str] = field(default_factory=dict)
    """Dotted key of the stage's config -> value, in which {sft}, {reward}, {ppo} are model folders of this run, and
    {data} is --data, or data.root of the YAML without it."""

    def __post_init__(self) -> None:
        for key, value in self.feeds.items():
            for name in _PLACEHOLDER.findall(value):
                if name not in (*STAGES, "data"):
                    raise ValueError(
                        f"feeds.{key}: {value!r} names {{{name}}}. Use {{sft}}, {{reward}}, {{ppo}} or {{data}}."
                    )


@dataclass(frozen=True, kw_only=True)
class StageEntries:
    """The stages of a recipe, in the order they run; a recipe may leave some out."""

    sft: StageEntry | None = None
    """Step 1."""
    reward: StageEntry | None = None
    """Step 2."""
    ppo: StageEntry | None = None
    """Step 3."""

    def __post_init__(self) -> None:
        if not any(getattr(self, stage) for stage in STAGES):
            raise ValueError("stages is empty. Name at least one of sft, reward, ppo.")
        for index, stage in enumerate(STAGES):
            entry: StageEntry | None = getattr(self, stage)
            for key, value in (entry.feeds if entry else {}).items():
                late = [name for name in _PLACEHOLDER.findall(value) if name in STAGES[index:]]
                if late:
                    raise ValueError(f"stages.{stage}.feeds.{key}: {value!r} is written after {stage} has run.")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """pipeline.yaml: which stages run, on how many ranks, and which model folder feeds which."""

    name: str
    """Name of the recipe; the default run folder is runs/<name>."""
    version: int
    """Raised whenever a number of the recipe changes, so that two runs of one name can be told apart."""
    description: str
    """One or two sentences."""
    deployment: Literal["single_node", "multi_node", "any"]
    """single_node: one machine, here or in a hostfile; multi_node: a --hostfile of several must be given; any: both."""
    num_gpus: int
    """Ranks of one machine; --num_gpus and the hostfile's slots take precedence."""
    num_nodes: int = 1
    """Machines the recipe is written for."""
    needs_accelerator: bool = True
    """False: the recipe is meant to run on CPUs too."""
    environment: dict[str, str] = field(default_factory=dict)
    """Variables of every rank; one that is set in the shell takes precedence."""
    environment_files: list[str] = field(default_factory=list)
    """Files of further variables, for a kind of machine: names in launch/env, or paths."""
    stages: StageEntries
    """The stages."""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[\w.-]+", self.name):
            raise ValueError(f"name must be made of letters, digits, `_`, `-` and `.`, got {self.name!r}.")
        if self.num_gpus < 1 or self.num_nodes < 1 or self.version < 1:
            raise ValueError(
                f"num_gpus, num_nodes and version must be >= 1, got {self.num_gpus}, {self.num_nodes}, {self.version}."
            )
        if self.deployment != "multi_node" and self.num_nodes != 1:
            raise ValueError(f"deployment is {self.deployment}, but num_nodes is {self.num_nodes}. Change one of them.")
        for name in self.environment:
            if not re.fullmatch(r"[A-Za-z_]\w*", name):
                raise ValueError(f"environment: {name!r} is not a variable name.")

    @property
    def stage_names(self) -> tuple[str, ...]:
        """Stages of the recipe, in order."""
        return tuple(stage for stage in STAGES if getattr(self.stages, stage))

    def entry(self, stage: str) -> StageEntry:
        """Entry of a stage that the recipe has."""
        entry: StageEntry = getattr(self.stages, stage)
        return entry


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One stage, resolved: its config as the stage program will read it."""

    name: str
    config: StageConfig
    out_dir: Path
    feeds: Mapping[str, str]
    """As in StageEntry."""

    @property
    def folder(self) -> str:
        """Package of the stage and name of its folder."""
        return FOLDERS[self.name]

    @property
    def module(self) -> str:
        """What `deepspeed --module` starts."""
        return f"{self.folder}.train"

    @property
    def model_dir(self) -> Path:
        """Where the stage leaves its model."""
        return self.out_dir / "model"

    @property
    def parents(self) -> tuple[str, ...]:
        """Stages whose model folder this one reads."""
        named = {name for value in self.feeds.values() for name in _PLACEHOLDER.findall(value)}
        return tuple(stage for stage in STAGES if stage in named)

    @property
    def fed_keys(self) -> dict[str, str]:
        """Dotted config key -> the stage that feeds it, for keys that are exactly one stage's folder."""
        return fed_keys(self.feeds)

    def models(self) -> dict[str, ModelConfig]:
        """Sections of the models that the stage loads, by their dotted key."""
        return {
            f.name: value
            for f in dataclasses.fields(self.config)
            if isinstance(value := getattr(self.config, f.name), ModelConfig) and self._has(f.name)
        }

    def ds_configs(self) -> dict[str, str]:
        """DeepSpeed JSONs of the config by role; of those that there are."""
        if isinstance(self.config, PPOConfig):
            return {role: str(value) for role, value in to_dict(self.config.deepspeed).items() if self._has(role)}
        configs = {"model": self.config.deepspeed}
        if isinstance(self.config, RewardConfig) and self.config.normalise.policy:
            configs["normalise"] = self.config.normalise.deepspeed
        return configs

    def _has(self, role: str) -> bool:
        return role != "critic" or not isinstance(self.config, PPOConfig) or self.config.has_critic


def fed_keys(feeds: Mapping[str, str]) -> dict[str, str]:
    """Dotted config key -> the stage that feeds it, for keys that are exactly one stage's folder."""
    return {key: value[1:-1] for key, value in feeds.items() if value[1:-1] in STAGES}


def recipe_names() -> list[str]:
    """Names of the recipes that come with the package."""
    return sorted(path.parent.name for path in RECIPES.glob("*/pipeline.yaml"))


def find_recipe(name_or_path: str) -> Path:
    """The pipeline.yaml of a recipe's name, folder or file.

    Raises:
        RecipeError: there is none.
    """
    packaged = RECIPES / name_or_path / "pipeline.yaml"
    if re.fullmatch(r"[\w.-]+", name_or_path) and packaged.is_file():
        return packaged
    path = Path(name_or_path)
    if path.is_dir():
        path /= "pipeline.yaml"
    if path.is_file():
        return path
    raise RecipeError(
        f"--recipe {name_or_path}: is neither a recipe ({', '.join(recipe_names())}) nor a folder with a pipeline.yaml."
    )


def load_recipe(path: Path) -> Recipe:
    """Read and check a pipeline.yaml.

    Raises:
        RecipeError: unknown keys, wrong types, broken rules.
    """
    return _parse(Recipe, ["--config", str(path)], source=str(path))


def resolve_stages(
    recipe: Recipe,
    recipe_path: Path,
    run_dir: Path,
    *,
    seed: int | None = None,
    data_root: str | None = None,
    overrides: Sequence[str] = (),
    stages: Sequence[str] = (),
) -> list[Stage]:
    """Configs of the chosen stages with feeds, shared flags and overrides applied, in that order.

    Args:
        recipe: the recipe.
        recipe_path: its pipeline.yaml.
        run_dir: absolute folder of the run.
        seed: sets run.seed of every stage.
        data_root: sets data.root of every stage.
        overrides: `--sft.optim.lr`, `1e-3` and so on.
        stages: subset to run; empty: all.

    Raises:
        RecipeError: all stages' problems, one a line.
    """
    chosen = list(recipe.stage_names) if not stages else [stage for stage in STAGES if stage in stages]
    problems = [
        f"--stages {stage}: recipe {recipe.name} has the stages {', '.join(recipe.stage_names)}."
        for stage in chosen
        if stage not in recipe.stage_names
    ]
    by_stage, override_problems = split_overrides(overrides, chosen)
    problems += override_problems
    resolved = []
    for stage in chosen:
        if stage not in recipe.stage_names:
            continue
        entry = recipe.entry(stage)
        config_path = recipe_path.parent / entry.config
        if not config_path.is_file():
            problems.append(f"{recipe_path}: stages.{stage}.config: {config_path} does not exist.")
            continue
        out_dir = run_dir / FOLDERS[stage]
        argv = [
            f"--{key}={fill(value, run_dir, data_root or _data_root(config_path))}"
            for key, value in entry.feeds.items()
        ]
        argv += [f"--run.out_dir={out_dir}", "--run.resume=false"]
        argv += [] if seed is None else [f"--run.seed={seed}"]
        argv += [] if data_root is None else [f"--data.root={data_root}"]
        try:
            config = read_stage_config(stage, config_path, [*argv, *by_stage.get(stage, [])])
        except RecipeError as error:
            problems.append(str(error))
            continue
        overridden = {argument.removeprefix("--").partition("=")[0] for argument in by_stage.get(stage, [])}
        feeds = {key: value for key, value in entry.feeds.items() if key not in overridden}
        resolved.append(Stage(name=stage, config=config, out_dir=out_dir, feeds=feeds))
    if problems:
        raise RecipeError("\n".join(problems))
    return resolved


def read_stage_config(stage: str, path: Path, overrides: Sequence[str] = ()) -> StageConfig:
    """Config of one stage from its YAML and `--section.key=value` overrides.

    Raises:
        RecipeError: unknown keys, wrong types, broken rules.
    """
    return _parse(_CONFIG_CLASSES[stage], ["--config", str(path), *overrides], source=str(path))


def fill(value: str, run_dir: Path, data_root: str = ".") -> str:
    """Put this run's model folders in the place of {sft}, {reward} and {ppo}, and the data folder in that of {data}."""
    folders = {"data": data_root, **{stage: str(run_dir / folder / "model") for stage, folder in FOLDERS.items()}}
    return _PLACEHOLDER.sub(lambda match: folders[match.group(1)], value)


def _data_root(config_path: Path) -> str:
    """data.root as the YAML has it; whether the YAML is sound is found by who parses it."""
    try:
        data = yaml.safe_load(config_path.read_text(encoding="utf-8"))["data"]
        return str(data["root"] or ".")
    except (yaml.YAMLError, OSError, KeyError, TypeError):
        return "."


def split_overrides(arguments: Sequence[str], stages: Sequence[str]) -> tuple[dict[str, list[str]], list[str]]:
    """`--sft.optim.lr 1e-3` or `--sft.optim.lr=1e-3` -> {"sft": ["--optim.lr=1e-3"]}, and what is wrong."""
    by_stage: dict[str, list[str]] = {}
    problems = []
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        match = re.fullmatch(rf"--({'|'.join(STAGES)})\.([^=\s]+)(?:=(.*))?", argument, re.DOTALL)
        if not match:
            problems.append(
                f"{argument}: unknown argument. A stage's key is written --sft.KEY, --reward.KEY or --ppo.KEY, for "
                "example --sft.optim.lr 1e-3; the command's own flags are shown by `rlhf run --help`."
            )
            while rest and not rest[0].startswith("--"):
                rest.pop(0)
            continue
        stage, key, value = match.groups()
        if value is None:
            if not rest or rest[0].startswith("--"):
                problems.append(f"{argument}: has no value. Write {argument} VALUE, or {argument}=VALUE.")
                continue
            value = rest.pop(0)
        if stage not in stages:
            problems.append(f"{argument}: stage {stage} is not part of this run, only {', '.join(stages)}.")
        elif key in ("run.out_dir", "run.resume"):
            problems.append(f"{argument}: belongs to the launcher. Use --out or --resume.")
        else:
            by_stage.setdefault(stage, []).append(f"--{key}={value}")
    return by_stage, problems


def _parse(config_class: type[_Config], argv: Sequence[str], *, source: str) -> _Config:
    """`parse_config`, with the message it would print raised instead, so that all stages' messages can be shown."""
    captured = io.StringIO()
    try:
        with contextlib.redirect_stderr(captured):
            return parse_config(config_class, argv, prog="rlhf")
    except SystemExit:
        text = captured.getvalue()
        message = text.rpartition("error: ")[2] if "error: " in text else text
        raise RecipeError(f"{source}: {' '.join(message.split())}") from None
