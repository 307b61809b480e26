"""What a rollout is planned to take: by hand, and against what it takes."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from rlhf.config import SamplingConfig
from rlhf.rollout import copy as copying
from rlhf.rollout import packed
from rlhf.rollout.cache import SlotCache
from rlhf.rollout.copy import GenerationCopy
from rlhf.rollout.decode import generate
from rlhf.rollout.packed import packed_linears
from rlhf.rollout.plan import Demand, MemoryPlan, cache_bytes, plan_copy, plan_in_place, plan_layerwise

DEMAND = Demand(num_rows=3, num_tokens=20)
NO_ZERO = SimpleNamespace(gathered=lambda weights: nullcontext())


def test_keys_and_values_by_hand(tiny_model):
    """2 (keys, values) x 2 layers x 2 key heads x 8 x 4 bytes = 256 bytes a token; 3 rows of 20 tokens."""
    model = tiny_model("llama")
    assert cache_bytes(model, DEMAND, num_ranks=1, device_type="cpu") == 256 * 3 * 20
    # Two ranks: half of the heads, and the rows of both.
    assert cache_bytes(model, DEMAND, num_ranks=2, device_type="cpu") == 256 * 3 * 20
    # On a CPU slots are float32; elsewhere, and in padded batches, they have the model's type.
    model = model.to(torch.bfloat16)
    assert cache_bytes(model, DEMAND, num_ranks=1, device_type="cpu") == 256 * 3 * 20
    assert cache_bytes(model, DEMAND, num_ranks=1, device_type="cuda") == 128 * 3 * 20
    bloom = tiny_model("bloom").to(torch.bfloat16)  # 4 key heads of 8
    assert cache_bytes(bloom, DEMAND, num_ranks=1, device_type="cpu") == 256 * 3 * 20


def test_a_copy_by_hand(tiny_model, monkeypatch):
    """A GPT-2 of 1 layer, hidden 32, vocabulary 97, 64 positions."""
    monkeypatch.setattr(packed, "onednn_multiplies", lambda dtype: True)
    monkeypatch.setattr(packed, "FEWEST_WEIGHTS", 4096)
    model = tiny_model("gpt2", n_layer=1)
    block = 32 * 96 + 96 + 32 * 32 + 32 + 32 * 128 + 128 + 128 * 32 + 32 + 4 * 32
    weights = 97 * 32 + 64 * 32 + block + 64  # the head is tied
    plan = plan_copy(GenerationCopy(model), DEMAND, num_ranks=1, device_type="cpu")
    cache = 2 * 32 * 4 * 60
    # Of the linear layers only c_fc and c_proj of the MLP have as many as 4096 weights.
    assert plan == MemoryPlan(weights=4 * weights, gathered=0, cache=cache, packed=4 * 2 * 4096)
    assert plan.peak == plan.weights + plan.cache + plan.packed
    # In bfloat16 all of them are packed, and the head.
    half = plan_copy(GenerationCopy(model, dtype=torch.bfloat16), DEMAND, num_ranks=1, device_type="cpu")
    assert half.weights == 2 * weights and half.packed == 2 * (32 * 96 + 32 * 32 + 2 * 4096 + 97 * 32)
    # Two ranks: half of every layer, 49 rows of the vocabulary; norms, positions and two biases are whole.
    shared = plan_copy(GenerationCopy(model, num_ranks=2), DEMAND, num_ranks=2, device_type="cuda")
    layers = (32 * 96 + 96 + 32 * 32 + 32 * 128 + 128 + 128 * 32) // 2 + 32 + 32 + 4 * 32
    assert shared.weights == 4 * (49 * 32 + 64 * 32 + layers + 64) and shared.packed == 0


def test_a_plan_says_its_peak_and_its_parts():
    plan = MemoryPlan(weights=10**9, gathered=5 * 10**8, cache=10**8, packed=2 * 10**8)
    assert plan.peak == 10**9 + 5 * 10**8  # gathering is over when decoding begins
    assert str(plan) == "weights 1.00 GB, keys and values 100.0 MB, packed copies 200.0 MB, gathered at a time 500.0 MB"
    layerwise = MemoryPlan(weights=0, gathered=5 * 10**8, cache=10**8, packed=0, layerwise=True)
    assert layerwise.peak == 6 * 10**8


def test_layer_by_layer(tiny_model):
    """As many weights as DeepSpeed lets live, but a whole one at least, and no more than there are."""
    model = tiny_model("opt", tie_word_embeddings=False)
    sizes = sorted(p.numel() for p in model.parameters())

    def gathered(max_live_weights):
        plan = plan_layerwise(model, DEMAND, max_live_weights=max_live_weights, device_type="cpu")
        assert plan.layerwise and plan.weights == plan.packed == 0 < plan.cache
        return plan.gathered

    assert [gathered(n) for n in (0, 5000, 10**9)] == [4 * sizes[-1], 20_000, 4 * sum(sizes)]


def test_what_is_gathered_at_a_time(tiny_model, monkeypatch):
    """Buckets of sharded weights; one that is larger than a bucket comes alone."""
    model = tiny_model("opt")
    for parameter in model.parameters():  # as ZeRO-3 leaves them
        parameter.ds_id, parameter.ds_shape = id(parameter), parameter.shape
        parameter.data = torch.empty(0)
    monkeypatch.setattr(copying, "BUCKET_WEIGHTS", 1000)
    plan = plan_copy(GenerationCopy(model, dtype=torch.bfloat16), DEMAND, num_ranks=1, device_type="cuda")
    assert plan.gathered == 97 * 32 * 4, "in the type that is trained"
    monkeypatch.setattr(copying, "BUCKET_WEIGHTS", 10**9)
    whole = plan_copy(GenerationCopy(model), DEMAND, num_ranks=1, device_type="cuda")
    assert whole.gathered == whole.weights == whole.peak - max(whole.gathered, whole.cache)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_the_plan_is_what_is_allocated(tiny_model, family, monkeypatch, dtype):
    monkeypatch.setattr(packed, "FEWEST_WEIGHTS", 2000)
    model = tiny_model(family).eval()
    copy = GenerationCopy(model, dtype=dtype)
    plan = plan_copy(copy, DEMAND, num_ranks=1, device_type="cpu")
    filled = copy.fill(NO_ZERO)
    assert plan.weights == sum(p.untyped_storage().nbytes() for p in {id(p): p for p in filled.parameters()}.values())
    with packed_linears(filled) as packing:
        assert plan.packed == packing.num_bytes
    caches = []
    init = SlotCache.__init__
    monkeypatch.setattr(SlotCache, "__init__", lambda self, **named: (caches.append(self), init(self, **named))[0])
    sampling = {"sampling": SamplingConfig(), "stop_token_ids": (), "seed": 0, "step": 0, "pad_id": 1}
    generate(
        filled, [[5] * 14, [6] * 3, [7]], uids=[0, 1, 2], sample_ids=[0] * 3, max_new_tokens=6, batch_size=3, **sampling
    )
    if family != "bloom":  # its batch has the shape of the longest row too, but no slots
        (cache,) = caches
        assert plan.cache == sum(x.untyped_storage().nbytes() for pair in cache.buffers for x in pair)
    in_place = plan_in_place(model, DEMAND, device_type="cpu")
    assert (in_place.weights, in_place.gathered) == (0, 0)
    if dtype is None:
        assert (in_place.cache, in_place.packed) == (plan.cache, plan.packed)
