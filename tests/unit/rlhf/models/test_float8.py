"""Float8 products against hand-worked numbers and torchao's own layer; weights, folders and rollouts stay plain."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from rlhf.config import LoRAConfig, ModelConfig, SamplingConfig
from rlhf.data.collate import collate_responses
from rlhf.models import float8
from rlhf.models.build import build_causal_lm
from rlhf.models.float8 import Float8Linear, check_float8, float8_layers, make_recipe, without_float8
from rlhf.models.policy import Policy
from rlhf.rollout.decode import generate, inference
from tests.unit.rlhf.models.test_compiled import RAGGED, batch_of, loss_and_gradients

pytest.importorskip("torchao")
RECIPES = ("tensorwise", "rowwise")


def layer_of(weight_OI: list[list[float]] | Tensor, recipe: str, bias: Tensor | None = None) -> Float8Linear:
    weight_OI = torch.as_tensor(weight_OI)
    layer: Any = nn.Linear(weight_OI.shape[1], weight_OI.shape[0], bias=bias is not None, dtype=weight_OI.dtype)
    with torch.no_grad():
        layer.weight.copy_(weight_OI)
        if bias is not None:
            layer.bias.copy_(bias)
    layer.recipe = make_recipe(recipe, emulate=True)
    layer.__class__ = Float8Linear
    return layer  # type: ignore[no-any-return]


def test_by_hand() -> None:
    """e4m3 reaches 448 and has three bits behind the point: between 2 and 4 it knows quarters, 3.3 becomes 3.25.

    With 448 as the largest of a tensor the scale is 1. In the second row 0.3 is 0.3125 then (steps of 1/32 between 1/4
    and 1/2), with its row's own scale, 2^10 (448 / 0.3 is 1493, rounded down), it is 307.2, which becomes 320.
    """
    input_RI = torch.tensor([[448.0, 3.3], [0.0, 0.3]], requires_grad=True)
    weight_OI = [[448.0, 1.0]]
    assert layer_of(weight_OI, "tensorwise")(input_RI).flatten().tolist() == [448.0 * 448 + 3.25, 0.3125]
    assert layer_of(weight_OI, "rowwise")(input_RI).flatten().tolist() == [448.0 * 448 + 3.25, 320 / 1024]
    # Backward of tensorwise: the incoming gradient is e5m2 with the largest at 57344, so 1 and 0.3 are scaled to 57344
    # and 17203.2, whose neighbours are 16384 and 20480: 0.3 becomes 16384 / 57344.
    layer = layer_of(weight_OI, "tensorwise")
    layer(input_RI).backward(torch.tensor([[1.0], [0.3]]))
    small = 16384 / 57344
    assert input_RI.grad is not None and layer.weight.grad is not None
    torch.testing.assert_close(input_RI.grad, torch.tensor([[448.0, 1.0], [448 * small, small]]), rtol=1e-6, atol=0)
    torch.testing.assert_close(layer.weight.grad, torch.tensor([[448.0, 3.25 + 0.3125 * small]]), rtol=1e-6, atol=0)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_output_and_gradients_are_those_of_torchao(recipe: str, dtype: torch.dtype) -> None:
    from torchao.float8 import Float8LinearConfig
    from torchao.float8.float8_linear import Float8Linear as Theirs

    torch.manual_seed(0)
    input_BTI, weight_OI, bias_O, grad_BTO = (
        torch.randn(shape).to(dtype) for shape in ((2, 5, 32), (48, 32), (48,), (2, 5, 48))
    )
    # Rows and columns of different size: powers of two round alike, so a scale for the wrong ones shows by underflow.
    weight_OI[3] *= 40
    for tensor in (input_BTI, grad_BTO):
        tensor[0, 1] /= 1 << 13
        tensor[..., 5] /= 1 << 13
    weight_OI[7] /= 1 << 13
    weight_OI[:, 9] /= 1 << 13
    ours = layer_of(weight_OI, recipe, bias_O)
    config = Float8LinearConfig.from_recipe_name(recipe)
    object.__setattr__(config, "emulate", True)
    plain = nn.Linear(32, 48, dtype=dtype)
    plain.load_state_dict(ours.state_dict())
    theirs = Theirs.from_float(plain, config=config)
    results = []
    for layer in (ours, theirs):
        input_ = input_BTI.clone().requires_grad_()
        output = layer(input_)
        output.backward(grad_BTO)
        results.append((output.detach(), input_.grad, layer.weight.grad, layer.bias.grad))
    for one, other in zip(*results, strict=True):
        assert one is not None and torch.equal(one, other)
    exact = nn.functional.linear(input_BTI, weight_OI, bias_O).float()
    off = ((results[0][0].float() - exact).norm() / exact.norm()).item()
    assert 0.005 < off < 0.1, off  # e4m3 rounds each factor by up to 1/16: it is float8, and close


@pytest.mark.parametrize("recipe", RECIPES)
def test_rows_depend_on_one_another_under_tensorwise_alone(recipe: str) -> None:
    torch.manual_seed(0)
    layer, input_RI = layer_of(torch.randn(16, 32), recipe), torch.randn(6, 32)
    louder = torch.cat([input_RI[:5], 50 * input_RI[5:]])
    with torch.no_grad():
        assert torch.equal(layer(input_RI)[:5], layer(louder)[:5]) == (recipe == "rowwise")
        assert torch.equal(layer(input_RI[:5]), layer(input_RI)[:5]) or recipe == "tensorwise"


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_is_not_hidden(recipe: str, bad: float) -> None:
    """A cast that saturates would let a step of nonsense through."""
    layer, input_RI = layer_of(torch.randn(16, 32), recipe), torch.randn(6, 32)
    input_RI[2, 3] = bad
    output = layer(input_RI)
    assert not torch.isfinite(output[2]).any()
    output.sum().backward()
    assert layer.weight.grad is not None and not torch.isfinite(layer.weight.grad).all()


def test_no_rows_give_no_output_and_no_gradient() -> None:
    layer = layer_of(torch.randn(16, 32), "tensorwise", torch.randn(16))
    layer(torch.zeros(1, 0, 32)).sum().backward()
    assert layer.weight.grad is not None and not layer.weight.grad.any()


def test_gathered_weights_are_not_kept_for_the_backward_pass() -> None:
    """As ZeRO-3 does it: the tensor is emptied after the forward pass and filled again before the backward pass."""
    torch.manual_seed(0)
    layer, input_RI = layer_of(torch.randn(16, 32), "tensorwise"), torch.randn(6, 32)
    (expected,) = torch.autograd.grad(layer(input_RI).square().sum(), [layer.weight])
    output, whole = layer(input_RI), layer.weight.detach().clone()
    gathered = StorageWeakRef(layer.weight.untyped_storage())
    layer.weight.data = torch.empty(0)
    assert gathered.expired(), "something holds the gathered weights"
    layer.weight.data = whole
    (found,) = torch.autograd.grad(output.square().sum(), [layer.weight])
    assert torch.equal(found, expected)


def test_a_frozen_weight_costs_no_product() -> None:
    from tests.unit.rlhf.models.test_recompute import Counted

    counts = {}
    for trained in (True, False):
        layer, input_RI = layer_of(torch.randn(16, 32), "tensorwise"), torch.randn(6, 32, requires_grad=True)
        layer.weight.requires_grad_(trained)
        output = layer(input_RI)
        with Counted() as counted:
            output.sum().backward()
        counts[trained] = counted.calls["aten.mm"]
    assert counts == {True: 2, False: 1}


def test_which_layers(families: dict[str, dict[str, Any]], make: Any) -> None:
    """OPT of 32 features with an MLP of 64; all but the heads, without those of a name or size."""

    def chosen(**options: Any) -> set[str]:
        model = make.lm(families["opt"], float8="tensorwise", **options)
        found = set(float8_layers(model))
        return {name.split(".", 2)[-1] for name, module in model.named_modules() if module in found}

    attention = {f"layers.{i}.self_attn.{name}_proj" for i in (0, 1) for name in ("q", "k", "v", "out")}
    mlp = {f"layers.{i}.{name}" for i in (0, 1) for name in ("fc1", "fc2")}
    assert chosen() == attention | mlp
    assert chosen(float8_filter_fqns=["self_attn", "layers.1"]) == {"layers.0.fc1", "layers.0.fc2"}
    assert chosen(float8_min_features=32) == attention | mlp
    with pytest.raises(ValueError, match=r"float8=tensorwise: of 12 linear layers.*float8_min_features=33 at least"):
        chosen(float8_min_features=33)
    odd = {**families["llama"], "intermediate_size": 72}
    assert not any("mlp" in n for n, m in make.lm(odd, float8="rowwise").named_modules() if isinstance(m, Float8Linear))
    with pytest.raises(ValueError, match=r"float8_filter_fqns: 'lm_hed' is in no name.*\['fc1', 'fc2', 'k_proj'"):
        chosen(float8_filter_fqns=["lm_hed"])
    with pytest.raises(ValueError, match=r"of 8 linear layers of GPT2LMHeadModel none is left.*Conv1D.*float8: none"):
        make.lm(families["gpt2"], float8="rowwise")
    assert not float8_layers(make.lm(families["opt"]))


def test_settings_without_float8_are_refused() -> None:
    for options in ({"float8_filter_fqns": ["fc"]}, {"float8_min_features": 8}, {"float8_emulate": True}):
        with pytest.raises(ValueError, match=r"have no effect with model.float8=none"):
            ModelConfig(path="x", **options)
    with pytest.raises(ValueError, match="model.float8_min_features must be >= 0, got -1"):
        ModelConfig(path="x", float8="rowwise", float8_min_features=-1)


def test_a_machine_that_cannot_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the capability of an accelerator that is not here."""
    on, emulated = ModelConfig(float8="rowwise"), ModelConfig(float8="rowwise", float8_emulate=True)
    monkeypatch.setattr(torch.version, "hip", None)
    for capability, fine in (((8, 0), False), ((8, 9), True), ((9, 0), True), ((7, 9), False), ((10, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda capability=capability: capability)
        if fine:
            check_float8(on, "cuda")
        else:
            with pytest.raises(ValueError, match=r"float8=rowwise needs.*8.9.*float8: none, or float8_emulate: true"):
                check_float8(on, "cuda")
        check_float8(emulated, "cuda")
    with pytest.raises(ValueError, match="needs an accelerator with float8 products"):
        check_float8(on, "xpu")
    check_float8(on, "cpu")
    with pytest.raises(ValueError, match="float8_emulate is true with compile: true"):
        check_float8(ModelConfig(float8="rowwise", float8_emulate=True, compile=True), "cuda")

    def missing(name: str) -> None:
        raise ImportError(f"No module named {name!r}")

    float8._torchao.cache_clear()
    monkeypatch.setattr(float8.importlib, "import_module", missing)
    try:
        with pytest.raises(ValueError, match=r"needs torchao.*pip install 'rlhf-deepspeed\[float8\]'.*float8: none"):
            check_float8(on, "cpu")
        check_float8(ModelConfig(), "cpu")
    finally:
        float8._torchao.cache_clear()


def test_amd(monkeypatch: pytest.MonkeyPatch) -> None:
    from types import SimpleNamespace

    monkeypatch.setattr(torch.version, "hip", "7.0")
    for name, fine in (("gfx942:sramecc+", True), ("gfx950", True), ("gfx90a", False)):
        properties = SimpleNamespace(gcnArchName=name)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda properties=properties: properties)
        assert float8._has_products("cuda") == fine


@pytest.mark.parametrize("recipe", RECIPES)
def test_weights_names_and_folders_stay_plain(
    families: dict[str, dict[str, Any]], make: Any, tokenizer: Any, tmp_path: Path, recipe: str
) -> None:
    plain, model = make.lm(families["llama"]), make.lm(families["llama"], float8=recipe)
    assert list(model.state_dict()) == list(plain.state_dict())
    assert all(type(p) is nn.Parameter and p.dtype == torch.float32 for p in model.parameters())
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    for folder, each in (("plain", plain), ("float8", model)):
        each.save_pretrained(tmp_path / folder)
    one, two = (load_file(tmp_path / folder / "model.safetensors") for folder in ("plain", "float8"))
    assert one.keys() == two.keys() and all(torch.equal(one[key], two[key]) for key in one)
    assert (tmp_path / "float8/config.json").read_text() == (tmp_path / "plain/config.json").read_text()
    loaded = build_causal_lm(ModelConfig(path=str(tmp_path / "float8")), tokenizer, seed=1)
    assert not float8_layers(loaded)


def test_a_rollout_does_not_see_it(families: dict[str, dict[str, Any]], make: Any) -> None:
    """It decodes what the plain model does, to the bit; around it float8 is on, after an exception too."""
    plain, model = make.lm(families["llama"]), make.lm(families["llama"], float8="tensorwise")
    options: dict[str, Any] = {
        "uids": [0, 1], "sample_ids": [0, 0], "stop_token_ids": [1], "max_new_tokens": 8, "seed": 0, "step": 0,
        "pad_id": 1, "batch_size": 2,
    }  # fmt: skip
    answers = [generate(m, [[5, 6, 7], [8]], sampling=SamplingConfig(), **options) for m in (plain, model)]
    assert [a.token_ids for a in answers[0]] == [a.token_ids for a in answers[1]]
    assert all(a.logprobs == b.logprobs for a, b in zip(*answers, strict=True))
    layers = float8_layers(model)
    with inference(model):
        assert not float8_layers(model)
    with pytest.raises(RuntimeError, match="device lost"), without_float8(model):
        raise RuntimeError("device lost")
    assert float8_layers(model) == layers and len(layers) == 14


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("how", ["selective", "full"])
def test_recomputed_gradients_are_equal_to_the_bit(
    families: dict[str, dict[str, Any]], make: Any, recipe: str, how: str
) -> None:
    for name in ("opt", "llama"):
        policies = [
            Policy(make.lm(families[name], dropout=0.0, float8=recipe, recompute=r)).train() for r in ("none", how)
        ]
        (loss, kept), (other, again) = (loss_and_gradients(p, batch_of(*RAGGED, packed=True)) for p in policies)
        assert loss == other and all(torch.equal(kept[key], again[key]) for key in kept)


def test_adapters_stay_in_their_type_over_a_float8_base(families: dict[str, dict[str, Any]], make: Any) -> None:
    model = make.lm(families["llama"], float8="rowwise", lora=LoRAConfig(rank=2))
    layers = float8_layers(model)
    assert len(layers) == 14 and not any(layer.weight.requires_grad for layer in layers)
    assert all(
        type(m) is nn.Linear for name, m in model.named_modules() if name.endswith(("lora_A.default", "lora_B.default"))
    )
    _, found = loss_and_gradients(Policy(model).train(), batch_of(*RAGGED, packed=True))
    plain = make.lm(families["llama"], lora=LoRAConfig(rank=2))
    _, expected = loss_and_gradients(Policy(plain).train(), batch_of(*RAGGED, packed=True))
    assert found.keys() == expected.keys() and all(".lora_" in key for key in found)
    flat, other = (torch.cat([g.flatten() for g in part.values()]) for part in (found, expected))
    assert 0.9 < torch.cosine_similarity(flat, other, dim=0).item() < 0.9999  # livelier weights than a trained model's


def test_compiled_blocks_compute_it_too(
    families: dict[str, dict[str, Any]], make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import functools

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    torch._dynamo.reset()
    for recipe in RECIPES:
        eager, other = (
            Policy(make.lm(families["llama"], dropout=0.0, float8=recipe, compile=on)).train() for on in (False, True)
        )
        (loss, kept), (found, again) = (loss_and_gradients(p, batch_of(*RAGGED, packed=True)) for p in (eager, other))
        assert found == pytest.approx(loss, rel=1e-5)
        for name, gradient in kept.items():
            assert (again[name] - gradient).norm() <= 1e-3 * gradient.norm() + 1e-7, name
    torch._dynamo.reset()


def losses(recipe: str, tokenizer: Any, *, num_steps: int = 200) -> Tensor:
    """Of a tiny Llama in bfloat16 over float32 master weights, which learns a page by heart."""
    page = Path(__file__).parents[4].joinpath("docs/engine.md").read_text()
    ids = tokenizer(page).input_ids
    sizes = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = {"model_type": "llama", "intermediate_size": 128, "max_position_embeddings": 64, **sizes}
    policy = Policy(build_causal_lm(ModelConfig(config=config, float8=recipe), tokenizer, seed=1))  # type: ignore[arg-type]
    master = [parameter.detach().clone() for parameter in policy.parameters()]
    policy.to(torch.bfloat16).train()
    optimizer = torch.optim.AdamW(master, lr=2e-3, betas=(0.9, 0.95), weight_decay=0.0)
    generator, found = torch.Generator().manual_seed(0), []
    for _ in range(num_steps):
        starts = torch.randint(0, len(ids) - 64, (8,), generator=generator).tolist()
        prompts, responses = [[ids[i]] for i in starts], [ids[i + 1 : i + 64] for i in starts]
        batch = collate_responses(prompts, responses, pad_id=1, device="cpu", packed=True)
        loss, gradients = loss_and_gradients(policy, batch)
        for weight, gradient in zip(master, gradients.values(), strict=True):
            weight.grad = gradient.float()
        torch.nn.utils.clip_grad_norm_(master, 1.0)
        optimizer.step()
        with torch.no_grad():
            for parameter, weight in zip(policy.parameters(), master, strict=True):
                parameter.copy_(weight)
        found.append(loss)
    return torch.tensor(found)


@pytest.mark.slow
def test_200_steps_stay_in_a_band_around_bf16(tokenizer: Any) -> None:
    """The mean loss of each 20 steps is within 0.1 nats and 4 % of bf16's; another seed's is within 0.06."""
    expected = losses("none", tokenizer).view(10, 20).mean(1)
    assert expected[-1] < 0.6 * expected[0]
    for recipe in RECIPES:
        found = losses(recipe, tokenizer).view(10, 20).mean(1)
        off = (found - expected).abs()
        assert off.max() < 0.1 and (off / expected).max() < 0.04, (recipe, found, expected)


@pytest.mark.parametrize("recipe", RECIPES)
def test_kernels_are_called_as_they_demand(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five rows, without emulation: inner sides of 16, the left matrix by rows and the right one by columns."""
    shapes = []

    def kernel(left: Tensor, right: Tensor, *, out_dtype: torch.dtype, **_: Any) -> Tensor:
        assert left.dtype.itemsize == right.dtype.itemsize == 1
        assert left.is_contiguous() and right.t().is_contiguous()
        assert left.shape[1] % 16 == right.shape[0] % 16 == right.shape[1] % 16 == 0
        shapes.append((tuple(left.shape), tuple(right.shape)))
        return torch.zeros(len(left), right.shape[1], dtype=out_dtype)

    monkeypatch.setattr(torch, "_scaled_mm", kernel)
    layer = layer_of(torch.randn(48, 32).bfloat16(), recipe)
    layer.recipe = make_recipe(recipe, emulate=False)
    input_RI = torch.randn(5, 32).bfloat16().requires_grad_()
    layer(input_RI).sum().backward()
    assert shapes == [((5, 32), (32, 48)), ((5, 48), (48, 32)), ((48, 16), (16, 32))]
