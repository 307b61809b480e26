"""The three steps, what makes one fit, and the search."""

import copy
from dataclasses import replace
from typing import Any

import pytest

from launch.recipe import recipe_names
from rlhf import cli, ds_config
from rlhf.plan import flops
from rlhf.plan.hardware import load_devices
from rlhf.plan.layout import OURS
from rlhf.plan.search import decide, layouts, reason, search
from rlhf.plan.setting import Choices, Setting, from_models, from_recipe, stack_of, with_lengths
from rlhf.plan.shapes import MODELS, gpt
from rlhf.plan.step import step
from rlhf.plan.steps import plan_step, remedies
from rlhf.plan.systems import MEGATRON_CORE

DEVICES = load_devices()


def setting(gpus: int = 8, gpu: str = "h100-sxm", actor: str = "opt-13b", **choices: Any) -> Setting:
    return from_models(actor, "opt-350m", DEVICES[gpu], gpus, Choices(**choices))


def test_hours_and_dollars_by_hand() -> None:
    """64 rows a step, 640 rows: 10 steps; 8 devices at 3 dollars."""
    plan = plan_step(setting(demonstrations=640), 1)
    assert (plan.rows, plan.steps) == (64, 10)
    assert plan.hours == pytest.approx(10 * plan.step_seconds / 3600)
    assert plan.cost == pytest.approx(plan.hours * 8 * 3)
    assert plan.tokens_per_gpu == pytest.approx(64 * 512 / 8 / plan.step_seconds)
    needed = 64 * flops.sft_row(MODELS["opt-13b"], 256, 256)
    assert plan.model_utilisation == pytest.approx(needed / (plan.step_seconds * 8 * 989e12))
    # All is recomputed but the head: between 1 and 4/3.
    assert 1.3 < plan.hardware_utilisation / plan.model_utilisation < 4 / 3


def test_pairs_are_two_rows() -> None:
    plan = plan_step(setting(), 2)
    assert plan.tokens == 2 * plan.rows * 512
    assert plan.model_flops == plan.rows * flops.preference_row(MODELS["opt-350m"], 256, 256, 256)


def test_an_iteration_has_all_phases() -> None:
    plan = plan_step(setting(), 3)
    assert set(plan.seconds) == {"gather", "prefill", "decode", "score", "update actor", "update critic"}
    assert plan.rows == 512
    assert set(plan.memory) == {"rollout", "score", "update"}
    # The rollout holds the whole actor; the update its activations.
    assert plan.memory["rollout"].gathered == 2 * MODELS["opt-13b"].parameters
    assert plan.memory["update"].activations > 0


def test_weights_that_stay_sharded_are_gathered_for_every_token() -> None:
    """OPT-66B's 131 GB do not fit on 80: 256 tokens a row, each of which passes all weights over the network."""
    made = setting(gpus=64, gpu="a100-80", actor="opt-66b")
    assert not made.ppo.hybrid and setting().ppo.hybrid
    plan = plan_step(made, 3)
    assert plan.missing <= 0
    assert plan.seconds["gather"] > 256 * 63 / 64 * 2 * 65.7e9 / made.device.node_bandwidth
    whole = plan_step(replace(made, ppo=replace(made.ppo, hybrid=True)), 3)
    assert whole.seconds["gather"] < plan.seconds["gather"] / 50
    assert whole.memory["rollout"].gathered > 131e9 > plan.memory["rollout"].gathered


def test_the_reference_of_an_adapted_actor_is_the_actor() -> None:
    plain, adapted = (plan_step(setting(lora=rank), 3).memory["score"].weights for rank in (0, 128))
    reference = 2 * MODELS["opt-13b"].parameters / 8
    adapters = 2 * MODELS["opt-13b"].lora_parameters(128) / 8
    assert plain - adapted == pytest.approx(reference - adapters)


def test_a_prompt_more_for_each_device_costs_time() -> None:
    few, many = setting(), setting()
    many = replace(many, ppo=replace(many.ppo, prompts_per_step=1024))
    assert plan_step(many, 3).step_seconds > 1.8 * plan_step(few, 3).step_seconds


