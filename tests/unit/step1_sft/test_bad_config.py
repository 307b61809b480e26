"""Settings of a stage that cannot be used: exit code 2, one line, whatever the YAML or the flags hold."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlhf.config import parse_config
from step1_sft.config import SFTConfig
from step3_ppo.config import PPOConfig

quietly = settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
GOOD = """\
model: {path: m}
data: {sources: [{path: "builtin:politeness", options: {rows: 8}}], max_prompt_tokens: 8, max_response_tokens: 8}
deepspeed: cpu_zero0
global_batch_size: 8
optim: {lr: 1.0e-3}
run: {out_dir: out}
"""


def refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line of an error, or nothing if it is taken."""
    try:
        parse_config(SFTConfig, argv, prog="step1")
    except SystemExit as stop:
        assert stop.code == 2
        text = capsys.readouterr().err
        assert text.count("error: ") == 1 and "Traceback" not in text
        return text.partition("error: ")[2]
    capsys.readouterr()
    return ""


@pytest.fixture
def good(tmp_path: Path) -> Path:
    path = tmp_path / "sft.yaml"
    path.write_text(GOOD)
    return path


def test_the_good_one_is_taken(good: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(["--config", str(good)], capsys) == ""


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("epochs: .nan\n", "epochs must be a finite number"),
        ("epochs: .inf\n", "epochs must be a finite number"),
        ("parallel: {sp: 0}\n", "parallel.sp must be >= 1, got 0. Use 1"),
        ("epochs: 1\nepochs: 2\n", "the key 'epochs' stands twice"),
        ("optim: {lr: 1.0e-3, lr: 2.0e-3}\n", "stands twice"),
        ("global_batch: 8\n", "global_batch"),
        ("epochs: many\n", "epochs"),
        ("epochs: [1\n", "not valid YAML"),
        ("tokenizer: !!python/object/apply:os.system [ls]\n", "constructor"),
        ("\0", "not valid YAML"),
    ],
)
def test_a_corpus_of_broken_settings(good: Path, more: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    good.write_text(GOOD + more)
    assert said in refused(["--config", str(good)], capsys)


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("data.packing=off", "parallel.sp=2 shares packed rows between ranks, but data.packing is `off`. Use `auto`"),
        ("model.attention=eager", "around sdpa attention, but model.attention is eager. Use sdpa, or parallel.sp=1."),
    ],
)
def test_what_rows_shared_by_ranks_do_not_go_with(
    good: Path, flag: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--config", str(good), f"--{flag}"]
    assert refused(argv, capsys) == ""
    assert said in refused([*argv, "--parallel.sp=2"], capsys)


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "1e999"])
@pytest.mark.parametrize("flag", ["optim.lr", "optim.clip_norm", "data.split.sft", "run.save_minutes"])
def test_numbers_that_are_none(good: Path, flag: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(["--config", str(good), f"--{flag}={value}"], capsys)


@quietly
@given(content=st.binary(max_size=120) | st.text(max_size=120).map(lambda text: text.encode("utf-8", "replace")))
def test_any_file(tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes) -> None:
    path = tmp_path / "any.yaml"
    path.write_bytes(content)
    assert refused(["--config", str(path)], capsys), "a file of noise is no config"


@quietly
@given(
    flag=st.sampled_from(("epochs", "optim.lr", "model.dropout", "data.max_prompt_tokens", "run.seed", "run.out_dir")),
    value=st.text(max_size=12),
)
def test_any_value(tmp_path: Path, capsys: pytest.CaptureFixture[str], flag: str, value: str) -> None:
    path = tmp_path / "sft.yaml"
    path.write_text(GOOD)
    refused(["--config", str(path), f"--{flag}={value}"], capsys)


def test_no_number_of_step_3_may_be_nan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each float of the config that has no rule of its own falls under the one of all."""
    base = ["--actor.path=a", "--reward.path=r", "--deepspeed.actor=x", "--deepspeed.critic=x", "--max_steps=1",
            "--rollout.prompts_per_step=8", "--update.minibatch_size=8", "--actor_optim.lr=1e-6",
            "--critic_optim.lr=1e-6", "--run.out_dir=o", "--data.max_prompt_tokens=8", "--data.max_response_tokens=8",
            '--data.sources=[{"path": "builtin:politeness"}]']  # fmt: skip
    parse_config(PPOConfig, base)
    for flag in ("kl.coef", "kl.target", "gae.lam", "gae.gamma", "shaping.clip", "update.clip_ratio", "sampling.top_p",
                 "update.entropy_coef", "shaping.missing_stop_penalty", "sampling.temperature"):  # fmt: skip
        with pytest.raises(SystemExit) as stop:
            parse_config(PPOConfig, [*base, f"--{flag}=nan"])
        assert stop.value.code == 2 and flag.rpartition(".")[2] in capsys.readouterr().err
