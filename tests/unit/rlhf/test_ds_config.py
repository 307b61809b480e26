import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rlhf import ds_config
from rlhf.config import OptimConfig

OPTIM = OptimConfig(lr=1e-4, weight_decay=0.1)
THRESHOLDS = (
    "stage3_param_persistence_threshold",
    "stage3_max_live_parameters",
    "stage3_max_reuse_distance",
    "stage3_prefetch_bucket_size",
)


def resolved(raw: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
    return ds_config.resolve(raw, **{"optim": OPTIM, "world_size": 2, "trainable": True, **kwargs})


def stage(number: int, **sections: Any) -> dict[str, Any]:
    zero = {"stage": number, **sections.pop("zero", {})}
    return {"train_micro_batch_size_per_gpu": 4, "zero_optimization": zero, **sections}


@pytest.mark.parametrize("name", ds_config.names())
def test_every_packaged_json_is_accepted_by_deepspeed_as_it_stands_and_resolved(name: str) -> None:
    from deepspeed.runtime.config import DeepSpeedConfig  # noqa: TID251  DeepSpeed itself is the judge

    raw = ds_config.load(name)
    parsed = DeepSpeedConfig(raw)
    assert parsed.zero_optimization_stage == ds_config.zero_stage(raw)
    frozen = "frozen" in name
    final = resolved(raw, world_size=1, trainable=not frozen, optim=None if frozen else OPTIM)
    assert DeepSpeedConfig(final).gradient_accumulation_steps == 1
    on_cpu = name.startswith("cpu")
    assert ds_config.dtype_name(raw) == ("float32" if on_cpu and "bf16" not in name else "bfloat16")
    if on_cpu and ds_config.zero_stage(raw) == 3:
        assert [raw["zero_optimization"][key] for key in THRESHOLDS] == [0, 0, 0, 0]


def test_the_names_that_recipes_use_exist() -> None:
    wanted = {"zero0", "zero1", "zero2", "zero3", "zero2_offload", "zero3_offload", "zero3_hybrid", "frozen"}
    wanted |= {"frozen_zero3", "cpu_zero0", "cpu_zero1", "cpu_zero2", "cpu_zero3", "cpu_zero3_hybrid", "cpu_frozen"}
    assert wanted <= set(ds_config.names())


def test_resolve_by_hand() -> None:
    final = resolved(stage(2, bf16={"enabled": True}), world_size=8)
    assert final["train_batch_size"] == 32 and final["gradient_accumulation_steps"] == 1
    assert final["gradient_clipping"] == 0.0, "the engine clips"
    assert final["optimizer"] == {
        "type": "AdamW",
        "params": {
            "lr": 1e-4,
            "betas": [0.9, 0.95],
            "eps": 1e-8,
            "weight_decay": 0.1,
            "torch_adam": True,
            "fused": True,
        },
    }


def test_an_adam_is_compiled_only_on_request() -> None:
    offload = {"zero": {"offload_optimizer": {"device": "cpu"}}}
    assert resolved(stage(2, **offload))["optimizer"]["params"]["torch_adam"]
    on_request = resolved(stage(2, **offload, zero_force_ds_cpu_optimizer=True))
    assert "torch_adam" not in on_request["optimizer"]["params"]
    # The request is about offload; without it torch's Adam runs where the weights are.
    assert resolved(stage(2, zero_force_ds_cpu_optimizer=True))["optimizer"]["params"]["torch_adam"]


@pytest.mark.parametrize(
    ("name", "sections", "said"),
    [
        ("adamw_8bit", {}, "its kernel works on the accelerator's memory"),
        ("muon", {"zero_force_ds_cpu_optimizer": True}, "which is DeepSpeed's CPU Adam"),
    ],
)
def test_other_optimisers_with_offload(name: Any, sections: dict[str, Any], said: str) -> None:
    optim = OptimConfig(lr=1e-4, name=name)
    offload = stage(2, zero={"offload_optimizer": {"device": "cpu"}}, **sections)
    with pytest.raises(ValueError, match=f"optim.name={name} .*{said}"):
        resolved(offload, optim=optim)


def test_an_optimiser_of_ours_is_not_deepspeeds_to_make() -> None:
    """DeepSpeed refuses to offload an object unless it is told that its own Adam is not wanted."""
    optim = OptimConfig(lr=1e-4, name="muon")
    final = resolved(stage(2, zero={"offload_optimizer": {"device": "cpu"}}), optim=optim)
    assert "optimizer" not in final and final["zero_force_ds_cpu_optimizer"] is False
    assert resolved(json.loads(json.dumps(final)), optim=optim) == final


def test_8_bit_moments_need_bitsandbytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ds_config.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"needs bitsandbytes, .*'rlhf-deepspeed\[bitsandbytes\]'"):
        resolved(stage(2), optim=OptimConfig(lr=1e-4, name="adamw_8bit"))


def test_resolving_twice_changes_nothing_and_other_values_are_an_error() -> None:
    final = json.loads(json.dumps(resolved(stage(3, hybrid_engine={"enabled": True}))))
    assert resolved(final) == final
    with pytest.raises(ValueError, match=r"`train_batch_size` was resolved to 8 by an earlier run, this one needs 16"):
        resolved(final, world_size=4)
    with pytest.raises(ValueError, match="`optimizer` was resolved to"):
        resolved(final, optim=OptimConfig(lr=2e-4))


