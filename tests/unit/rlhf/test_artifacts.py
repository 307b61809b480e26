import json
import subprocess
import sys
from pathlib import Path

import pytest

from rlhf.artifacts import (
    ArtifactError,
    Contract,
    Kind,
    check_contract,
    check_kind,
    check_parents,
    check_reads,
    check_same_text,
    digest_of,
    read_manifest,
    staged_folder,
    verify,
    write_json,
    write_manifest,
)

CONTRACT = Contract(
    tokenizer="9f3c" * 16, template_name="human_assistant", template_fingerprint="aa" * 32, stop_token_id=2
)


def model_folder(
    folder: Path,
    *,
    kind: Kind = "policy",
    contract: Contract = CONTRACT,
    weights: bytes = b"w" * 100,
    parents: tuple = (),
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.safetensors").write_bytes(weights)
    (folder / "config.json").write_text('{"model_type": "opt"}')
    (folder / "extra").mkdir(exist_ok=True)
    (folder / "extra" / "tokens.txt").write_text("a b")
    stage = {"policy": "step1_sft", "reward": "step2_reward", "critic": "step3_ppo"}[kind]
    write_manifest(folder, kind=kind, stage=stage, contract=contract, parents=parents, seed=1, metrics={"loss": 0.5})
    return folder


def test_manifest_reads_back_as_written(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model")
    manifest = verify(folder)
    assert manifest == read_manifest(folder)
    assert (manifest.kind, manifest.stage, manifest.contract, manifest.seed) == ("policy", "step1_sft", CONTRACT, 1)
    assert set(manifest.files) == {"model.safetensors", "config.json", "extra/tokens.txt"}
    raw = json.loads((folder / "manifest.json").read_text())
    assert raw["files"]["model.safetensors"]["bytes"] == 100
    # sha256 by another program
    shown = subprocess.run(["sha256sum", str(folder / "model.safetensors")], capture_output=True, text=True, check=True)
    assert raw["files"]["model.safetensors"]["sha256"] == shown.stdout.split()[0]


def test_files_larger_than_one_chunk_are_hashed_whole(tmp_path: Path) -> None:
    one = bytes(9 << 20)
    other = one[:-1] + b"\x01"
    assert digest_of(model_folder(tmp_path / "a", weights=one)) != digest_of(
        model_folder(tmp_path / "b", weights=other)
    )


def test_digest_depends_on_contents_and_kind_alone(tmp_path: Path) -> None:
    first = digest_of(model_folder(tmp_path / "a"))
    assert digest_of(model_folder(tmp_path / "elsewhere" / "b")) == first
    assert digest_of(model_folder(tmp_path / "c", weights=b"v" * 100)) != first
    assert digest_of(model_folder(tmp_path / "d", kind="critic")) != first


@pytest.mark.parametrize(
    ("damage", "what"),
    [
        (lambda f: (f / "model.safetensors").unlink(), "model.safetensors is missing"),
        (lambda f: (f / "model.safetensors").write_bytes(b"w" * 60), "model.safetensors is truncated: 60 bytes"),
        (lambda f: (f / "model.safetensors").write_bytes(b"w" * 99 + b"x"), "model.safetensors is changed: its sha256"),
        (lambda f: (f / "config.json").write_text('{"model_type": "llama"}'), "config.json is changed"),
        (lambda f: (f / "pytorch_model.bin").write_bytes(b"old"), "pytorch_model.bin is not in manifest.json"),
        (lambda f: (f / "adapter_config.json").write_text("{}"), "adapter_config.json is not in manifest.json"),
        (lambda f: (f / "manifest.json").unlink(), "holds no manifest.json"),
        (lambda f: (f / "manifest.json").write_text('{"schema": 1, "kind'), "is damaged"),
        (lambda f: (f / "manifest.json").write_text("[]"), "is damaged"),
        (lambda f: (f / "manifest.json").write_text('{"schema": 1, "kind": "policy"}'), "is damaged"),
        (lambda f: (f / "manifest.json").write_text('{"schema": 99}'), "has schema 99"),
    ],
)
def test_F9_stale_or_partial_folder_is_an_error_that_names_the_file(tmp_path: Path, damage, what: str) -> None:
    folder = model_folder(tmp_path / "model")
    damage(folder)
    with pytest.raises(ArtifactError, match=what):
        verify(folder)


def test_F9_size_alone_shows_truncation_and_not_a_flipped_byte(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model")
    (folder / "model.safetensors").write_bytes(b"w" * 99 + b"x")
    verify(folder, contents=False)
    (folder / "model.safetensors").write_bytes(b"w")
    with pytest.raises(ArtifactError, match="truncated"):
        verify(folder, contents=False)


def test_F9_a_manifest_edited_by_hand_is_an_error(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model")
    raw = json.loads((folder / "manifest.json").read_text())
    raw["kind"] = "reward"
    (folder / "manifest.json").write_text(json.dumps(raw))
    with pytest.raises(ArtifactError, match="was edited"):
        read_manifest(folder)


def test_a_note_beside_the_model_is_no_error(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model")
    (folder / "README.md").write_text("mine")
    verify(folder)


def test_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="does not exist. Run the stage"):
        read_manifest(tmp_path / "nothing")


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"tokenizer": "17ab" * 16}, "tokenizer 17ab17ab17ab, .*uses 9f3c9f3c9f3c"),
        ({"template_fingerprint": "bb" * 32}, "chat template human_assistant .bbbb"),
        ({"template_name": "alpaca", "template_fingerprint": "cc" * 32}, "chat template alpaca"),
        ({"stop_token_id": 50256}, "stop token id 50256, .*uses 2"),
    ],
)
def test_C12_C13_models_that_read_text_differently_do_not_meet(tmp_path: Path, change: dict, what: str) -> None:
    """Same size of vocabulary and another tokenizer is the silent case: only the fingerprint tells."""
    policy = read_manifest(model_folder(tmp_path / "policy"))
    other = Contract(**{**vars(CONTRACT), **change})
    reward = read_manifest(model_folder(tmp_path / "reward", kind="reward", contract=other))
    with pytest.raises(ArtifactError, match=what):
        check_contract(policy, reward)
    with pytest.raises(ArtifactError):
        check_same_text(reward, policy)
    check_reads(policy, CONTRACT)
    with pytest.raises(ArtifactError, match="was trained with .*this run uses .*data.template"):
        check_reads(reward, CONTRACT)


