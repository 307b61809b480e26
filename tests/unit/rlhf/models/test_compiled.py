"""Compiled blocks compute what uncompiled ones do, build no graph for a new length, and leave names and folders alone.

Most tests stop before the machine code, which takes a minute for each family.
"""

import functools
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch._dynamo.utils import counters

from rlhf.config import LoRAConfig, ModelConfig
from rlhf.data.collate import collate_responses
from rlhf.models import compiled
from rlhf.models.build import build_causal_lm
from rlhf.models.policy import Policy

compile_with = torch.compile


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """No graphs of other tests, and no trace of each graph for pytest's log, which takes longer than the tracing."""
    trace = logging.getLogger("torch.__trace")
    torch._dynamo.reset()
    counters.clear()
    trace.disabled = True
    yield
    trace.disabled = False
    torch._dynamo.reset()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Traced, differentiated and partitioned, then run without machine code."""
    monkeypatch.setattr(torch, "compile", functools.partial(compile_with, backend="aot_eager"))


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Traced alone."""
    monkeypatch.setattr(torch, "compile", functools.partial(compile_with, backend="eager"))


def batch_of(*sizes: tuple[int, int], packed: bool, seed: int = 0) -> Any:
    """A batch of (prompt, response) sizes."""
    generator = torch.Generator().manual_seed(seed)
    prompts, responses = (
        [torch.randint(4, 200, (size[part],), generator=generator).tolist() for size in sizes] for part in (0, 1)
    )
    return collate_responses(prompts, responses, pad_id=1, device="cpu", packed=packed)


RAGGED = ((3, 2), (1, 1), (5, 6), (2, 3), (9, 1))


def loss_and_gradients(policy: Policy, batch: Any) -> tuple[float, dict[str, torch.Tensor]]:
    policy.zero_grad()
    output = policy(**batch.sequences.inputs, target_mask_BT=batch.response_mask_BT)
    loss = -output.logprob_BT.sum() / batch.response_mask_BT.sum()
    loss.backward()
    return loss.item(), {name: p.grad.clone() for name, p in policy.named_parameters() if p.grad is not None}


def num_graphs() -> int:
    return int(counters["stats"]["unique_graphs"])


def assert_same(make: Any, config: dict[str, Any], *, packed: bool, **options: Any) -> None:
    """Loss and each gradient within 1e-5 of its largest entry, and the same without gradients.

    Beside that a gradient may be off by 1e-7 of the largest of all: that of a key's bias is 0 but for rounding.
    """
    eager, other = (Policy(make.lm(config, dropout=0.0, compile=on, **options)) for on in (False, True))
    assert len(compiled.compiled_blocks(other)) == 2 and not compiled.compiled_blocks(eager)
    eager.train(), other.train()
    batch = batch_of(*RAGGED, packed=packed)
    loss, gradients = loss_and_gradients(eager, batch)
    found, found_gradients = loss_and_gradients(other, batch)
    assert found == pytest.approx(loss, rel=1e-5)
    assert found_gradients.keys() == gradients.keys()
    largest = max(float(gradient.abs().max()) for gradient in gradients.values())
    for name, gradient in gradients.items():
        allowed = 1e-5 * float(gradient.abs().max()) + 1e-7 * largest
        assert float((found_gradients[name] - gradient).abs().max()) <= allowed, name
    with torch.no_grad():
        arguments = {**batch.sequences.inputs, "target_mask_BT": batch.response_mask_BT}
        torch.testing.assert_close(other(**arguments), eager(**arguments), rtol=1e-5, atol=1e-5)
    assert num_graphs() > 0, "nothing was compiled"


@pytest.mark.usefixtures("traced")
def test_loss_and_gradients_are_those_of_uncompiled_blocks(family: dict[str, Any], make: Any) -> None:
    assert_same(make, family, packed=family["model_type"] != "bloom")


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_the_partitioned_graphs_do_too(families: dict[str, dict[str, Any]], make: Any, recompute: str) -> None:
    assert_same(make, families["opt"], packed=True, recompute=recompute)


@pytest.mark.usefixtures("traced")
def test_adapters_go_with_it(families: dict[str, dict[str, Any]], make: Any) -> None:
    assert_same(make, families["opt"], packed=True, lora=LoRAConfig(rank=2))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["opt", "llama", "gpt_neox"])
@pytest.mark.parametrize("packed", [True, False])
def test_machine_code_computes_the_same(
    families: dict[str, dict[str, Any]], make: Any, name: str, *, packed: bool
) -> None:
    assert_same(make, families[name], packed=packed)


