"""What is found before a process is started: one message each, all at once. Fault row F9 (artifacts)."""

import dataclasses
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from launch import preflight
from launch.hostfile import Host
from launch.inputs import is_hub_name
from launch.placement import Placement
from launch.recipe import RecipeError, find_recipe, load_recipe, resolve_stages
from rlhf import artifacts

LOCAL = Placement(hosts=(Host("localhost", (0, 1)),), num_gpus=2)
CPU = {"DS_ACCELERATOR": "cpu"}


def problems(tmp_path: Path, name: str = "tiny_cpu", **arguments: Any) -> str:
    """Problems of a recipe, one a line."""
    path = find_recipe(name)
    recipe = load_recipe(path)
    environment = {**CPU, **arguments.pop("environment", {})}
    placement = arguments.pop("placement", LOCAL)
    stages = resolve_stages(recipe, path, tmp_path, **arguments)
    found = preflight.check(recipe, stages, placement, run_dir=tmp_path, environment=environment)
    return "\n".join(map(str, found))


def test_tiny_cpu_has_none(tmp_path: Path) -> None:
    assert problems(tmp_path) == ""


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("--sft.deepspeed=zero4", "step1_sft: deepspeed: no DeepSpeed JSON is called 'zero4'"),
        ("--ppo.deepspeed.reference=cpu_zero2", "step3_ppo: deepspeed.reference: .*frozen model"),
        ("--reward.normalise.deepspeed=cpu_zero2", "step2_reward: normalise.deepspeed: .*frozen model"),
        ("--ppo.deepspeed.actor=./none.json", r"deepspeed.actor: DeepSpeed JSON ./none.json does not exist"),
        ("--sft.data.max_prompt_tokens=400", r"step1_sft: .*= \d+ is above max_position_embeddings=\d+ of model"),
        ("--ppo.data.max_response_tokens=300", r"step3_ppo: .*= \d+ is above max_position_embeddings=\d+ of actor"),
        ("--ppo.gold_rule=politness", "gold_rule=politness: there is no such rule. Use one of .*politeness"),
        ("--ppo.rollout.tensor_parallel=3", "step3_ppo: rollout.tensor_parallel=3 does not divide the 2 ranks"),
        ("--sft.parallel.sp=3", "step1_sft: parallel.sp=3 does not divide the number of ranks, 2. Use a divisor of it"),
        ("--reward.parallel.tp=3", "step2_reward: parallel.tp=3 does not divide the number of ranks, 2. Use a divisor"),
        ("--sft.parallel.pp=3", "step1_sft: parallel.pp=3 does not divide the number of ranks, 2. Use a divisor of it"),
        ("--sft.parallel.pp=2", "parallel.pp .layers dealt. does not go with zero_optimization.stage=3 .ZeRO-3."),
        ("--reward.parallel.sp=3", "step2_reward: parallel.sp=3 does not divide the number of ranks, 2."),
        ("--ppo.parallel.sp=3", "step3_ppo: parallel.sp=3 does not divide the number of ranks, 2."),
        ("--ppo.rollout.dtype=bfloat16", "step3_ppo: rollout.dtype=bfloat16, but the actor is trained in float32"),
        ("--ppo.data.split.seed=3", "step3_ppo: data.split=.*a prompt could stand in both"),
        ("--reward.data.template=plain", "step2_reward: data.template=plain, but step1_sft uses auto"),
        ('--sft.data.sources=[{"path":"builtin:rudeness"}]', "no such built-in task. Use builtin:politeness"),
        ('--sft.data.sources=[{"path":"rows.jsonl"}]', r"path=rows.jsonl: rows.jsonl does not exist"),
        ("--reward.model.path=./none", "step2_reward: model.path=none: there is no such folder"),
        ("--reward.model.path=/none/here", "step2_reward: model.path=/none/here: there is no such folder"),
    ],
)
def test_one_problem_each(tmp_path: Path, override: str, message: str) -> None:
    import re

    found = problems(tmp_path, overrides=[override])
    assert re.search(message, found), found


