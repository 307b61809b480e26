"""The `rlhf` command: quick, without torch, and honest about what it does not know."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlhf import artifacts
from rlhf.cli import main

REPOSITORY = Path(__file__).resolve().parents[3]


def cpu_seconds_and_modules(*arguments: str, cwd: Path) -> tuple[float, str]:
    """Processor seconds of a command, and which heavy packages it imported; wall time depends on the neighbours."""
    code = (
        "import sys, time\nfrom rlhf.cli import main\n"
        f"try: main({list(arguments)!r})\nexcept SystemExit: pass\n"
        "heavy = {'torch', 'transformers', 'deepspeed', 'datasets', 'matplotlib'} & set(sys.modules)\n"
        "print('\\nMEASURED', time.process_time(), sorted(heavy))\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=cwd, env=environment, check=True
    )
    _, seconds, heavy = done.stdout.splitlines()[-1].split(" ", 2)
    return float(seconds), heavy


@pytest.mark.parametrize(
    "arguments",
    [
        ("--help",),
        ("run", "--help"),
        ("run", "--recipe", "tiny_cpu", "--dry-run"),
        ("check", "--recipe", "tiny_cpu", "--no-links"),
        ("bench", "peers", "--help"),
    ],
)
def test_quick_and_without_torch(arguments: tuple[str, ...], tmp_path: Path) -> None:
    seconds, heavy = cpu_seconds_and_modules(*arguments, cwd=tmp_path)
    assert heavy == "[]"
    # Alone 0.05 s of help and 0.7 s of the others; a machine that others use takes up to twice as long.
    assert seconds < (1.0 if "--help" in arguments else 2.0)
    assert list(tmp_path.iterdir()) == []


def test_problems_have_exit_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "run")
    assert main(["run", "--recipe", "nope", "--out", out]) == 2
    assert main(["run", "--recipe", "tiny_cpu", "--out", out, "--sft.optim.lrr", "1"]) == 2
    assert main(["run", "--recipe", "opt_13b_350m_multi_node", "--out", out]) == 2
    assert main(["run", "--recipe", "tiny_cpu", "--out", out, "--hostfile", str(tmp_path / "none")]) == 2
    text = capsys.readouterr().out
    for message in ("neither a recipe", "optim.lrr", "no --hostfile is given", "does not exist"):
        assert message in text
    assert not (tmp_path / "run").exists()


def test_unknown_arguments_of_other_commands() -> None:
    with pytest.raises(SystemExit) as caught:
        main(["report", "runs/x", "--fast"])
    assert caught.value.code == 2


def test_check_of_a_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Problems found are exit code 1; what is asked for and is not there, or cannot be, is 2."""
    assert main(["check", "--recipe", "gsm8k_small", "--data", str(tmp_path), "--no-links"]) == 1
    out = capsys.readouterr().out
    assert "gsm8k/train.jsonl does not exist" in out and "opt-tokenizer" in out
    for arguments, message in (
        (["--recipe", "nope"], "neither a recipe"),
        (["--recipe", "tiny_cpu", "--json", str(tmp_path / "none" / "r.json")], "its folder does not exist"),
        (["--recipe", "tiny_cpu", "--json", str(tmp_path)], "is a folder"),
        (["--recipe", "tiny_cpu", "--link-mib", "0"], "--link-mib must be >= 1, got 0."),
        (["--recipe", "tiny_cpu", "--link-seconds", "nan"], "--link-seconds must be > 0, got nan."),
        (["--recipe", "tiny_cpu", "--slow-link", "50"], "--slow-link must be in [0, 1], got 50.0."),
        (["--recipe", "tiny_cpu", "--clock", "-1"], "--clock must be >= 0, got -1.0."),
        (["tiny_cpu"], "a recipe is named by --recipe"),
        ([], "give either --recipe NAME or a model folder"),
    ):
        assert main(["check", *arguments]) == 2
        captured = capsys.readouterr()
        assert message in captured.out + captured.err


def test_check_that_cannot_write_its_report(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--recipe", "tiny_cpu", "--no-links", "--json", "/proc/report.json"]) == 2
    assert "rlhf check: --json /proc/report.json cannot be written: " in capsys.readouterr().out


def test_check_of_a_model_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"weights")
    contract = artifacts.Contract(tokenizer="t", template_name="plain", template_fingerprint="f", stop_token_id=0)
    artifacts.write_manifest(folder, kind="policy", stage="step1_sft", contract=contract, seed=1)
    assert main(["check", str(folder)]) == 0
    (folder / "model.safetensors").write_bytes(b"weigh")
    assert main(["check", str(folder)]) == 2
    assert "truncated" in capsys.readouterr().err


def test_report_of_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path / "none")]) == 2
    assert "rlhf report:" in capsys.readouterr().err


def test_data_show(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    config = REPOSITORY / "launch" / "recipes" / "tiny_cpu" / "sft.yaml"
    assert main(["data", "show", "--config", str(config), "--rows", "2"]) == 0
    out = capsys.readouterr().out
    assert "template human_assistant" in out
    assert out.count("-- row ") == 2 and out.count("<<") == 2 and out.count("<eos>>>") == 2
    assert main(["data", "show", "--config", str(config.with_name("pipeline.yaml"))]) == 2
    assert "Pass --stage" in capsys.readouterr().err
