"""Whatever a hostfile, a DeepSpeed JSON, a manifest or a state's record holds: taken, or refused by our own error."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from launch import hostfile
from launch.hostfile import HostfileError, filter_hosts, read_hostfile
from rlhf import cli, ds_config, states
from rlhf.artifacts import MANIFEST, ArtifactError, Contract, read_manifest, verify, write_manifest
from rlhf.states import RECORD, StateError

quietly = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
WORDS = st.sampled_from(("node1", "node2", "slots=8", "slots=0", "slots=-1", "slots=x", "#", "localhost", "\n", "\r\n",
                         "\0", "é", "slots=99999999999999999999", "127.0.0.1", "=", "max_slots=2"))  # fmt: skip
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2)
    | st.dictionaries(
        st.sampled_from(("zero_optimization", "stage", "bf16", "enabled", "train_micro_batch_size_per_gpu", "optimizer",
                         "hybrid_engine", "max_out_tokens", "schema", "kind", "files", "offload_optimizer", "device",
                         "reduce_bucket_size", "step", "world_size", "engines", "run", "parts", "fits", "contract"))
        | st.text(max_size=3),
        inner, max_size=4,
    ),
    max_leaves=12,
)  # fmt: skip


@pytest.fixture(autouse=True)
def no_names_are_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds of names that nobody has, of a name server that may be slow."""
    monkeypatch.setattr(hostfile, "is_local", lambda name: False)


@quietly
@given(content=st.binary(max_size=60) | st.lists(WORDS, max_size=8).map(lambda words: " ".join(words).encode()))
def test_any_hostfile(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "hosts"
    path.write_bytes(content)
    try:
        hosts = read_hostfile(path)
    except HostfileError as error:
        assert str(error) and all(str(path) in line for line in str(error).splitlines())
    else:
        assert hosts and all(host.slots for host in hosts)
        assert len({host.name for host in hosts}) == len(hosts)


@quietly
@given(text=st.text(alphabet="node12@:,0-x= ", max_size=16), flag=st.sampled_from(("include", "exclude")))
def test_any_filter(tmp_path: Path, text: str, flag: str) -> None:
    path = tmp_path / "hosts"
    path.write_text("node1 slots=2\nnode2 slots=2\n")
    hosts = read_hostfile(path)
    try:
        kept = filter_hosts(hosts, **{flag: text})
    except HostfileError as error:
        assert f"--{flag}" in str(error)
    else:
        assert kept and {host.name for host in kept} <= {"node1", "node2"}


@quietly
@given(value=JSON)
def test_any_deepspeed_json(tmp_path: Path, value: Any) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(value))
    try:
        raw = ds_config.load(path)
        ds_config.dtype_name(raw), ds_config.zero_stage(raw), ds_config.hybrid_engine(raw)
    except ValueError as error:
        assert "\n" not in str(error) and str(error)


@quietly
@given(content=st.binary(max_size=60) | JSON.map(lambda value: json.dumps(value).encode()))
def test_any_manifest_and_any_record(tmp_path: Path, content: bytes) -> None:
    (tmp_path / MANIFEST).write_bytes(content)
    (tmp_path / RECORD).write_bytes(content)
    with pytest.raises(ArtifactError, match="manifest"):
        read_manifest(tmp_path)
    with pytest.raises(StateError):
        states.read_record(tmp_path)


@pytest.fixture
def good(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "config.json").write_text("{}")
    contract = Contract(tokenizer="t", template_name="plain", template_fingerprint="f", stop_token_id=1)
    write_manifest(tmp_path, kind="policy", stage="step1_sft", contract=contract, seed=1, metrics={"loss": 0.5})
    return json.loads((tmp_path / MANIFEST).read_text())  # type: ignore[no-any-return]


@quietly
@given(data=st.data())
def test_a_manifest_with_a_value_changed(tmp_path: Path, data: st.DataObject, good: dict[str, Any]) -> None:
    """One value of a right manifest replaced: read as it is, or refused."""
    raw = json.loads(json.dumps(good))
    key = data.draw(st.sampled_from(sorted(raw)))
    raw[key] = data.draw(JSON)
    (tmp_path / MANIFEST).write_text(json.dumps(raw))
    try:
        verify(tmp_path)
    except ArtifactError as error:
        assert str(tmp_path) in str(error)


def test_f1_a_hostfile_in_the_wrong_place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A path without its flag is refused; hosts with a user's name are shown before anything starts."""
    path = tmp_path / "hosts"
    path.write_text("me@10.0.0.7 slots=2\nme@10.0.0.8 slots=2\n")
    with pytest.raises(SystemExit) as stop:
        cli.main(["run", str(path), "--recipe"])
    assert stop.value.code == 2
    assert cli.main(["run", "--recipe", "tiny_cpu", "--dry-run", str(path)]) == 2
    assert str(path) in capsys.readouterr().out
    arguments = ["run", "--recipe", "tiny_cpu", "--dry-run", "--hostfile", str(path), "--out", str(tmp_path / "run")]
    cli.main(arguments)
    assert "me@10.0.0.7" in capsys.readouterr().out
