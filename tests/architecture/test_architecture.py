"""The shape of the code: who imports whom, what loads without torch, and that every file of configuration is read.

The commands: tests/unit/rlhf/test_cli.py (quick, without torch) and test_docs.py beside this file.
"""

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from launch.recipe import RECIPES, Recipe, find_recipe, load_recipe, read_stage_config
from rlhf import ds_config
from rlhf.config import OptimConfig

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("rlhf", "step1_sft", "step2_reward", "step3_ppo", "launch", "ds_configs")
STAGES = ("step1_sft", "step2_reward", "step3_ppo")

# Imports inside rlhf point down, or to the same row.
LAYERS = (
    (
        "config",
        "health_config",
        "health",
        "records",
        "data.schema",
        "data.formats",
        "data.splits",
        "data.toy",
        "schedule",
        "artifacts",
        "host",
        "stopping",
        "sections",
        "terminal",
        "procfs",
        "strict",
        "heartbeat",
        "watchdog",
        "py.typed",
    ),
    (
        "data.sources",
        "plan",
        "rules",
        "ds_config",
        "distributed",
        "memory",
        "ops",
        "report_plots",
        "report",
        "states",
        "state_writer",
    ),
    (
        "combinations",
        "metrics",
        "models",
        "data",
        "clock",
        "rng",
        "run_folder",
        "universal",
        "state_checks",
        "resumable",
        "engine_memory",
        "optimizers",
        "mpu",
        "profile",
        "stopwatch",
    ),
    ("engine", "run", "sharing", "pipeline_engine", "rollout", "checkpoint", "model_folder"),
    ("stage", "bench", "from_state", "links"),
    ("show", "cli"),
)
# Beside every module whose docstring says "No torch".
WITHOUT_TORCH = (
    *(f"rlhf.{name}" for name in ("config", "ds_config", "artifacts", "schedule", "report", "rules", "cli")),
    *(f"{stage}.config" for stage in STAGES),
    "launch.pipeline",
    *PACKAGES,
)


def modules() -> dict[str, Path]:
    found = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()
TREES = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in MODULES.items()}


def imports(name: str) -> Iterator[str]:
    """Everything a module imports, inside functions too; `from a import b` as a.b where that is a module."""
    return _imported(name, ast.walk(TREES[name]))


def early_imports(name: str) -> Iterator[str]:
    """What it imports when it is imported itself: not inside functions, not for types alone."""
    body = TREES[name].body
    conditional = [node for node in body if isinstance(node, ast.If) and "TYPE_CHECKING" not in ast.dump(node.test)]
    return _imported(name, [*body, *(inner for node in conditional for inner in node.body)])


