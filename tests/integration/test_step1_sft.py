"""Step 1 as a whole program, in one process on the real engine."""

import json
import math
import os
import re
import signal
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlhf.data.dataset import TokenDataset, build_dataset
from rlhf.data.template import load_template
from rlhf.engine import NonFiniteError
from rlhf.plan import flops
from rlhf.plan.shapes import find_shape
from rlhf.run import Run
from step1_sft.config import SFTConfig
from step1_sft.train import train
from tests.stages import (
    Killed,
    changed,
    data_config,
    ds_json,
    kill_at,
    metric_lines,
    result,
    series,
    sft_config,
    weights,
    write_rows,
    yes_rows,
)

pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(tmp_path_factory.mktemp("rows") / "rows.jsonl", yes_rows(40))


def naive_loss(cfg: SFTConfig, model_dir: Path, *, part: str, loss_on: str = "responses") -> dict[str, float]:
    """Loss per token and accuracy, one unpadded row at a time, by Hugging Face's model; by source name."""
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    model = AutoModelForCausalLM.from_pretrained(model_dir).eval()
    template = load_template("auto", tokenizer)
    data: TokenDataset = build_dataset(cfg.data, stage="sft", part=part, template=template, tokenizer=tokenizer)  # type: ignore[arg-type]
    sums: dict[str, list[float]] = {}
    for i in range(len(data)):
        row = data[i]
        with torch.no_grad():
            logprob_TV = model(input_ids=torch.tensor([row.token_ids.tolist()])).logits[0].double().log_softmax(-1)
        for t in range(1, len(row.token_ids)):
            if loss_on == "all" or row.loss_mask[t]:
                for name in ("", data.source_names[row.source]):
                    total = sums.setdefault(name, [0.0, 0.0, 0.0])
                    total[0] -= logprob_TV[t - 1, row.token_ids[t]].item()
                    total[1] += logprob_TV[t - 1].argmax().item() == row.token_ids[t]
                    total[2] += 1
    found = {}
    for name, (loss, correct, count) in sums.items():
        suffix = f"/{name}" if name else ""
        found |= {f"loss{suffix}": loss / count, f"token_accuracy{suffix}": correct / count}
        found[f"perplexity{suffix}"] = math.exp(loss / count)
    return found


def test_overfits_eight_rows(rows: Path, tmp_path: Path) -> None:
    """Learning: 8 rows are known by heart, the stop token among them."""
    few = write_rows(tmp_path / "few.jsonl", yes_rows(8))
    cfg = sft_config(tmp_path / "sft", few, max_steps=50, optim__lr=1e-2, data__split__eval=0.0)
    train(cfg)
    losses = series(tmp_path / "sft", "train/loss")
    assert losses[0] > 3 and losses[-1] < 0.1
    assert series(tmp_path / "sft", "train/token_accuracy")[-1] > 0.97
    # Each of the 50 steps trains on all rows: what they need is counted to the last target.
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "sft/model")
    template = load_template("auto", tokenizer)
    data: TokenDataset = build_dataset(cfg.data, stage="sft", part="train", template=template, tokenizer=tokenizer)
    rows_of_step = [data[i] for i in range(len(data))]
    targets = sum(int(row.loss_mask[1:].sum()) for row in rows_of_step)
    needed = flops.update(
        find_shape(str(tmp_path / "sft/model")), [len(row.token_ids) for row in rows_of_step], targets=targets
    )
    assert len(rows_of_step) == 8 and result(tmp_path / "sft")["model_flops"] == pytest.approx(50 * needed)