def test_remedies_fit_and_the_cheapest_is_first() -> None:
    plan = plan_step(setting(), 3)
    assert plan.missing > 0
    found = remedies(setting(), 3)
    assert found and all(remedy.plan.missing <= 0 for remedy in found)
    assert [r.plan.cost for r in found] == sorted(r.plan.cost for r in found)
    assert any("rollout.batch_size 16" in r.change for r in found)


def test_two_changes_where_one_is_not_enough() -> None:
    large = setting(gpus=8, gpu="a100-40", actor="opt-66b", zero=2)
    assert plan_step(large, 1).missing > 0
    found = remedies(large, 1)
    assert found and all(" and " in remedy.change for remedy in found)


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_is_planned(name: str) -> None:
    read, stages, gpus = cli._read_recipe(name)
    if name == "smollm2_cpu":
        return  # its model is a folder that the recipe downloads
    try:
        made = from_recipe(read, stages, DEVICES["h100-sxm"], gpus, load=ds_config.load)
    except ValueError as error:
        pytest.skip(str(error))
    plans = [plan_step(made, number) for number in made.steps]
    assert len(plans) == len(stages) and all(plan.hours > 0 and plan.peak_memory > 0 for plan in plans)


def test_the_reference_recipe_is_read_as_written() -> None:
    made = from_recipe(*cli._read_recipe("opt_13b_350m_single_node")[:2], DEVICES["a100-80"], 8, load=ds_config.load)
    assert (made.actor, made.reward) == (MODELS["opt-13b"], MODELS["opt-350m"])
    sft, ppo = made.sft.layout, made.ppo
    assert (sft.zero, sft.micro_batch, sft.accumulation, sft.recompute, sft.dtype) == (3, 4, 2, "full", "bf16")
    assert (ppo.actor.zero, ppo.critic.zero, ppo.reference.zero, ppo.reward.zero) == (3, 0, 3, 0)
    assert (ppo.prompts_per_step, ppo.decode_batch, ppo.score_batch, ppo.minibatch) == (512, 64, 16, 64)
    assert ppo.prompts == 240 * 512


def test_each_role_s_optimiser_is_planned() -> None:
    name, stages, gpus = cli._read_recipe("opt_13b_350m_single_node")
    plain = from_recipe(name, stages, DEVICES["a100-80"], gpus, load=ds_config.load)
    others = copy.deepcopy(dict(stages))
    others["sft"]["optim"]["name"] = "muon"
    others["ppo"]["critic_optim"]["name"] = "adamw_8bit"
    made = from_recipe(name, others, DEVICES["a100-80"], gpus, load=ds_config.load)
    roles = (made.sft, made.preference, made.ppo.actor, made.ppo.critic, made.ppo.reward)
    layouts = [getattr(role, "layout", role) for role in roles]
    assert [layout.optimizer for layout in layouts] == ["muon", "adamw", "adamw", "adamw_8bit", "adamw"]
    assert plan_step(plain, 1).peak_memory - plan_step(made, 1).peak_memory > 12e9 * 4 / gpus
    assert plan_step(plain, 3).peak_memory - plan_step(made, 3).peak_memory > 330e6 * 5.9


def test_half_of_the_layers_recomputed_are_half_of_its_flops() -> None:
    plans = [
        plan_step(replace(made, sft=replace(made.sft, layout=replace(made.sft.layout, **changes))), 1)
        for made in [from_models("opt-13b", "opt-350m", DEVICES["a100-80"], 8, Choices())]
        for changes in ({"recompute": "full"}, {"recompute": "full", "recompute_budget": 0.5})
    ]
    whole, half = (plan.hardware_flops - plan.model_flops for plan in plans)
    assert whole > 0 and half == pytest.approx(whole / 2)


