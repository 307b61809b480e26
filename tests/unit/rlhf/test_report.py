import json
import math
import random
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml

from rlhf.artifacts import Contract, write_json, write_manifest
from rlhf.report import PHASES, Stage, clock_time, number, panels, read_stage, write_report
from rlhf.report_plots import running_mean, stacked_seconds

SCRIPT = "<script>alert('x')</script>"
CONTRACT = Contract(tokenizer="9f" * 32, template_name="plain", template_fingerprint="aa" * 32, stop_token_id=2)


def fake_stage(
    run: Path, name: str, *, train: list[dict], evals: list[dict], metrics: dict | None, extra: dict
) -> Path:
    folder = run / name
    folder.mkdir(parents=True)
    lines = [{"step": i + 1, "split": "train", "time": 1e9 + i, **line} for i, line in enumerate(train)]
    lines += [{"split": "eval", "time": 1e9, **line} for line in evals]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "config.yaml").write_text(yaml.safe_dump({"run": {"seed": 1}, "optim": {"lr": 1e-3}}))
    write_json(folder / "environment.json", {
        "stage": name, "seed": 1, "started": "2025-05-01T12:00:00+0000", "world_size": 2, "git_commit": "4f1c" * 10,
        "command": f"python -m {name}.train --config launch/recipes/tiny_cpu/x.yaml", "versions": {"torch": "2.13.0"},
        "hardware": {"accelerator": "none (CPU)", "cpu": "Xeon", "cpu_count": 2, "memory_bytes": 24 * 2**30},
    })  # fmt: skip
    write_json(folder / "progress.json", {"step": len(train), "num_steps": 60, "tokens_per_second": 950.0,
                                          "eta_seconds": 1.0, "phase": "train"})  # fmt: skip
    if metrics is not None:
        write_json(folder / "result.json", {
            "status": "done", "seconds": 71.5, "tokens_per_second": 9512.0, "num_tokens": 412345, "world_size": 2,
            "train_seconds": 50.0, "model_dir": "model", "metrics": metrics, "phase_seconds": extra["phases"],
        })  # fmt: skip
    if "samples" in extra:
        (folder / "samples.jsonl").write_text("".join(json.dumps(s) + "\n" for s in extra["samples"]))
    for key in ("histograms", "data"):
        if key in extra:
            write_json(folder / f"{key}.json", extra[key])
    return folder


def fake_model(folder: Path, kind: str, stage: str, parents: tuple = ()) -> None:
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(stage.encode() * 1000)
    write_manifest(folder, kind=kind, stage=stage, contract=CONTRACT, parents=parents, seed=1)  # type: ignore[arg-type]