def test_a_model_that_cannot_be_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By name, before a process is started."""
    overrides = ["--ppo.rollout.tensor_parallel=2"]
    assert problems(tmp_path, overrides=overrides) == ""
    monkeypatch.setattr(preflight, "_origin", lambda *_: {"model_type": "bloom", "n_head": 4})
    assert "tensor_parallel=2: models of model_type bloom cannot be split" in problems(tmp_path, overrides=overrides)


def test_heads_that_cannot_be_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "_origin", lambda *_: {"model_type": "llama", "num_attention_heads": 3})
    found = problems(tmp_path, overrides=["--sft.parallel.sp=2"])
    assert "step1_sft: parallel.sp=2: the model's 3 attention heads do not divide over 2 ranks" in found


def test_weights_that_cannot_be_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In all stages, for both models of step 3; by family, heads, optimiser and DeepSpeed JSON."""
    overrides = [f"--{stage}.parallel.tp=2" for stage in ("sft", "reward", "ppo")]
    assert problems(tmp_path, overrides=overrides) == ""
    found = problems(tmp_path, overrides=[*overrides, "--ppo.critic_optim.name=muon", "--sft.deepspeed=cpu_bf16"])
    refused = "parallel.tp (weights shared) does not go with"
    assert f"step3_ppo: deepspeed.critic: {refused} optim.name=muon (Muon)" in found
    assert f"step1_sft: deepspeed: {refused} zero_optimization.stage=0 (ZeRO-0) and bf16.enabled (bf16)" in found
    monkeypatch.setattr(preflight, "_origin", lambda *_: {"model_type": "bloom", "n_head": 4})
    found = problems(tmp_path, overrides=overrides)
    for stage, name in (("step1_sft", "model"), ("step2_reward", "model"), ("step3_ppo", "actor")):
        assert f"{stage}: parallel.tp=2 for {name}: models of model_type bloom cannot be split" in found
    monkeypatch.setattr(preflight, "_origin", lambda *_: {"model_type": "llama", "num_attention_heads": 3})
    assert "parallel.tp=2 for actor: the model's 3 attention heads do not divide" in problems(
        tmp_path, overrides=overrides
    )


def test_a_model_that_is_not_cut_by_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    overrides = ["--sft.parallel.pp=2", "--sft.deepspeed=cpu_zero1"]
    assert problems(tmp_path, overrides=overrides) == ""
    monkeypatch.setattr(preflight, "_origin", lambda *_: {"model_type": "bloom", "n_head": 4})
    found = problems(tmp_path, overrides=overrides)
    assert "step1_sft: parallel.pp=2: models of model_type bloom are not cut by layers, only opt, gpt2" in found


def test_all_at_once(tmp_path: Path) -> None:
    overrides = ["--sft.deepspeed=zero4", "--ppo.gold_rule=x", "--reward.model.path=./none"]
    assert len(problems(tmp_path, overrides=overrides).splitlines()) == 3


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({"fp16": {"enabled": True}}, "fp16 does not train on a CPU"),
        ({"zero_optimization": {"stage": 3, "zero_quantized_weights": True}}, "(ZeRO++ qwZ) does not run on a CPU"),
    ],
)
def test_what_deepspeed_cannot_do_on_a_cpu(tmp_path: Path, section: dict[str, Any], said: str) -> None:
    (tmp_path / "other.json").write_text(json.dumps({"train_micro_batch_size_per_gpu": 1, **section}))
    overrides = [f"--sft.deepspeed={tmp_path}/other.json"]
    assert said in problems(tmp_path, overrides=overrides)
    remote = Placement(hosts=(Host("n", (0,)),), hostfile=Path("/n"))
    assert said not in problems(tmp_path, placement=remote, overrides=overrides)


def test_hybrid_engine_limit(tmp_path: Path) -> None:
    raw = {"train_micro_batch_size_per_gpu": 1, "hybrid_engine": {"enabled": True, "max_out_tokens": 10}}
    (tmp_path / "actor.json").write_text(json.dumps(raw))
    found = problems(tmp_path, overrides=[f"--ppo.deepspeed.actor={tmp_path}/actor.json"])
    assert "max_out_tokens=10 is below data.max_prompt_tokens + data.max_response_tokens = " in found