def test_ranks_that_share_weights_are_one_replica_of_this_code() -> None:
    """8 ranks in groups of 2: half the weights and optimiser on each, sums of activations, and frozen roles whole."""
    name, stages, _ = cli._read_recipe("opt_13b_350m_single_node")
    halves = {stage: {**config, "parallel": {"tp": 2}} for stage, config in stages.items()}
    alone, made = (from_recipe(name, one, DEVICES["a100-80"], 8, load=ds_config.load) for one in (stages, halves))
    for layout in (made.sft.layout, made.preference.layout, made.ppo.actor, made.ppo.critic):
        assert (layout.tensor, layout.data, layout.shards) == (2, 4, 4) and stack_of(layout) is OURS
    assert made.ppo.reference.tensor == made.ppo.reward.tensor == 1
    assert made.sft.layout.global_batch == alone.sft.layout.global_batch
    assert made.sft.layout.accumulation == 2 * alone.sft.layout.accumulation
    assert plan_step(made, 1).seconds["tensor"] > 0 == plan_step(alone, 1).seconds["tensor"]
    assert stack_of(replace(made.sft.layout, sequence_parallel=True)) is MEGATRON_CORE


def test_ranks_that_share_rows_are_one_replica() -> None:
    """8 ranks in groups of 2 are 4 replicas: twice the micro-batches, half of each one's tokens on a rank."""
    name, stages, _ = cli._read_recipe("opt_13b_350m_single_node")
    shared = {**stages, "sft": {**stages["sft"], "parallel": {"sp": 2}}}
    alone, pairs = (
        from_recipe(name, one, DEVICES["a100-80"], 8, load=ds_config.load).sft.layout for one in (stages, shared)
    )
    assert pairs.context == 2 and pairs.data == 4 and pairs.global_batch == alone.global_batch
    assert pairs.accumulation == 2 * alone.accumulation and pairs.tokens == alone.tokens / 2
    assert pairs.shards == alone.shards == 8
    made = from_recipe(name, shared, DEVICES["a100-80"], 8, load=ds_config.load)
    # 16 rows of a group; on each rank a micro-batch of the tokens of one row is two rows of the group.
    again = with_lengths(made, prompt=28, response=100, micro_batch_rows=1.0).sft.layout
    assert again.accumulation == 8 and again.micro_batch == 2
    with pytest.raises(ValueError, match="1 ranks do not split into"):
        from_recipe(name, shared, DEVICES["a100-80"], 1, load=ds_config.load)


def test_ranks_of_a_pipeline_are_one_replica_of_this_code_s() -> None:
    """8 ranks in pipelines of 2 are 4 replicas with twice the micro-batches of the same tokens."""
    name, stages, _ = cli._read_recipe("opt_13b_350m_single_node")
    cut = {**stages, "sft": {**stages["sft"], "parallel": {"pp": 2}, "deepspeed": "zero1"}}
    alone, pairs = (
        from_recipe(name, one, DEVICES["a100-80"], 8, load=ds_config.load).sft.layout for one in (stages, cut)
    )
    assert pairs.pipeline == 2 and pairs.data == 4 and pairs.global_batch == alone.global_batch
    assert pairs.accumulation * pairs.micro_batch == 2 * alone.accumulation * alone.micro_batch
    assert stack_of(pairs) is OURS and stack_of(replace(pairs, virtual=2)) is not OURS


def test_shared_rows_in_all_steps() -> None:
    """Twice the row on twice the ranks a row: as many tokens on each; a rollout knows nothing of it."""
    alone, pairs = (
        from_models("llama3-8b", "llama3-8b", DEVICES["h100-sxm"], 8, Choices(sp=sp, micro_batch=2, zero=3))
        for sp in (1, 2)
    )
    for layout in (pairs.sft.layout, pairs.preference.layout, pairs.ppo.actor, pairs.ppo.critic, pairs.ppo.reward):
        assert layout.context == 2 and layout.data == 4 and layout.shards == 8
    first, second = plan_step(alone, 3), plan_step(pairs, 3)
    assert first.rows == second.rows
    for phase in ("gather", "prefill", "decode"):
        assert second.seconds[phase] == pytest.approx(first.seconds[phase])
    assert second.memory["rollout"].cache == first.memory["rollout"].cache
    assert second.memory["score"].working == pytest.approx(first.memory["score"].working / 2)
    with pytest.raises(ValueError, match="--sp 3: 32 attention heads and 8 key and value heads do not both divide"):
        from_models("llama3-8b", "llama3-8b", DEVICES["h100-sxm"], 6, Choices(sp=3))