def test_the_raw_dict_is_not_changed() -> None:
    raw = stage(2)
    before = json.dumps(raw)
    resolved(raw)
    assert json.dumps(raw) == before


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"zero_optimisation": {"stage": 3}}, r"unknown key `zero_optimisation`.*Did you mean `zero_optimization`"),
        ({"bf61": {"enabled": True}}, r"unknown key `bf61`.*Did you mean `bf16`"),
        ({"optimizer": {"type": "AdamW"}}, r"`optimizer` does not belong here.*Remove it"),
        ({"gradient_clipping": 1.0}, r"`gradient_clipping` does not belong here: the limit is `optim.clip_norm`"),
        ({"gradient_accumulation_steps": 4}, "`gradient_accumulation_steps` does not belong here"),
        ({"train_batch_size": 4}, "`train_batch_size` does not belong here"),
        ({"scheduler": {"type": "WarmupLR"}}, "`scheduler` does not belong here"),
        ({"gradient_allreduce_op": "sum"}, "`gradient_allreduce_op` is not supported"),
        ({"zero_optimization": {"stage": "auto"}}, r'`zero_optimization.stage` is "auto".*Give a value'),
        ({"train_micro_batch_size_per_gpu": "auto"}, r'`train_micro_batch_size_per_gpu` is "auto"'),
        ({"train_micro_batch_size_per_gpu": 0}, "must be an integer >= 1, got 0"),
        ({"zero_optimization": {"stage": 4}}, "must be 0, 1, 2 or 3, got 4"),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, "both enabled"),
        ({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}}}, "nvme.*not be resumed. Use cpu"),
        ({"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}, "nvme without `nvme_path`. Name a"),
        (
            {"zero_optimization": {"stage": 2, "offload_param": {"device": "nvme"}}},
            "offload_param` needs stage 3, got 2",
        ),
        ({"zero_optimization": {"stage": 0, "offload_optimizer": {"device": "cpu"}}}, "needs a stage of 1, 2 or 3"),
        ({"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}, "needs stage 3, got 2"),
        ({"tensor_parallel": {"autotp_size": 2}}, "`tensor_parallel` does not belong here: .*`parallel.tp`"),
        ({"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}, "at stage 0 .* bfloat16: .*stage 2"),
        ({"data_types": {"grad_accum_dtype": "float"}}, "must be one of fp32, bf16, fp16, got 'float'"),
        ({"hybrid_engine": {"enable": True}}, r"unknown key `hybrid_engine.enable`. Did you mean `enabled`"),
        ({"hybrid_engine": {"enabled": True, "max_out_tokens": 0}}, "max_out_tokens` must be >= 1"),
        ({"hybrid_engine": {"enabled": True, "enable_cuda_graph": True}}, "must be false"),
    ],
)
def test_refused(raw: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolved({**stage(0), **raw})


def test_a_missing_micro_batch() -> None:
    with pytest.raises(ValueError, match=r"`train_micro_batch_size_per_gpu` must be an integer >= 1, got None"):
        ds_config.check({})


def test_tensor_parallel_generation_is_refused() -> None:
    """E2: DeepSpeed gathers the ids over the group, not the mask; the YAML's rollout.tensor_parallel is another way."""
    with pytest.raises(ValueError, match=r"inference_tp_size` must be 1, got 2.*Set 1"):
        resolved(stage(3, hybrid_engine={"enabled": True, "inference_tp_size": 2}))


def test_zero2_hybrid_offload_without_lora_is_refused() -> None:
    """E22: with the reason, before anything is loaded."""
    raw = stage(2, zero={"offload_optimizer": {"device": "cpu"}}, hybrid_engine={"enabled": True})
    with pytest.raises(ValueError, match=r"ZeRO-2 with the hybrid engine.*unstable.*Use ZeRO-3, or LoRA"):
        resolved(raw)
    assert resolved(raw, lora=True)["hybrid_engine"] == {"enabled": True}
    for other in (stage(3), stage(2)):
        raw["zero_optimization"] = other["zero_optimization"]
        resolved(raw)


@pytest.mark.parametrize("number", [1, 2])
def test_a_frozen_model_has_nothing_to_shard_at_stages_1_and_2(number: int) -> None:
    with pytest.raises(ValueError, match="a frozen model has none. Use 0 or 3"):
        resolved(stage(number), optim=None, trainable=False)
    with pytest.raises(ValueError, match="offload_optimizer` is set, and a frozen model has none"):
        resolved(stage(3, zero={"offload_optimizer": {"device": "cpu"}}), optim=None, trainable=False)


def test_hybrid_engine_section() -> None:
    assert not ds_config.hybrid_engine(stage(3)).enabled
    assert ds_config.hybrid_engine(ds_config.load("zero3_hybrid")).enabled


def test_load(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text('{"train_micro_batch_size_per_gpu": 3}')
    assert ds_config.micro_batch_size(ds_config.load(path)) == 3 and ds_config.zero_stage(ds_config.load(path)) == 0
    with pytest.raises(FileNotFoundError, match=r"no DeepSpeed JSON is called 'zero33'. Did you mean `zero3`"):
        ds_config.load("zero33")
    with pytest.raises(FileNotFoundError, match=r"nothing.json does not exist. Packaged names: "):
        ds_config.load(tmp_path / "nothing.json")
    for text, message in (("{", "not valid JSON"), ("[]", "is a list"), ('{"bf16": 1, "bf16": 2}', "stands twice")):
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            ds_config.load(path)


def test_no_torch_is_imported() -> None:
    code = (
        "import sys; from rlhf import ds_config, schedule; ds_config.load('zero3'); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