def test_float8_needs_torchao(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    overrides = ["--ppo.critic.float8=rowwise"]
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "torchao" else find(name, *more)
    )
    found = problems(tmp_path, overrides=overrides)
    assert "step3_ppo: critic.float8=rowwise: torchao is not installed. Run `pip install" in found
    assert "torchao" not in problems(tmp_path)
    monkeypatch.undo()
    assert "torchao" not in problems(tmp_path, overrides=overrides)


def test_a_compiler_needed(tmp_path: Path) -> None:
    overrides = ["--ppo.actor.compile=true", "--ppo.reward.compile=true"]
    found = problems(tmp_path, overrides=overrides, environment={"PATH": str(tmp_path)})
    assert "step3_ppo: actor.compile and reward.compile: there is no C++ compiler (g++)" in found
    assert "compile: false" in found
    (tmp_path / "mycc").touch(mode=0o755)
    chosen = {"PATH": str(tmp_path), "CXX": "mycc"}
    assert problems(tmp_path, overrides=overrides, environment=chosen) == ""
    assert problems(tmp_path, environment={"PATH": str(tmp_path)}) == "", "nothing is compiled unless asked for"


def test_accelerator_needed(tmp_path: Path) -> None:
    found = problems(tmp_path, "opt_1.3b_350m_single_gpu")
    assert found.startswith("recipe opt_1.3b_350m_single_gpu needs accelerators")


def test_offline_model_that_is_not_cached(tmp_path: Path) -> None:
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")}
    found = problems(tmp_path, "opt_1.3b_350m_single_gpu", environment=offline)
    assert "step1_sft: model.path=facebook/opt-1.3b: HF_HUB_OFFLINE is set" in found
    (tmp_path / "hf" / "hub" / "models--facebook--opt-1.3b" / "snapshots").mkdir(parents=True)
    assert "opt-1.3b: HF_HUB" not in problems(tmp_path, "opt_1.3b_350m_single_gpu", environment=offline)


def test_port_in_use(tmp_path: Path) -> None:
    import dataclasses
    import socket

    with socket.socket() as holder:
        holder.bind(("", 0))
        holder.listen()
        placement = dataclasses.replace(LOCAL, master_port=holder.getsockname()[1])
        assert "is in use on this machine" in problems(tmp_path, placement=placement)


def test_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "free_bytes", lambda path: 10**9)
    assert problems(tmp_path) == ""  # 1 M parameters fit
    overrides = ["--sft.model.config.hidden_size=4096", "--sft.model.config.num_hidden_layers=32"]
    assert "GB, but 1.0 GB are free there" in problems(tmp_path, overrides=overrides)


def make_model(folder: Path, kind: artifacts.Kind, tokenizer: str) -> None:
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b"weights")
    contract = artifacts.Contract(tokenizer=tokenizer, template_name="p", template_fingerprint="f", stop_token_id=0)
    artifacts.write_manifest(folder, kind=kind, stage=folder.parent.name, contract=contract, seed=1)


def test_f9_models_of_stages_that_are_not_run(tmp_path: Path) -> None:
    """F9: step 3 alone looks at the files of the models it is given, and at whether they fit each other."""
    found = problems(tmp_path, stages=["ppo"])
    assert found.count("does not exist. Run the stage that writes it") == 2
    make_model(tmp_path / "step1_sft" / "model", "policy", "tokenizer-one")
    make_model(tmp_path / "step2_reward" / "model", "reward", "tokenizer-one")
    assert problems(tmp_path, stages=["ppo"]) == ""
    (tmp_path / "step2_reward" / "model" / "model.safetensors").write_bytes(b"weightS")
    assert "sha256 is not the one" in problems(tmp_path, stages=["ppo"])


def test_f9_models_that_do_not_fit(tmp_path: Path) -> None:
    make_model(tmp_path / "step1_sft" / "model", "policy", "tokenizer-one")
    make_model(tmp_path / "step2_reward" / "model", "reward", "tokenizer-two")
    assert "was trained with tokenizer tokenizer-tw" in problems(tmp_path, stages=["ppo"])