def fake_run(run: Path) -> Path:
    """Three stages with curves as a small run gives them, and text that would break a careless page."""
    rng = random.Random(0)
    common = {"train/grad_norm": 1.1, "time/update_seconds": 0.4, "speed/tokens_per_second": 9500.0,
              "memory/peak_bytes": 9e8, "train/lr": 1e-3}  # fmt: skip
    sft = [{**common, "train/loss": 5.5 * math.exp(-i / 12) + 0.5 + rng.gauss(0, 0.08),
            "train/token_accuracy": 0.9 - 0.8 * math.exp(-i / 15), "train/lr": 1e-3 * math.cos(i / 60),
            "speed/tokens_per_second": 9500 + rng.gauss(0, 300)} for i in range(90)]  # fmt: skip
    sft_evals = [{"step": s, "eval/loss": loss, "eval/token_accuracy": a, "eval/stop_frac": f}
                 for s, loss, a, f in ((0, 6.3, 0.01, 0.0), (45, 0.71, 0.82, 0.9), (90, 0.52, 0.88, 0.97))]  # fmt: skip
    data = {"train": {"kept": 1840, "cut": {"response over the limit": 12},
                      "dropped": {"prompt over the limit": 3, "no text": 1}},
            "leak": {"prompts": 4000, "across_parts": 0, "across_sources": {}}}  # fmt: skip
    metrics = {"eval_loss_before": 6.3, "eval_loss_after": 0.52, "stop_frac": 0.97}
    phases = {"startup": 9, "update": 42, "eval": 12, "other": 8}
    extra = {"phases": phases, "data": data}
    folder = fake_stage(run, "step1_sft", train=sft, evals=sft_evals, metrics=metrics, extra=extra)
    fake_model(folder / "model", "policy", "step1_sft")
    reward = [{**common, "train/loss": 0.7 * math.exp(-i / 20) + rng.gauss(0, 0.03),
               "train/pair_accuracy": 0.97 - 0.45 * math.exp(-i / 12) + rng.gauss(0, 0.02),
               "train/margin": 3 * (1 - math.exp(-i / 20))} for i in range(60)]  # fmt: skip
    counts = [int(300 * math.exp(-(((x - 2.4) / 1.8) ** 2))) for x in [-3.75 + 0.5 * i for i in range(24)]]
    histograms = {
        "margin": {"edges": [-4 + 0.5 * i for i in range(25)], "counts": counts},
        "calibration": {"predicted": [0.55, 0.65, 0.75, 0.85, 0.96], "observed": [0.5, 0.69, 0.74, 0.9, 0.98],
                        "counts": [20, 35, 60, 110, 400]},
    }  # fmt: skip
    folder = fake_stage(run, "step2_reward", train=reward, evals=[
        {"step": 0, "eval/loss": 0.7, "eval/pair_accuracy": 0.51, "eval/margin": 0.0},
        {"step": 60, "eval/loss": 0.12, "eval/pair_accuracy": 0.953, "eval/margin": 2.9}],
        metrics={"pair_accuracy": 0.953, "tie_frac": 0.041, "calibration_error": 0.021, "length_correlation": 0.083},
        extra={"phases": {"startup": 8, "update": 30, "eval": 5, "other": 4}, "histograms": histograms})  # fmt: skip
    fake_model(folder / "model", "reward", "step2_reward", (run / "step1_sft" / "model",))
    ppo = [{**common, "ppo/gold": 0.93 - 0.4 * math.exp(-i / 15) + rng.gauss(0, 0.03),
            "ppo/score": 1.8 * (1 - math.exp(-i / 14)) + rng.gauss(0, 0.1), "ppo/reward": 1.5 * (1 - math.exp(-i / 14)),
            "ppo/kl_ref": 4 * (1 - math.exp(-i / 20)), "ppo/kl_coef": 0.05, "ppo/entropy": 0.5 * math.exp(-i / 70),
            "ppo/response_length": 14 - i / 20 + rng.gauss(0, 0.4), "ppo/stop_frac": 0.98,
            "ppo/distinct_frac": 0.85 - i / 500, "policy/clip_frac": 0.08 + rng.gauss(0, 0.02), "policy/loss": -0.01,
            "value/clip_frac": 0.02, "value/loss": 0.3 * math.exp(-i / 20), "policy/kl_old": 0.003,
            "value/explained_variance": 0.9 - 0.9 * math.exp(-i / 9), "critic/lr": 2e-3, "critic/grad_norm": None,
            "notes": {"critic/grad_norm": "nan"}} for i in range(60)]  # fmt: skip
    questions = ("Please tell me the capital of France.", "What colour is the sky? Be brief.", "Name a | b\nand c.")
    samples = [{"when": when, "prompt": prompt, "response": text, "stopped": stopped, "score": score, "gold": gold}
               for prompt in questions
               for when, text, stopped, score, gold in (
                   ("before", f"well i guess {SCRIPT} whatever, look it up look it up", False, -0.31, 0.25),
                   ("after", "Certainly: it is Paris. Thank you for asking!", True, 1.94, 1.0))]  # fmt: skip
    folder = fake_stage(run, "step3_ppo", train=ppo, evals=[
        {"step": 0, "eval/gold": 0.53, "eval/score": 0.02}, {"step": 60, "eval/gold": 0.91, "eval/score": 1.79}],
        metrics={"gold_sft": 0.53, "gold_ppo": 0.91, "gold_max": 1.0, "score_sft": 0.02, "score_ppo": 1.79, "kl": 3.8,
                 "entropy": 0.22, "distinct_frac": 0.73, "response_length": 11.2},
        extra={"phases": {"startup": 14, "rollout": 38, "score": 11, "update": 33, "eval": 9, "other": 6},
               "samples": samples})  # fmt: skip
    parents = (run / "step1_sft" / "model", run / "step2_reward" / "model")
    fake_model(folder / "model", "policy", "step3_ppo", parents)
    write_json(run / "summary.json", {"schema": 1, "recipe": "tiny_cpu", "seed": 1, "stages": {}})
    return run


