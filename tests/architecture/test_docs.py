"""The documents say what is true: commands, links, file names, settings, metrics, quoted errors, the worked example."""

import argparse
import dataclasses
import importlib.util
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from launch.recipe import read_stage_config
from rlhf import cli
from rlhf.config import parse_config
from step1_sft.config import SFTConfig
from step2_reward.config import RewardConfig
from step3_ppo.config import PPOConfig

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted(
    [*ROOT.glob("*.md"), *ROOT.glob("step*/*.md"), ROOT / "ds_configs" / "README.md", *ROOT.glob("docs/**/*.md")]
)
STAGES: dict[str, Any] = {
    "step1_sft.train": SFTConfig,
    "step2_reward.train": RewardConfig,
    "step3_ppo.train": PPOConfig,
}
by_document = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))


# Commands


def commands(document: Path) -> list[str]:
    """Commands of a document's bash blocks, and inline ones that start a stage."""
    text = document.read_text(encoding="utf-8")
    found = []
    for block in re.findall(r"```(?:bash|sh)\n(.*?)```", text, re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            found += [part.strip() for part in line.split("  #")[0].split("&&") if part.strip()]
    found += re.findall(r"`(deepspeed [^`]*--module[^`]*|python -m [^`]*)`", text)
    return found


def check_stage(words: Sequence[str]) -> None:
    """`step1_sft.train --config FILE --key value ...`"""
    module, *arguments = words
    if arguments == ["--help"] or "--print_config" in arguments:
        with pytest.raises(SystemExit) as ended:
            parse_config(STAGES[module], arguments)
        assert ended.value.code == 0
        return
    parse_config(STAGES[module], arguments)


def check_deepspeed(words: Sequence[str]) -> None:
    launcher = argparse.ArgumentParser(allow_abbrev=False)
    launcher.add_argument("--num_gpus", type=int)
    launcher.add_argument("--module", action="store_true", required=True)
    launcher.add_argument("program")
    launcher.add_argument("rest", nargs=argparse.REMAINDER)
    parsed = launcher.parse_args(list(words))
    check_stage([parsed.program, *parsed.rest])


def check_python(words: Sequence[str]) -> None:
    assert words[0] == "-m"
    module, *rest = words[1:]
    if module in STAGES:
        check_stage([module, *rest])
    else:
        assert importlib.util.find_spec(module) is not None, module


def check_rlhf(words: Sequence[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, rest = cli._parser().parse_known_args(words)
    if arguments.command == "run":
        dry_run = [word for word in words if word != "--dry-run"]
        out = [] if arguments.out else ["--out", str(tmp_path / "out")]
        assert cli.main([*dry_run, *out, "--dry-run"]) == 0
        return
    assert not rest
    if arguments.command == "data":
        read_stage_config(arguments.stage or arguments.config.stem, arguments.config)
    if arguments.command == "convert":
        # It gets as far as it can without the model: the folder to write is there already.
        capsys.readouterr()
        assert cli.main(["convert", arguments.source, "--out", str(tmp_path)]) == 2
        assert "Remove it, or write to another folder." in capsys.readouterr().err


def check_script(words: Sequence[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script, *arguments = words
    assert Path(script).is_file()
    if script == "launch/run_e2e.sh" and "--install-only" not in arguments:
        recipe = [] if "--recipe" in arguments else ["--recipe", "tiny_cpu"]
        check_rlhf(["run", *recipe, *arguments], tmp_path, capsys)


@pytest.mark.parametrize(
    ("document", "command"),
    [
        pytest.param(document, command, id=f"{document.relative_to(ROOT)}: {command}")
        for document in DOCUMENTS
        for command in dict.fromkeys(commands(document))
    ],
)
def test_f26_commands_are_accepted(
    document: Path, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """F26: a command of any document passes its program's parser, and a run its dry run, from the repository's root.

    `rlhf run` of README.md and of docs/ is dry-run in tests/unit/launch/test_recipe.py already.
    """
    monkeypatch.chdir(ROOT)
    words = shlex.split(re.split(r"\s[<>]\s", command)[0].replace("DIR", str(tmp_path)))
    if words[:2] == ["rlhf", "run"] and document.parent in (ROOT, ROOT / "docs"):
        return
    checks: dict[str, Callable[[list[str]], None]] = {
        "rlhf": lambda rest: check_rlhf(rest, tmp_path, capsys),
        "bash": lambda rest: check_script(rest, tmp_path, capsys),
        "deepspeed": check_deepspeed,
        "python": check_python,
    }
    without_check = {"source", "export", "pip", "ruff", "mypy"}
    assert words[0] in checks or words[0] in without_check, f"no check for {words[0]}: add one here"
    if words[0] in checks:
        checks[words[0]](words[1:])


def test_commands_are_found() -> None:
    found = {command.split()[0] for document in DOCUMENTS for command in commands(document)}
    assert {"rlhf", "bash", "deepspeed", "python"} <= found


def test_a_wrong_command_is_refused(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    for arguments in (["--optim.rate", "1"], ["--optim.lr", "-1"], ["--epochs", "many"]):
        with pytest.raises(SystemExit):
            check_deepspeed(
                ["--num_gpus", "2", "--module", "step1_sft.train", "--config", "launch/recipes/tiny_cpu/sft.yaml"]
                + arguments
            )


# Links and file names


def anchors(document: Path) -> set[str]:
    """Anchors of a document's headings, as code hosts make them."""
    headings = re.findall(r"^#+ (.+)$", document.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@by_document
def test_links_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", document.read_text(encoding="utf-8")):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        found = (document.parent / path).resolve() if path else document
        assert found.exists(), f"{document.name}: {target} leads nowhere"
        assert found.is_relative_to(ROOT), f"{document.name}: {target} leads out of the repository"
        assert not anchor or anchor in anchors(found), f"{document.name}: {target} has no such heading"


@by_document
def test_named_files_exist(document: Path) -> None:
    """Code-like words that read as a path of this repository, `rlhf/run.py` or `docs/design/`, are there."""
    tops = [path.name for path in ROOT.iterdir() if path.is_dir() and path.name not in ("runs", "models")]
    for word in re.findall(r"`([\w./-]+)`", document.read_text(encoding="utf-8")):
        if word.split("/")[0] in tops and "/" in word:
            # `step1_sft/model` and the like are folders of a run, not of the repository.
            if re.match(r"step\d\w+/(model|critic|state)\b", word):
                continue
            assert (ROOT / word).exists(), f"{document.name}: {word}"


# Settings, metrics, errors


def tables(document: Path) -> Iterator[list[list[str]]]:
    """Markdown tables as rows of cells; the first row is the head."""
    for block in re.findall(r"(?:^\|.*\n)+", document.read_text(encoding="utf-8"), re.MULTILINE):
        yield [
            [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip("|"))]
            for line in block.splitlines()
            if not re.match(r"\|[-| :]+\|$", line)
        ]


def default_of(config_class: Any, dotted: str) -> str:
    """A key's default as documents write it: `required`, `none`, or the YAML value."""
    name, _, rest = dotted.partition(".")
    found = {f.name: f for f in dataclasses.fields(config_class)}
    assert name in found, f"{config_class.__name__} has no {dotted}"
    if rest:
        return default_of(found[name].type, rest)
    default = found[name].default
    if default is dataclasses.MISSING:
        return "required"
    return "none" if default is None else yaml.safe_dump(default).split("\n")[0]


@pytest.mark.parametrize("module", STAGES)
def test_settings_and_defaults_of_the_stages_pages(module: str) -> None:
    document = ROOT / module.split(".")[0] / "README.md"
    seen = 0
    for head, *rows in tables(document):
        if head[:2] != ["Key", "Default"]:
            continue
        for keys, defaults, *_ in rows:
            names = re.findall(r"`([^`]+)`", keys)
            written = [default.strip("` ") for default in defaults.split(",")]
            for name, default in zip(names, written * len(names) if len(written) == 1 else written, strict=False):
                actual = default_of(STAGES[module], name)
                # A path that a stage cannot do without is checked by its root config.
                if name in ("actor.path", "reward.path"):
                    actual = "required"
                assert default == actual, (name, default, actual)
                seen += 1
    assert seen > 10


@by_document
def test_metric_names_are_registered(document: Path) -> None:
    from rlhf.metrics import METRICS

    groups = "|".join(sorted({name.split("/")[0] for name in METRICS} - {"data"}))
    for name in re.findall(rf"`((?:{groups})/\w+)`", document.read_text(encoding="utf-8")):
        assert name in METRICS, f"{document.name}: {name}"


def source_text() -> str:
    """All code, with adjacent string literals joined as Python joins them."""
    folders = ("rlhf", "launch", "step1_sft", "step2_reward", "step3_ppo")
    text = "\n".join(path.read_text(encoding="utf-8") for f in folders for path in sorted((ROOT / f).rglob("*.py")))
    return re.sub(r"[\"']\s*\n\s*f?[\"']", "", text)


def test_errors_of_the_troubleshooting_page_are_the_codes() -> None:
    source = source_text()
    quoted = [
        fragment
        for head, *rows in tables(ROOT / "docs" / "troubleshooting.md")
        if head[0] == "Message"
        for row in rows
        for fragment in re.findall(r"`([^`]+)`", row[0])
    ]
    assert len(quoted) > 30
    assert [fragment for fragment in quoted if fragment.strip() not in source] == []


# Step 3's worked example


def shown(label: str, cells: Sequence[Any]) -> str:
    return " ".join([label, *(f"{cell:.4f}" if isinstance(cell, float) else str(cell) for cell in cells)])


def row_of_page(block: str, row: int) -> list[str]:
    """Lines of one row of a worked table, blanks squeezed."""
    lines = [" ".join(line.split()) for line in block.splitlines()]
    starts = [i for i, line in enumerate(lines) if line.startswith("row ")] + [len(lines)]
    return [line for line in lines[starts[row] + 1 : starts[row + 1]] if line]


def test_d11_worked_example_of_masks_and_alignment() -> None:
    """D11: each line of the two tables in step3_ppo/README.md, computed by the code that step 3 runs."""
    import torch

    from rlhf.data.collate import collate_responses
    from rlhf.ops import masked_mean, masked_var, response_mask, to_columns, whiten_with
    from step3_ppo.advantages import gae
    from step3_ppo.rewards import token_rewards

    batch = collate_responses([[1, 11, 12], [1, 13]], [[21, 22, 2], [2]], pad_id=2, device="cpu", packed=False)
    sequences, length_B, first_B = batch.sequences, batch.response_length_S, batch.first_response_S
    assert sequences.attention_mask_BT is not None
    mask_BR = response_mask(length_B, 3)
    # Which column of a row each response column is read from.
    column_BT = torch.arange(6).expand(2, 6)
    logprob_from_BR = to_columns(column_BT, first_B, length_B, 3)
    value_from_BR = to_columns(column_BT, first_B - 1, length_B, 3)
    score_column_B = sequences.length_S - 1
    kl_BR = torch.tensor([[0.2, -0.1, 0.3], [0.5, 0.0, 0.0]])
    value_BR = torch.tensor([[0.1, 0.2, 0.4], [0.0, 0.0, 0.0]])
    reward_BR = token_rewards(torch.tensor([1.0, -0.5]), kl_BR, mask_BR, kl_coef=0.1)
    advantage_BR, return_BR = gae(reward_BR, value_BR, mask_BR, gamma=1.0, lam=0.5)
    delta_BR, _ = gae(reward_BR, value_BR, mask_BR, gamma=1.0, lam=0.0)
    whitened_BR = whiten_with(
        advantage_BR, mask_BR, mean=masked_mean(advantage_BR, mask_BR), var=masked_var(advantage_BR, mask_BR)
    )
    columns = {
        "KL_t": kl_BR,
        "reward_BR": reward_BR,
        "value_BR": value_BR,
        "delta": delta_BR,
        "advantage": advantage_BR,
        "return_BR": return_BR,
        "advantage_BR": whitened_BR,
    }
    text = (ROOT / "step3_ppo" / "README.md").read_text(encoding="utf-8")
    page = text.split("### Worked example")[1].split("\n## ")[0]
    masks, numbers = page.split("With kl_coef")
    for b in range(2):
        num = int(length_B[b])

        def marks(sources_BR: torch.Tensor, b: int = b, num: int = num) -> list[int | str]:
            sources = sources_BR[b, :num].tolist()
            return [sources.index(t) if t in sources else "." for t in range(6)]

        def bits(mask_BT: torch.Tensor, b: int = b) -> list[int | str]:
            return [1 if bit else "." for bit in mask_BT[b]]

        expected = [
            shown("token_ids_BT", sequences.token_ids_BT[b].tolist()),
            shown("attention_mask_BT", bits(sequences.attention_mask_BT)),
            shown("position_ids_BT", sequences.position_ids_BT[b].tolist()),
            shown("response_mask_BT", bits(batch.response_mask_BT))
            + f" prompt_length {batch.prompt_length_S[b]}, response_length {num}",
            shown("logprob of token", marks(logprob_from_BR)) + " -> logprob_BR columns",
            shown("value after token", marks(value_from_BR)) + " -> value_BR columns",
            shown("score", ["s" if t == score_column_B[b] else "." for t in range(6)]),
        ]
        assert row_of_page(masks, b) == expected
        on_page = row_of_page(numbers, b)
        assert len(on_page) >= len(columns)
        for line, (label, x_BR) in zip(on_page, columns.items(), strict=False):
            assert line.startswith(shown(label, [float(x_BR[b, i]) if i < num else "." for i in range(3)]))
