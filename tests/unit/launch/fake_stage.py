"""Stands in for a stage program where the launcher is what is tested: reads its config, writes what a stage writes.

    python fake_stage.py --config resolved.yaml

FAKE_STAGE holds what goes wrong, `<stage>:<what>` separated by commas: `exit3`, `kill`, `hang` (while it starts),
`state` (leaves a saved state, then exits 1), `steps` (fails in its steps without one), `patient` (waits in its steps
until it is asked to stop, then saves), `silent` (exits 0 without a result),
`unhealthy` (a detector stopped it), `advance` (gets two steps further each time, up to 6).
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import yaml

from rlhf import artifacts, heartbeat, states

SAVED = {"step1_sft": "policy", "step2_reward": "reward", "step3_ppo": "policy"}


def main() -> None:
    config = yaml.safe_load(Path(sys.argv[-1]).read_text())
    out = Path(config["run"]["out_dir"])
    stage = out.name
    faults = dict(part.split(":") for part in os.environ.get("FAKE_STAGE", "").split(",") if part)
    fault = faults.get(stage)
    for number in range(40):
        sys.stdout.write(f"[rank 0] {stage} line {number}\n")
    out.mkdir(parents=True, exist_ok=True)
    started = out / "starts.txt"
    started.write_text((started.read_text() if started.exists() else "") + f"resume={config['run']['resume']}\n")
    phase = "start" if fault in ("hang", "exit3", "kill") else "train"
    (out / "progress.json").write_text(json.dumps({"step": 0, "num_steps": 2, "loss": 0.5, "phase": phase}))
    if fault is not None:
        go_wrong(fault, out)
    if fault == "silent":
        return
    if fault == "advance":
        step = 2 * len(started.read_text().splitlines())
        folder = Path(os.environ["RLHF_WATCH_DIR"])
        heartbeat.write_beat(folder, heartbeat.Beat(rank=0, world_size=2, host="h", pid=os.getpid(), step=step))
        save_state(out, step)
        if step < 6:
            raise SystemExit(1)
    write_model(out / "model", stage, config["run"]["seed"])
    result = {"status": "done", "seconds": 1.5, "tokens_per_second": 100.0, "model_dir": "model"}
    metrics = {"eval_loss_before": 2.0, "eval_loss_after": 1.0, "stop_frac": 1.0, "gold_sft": 0.5, "gold_ppo": 0.75}
    artifacts.write_json(out / "result.json", {**result, "metrics": metrics})


def go_wrong(fault: str, out: Path) -> None:
    """What ends the program before its work, or delays it."""
    if fault == "exit3":
        raise SystemExit(3)
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "hang":
        (out / "pid").write_text(str(os.getpid()))
        time.sleep(60)
    if fault == "patient":
        (out / "pid").write_text(str(os.getpid()))
        while not (out / "stop_request").exists():
            time.sleep(0.05)
        (out / "progress.json").write_text(json.dumps({"step": 1, "num_steps": 2, "phase": "stopped"}))
    if fault in ("state", "patient"):
        save_state(out, 1)
        raise SystemExit(75 if fault == "patient" else 1)
    if fault == "unhealthy":
        beat = {"state": "failed", "error": "UnhealthyError: the loss is 9", "error_time": 1.0, "exit_code": 78}
        folder = Path(os.environ["RLHF_WATCH_DIR"])
        heartbeat.write_beat(folder, heartbeat.Beat(rank=1, world_size=2, host="h", pid=os.getpid(), **beat))
        save_state(out, 1)
    if fault in ("steps", "unhealthy"):
        raise SystemExit(1)


def save_state(out: Path, step: int) -> None:
    """As much of a state as the launcher looks at."""
    folder = states.path_of(states.states_of(out), step)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / states.RECORD).write_text("{}")


def write_model(folder: Path, stage: str, seed: int) -> None:
    folder.mkdir()
    (folder / "model.safetensors").write_text(f"weights of {stage} with seed {seed}")
    (folder / "config.json").write_text('{"model_type": "opt"}')
    contract = artifacts.Contract(tokenizer="t", template_name="plain", template_fingerprint="f", stop_token_id=0)
    artifacts.write_manifest(folder, kind=SAVED[stage], stage=stage, contract=contract, seed=seed)


if __name__ == "__main__":
    main()