def test_evaluation_equals_a_naive_loop(rows: Path, tmp_path: Path) -> None:
    """C23: token-weighted over ragged rows and two sources, exponentiated once; the summary has the issue's keys."""
    other = write_rows(tmp_path / "other.jsonl", yes_rows(30, seed=9))
    cfg = sft_config(tmp_path / "sft", rows, eval__max_rows=1000, model__dropout=0.1)  # which evaluation must not see
    cfg = changed(cfg, data__sources=[*cfg.data.sources, *data_config(other, share="sft").sources])
    train(cfg)
    naive = naive_loss(cfg, tmp_path / "sft/model", part="eval")
    assert len(naive) == 9, "three numbers, over all and over each of two sources"
    last = metric_lines(tmp_path / "sft")[-1]
    assert (last["split"], last["step"]) == ("eval", 4)
    for name, value in naive.items():
        assert last[f"eval/{name}"] == pytest.approx(value, rel=1e-5), name  # fp32 against fp64 sums

    log = (tmp_path / "sft/log.txt").read_text()
    for name in ("rows", "other"):
        for part in ("train", "eval"):
            assert re.search(rf"{name}: \d+ rows for step 1 {part}", log), (name, part)

    done = result(tmp_path / "sft")
    assert done["status"] == "done" and done["seconds"] > 0 and done["tokens_per_second"] > 0
    assert done["model_dir"] == "model"
    assert done["metrics"]["eval_loss_after"] == last["eval/loss"]
    assert done["metrics"]["eval_loss_before"] == metric_lines(tmp_path / "sft")[0]["eval/loss"]
    assert done["metrics"]["eval_loss_after"] < done["metrics"]["eval_loss_before"]
    assert 0 <= done["metrics"]["stop_frac"] <= 1
    assert done["num_tokens"] > 0
    train_line = metric_lines(tmp_path / "sft", measured=True)[1]
    for name in (
        *("train/loss", "train/lr", "train/grad_norm", "train/token_accuracy"),
        *("time/step_seconds", "time/update_seconds", "speed/tokens_per_second"),
        *("memory/peak_bytes", "data/padding_frac"),
    ):
        assert name in train_line, name


@pytest.mark.parametrize("loss_on", ["responses", "all"])
def test_training_loss_equals_a_naive_loop(rows: Path, tmp_path: Path, loss_on: str) -> None:
    """A1, B22: one step over all rows in ragged micro-batches of 3; the rate is so low that the model stays."""
    cfg = sft_config(
        tmp_path / "sft",
        rows,
        loss_on=loss_on,
        global_batch_size=1000,
        epochs=1.0,
        max_steps=0,
        optim__lr=1e-12,
        deepspeed=ds_json(tmp_path, "cpu_zero0", micro_batch_size=3),
        eval__max_rows=0,
        eval__generate_rows=0,
    )
    train(cfg)
    (loss,) = series(tmp_path / "sft", "train/loss")
    naive = naive_loss(cfg, tmp_path / "sft/model", part="train", loss_on=loss_on)
    assert loss == pytest.approx(naive["loss"], rel=1e-5)
    assert series(tmp_path / "sft", "train/token_accuracy") == [pytest.approx(naive["token_accuracy"])]