class Page(HTMLParser):
    """Tags that are opened and closed in order, ids once, and nothing fetched from elsewhere."""

    VOID = {"meta", "br", "img", "path", "use", "link", "hr"}

    def __init__(self) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.text = ""

    def handle_starttag(self, tag, attrs) -> None:
        self.tags.append(tag)
        values = dict(attrs)
        if "id" in values:
            self.ids.append(values["id"])
        for key in ("src", "href", "xlink:href"):
            assert (values.get(key) or "#").startswith("#"), f"{tag} fetches {values[key]}"
        if tag not in self.VOID:
            self.stack.append(tag)

    def handle_startendtag(self, tag, attrs) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.stack.pop()

    def handle_endtag(self, tag) -> None:
        if tag not in self.VOID:
            assert self.stack.pop() == tag

    def handle_data(self, data) -> None:
        self.text += data


def parse(path: Path) -> Page:
    page = Page()
    page.feed(path.read_text(encoding="utf-8"))
    assert page.stack == []
    return page


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = fake_run(tmp_path_factory.mktemp("runs") / "tiny")
    assert write_report(run) == run / "report.html"
    return run


def test_page_is_one_whole_self_contained_file(finished: Path) -> None:
    page = parse(finished / "report.html")
    assert len(page.ids) == len(set(page.ids))
    assert page.tags.count("svg") >= 25
    source = (finished / "report.html").read_text(encoding="utf-8")
    assert "url(http" not in source and "@import" not in source


def test_page_says_what_was_run_and_what_came_out(finished: Path) -> None:
    text = parse(finished / "report.html").text
    for expected in ("tiny_cpu", "4f1c4f1c", "python -m step1_sft.train", "torch\u00a02.13.0", "0.52", "0.97", "0.953",
                     "0.041", "0.021", "0.083", "0.53 \u2192 0.91", "of at most 1", "1 min 12 s", "412\u202f345",
                     "9\u202f512", "response over the limit", "held out", "nats per token"):  # fmt: skip
        assert expected in text, expected
    assert "Missing" not in text


def test_model_text_is_escaped_in_page_and_markdown(finished: Path) -> None:
    page = parse(finished / "report.html")
    assert "script" not in page.tags and SCRIPT in page.text
    assert "<script" not in (finished / "report.md").read_text(encoding="utf-8")


def test_markdown_tables_have_equal_columns(finished: Path) -> None:
    text = (finished / "report.md").read_text(encoding="utf-8")
    for table in re.findall(r"(?:^\|.*\n)+", text, flags=re.MULTILINE):
        widths = {len(re.findall(r"(?<!\\)\|", row)) for row in table.splitlines()}
        assert len(widths) == 1, table
        assert re.fullmatch(r"[|\-: ]+", table.splitlines()[1]), table
    assert "| step3_ppo | Gold reward | 0.53 \u2192 0.91 |" in text and "## Answers" in text