@pytest.mark.slow
def test_machine_code_goes_with_recomputation(families: dict[str, dict[str, Any]], make: Any) -> None:
    assert_same(make, families["opt"], packed=True, recompute="full")


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("name", ["opt", "llama", "gpt_neox"])
def test_new_lengths_build_no_new_graph(
    families: dict[str, dict[str, Any]], make: Any, name: str, *, packed: bool
) -> None:
    """After the first steps; four layers have the graphs of one. Padded rows have a mask, or none if all are alike."""
    policy = Policy(make.lm({**families[name], "num_hidden_layers": 4}, dropout=0.0, compile=True)).train()

    def step(*sizes: tuple[int, int], seed: int) -> None:
        batch = batch_of(*sizes, packed=packed, seed=seed)
        loss_and_gradients(policy, batch)
        with torch.no_grad():
            policy(**batch.sequences.inputs, target_mask_BT=batch.response_mask_BT)

    step(*RAGGED, seed=0)
    step(*((2, 2),) * 3, seed=1)
    warm = num_graphs()
    # With and without gradients; a packed block is four graphs around attention.
    assert warm == 2 * (4 if packed else 2)
    varied = [((7, 3), (1, 1)), ((4, 1),) * 11, ((30, 20), (1, 4), (2, 9), (17, 3)), ((3, 3), (3, 3)), ((2, 1),) * 4]
    for seed, sizes in enumerate(varied, start=2):
        step(*sizes, seed=seed)
    assert num_graphs() == warm
    breaks = sum(counters["graph_break"].values())
    assert (breaks > 0) == packed, "a packed block is cut at its attention, a padded one nowhere"


@pytest.mark.usefixtures("traced")
def test_names_and_folders_stay_as_they_are(
    families: dict[str, dict[str, Any]], make: Any, tokenizer: Any, tmp_path: Path
) -> None:
    plain, model = make.lm(families["opt"]), make.lm(families["opt"], compile=True)
    loss_and_gradients(Policy(model), batch_of(*RAGGED, packed=True))
    assert list(model.state_dict()) == list(plain.state_dict())
    assert [name for name, _ in model.named_modules()] == [name for name, _ in plain.named_modules()]
    for folder, each in (("plain", plain), ("compiled", model)):
        each.save_pretrained(tmp_path / folder)
    assert sorted(p.name for p in (tmp_path / "plain").iterdir()) == sorted(
        p.name for p in (tmp_path / "compiled").iterdir()
    )
    one, two = (load_file(tmp_path / folder / "model.safetensors") for folder in ("plain", "compiled"))
    assert one.keys() == two.keys() and all(torch.equal(one[key], two[key]) for key in one)
    config = (tmp_path / "compiled/config.json").read_text()
    assert config == (tmp_path / "plain/config.json").read_text()
    loaded = build_causal_lm(ModelConfig(path=str(tmp_path / "compiled"), compile=True), tokenizer, seed=1)
    assert len(compiled.compiled_blocks(loaded)) == 2


def test_outside_of_the_block_it_is_compiled_again(families: dict[str, dict[str, Any]], make: Any) -> None:
    model = make.lm(families["opt"], compile=True)
    before = [vars(block)["forward"] for block in compiled.compiled_blocks(model)]
    with pytest.raises(RuntimeError, match="device lost"), compiled.uncompiled(model):
        assert not compiled.compiled_blocks(model)
        raise RuntimeError("device lost")
    assert [vars(block)["forward"] for block in compiled.compiled_blocks(model)] == before and len(before) == 2


@pytest.mark.usefixtures("traced")
def test_compiling_is_timed_once(families: dict[str, dict[str, Any]], make: Any) -> None:
    policy = Policy(make.lm(families["opt"], compile=True)).train()
    batch, start = batch_of(*RAGGED, packed=True), compiled.compile_seconds()
    loss_and_gradients(policy, batch)
    first = compiled.compile_seconds()
    assert 0 < first - start < 60
    loss_and_gradients(policy, batch)
    assert compiled.compile_seconds() == first


def test_a_machine_without_a_compiler_says_so(families: dict[str, dict[str, Any]], make: Any) -> None:
    from torch._inductor import config

    # Its own way back: pytest's would delete the setting.
    with (
        config.patch({"cpp.cxx": ("no-such-compiler",)}),
        pytest.raises(
            ValueError, match="compile is true, but there is no C\\+\\+ compiler.*Install g\\+\\+.*compile: false"
        ),
    ):
        make.lm(families["opt"], compile=True)
    make.lm(families["opt"])
    with pytest.raises(ValueError, match="Triton.*cuda.*compile: false"):
        compiled.check_compiler("cuda")


def test_a_model_without_known_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="no decoder layers are known in Linear.*compile: false"):
        compiled.compile_blocks(torch.nn.Linear(2, 2))