def test_a_recipe_may_leave_out_the_last_steps() -> None:
    """Step 1 is planned as if the others were there; they are not planned at all."""
    name, stages, gpus = cli._read_recipe("opt_13b_350m_single_node")
    whole = from_recipe(name, stages, DEVICES["a100-80"], gpus, load=ds_config.load)
    for left, steps in (({"sft"}, (1,)), ({"sft", "reward"}, (1, 2)), ({"sft", "ppo"}, (1, 3))):
        part = {stage: config for stage, config in stages.items() if stage in left}
        made = from_recipe(name, part, DEVICES["a100-80"], gpus, load=ds_config.load)
        assert made.steps == steps and (made.sft, made.actor) == (whole.sft, whole.actor)
        assert made.ppo == whole.ppo or 3 not in steps
        assert (made.preference, made.reward) == (whole.preference, whole.reward) or 2 not in steps
    with pytest.raises(ValueError, match="recipe x has no sft"):
        from_recipe("x", {"ppo": {}}, DEVICES["a100-80"], 8, load=ds_config.load)


def test_search_ranks_what_fits() -> None:
    found = search(MODELS["opt-13b"], DEVICES["h100-sxm"], 8, length=512, global_batch=64)
    assert found.tried == len(found.ranked) + found.too_large
    rates = [candidate.tokens_per_gpu for candidate in found.ranked]
    assert rates == sorted(rates, reverse=True)
    assert all(candidate.memory <= 80e9 for candidate in found.ranked)
    assert reason(found.ranked[0], found.ranked[-1]) != "as fast"


def test_search_says_what_is_nearest() -> None:
    found = search(MODELS["gpt-1t"], DEVICES["a6000"], 8, length=512, global_batch=8)
    assert not found.ranked and found.nearest is not None
    assert found.nearest.memory > 48e9


def test_layouts_split_everything_evenly(make_device: Any) -> None:
    shape = gpt(6, 64, 4)
    for layout in layouts(shape, make_device(), 8, length=8, global_batch=16, dtype="bf16"):
        assert layout.data * layout.model_ranks == 8
        assert shape.layers % layout.pipeline == 0 and shape.heads % layout.tensor == 0
        assert abs(layout.global_batch - 16) <= 1.6
        assert layout.zero <= 1 or layout.pipeline == 1


def test_a_decision_in_words() -> None:
    assert "ZeRO alone" in decide(1.3e9, DEVICES["a100-80"], 8)
    assert "pipeline between machines" in decide(1e12, DEVICES["mi250x-gcd"], 3072)
    assert "slow network" in decide(30e9, DEVICES["a6000"], 256)


def test_e16_zero3_can_need_more_memory_than_zero2() -> None:
    """OPT-125M on two devices: ZeRO-3 saves half of the weights and gathers all of them for a rollout. Said before."""
    found = []
    for zero in (2, 3):
        made = setting(2, "a100-40", "opt-125m", zero=zero)
        whole = replace(made, ppo=replace(made.ppo, reference=replace(made.ppo.reference, zero=0)))
        found.append(plan_step(whole, 3).memory["rollout"])
    zero2, zero3 = found
    assert zero2.gathered == 0 and zero3.gathered == 2 * MODELS["opt-125m"].parameters
    assert zero3.weights + zero3.gathered > zero2.weights


def test_the_prompt_of_a_pair_is_computed_once() -> None:
    """256 + 256 tokens: two sequences of 128 + 256 take the time; what is needed is counted in full."""
    whole = setting()
    plan = plan_step(whole, 2)
    pair = replace(whole.preference.layout, micro_batch=2 * whole.preference.layout.micro_batch, length=384)
    expected = step(whole.reward, pair, whole.device, replace(stack_of(pair), logit_bytes=0), with_head=False)
    assert plan.step_seconds == expected.total and plan.tokens == plan.rows * 1024


