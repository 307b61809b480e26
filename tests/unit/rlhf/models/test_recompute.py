from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from rlhf.config import ModelConfig
from rlhf.data.collate import collate_responses
from rlhf.models.policy import Policy
from rlhf.models.recompute import recompute_blocks

HOW = {
    "none": {},
    "full": {"recompute": "full"},
    "selective": {"recompute": "selective"},
    "every second": {"recompute": "full", "recompute_every": 2},
    "budget": {"recompute": "full", "recompute_budget": 0.5},
}
LAYERS = 2


class Counted(TorchDispatchMode):
    """Counts calls of operations by their packet's name."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[str(func.overloadpacket)] += 1
        return func(*args, **(kwargs or {}))


def gradients(policy: Policy, *, packed: bool) -> tuple[Counter[str], Tensor]:
    """Operations of the backward pass, and all gradients."""
    batch = collate_responses([[4, 5, 6], [7, 8]], [[9, 10], [11, 12, 13]], pad_id=1, device="cpu", packed=packed)
    policy.train()
    logprob_BT = policy(**batch.sequences.inputs, target_mask_BT=batch.response_mask_BT).logprob_BT
    with Counted() as counted:
        logprob_BT.sum().backward()
    return counted.calls, torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None])


def test_gradients_are_those_of_kept_activations(family: dict[str, Any], make: Any) -> None:
    for packed in (False, True)[: 1 if family["model_type"] == "bloom" else 2]:
        expected = None
        for name, options in HOW.items():
            policy = Policy(make.lm(family, dropout=0.0, **options))
            _, found = gradients(policy, packed=packed)
            expected = found if expected is None else expected
            assert torch.allclose(found, expected, atol=1e-5), (name, packed)


def test_selective_repeats_no_attention_and_half_of_the_products(
    families: dict[str, Any], make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OPT's six products of a layer have a bias, so `addmm` in a backward pass is a product that is made again.

    In torch's own `linear`, that is: DeepSpeed puts another in its place once it has sharded a model in this process.
    The last one of a layer is never needed: full repeats q, k, v, out and fc1, selective the second and fourth of them.
    """
    monkeypatch.setattr(torch.nn.functional, "linear", torch._C._nn.linear)
    found = {}
    for name, options in HOW.items():
        policy = Policy(make.lm(families["opt"], dropout=0.0, **options))
        calls, _ = gradients(policy, packed=False)
        attention = sum(n for op, n in calls.items() if "scaled_dot_product" in op and "backward" not in op)
        found[name] = (attention, calls["aten.addmm"])
    assert found == {
        "none": (0, 0),
        "full": (LAYERS, 5 * LAYERS),
        "selective": (0, 2 * LAYERS),
        "every second": (1, 5),
        "budget": (1, 5),
    }


class Made(TorchDispatchMode):
    """Notes what operations made: a storage that is still there at the end was kept."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, tuple[Any, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                reference = StorageWeakRef(storage)
                self.storages[reference.cdata] = (reference, storage.nbytes())
        return out

    def kept_bytes(self) -> int:
        return sum(size for reference, size in self.storages.values() if not reference.expired())


def test_less_is_kept_the_more_is_recomputed(families: dict[str, Any], make: Any) -> None:
    kept = {}
    for name, options in HOW.items():
        policy = Policy(make.lm({**families["llama"], "num_hidden_layers": 4}, dropout=0.0, **options)).train()
        batch = make.pad(make.rows(60, 40))
        with Made() as made:
            out = policy(**batch, target_mask_BT=make.targets(batch))
        kept[name] = made.kept_bytes()
        assert out.logprob_BT.requires_grad
    assert kept["full"] < kept["selective"] < kept["none"] and kept["full"] < kept["every second"] < kept["none"], kept
    assert kept["full"] < 0.5 * kept["none"], kept
    # Half of the four layers are whole: half of what is saved, but for a tensor between the two kinds.
    assert kept["budget"] == pytest.approx((kept["full"] + kept["none"]) / 2, abs=0.01 * kept["none"])


def test_the_first_of_every_n_layers(families: dict[str, Any], make: Any) -> None:
    model = make.lm({**families["llama"], "num_hidden_layers": 5}, recompute="selective", recompute_every=2)
    assert [layer.gradient_checkpointing for layer in model.model.layers] == [True, False, True, False, True]


def test_a_budget_keeps_the_last_layers(families: dict[str, Any], make: Any) -> None:
    """What is kept lies between all and nothing of what recomputation saves as the budget says, by whole layers."""
    model = make.lm({**families["llama"], "num_hidden_layers": 5}, recompute="selective", recompute_budget=0.5)
    assert [layer.gradient_checkpointing for layer in model.model.layers] == [True, True, True, False, False]
    assert not any(layer.gradient_checkpointing for layer in make.lm(families["llama"]).model.layers)


def test_bad_values_are_refused(families: dict[str, Any], make: Any) -> None:
    with pytest.raises(ValueError, match=r"model.recompute_every must be >= 1, got 0"):
        ModelConfig(recompute="full", recompute_every=0)
    with pytest.raises(ValueError, match=r"recompute_every=2 has no effect with model.recompute=none"):
        ModelConfig(recompute_every=2)
    with pytest.raises(ValueError, match=r"recompute_every=2 and model.recompute_budget=0.5 both"):
        ModelConfig(recompute="full", recompute_every=2, recompute_budget=0.5)
    for budget in (-0.1, 1.0):
        with pytest.raises(ValueError, match=rf"recompute_budget must be in \[0, 1\), got {budget}.*recompute=none"):
            ModelConfig(recompute="full", recompute_budget=budget)
    with pytest.raises(ValueError, match=r"recompute_budget=0.5 has no effect with model.recompute=none"):
        ModelConfig(recompute_budget=0.5)
    model = make.lm(families["llama"])
    model.model.layers = torch.nn.ModuleList()
    with pytest.raises(ValueError, match=r"no decoder layers are known in LlamaForCausalLM.*Set recompute: none"):
        recompute_blocks(model, "full", every=1, budget=0.0)
