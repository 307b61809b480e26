"""Activations that were away: gradients equal to the bit, weights stay, memory is given back behind the copies."""

import functools
import gc
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from rlhf.config import LoRAConfig
from rlhf.models import offload
from rlhf.models.policy import Policy
from tests.unit.rlhf.models.test_compiled import RAGGED, batch_of, loss_and_gradients
from tests.unit.rlhf.models.test_recompute import Made

HOW: dict[str, dict[str, Any]] = {
    "none": {},
    "full": {"recompute": "full"},
    "budget": {"recompute": "full", "recompute_budget": 0.5},
}


@pytest.fixture
def entries(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, Tensor]]:
    """Every (stay, tensor) that is sent away."""
    found: list[tuple[Any, Tensor]] = []
    made = offload._Entry.__init__

    def note(self: Any, stay: Any, source: Tensor) -> None:
        found.append((stay, source))
        made(self, stay, source)

    monkeypatch.setattr(offload._Entry, "__init__", note)
    return found


def alive() -> list[Any]:
    return [entry for entry in gc.get_objects() if type(entry) is offload._Entry]


@pytest.mark.parametrize("how", HOW)
def test_gradients_are_equal_to_the_bit(family: dict[str, Any], make: Any, entries: list[Any], how: str) -> None:
    packed = family["model_type"] != "bloom"
    policies = [
        Policy(make.lm(family, dropout=0.0, offload_activations=away, **HOW[how])).train() for away in (False, True)
    ]
    batch = batch_of(*RAGGED, packed=packed)
    (loss, kept), (other, back) = (loss_and_gradients(policy, batch) for policy in policies)
    assert loss == other and kept.keys() == back.keys()
    assert all(torch.equal(kept[name], back[name]) for name in kept)
    assert entries, "nothing was sent away"


def test_what_is_sent_away(families: dict[str, Any], make: Any, entries: list[Any]) -> None:
    """No weight, no mask or rotary table, nothing twice; with full recomputation a block's input alone."""
    for how, blocks in (("none", 3), ("full", 3)):
        entries.clear()
        model = make.lm(
            {**families["llama"], "num_hidden_layers": 4}, dropout=0.0, offload_activations=True, **HOW[how]
        )
        policy, batch = Policy(model).train(), batch_of(*RAGGED, packed=False)
        loss_and_gradients(policy, batch)
        weights = {p.untyped_storage().data_ptr() for p in policy.parameters()}
        assert not any(source.untyped_storage().data_ptr() in weights for _, source in entries)
        names = [(id(stay), source.data_ptr(), source.shape, source.stride()) for stay, source in entries]
        assert len(set(names)) == len(names)
        senders: dict[int, set[int]] = {}
        for stay, source in entries:
            senders.setdefault(source.untyped_storage().data_ptr(), set()).add(id(stay))
        assert all(len(stays) == 1 for stays in senders.values()), "what blocks share was sent away"
        assert len({id(stay) for stay, _ in entries}) == blocks
        if how == "full":
            rows = batch.sequences.inputs["token_ids_BT"].shape
            assert [tuple(source.shape) for _, source in entries] == [(*rows, 32)] * blocks


def test_memory_of_the_device_is_given_back(families: dict[str, Any], make: Any) -> None:
    """What stays, host copies aside, is what the last of eight blocks saves and what lies outside of blocks.

    With recomputation of all, nothing of a block but the last one's input.
    """
    stays = {}
    for away in (False, True):
        for how in ("none", "full"):
            config = {**families["llama"], "num_hidden_layers": 8}
            policy = Policy(make.lm(config, dropout=0.0, offload_activations=away, **HOW[how])).train()
            batch = make.pad(make.rows(60, 40))
            with Made() as made:
                out = policy(**batch, target_mask_BT=make.targets(batch))
            assert all(entry.source is None for entry in alive()) and bool(alive()) == away
            stays[away, how] = made.kept_bytes() - sum(entry.host.untyped_storage().nbytes() for entry in alive())
            del out
    outside = stays[False, "full"] - 8 * 2 * 60 * 32 * 4  # kept beside eight inputs of 2 x 60 x 32 numbers
    assert stays[True, "full"] == pytest.approx(outside + 2 * 60 * 32 * 4, rel=0.02)
    one_block = (stays[False, "none"] - outside) / 8
    assert stays[True, "none"] == pytest.approx(outside + one_block, rel=0.1)


def test_no_entry_outlives_its_backward_pass(families: dict[str, Any], make: Any) -> None:
    policy = Policy(make.lm(families["llama"], offload_activations=True)).train()
    loss_and_gradients(policy, batch_of(*RAGGED, packed=True))
    batch = batch_of(*RAGGED, packed=True)
    policy(**batch.sequences.inputs, target_mask_BT=batch.response_mask_BT)
    assert not alive()