def test_rows_of_another_length_are_cut_into_micro_batches_anew() -> None:
    """16 rows a rank of 512 tokens in micro-batches of 4: of 128 tokens all fit one; as measured, 6 and 5 and 5."""
    whole = setting()
    whole = replace(whole, sft=replace(whole.sft, layout=replace(whole.sft.layout, micro_batch=4, accumulation=4)))
    short = with_lengths(whole, prompt=27.6, response=100.0)
    layout = short.sft.layout
    assert (short.prompt, short.response, layout.length) == (28, 100, 128)
    assert (layout.micro_batch, layout.accumulation) == (16, 1)
    assert short.ppo.score_batch == 4 * whole.ppo.score_batch
    measured = with_lengths(whole, prompt=28, response=100, micro_batch_rows=5.3).sft.layout
    assert (measured.micro_batch, measured.accumulation) == (6, 3)


def test_adapters_need_fewer_flops_in_step_3_too() -> None:
    plan = plan_step(setting(lora=8), 3)
    row = flops.ppo_row(MODELS["opt-13b"], MODELS["opt-350m"], 256, 256, lora=8)
    assert plan.model_flops == pytest.approx(plan.rows * row)
    assert plan.model_flops < 0.9 * plan_step(setting(), 3).model_flops


def test_ranks_with_fewer_rows_than_a_micro_batch_take_smaller_ones() -> None:
    """64 rows on 32 ranks are 2 each, whatever fits; on 128 ranks one each, which is the least a rank can do."""
    few = setting(gpus=32, micro_batch=4, global_batch=64).sft.layout
    assert (few.micro_batch, few.accumulation, few.global_batch) == (2, 1, 64)
    assert setting(gpus=128, micro_batch=4, global_batch=64).sft.layout.global_batch == 128
    whole = setting(gpus=8, micro_batch=4, global_batch=64).sft.layout
    assert (whole.micro_batch, whole.accumulation) == (4, 2)


def without_critic() -> tuple[Setting, Setting]:
    """The reference recipe as it is, and with an algorithm that has no critic."""
    name, stages, gpus = cli._read_recipe("opt_13b_350m_single_node")
    others = copy.deepcopy(dict(stages))
    others["ppo"].update(algorithm="rloo", critic_optim=None)
    others["ppo"]["deepspeed"]["critic"] = None
    with_it, without = (
        from_recipe(name, found, DEVICES["a100-80"], gpus, load=ds_config.load) for found in (stages, others)
    )
    return with_it, without


def test_an_algorithm_without_a_critic_is_planned_without_one() -> None:
    """OPT-350M at ZeRO-0 in bf16: 16 bytes a parameter of states less, one update and one scoring forward less."""
    with_it, without = without_critic()
    assert with_it.ppo.critic is not None and without.ppo.critic is None
    plans = [plan_step(made, 3) for made in (with_it, without)]
    parameters = MODELS["opt-350m"].backbone_parameters
    for phase in ("rollout", "score"):
        first, second = (plan.memory[phase] for plan in plans)
        states = [part.weights + part.optimizer for part in (first, second)]
        assert states[0] - states[1] == pytest.approx(14 * parameters, rel=0.05), phase
    assert "update critic" in plans[0].seconds and "update critic" not in plans[1].seconds
    assert plans[1].seconds["score"] < plans[0].seconds["score"]
    assert plans[1].seconds["update actor"] == plans[0].seconds["update actor"]
    row = [
        flops.ppo_row(made.actor, made.reward, made.prompt, made.response, critic=made.ppo.critic is not None)
        for made in (with_it, without)
    ]
    assert [plan.model_flops / plan.rows for plan in plans] == pytest.approx(row)
    assert all(remedy.setting.ppo.critic is None for remedy in remedies(without, 3))


def test_flops_of_a_critic_are_its_scoring_and_training() -> None:
    opt = MODELS["opt-350m"]
    found = [flops.ppo_row(opt, opt, 5, 7, epochs=2, critic=critic) for critic in (True, False)]
    assert found[0] - found[1] == pytest.approx(flops.forward(opt, 12) + 2 * flops.update(opt, [12]))