def test_resume_equals_an_uninterrupted_run(rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """F12, F14: killed in step 5, resumed from step 3 of 6, with dropout: metrics and weights equal to the bit."""
    changes = {
        "model__dropout": 0.1,
        "max_steps": 6,
        "run__save_every": 3,
        "run__eval_every": 2,
        "optim__warmup_frac": 0.4,
        "global_batch_size": 7,
        "deepspeed": ds_json(tmp_path, "cpu_zero0", micro_batch_size=3),
    }
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(sft_config(whole, rows, **changes))
    with monkeypatch.context() as patch:
        kill_at(patch, Run, step=5)
        with pytest.raises(Killed):
            train(sft_config(parts, rows, **changes))
    assert len(series(parts, "train/loss")) == 4, "step 4 is on record, and will be made again"
    assert not (parts / "result.json").exists()
    train(sft_config(parts, rows, **changes, run__resume=True))
    assert metric_lines(parts) == metric_lines(whole)
    assert len(metric_lines(parts)) == 6 + 2 + 2
    expected, found = weights(whole / "model"), weights(parts / "model")
    assert expected.keys() == found.keys() and all(torch.equal(expected[k], found[k]) for k in expected)
    assert result(parts)["metrics"] == result(whole)["metrics"]
    assert result(parts)["num_tokens"] == result(whole)["num_tokens"]
    assert (parts / "samples.jsonl").read_text() == (whole / "samples.jsonl").read_text()


@pytest.mark.parametrize("signum", [signal.SIGUSR1, signal.SIGTERM])
def test_stopped_by_a_signal_and_resumed(
    rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, signum: signal.Signals
) -> None:
    """Without any cadence, between two lines of metrics: no step is lost, and the records are as if nothing was."""
    changes = {"model__dropout": 0.1, "max_steps": 6, "run__log_every": 3}
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(sft_config(whole, rows, **changes))
    log = Run.log

    def log_and_ask(self: Run, step: int) -> None:
        log(self, step)
        if step == 4:
            os.kill(os.getpid(), signum)

    with monkeypatch.context() as patch:
        patch.setattr(Run, "log", log_and_ask)
        with pytest.raises(SystemExit) as stop:
            train(sft_config(parts, rows, **changes))
    assert stop.value.code == 75
    assert [path.name for path in (parts / "state").glob("step_*")] == ["step_00000004"]
    assert json.loads((parts / "progress.json").read_text())["phase"] == "stopped"
    steps = []
    with monkeypatch.context() as patch:
        patch.setattr(Run, "log", lambda self, step: (steps.append(step), log(self, step)))
        train(sft_config(parts, rows, **changes, run__resume=True))
    assert steps == [5, 6]
    assert metric_lines(parts) == metric_lines(whole) and len(metric_lines(parts)) == 4
    expected, found = weights(whole / "model"), weights(parts / "model")
    assert all(torch.equal(expected[k], found[k]) for k in expected)
    assert result(parts)["num_tokens"] == result(whole)["num_tokens"]


def test_keep_best_names_a_metric_that_is_written_with_each_state(rows: Path, tmp_path: Path) -> None:
    best = {"run__keep_best": "eval/loss", "run__save_every": 1, "run__keep_states": 1, "run__eval_every": 1}
    train(sft_config(tmp_path / "a", rows, max_steps=4, optim__lr=1e-2, **best))
    losses = series(tmp_path / "a", "eval/loss", split="eval")[:4]  # before, and after steps 1 to 3
    best_step = losses.index(min(losses))
    names = {path.name for path in (tmp_path / "a" / "state").glob("step_*")}
    assert names == {f"step_{best_step:08d}", "step_00000004"}
    with pytest.raises(ValueError, match="metric 'eval/nothing' is not registered"):
        train(sft_config(tmp_path / "b", rows, **{**best, "run__keep_best": "eval/nothing"}))


def test_an_empty_evaluation_split_is_skipped_with_a_notice(rows: Path, tmp_path: Path) -> None:
    """B8."""
    train(sft_config(tmp_path / "sft", rows, max_steps=1, data__split__eval=0.0))
    assert "no evaluation rows for step 1: evaluation is skipped" in (tmp_path / "sft/log.txt").read_text()
    assert result(tmp_path / "sft")["metrics"] == {}
    assert (tmp_path / "sft/model/manifest.json").is_file()


def test_a_loss_that_is_not_finite_stops_the_run(rows: Path, tmp_path: Path) -> None:
    """The first update breaks the weights; the second step's loss is found out before an update or a model folder."""
    with pytest.raises(NonFiniteError, match=r"^policy: the loss is not finite at step 1 on rank 0") as caught:
        train(sft_config(tmp_path / "sft", rows, optim__lr=1e30, optim__clip_norm=0.0))
    assert (caught.value.step, caught.value.rank, caught.value.role) == (1, 0, "policy")
    assert not (tmp_path / "sft/model").exists() and not (tmp_path / "sft/result.json").exists()


def test_who_computes_the_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """Liger on CUDA where it is installed, but not under ZeRO-3 and not where it is switched off."""
    from rlhf.models.liger import liger_stats
    from rlhf.models.token_stats import token_stats
    from step1_sft import train as program

    assert program.choose_loss("auto", zero_stage=0) is token_stats  # on this CPU
    monkeypatch.setattr(program, "device_type", lambda: "cuda")
    monkeypatch.setattr(program.liger, "is_installed", lambda: False)
    assert program.choose_loss("auto", zero_stage=0) is token_stats
    monkeypatch.setattr(program.liger, "is_installed", lambda: True)
    assert program.choose_loss("auto", zero_stage=2) is liger_stats
    assert program.choose_loss("auto", zero_stage=3) is token_stats
    assert program.choose_loss("off", zero_stage=0) is token_stats
