"""`rlhf plan` and `rlhf plan validate` as a user calls them."""

import json
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlhf import cli
from rlhf.plan import published
from rlhf.plan.command import validation_markdown
from rlhf.plan.hardware import load_devices
from rlhf.plan.validate import validate

ACTOR = ["plan", "--actor", "opt-13b", "--reward", "opt-350m", "--gpus", "8", "--gpu", "h100-sxm"]


def test_a_plan_says_what_fits_and_what_it_costs(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    assert cli.main([*ACTOR, "--json", str(path)]) == 0
    out = capsys.readouterr().out
    assert "opt-13b, opt-350m on 8 x h100-sxm" in out
    assert "step 3, PPO does not fit: rollout needs" in out
    made = json.loads(path.read_text())
    assert [step["fits"] for step in made["steps"]] == [True, True, False]
    assert made["usd"] == pytest.approx(sum(step["usd"] for step in made["steps"]))
    assert made["steps"][0]["step_seconds"] == pytest.approx(sum(made["steps"][0]["seconds"].values()))


def test_a_recipe_of_one_step(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """What it has is planned; what it has not is refused by name, and no recipe is made of it."""
    arguments = ["plan", "--recipe", "frontier_175b", "--gpu", "mi250x-gcd"]
    assert cli.main(arguments) == 0
    out = capsys.readouterr().out
    assert "frontier_175b on 1024 x mi250x-gcd" in out and "step 1, SFT" in out and "step 2" not in out
    assert cli.main([*arguments, "--steps", "1,3"]) == 2
    assert "--steps 1,3: frontier_175b has no step 3. Leave it out." in capsys.readouterr().err
    assert cli.main([*arguments, "--emit", str(tmp_path / "new")]) == 2
    assert "--emit writes three stages, and frontier_175b has not all" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_a_recipe_and_one_step(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "--recipe", "opt_66b_350m_multi_node", "--gpu", "a100-80", "--steps", "1"]
    assert cli.main(arguments) == 0
    out = capsys.readouterr().out
    assert "opt_66b_350m_multi_node on" in out and "step 3" not in out


def test_search_shows_why_others_lose(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*ACTOR, "--steps", "1", "--search"]) == 0
    out = capsys.readouterr().out
    assert "loses by" in out and "layouts of step 1" in out and "of a step" in out


def test_comparison_and_curves_as_json(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    recipe = ["--recipe", "opt_66b_350m_multi_node", "--json", str(path)]
    assert cli.main(["plan", "compare", "a100-80", "h200", *recipe]) == 0
    made = json.loads(path.read_text())
    assert [step["step"] for step in made["steps"]] == [1, 2, 3] and all(step["ratio"] > 1 for step in made["steps"])
    assert cli.main(["plan", "scale", "--gpu", "h200", "--to", "128", "--from", "32", "--steps", "1", *recipe]) == 0
    weak, strong = json.loads(path.read_text())["curves"]
    assert (weak["kind"], strong["kind"]) == ("weak", "strong")
    assert [point["gpus"] for point in weak["points"]] == [32, 64, 128]
    out = capsys.readouterr().out
    assert "lost to" in out and "the same layouts" in out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["plan"], "give either --recipe NAME or --actor MODEL"),
        (["plan", "--actor", "opt-13b", "--recipe", "tiny_cpu", "--gpu", "a100-80"], "give either --recipe"),
        (["plan", "--actor", "opt-13b", "--gpus", "8"], "--gpu is missing. There are"),
        (["plan", "--actor", "opt-13b", "--gpu", "a100-80"], "--gpus is missing"),
        ([*ACTOR, "--steps", "1,4"], "--steps '1,4' is not made of"),
        ([*ACTOR, "--micro-batch", "0"], "--micro-batch must be >= 1, got 0"),
        ([*ACTOR, "--tensor", "3"], "8 ranks do not split into tensor 3"),
        ([*ACTOR[:-1], "h100"], "'h100' is not known. Did you mean"),
        ([*ACTOR[:-1], "a100-80", "--dtype", "fp8"], "a100-80 has no fp8 peak"),
        (["plan", "--actor", "opt-14b", "--gpus", "8", "--gpu", "h200"], "model 'opt-14b' is neither"),
        (["plan", "--recipe", "nothing", "--gpu", "h200"], "neither a recipe"),
        (["plan", "validate", "--tables", "none.json"], "none.json"),
        (["plan", "compare", "a100-80", "h100", "--recipe", "tiny_cpu"], "'h100' is not known. Did you mean"),
        (["plan", "scale", *ACTOR[1:], "--to", "4", "--from", "8"], "--from must be >= 1 and at most --to"),
        (["plan", "scale", *ACTOR[1:], "--to", "8", "--jitter", "2"], "--jitter must be at least 0"),
        (["plan", "scale", *ACTOR[1:], "--to", "8", "--plot", "x.pdf"], "must end in .png, .svg, .html"),
    ],
)
def test_one_clear_error(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("rlhf plan: ") and said in captured.err
    assert captured.err.count("\n") == 1


def test_validate_prints_every_figure_and_writes_a_page(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    page, path = tmp_path / "page.md", tmp_path / "v.json"
    page.write_text("before\n<!-- rlhf plan validate: begin -->\n<!-- rlhf plan validate: end -->\nafter\n")
    assert cli.main(["plan", "validate", "--write", str(page), "--json", str(path)]) == 0
    out = capsys.readouterr().out
    assert "127.5" in out and "fitted" in out and "judged" in out
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "| MosaicML MPT | time | fitted |" in text
    made = json.loads(path.read_text())
    assert len(made["figures"]) > 1000 and {"published", "predicted", "error", "fitted"} <= set(made["figures"][0])


def test_other_tables(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    row = {
        "system": "MosaicML x", "hardware": "h100_80gb", "n_gpus": 8, "model": "mpt-1b", "layers": 24, "hidden": 2048,
        "heads": 16, "seq": 2048, "vocab": 50368, "mbs": 14, "gas": 1, "gbs": 112, "zero_stage": 3,
        "metric": "tokens/s/GPU", "value": 45455, "unit": "tokens/s/GPU", "verified": True,
    }  # fmt: skip
    path = tmp_path / "tables.json"
    path.write_text(json.dumps({"records": [row, {**row, "verified": False}]}))
    assert cli.main(["plan", "validate", "--tables", str(path)]) == 0
    out = capsys.readouterr().out
    assert "1 figures predicted, 1 left out" in out and "1: not verified" in out


def test_quick_and_without_torch() -> None:
    code = (
        "import sys, rlhf.cli as c\n"
        f"assert c.main({ACTOR!r}) == 0\n"
        "assert not {'torch', 'transformers', 'deepspeed', 'numpy'} & set(sys.modules)\n"
    )
    begin = time.monotonic()
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
    assert time.monotonic() - begin < 5  # under one second on an idle machine


def test_the_largest_search_is_quick() -> None:
    begin = time.monotonic()
    arguments = ["plan", "--actor", "gpt-1t", "--gpus", "3072", "--gpu", "mi250x-gcd", "--pipeline", "64"]
    assert cli.main([*arguments, "--tensor", "8", "--steps", "1", "--global-batch", "9600", "--search"]) == 0
    assert time.monotonic() - begin < 15


def examples() -> list[tuple[str, str]]:
    """Commands of docs/scaling.md that are followed by what they print."""
    text = (Path(__file__).parents[4] / "docs" / "scaling.md").read_text(encoding="utf-8")
    return re.findall(r"```bash\n(rlhf plan [^`]*?)\n```\n\n```text\n(.*?)\n```", text, re.DOTALL)


@pytest.mark.parametrize(("command", "printed"), examples())
def test_the_worked_examples_are_what_is_printed(
    command: str, printed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(shlex.split(command.replace("\\\n", " "))[1:]) == 0
    out = "\n".join(line.rstrip() for line in capsys.readouterr().out.splitlines()).strip()
    assert out == printed, "print it again into docs/scaling.md"


def test_there_are_five_worked_examples() -> None:
    assert len(examples()) == 5


def test_the_validation_of_the_page_is_the_current_one() -> None:
    """E18: what the page shows is what the command makes today."""
    text = (Path(__file__).parents[4] / "docs" / "scaling.md").read_text(encoding="utf-8")
    found = validation_markdown(validate(published.load(), load_devices()))
    assert found in text, "run: rlhf plan validate --write docs/scaling.md"