def test_a_template_has_another_name_once_it_is_a_model_folders_own(tmp_path: Path) -> None:
    """Read from a file in step 1, from step 1's folder in step 2: what it does is the same."""
    policy = read_manifest(
        model_folder(tmp_path / "policy", contract=Contract(**{**vars(CONTRACT), "template_name": "my.jinja"}))
    )
    reward = read_manifest(
        model_folder(
            tmp_path / "reward", kind="reward", contract=Contract(**{**vars(CONTRACT), "template_name": "tokenizer"})
        )
    )
    check_contract(policy, reward)


def test_fitting_models_pass(tmp_path: Path) -> None:
    policy = model_folder(tmp_path / "step1" / "model")
    reward = model_folder(tmp_path / "step2" / "model", kind="reward", parents=(policy, "facebook/opt-350m"))
    check_contract(read_manifest(policy), read_manifest(reward))


def test_a_reward_model_is_no_actor_and_a_policy_no_reward_model(tmp_path: Path) -> None:
    """D18: each folder says which model it holds, so that the wrong one is not loaded by mistake."""
    policy = read_manifest(model_folder(tmp_path / "policy"))
    reward = read_manifest(model_folder(tmp_path / "reward", kind="reward"))
    with pytest.raises(ArtifactError, match=r"actor.path=.* is a reward model .*needs a policy model.* step 1 or 3"):
        check_contract(reward, reward)
    with pytest.raises(ArtifactError, match=r"reward.path=.* is a policy model"):
        check_contract(policy, policy)
    check_kind(reward, "critic", allowed=("critic", "reward"))


def test_F9_a_replaced_parent_makes_the_child_stale(tmp_path: Path) -> None:
    policy = model_folder(tmp_path / "step1" / "model")
    reward = read_manifest(model_folder(tmp_path / "step2" / "model", kind="reward", parents=(policy,)))
    check_parents(reward)
    model_folder(policy, weights=b"retrained")
    with pytest.raises(ArtifactError, match="is stale: .*step1.*Run step2_reward again"):
        check_contract(read_manifest(policy), reward)


def test_F19_parents_may_be_removed_or_moved_along(tmp_path: Path) -> None:
    policy = model_folder(tmp_path / "run" / "step1" / "model")
    model_folder(tmp_path / "run" / "step2" / "model", kind="reward", parents=(policy,))
    (tmp_path / "run").rename(tmp_path / "renamed")
    reward = read_manifest(tmp_path / "renamed" / "step2" / "model")
    assert reward.parent_folder(reward.parents[0]) == tmp_path / "renamed" / "step1" / "model"
    check_parents(reward)
    model_folder(tmp_path / "renamed" / "step1" / "model", weights=b"other")
    with pytest.raises(ArtifactError, match="stale"):
        check_parents(reward)
    (tmp_path / "renamed" / "step1").rename(tmp_path / "gone")
    check_parents(reward)


def test_staged_folder_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "model"
    with pytest.raises(OSError, match="disk"), staged_folder(target) as part:
        (part / "half").write_text("x")
        raise OSError("disk full")
    assert list(tmp_path.iterdir()) == []
    with staged_folder(target) as part:
        (part / "a").write_text("1")
        assert not target.exists()
    with staged_folder(target) as part:
        (part / "b").write_text("2")
        assert (target / "a").exists()
    assert [p.name for p in target.iterdir()] == ["b"]
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def test_write_json_replaces_or_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    write_json(path, {"a": 1})
    with pytest.raises(ValueError, match="JSON"):
        write_json(path, {"a": float("nan")})
    assert json.loads(path.read_text()) == {"a": 1}
    write_json(path, {"a": 2})
    assert [p.name for p in tmp_path.iterdir() if not p.name.endswith(".part")] == ["x.json"]


def test_imports_without_torch() -> None:
    code = "import sys, rlhf.artifacts; print([m for m in ('torch', 'transformers', 'deepspeed') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"