def _imported(name: str, nodes: Iterable[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name} has a relative import"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full in MODULES else str(node.module)


def layer(name: str) -> int:
    """Row of a module of rlhf; the longest entry that fits counts."""
    short = name.removeprefix("rlhf.")
    fits = [(len(entry), i) for i, row in enumerate(LAYERS) for entry in row if f"{short}.".startswith(f"{entry}.")]
    assert fits, f"{name} is in no layer: put it in LAYERS"
    return max(fits)[1]


@pytest.mark.parametrize("name", [name for name in MODULES if name.startswith("rlhf.")])
def test_library_imports_point_down(name: str) -> None:
    for other in imports(name):
        package = other.partition(".")[0]
        if name != "rlhf.cli":  # the command stands above the launcher
            assert package not in (*STAGES, "launch"), f"{name} knows {other}"
        if package == "rlhf" and other != "rlhf":
            assert layer(other) <= layer(name), f"{name} imports {other} from above"


def test_imports_have_no_circle() -> None:
    edges = {name: set(early_imports(name)) & MODULES.keys() - {name} for name in MODULES}
    while leaves := [name for name, others in edges.items() if not others & edges.keys()]:
        for name in leaves:
            del edges[name]
    assert not edges, f"a circle among {sorted(edges)}"


@pytest.mark.parametrize("stage", STAGES)
def test_stages_meet_on_disk(stage: str) -> None:
    """No stage imports another one or the launcher; its config reaches down to rlhf.config alone."""
    for name in MODULES:
        if name.partition(".")[0] != stage:
            continue
        for other in imports(name):
            package = other.partition(".")[0]
            assert package not in (*STAGES, "launch") or package == stage, f"{name} imports {other}"
    assert {other for other in imports(f"{stage}.config") if other.startswith("rlhf")} == {"rlhf.config"}


def test_the_launcher_knows_configs_only() -> None:
    for name in MODULES:
        for other in imports(name) if name.startswith("launch") else ():
            if other.partition(".")[0] in STAGES:
                assert other.endswith(".config"), f"{name} imports {other}"


@pytest.mark.parametrize(
    ("package", "allowed"),
    [
        ("deepspeed", {"rlhf.engine", "rlhf.pipeline_engine", "rlhf.universal"}),
        ("torch.distributed", {"rlhf.distributed"}),
    ],
)
def test_one_user(package: str, allowed: set[str]) -> None:
    for name in MODULES:
        used = {other for other in imports(name) if f"{other}.".startswith(f"{package}.")}
        attributes = {ast.unparse(node) for node in ast.walk(TREES[name]) if isinstance(node, ast.Attribute)}
        used |= {text for text in attributes if text == package}
        assert not used or name in allowed, f"{name} uses {used}"


def test_modules_without_torch() -> None:
    """They load on a login node: no torch, transformers or deepspeed, however indirectly."""
    said = [name for name, tree in TREES.items() if re.search(r"\bNo torch\b", ast.get_docstring(tree) or "")]
    names = sorted({*WITHOUT_TORCH, *said})
    assert len(said) > 15
    code = (
        "import importlib, sys\n"
        f"for name in {names!r}:\n"
        "    importlib.import_module(name)\n"
        "    heavy = {'torch', 'transformers', 'deepspeed', 'datasets', 'matplotlib'} & set(sys.modules)\n"
        "    assert not heavy, f'{name} imports {heavy}'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr.splitlines()[-1]


def test_ops_are_torch_only() -> None:
    code = "import sys, rlhf.ops; assert not {'transformers', 'deepspeed', 'datasets'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_packages_are_empty() -> None:
    """An __init__.py is a docstring or nothing: importing one module imports no other."""
    for name, path in MODULES.items():
        if path.name == "__init__.py":
            body = TREES[name].body
            assert len(body) <= 1 and all(isinstance(node, ast.Expr) for node in body), path


CUDA_BY_NAME = {
    "rlhf.data.packing": "torch's variable-length flash attention is there for CUDA and ROCm, both called cuda, alone",
    "step1_sft.train": "Liger's kernels are there for CUDA and ROCm alone",
    "rlhf.profile": "names that backends give to what they record",
    "rlhf.models.float8": "which float8 products a device has is known for CUDA and ROCm alone",
}
"""Modules that may name the device or the backend, and why; all else asks the accelerator API."""


def test_nothing_assumes_cuda() -> None:
    """F23, F24: no torch.cuda, `.cuda()`, is_cuda or pynvml; no device or backend by name but in CUDA_BY_NAME."""
    named = set()
    for name, tree in TREES.items():
        assert not {other for other in imports(name) if re.match(r"pynvml|torch\.cuda", other)}, name
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute):
                is_cuda = node.attr in ("cuda", "is_cuda", "CUDA", "CUDAGraph")
                assert not is_cuda or name == "rlhf.models.float8", f"{name}: {ast.unparse(node)}"
            said = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
            if re.fullmatch(r"(cuda|hip|xpu|npu)(:.*)?|[nr]ccl|pynvml", said, re.IGNORECASE):
                named.add(name)
                assert name in CUDA_BY_NAME, f"{name}: {said!r}"
    assert named == CUDA_BY_NAME.keys() & MODULES.keys(), "no entry that nothing needs"


def test_f27_nothing_is_unpickled_from_data_or_models() -> None:
    """Pickle runs what a file says. Only DeepSpeed's own files of a saved state are pickled (docs/reliability.md)."""
    for name, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                modules = {alias.name for alias in node.names} | {getattr(node, "module", None)}
                assert not modules & {"pickle", "dill", "cloudpickle", "shelve", "marshal"}, name
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
                assert name == "rlhf.universal", name
            if isinstance(node, ast.Attribute):
                assert node.attr not in ("unsafe_load", "full_load", "UnsafeLoader", "FullLoader"), name
            if isinstance(node, ast.keyword) and node.arg in ("allow_pickle", "trust_remote_code"):
                raise AssertionError(f"{name}: {ast.unparse(node)}")


@pytest.mark.parametrize("folder", sorted(path.name for path in RECIPES.iterdir() if path.is_dir()))
def test_every_recipe_parses(folder: str) -> None:
    """pipeline.yaml, and each stage's YAML into its config class; the DeepSpeed JSON it names loads."""
    recipe = load_recipe(find_recipe(folder))
    assert recipe.name == folder
    files = {path.name for path in (RECIPES / folder).glob("*.yaml")}
    for stage in recipe.stage_names:
        config = read_stage_config(stage, RECIPES / folder / f"{stage}.yaml", _fed(recipe, stage))
        names = config.deepspeed if isinstance(config.deepspeed, str) else vars(config.deepspeed).values()
        for name in [names] if isinstance(names, str) else names:
            assert ds_config.load(name), name
        files.discard(f"{stage}.yaml")
    assert files == {"pipeline.yaml"}, "no YAML that nothing reads"


def _fed(recipe: Recipe, stage: str) -> list[str]:
    """What the pipeline hands on, as flags, with names in place of folders."""
    feeds = getattr(recipe.stages, stage).feeds
    return [f"--{key}={re.sub(r'[{}]', '', value)}" for key, value in feeds.items()]


@pytest.mark.parametrize("path", sorted((ROOT / "ds_configs").glob("*.json")), ids=lambda path: path.stem)
def test_every_deepspeed_json_loads_and_resolves(path: Path) -> None:
    """By name and by path; what DeepSpeed is given at the end has a batch size and no `auto`."""
    raw = ds_config.load(path.stem)
    assert raw == ds_config.load(str(path)) == json.loads(path.read_text())
    trains = "frozen" not in path.stem
    resolved = ds_config.resolve(raw, optim=OptimConfig(lr=1e-3) if trains else None, world_size=2, trainable=trains)
    assert resolved["train_micro_batch_size_per_gpu"] == ds_config.micro_batch_size(raw) > 0
    assert "auto" not in json.dumps(resolved)