def test_hub_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert is_hub_name("facebook/opt-125m")
    assert not any(map(is_hub_name, ("./facebook/opt", "../a", "/a/b", "a", "a/b/c", "~/a")))
    (tmp_path / "facebook" / "opt-125m").mkdir(parents=True)
    assert not is_hub_name("facebook/opt-125m")


def test_hosts_that_do_not_answer_are_named_with_their_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ssh here answers for node1 alone."""
    ssh = tmp_path / "bin" / "ssh"
    ssh.parent.mkdir()
    ssh.write_text('#!/bin/sh\n[ "$5" = node1 ]\n')
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", str(ssh.parent), prepend=":")
    placement = Placement(hosts=(Host("node1", (0,), 1), Host("node2", (0,), 4)), hostfile=Path("/nodes"))
    assert preflight.hosts_without_answer(placement) == ["node2"]
    (problem,) = preflight.unreachable_hosts(placement)
    assert problem.text.startswith("/nodes:4: host node2 does not answer `ssh -o BatchMode=yes node2 true`.")
    assert preflight.hosts_without_answer(LOCAL) == []


def test_slurm_nodes_that_are_down_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As sinfo 22.05 writes them; a `*` is a daemon that does not respond. ssh is not asked."""
    sinfo = tmp_path / "bin" / "sinfo"
    sinfo.parent.mkdir()
    sinfo.write_text("#!/bin/sh\nprintf 'n1 idle\\nn2 down*\\nn3 mixed\\nn4 idle*\\nn5 drained\\nn6 draining\\n'\n")
    sinfo.chmod(0o755)
    monkeypatch.setenv("PATH", str(sinfo.parent), prepend=":")
    hosts = tuple(Host(f"n{i}", (0,), i) for i in range(1, 8))
    placement = Placement(hosts=hosts, hostfile=Path("/nodes"), launcher="slurm")
    assert preflight.hosts_without_answer(placement) == ["n2", "n4", "n5", "n7"]
    assert preflight.unreachable_hosts(placement)[0].text.startswith("/nodes:2: host n2 is no node that `sinfo` shows")
    sinfo.write_text("#!/bin/sh\necho 'slurm_load_partitions: Unable to contact slurm controller' >&2; exit 1\n")
    assert len(preflight.hosts_without_answer(placement)) == 7


def test_mpirun_as_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    placement = Placement(hosts=(Host("n", (0,)),), hostfile=Path("/n"), launcher="openmpi")
    monkeypatch.setattr("os.geteuid", lambda: 0)
    assert "mpirun does not start as root" in problems(tmp_path, placement=placement)
    both = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    assert "as root" not in problems(tmp_path, placement=placement, environment=both)
    told = dataclasses.replace(placement, launcher_args="--allow-run-as-root")
    assert "as root" not in problems(tmp_path, placement=told)
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert "as root" not in problems(tmp_path, placement=placement)


def test_a_critic_that_is_not_built_is_not_checked(tmp_path: Path) -> None:
    """With RLOO its DeepSpeed JSON and its model play no part; with PPO the JSON has to be there."""
    missing = "--ppo.deepspeed.critic=./none.json"
    assert "deepspeed.critic: DeepSpeed JSON ./none.json does not exist" in problems(tmp_path, overrides=[missing])
    rloo = ["--ppo.algorithm=rloo", "--ppo.rollout.samples_per_prompt=2", missing]
    assert problems(tmp_path, overrides=rloo) == ""
    path = find_recipe("tiny_cpu")
    stages = {stage.name: stage for stage in resolve_stages(load_recipe(path), path, tmp_path, overrides=rloo)}
    assert set(stages["ppo"].models()) == set(stages["ppo"].ds_configs()) == {"actor", "reference", "reward"}
    with pytest.raises(RecipeError, match="samples_per_prompt=1, but algorithm=rloo compares"):
        problems(tmp_path, overrides=rloo[:1])