def test_what_detectors_saw_is_told(tmp_path: Path) -> None:
    run = fake_run(tmp_path / "tiny")
    events = [
        {"step": 7, "time": 1.0, "detector": "kl_explosion", "event": "fires", "text": "KL 1.4 | nats, beyond <1>"},
        {
            "step": 9,
            "time": 2.0,
            "detector": "kl_explosion",
            "event": "rollback",
            "text": "back",
            "state": "step_00000005",
        },
    ]
    (run / "step3_ppo" / "health.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    text = parse(write_report(run)).text
    assert "What the detectors saw" in text and "KL 1.4 | nats, beyond <1>" in text
    assert "rollback to step_00000005" in text
    rows = [line for line in (run / "report.md").read_text().splitlines() if "kl_explosion" in line]
    assert rows[0] == r"| Step 3: PPO | 7 | kl_explosion | fires | KL 1.4 \| nats, beyond &lt;1> |"
    assert rows[1].startswith("| Step 3: PPO | 9 | kl_explosion | rollback to step_00000005 |")


def test_a_run_without_events_has_no_table(finished: Path) -> None:
    assert "detectors" not in parse(finished / "report.html").text


def test_lineage_is_a_tree_from_the_last_model_down(finished: Path) -> None:
    text = (finished / "report.md").read_text(encoding="utf-8")
    tree = [line for line in text.splitlines() if re.match(r" *- step\d", line)]
    assert [re.match(r"( *)- (\w+)", line).groups() for line in tree] == [
        ("", "step3_ppo"), ("  ", "step1_sft"), ("  ", "step2_reward"), ("    ", "step1_sft"),
    ]  # fmt: skip


def test_same_folder_gives_the_same_page(finished: Path) -> None:
    first = (finished / "report.html").read_bytes()
    write_report(finished)
    assert (finished / "report.html").read_bytes() == first


def test_one_stage_alone(finished: Path) -> None:
    path = write_report(finished / "step2_reward")
    text = parse(path).text
    assert "0.953" in text and "Calibration" in text and "not started" not in text and "Missing" not in text


def test_unfinished_run_says_what_is_missing(tmp_path: Path) -> None:
    run = fake_run(tmp_path / "run")
    for name in ("samples.jsonl", "result.json", "environment.json"):
        (run / "step3_ppo" / name).unlink()
    (run / "step3_ppo" / "model" / "manifest.json").unlink()
    with (run / "step3_ppo" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 61, "spl')
    text = parse(write_report(run)).text
    assert "PPO: not finished (no result.json). It reached step 60 of 60." in text
    assert "holds no manifest.json" in text
    assert "0.53 \u2192 0.91" in text  # from the eval lines


def test_run_that_just_started(tmp_path: Path) -> None:
    (tmp_path / "step1_sft").mkdir()
    (tmp_path / "step1_sft" / "config.yaml").write_text("")
    text = parse(write_report(tmp_path)).text
    assert "no metrics.jsonl yet" in text and "Step 3: PPO: not started" in text


def test_folders_without_a_run_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="does not exist"):
        write_report(tmp_path / "nothing")
    with pytest.raises(FileNotFoundError, match="holds neither"):
        write_report(tmp_path)


def test_values_that_were_not_finite_leave_a_gap(tmp_path: Path) -> None:
    train = [{"train/loss": loss} for loss in (2.0, None, 1.0)]
    folder = fake_stage(tmp_path, "step1_sft", train=train, evals=[], metrics=None, extra={})
    stage: Stage = read_stage(folder, name="step1_sft")
    (series,) = stage.series("train", "train/loss")
    assert series.values[0] == 2.0 and math.isnan(series.values[1])
    assert [panel.title for panel in panels(stage)] == ["Loss"]


def test_every_curve_is_of_a_registered_metric() -> None:
    from rlhf.metrics import METRICS
    from rlhf.report import _CURVES

    for curves in _CURVES.values():
        for _, _, wanted in curves:
            assert {name for _, name, _ in wanted} <= set(METRICS)


def test_running_mean() -> None:
    assert running_mean([1.0, 3.0, math.nan, 5.0], 2) == [2.0, 2.0, 4.0, 5.0]
    ramp = [float(i) for i in range(100)]
    assert running_mean(ramp, 5)[2:-2] == ramp[2:-2]


def test_long_runs_are_shown_in_hours() -> None:
    assert ">12.5 h<" in stacked_seconds({"PPO": {"rollout": 45000.0}}, PHASES)
    assert "wall seconds" in stacked_seconds({"PPO": {"rollout": 45.0}}, PHASES)


@pytest.mark.parametrize(
    ("value", "shown"),
    [(None, "-"), (math.nan, "-"), (0.0, "0"), (0.95312, "0.953"), (12.3456, "12.35"), (412345, "412\u202f345"),
     (9512.4, "9\u202f512"), (0.00001, "1.00e-05"), ("text", "text"), (-0.31, "-0.31")],
)  # fmt: skip
def test_number(value, shown: str) -> None:
    assert number(value) == shown


def test_clock_time() -> None:
    assert [clock_time(s) for s in (None, 5.2, 185, 7620)] == ["-", "5 s", "3 min 05 s", "2 h 07 min"]


def test_imports_neither_torch_nor_matplotlib() -> None:
    code = "import sys, rlhf.report; print([m for m in ('torch', 'transformers', 'matplotlib') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"