def test_several_passes_at_a_time(families: dict[str, Any], make: Any) -> None:
    """Two forwards before one backward, a second backward over the same graph, a forward without gradients between."""
    found = []
    for away in (False, True):
        policy = Policy(make.lm(families["llama"], dropout=0.0, offload_activations=away)).train()
        batches = [batch_of(*RAGGED, packed=True), batch_of((4, 9), (2, 2), packed=True, seed=1)]
        outs = []
        for batch in batches:
            arguments = {**batch.sequences.inputs, "target_mask_BT": batch.response_mask_BT}
            with torch.no_grad():
                policy(**arguments)
            outs.append(policy(**arguments).logprob_BT.sum())
        total = outs[0] + 2 * outs[1]
        total.backward()
        model, batch = policy.model.model, make.pad(make.rows(9, 4))
        again = model(
            input_ids=batch["token_ids_BT"], attention_mask=batch["attention_mask_BT"].long()
        ).last_hidden_state
        again.square().sum().backward(retain_graph=True)
        assert all(entry.here is None for entry in alive()) and bool(alive()) == away
        again.sum().backward()
        found.append([p.grad.clone() for p in policy.parameters() if p.grad is not None])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True)) and found[0]


def test_adapters(families: dict[str, Any], make: Any, entries: list[Any]) -> None:
    for how in ("none", "full"):
        policies = [
            Policy(
                make.lm(families["opt"], dropout=0.0, offload_activations=a, lora=LoRAConfig(rank=2), **HOW[how])
            ).train()
            for a in (False, True)
        ]
        (_, kept), (_, back) = (loss_and_gradients(policy, batch_of(*RAGGED, packed=True)) for policy in policies)
        assert all(torch.equal(kept[name], back[name]) for name in kept) and len(kept) == 24
    assert entries


def test_compiled_blocks(
    families: dict[str, Any], make: Any, entries: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same graphs, no more of them for a new length or for the hooks."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    numbers = []
    for away in (False, True):
        torch._dynamo.reset()
        counters.clear()
        policy = Policy(make.lm(families["llama"], dropout=0.0, compile=True, offload_activations=away)).train()
        found = [loss_and_gradients(policy, batch_of(*RAGGED, packed=True))]
        found.append(loss_and_gradients(policy, batch_of((4, 9), (2, 2), (3, 3), packed=True, seed=1)))
        numbers.append((int(counters["stats"]["unique_graphs"]), found))
    torch._dynamo.reset()
    (graphs, kept), (others, back) = numbers
    assert others == graphs > 0 and entries
    for (loss, one), (other, two) in zip(kept, back, strict=True):
        assert loss == other and all(torch.equal(one[name], two[name]) for name in one)


class Log(list[str]):
    """Stands for the streams of an accelerator: notes what is asked of them, in order."""

    def to_host(self, device: Any) -> Any:
        return self._copying("out")

    def to_device(self, device: Any) -> Any:
        return self._copying("back")

    @contextmanager
    def _copying(self, way: str) -> Any:
        if not self or self[-1] != way:
            self.append(way)
        yield

    def mark(self, device: Any, *, back: bool) -> str:
        self.append(f"mark {'back' if back else 'out'} {sum('mark' in line for line in self)}")
        return self[-1].removeprefix("mark ")

    def wait_event(self, event: str) -> None:
        if not self or self[-1] != f"wait {event}":
            self.append(f"wait {event}")


def test_the_order_of_copies_and_waits(families: dict[str, Any], make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is given back one block later, behind its copy; on the way back, the block before is fetched ahead.

    Of four blocks the first three are sent away: marks 0 to 2 out, 3 to 5 back.
    """
    log = Log()
    monkeypatch.setattr(offload, "_Streams", lambda: log)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda *_: log)
    monkeypatch.setattr(Tensor, "record_stream", lambda *_: None)
    policy = Policy(make.lm({**families["llama"], "num_hidden_layers": 4}, offload_activations=True, recompute="full"))
    policy.train()
    batch = batch_of(*RAGGED, packed=True)
    out = policy(**batch.sequences.inputs, target_mask_BT=batch.response_mask_BT).logprob_BT.sum()
    forward = ["out", "mark out 0", "out", "mark out 1", "wait out 0", "out", "mark out 2", "wait out 1", "wait out 2"]
    assert log == forward
    log.clear()
    out.backward()
    assert [line.split(" ")[:2] for line in log] == [
        ["back"], ["mark", "back"], ["back"], ["mark", "back"], ["wait", "back"],
        ["back"], ["mark", "back"], ["wait", "back"], ["wait", "back"],
    ]  # fmt: skip
    waits = [line.split(" ")[-1] for line in log if line.startswith("wait")]
    marks = [line.split(" ")[-1] for line in log if line.startswith("mark")]
    assert waits == marks, "each block waits for its own copies, the third first"


def test_a_model_without_layers_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no decoder layers are known in Linear.*offload_activations: false"):
        offload.offload_activations(torch.nn.Linear(2, 2))
