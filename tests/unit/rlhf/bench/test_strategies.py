"""Which ways to run a step there are, and what their table says."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from rlhf import cli, ds_config
from rlhf.bench.result import Foreseen, Result
from rlhf.bench.steps import Sources
from rlhf.bench.strategies import Row, Strategy, _command, _flags, as_json, markdown, select, strategies
from rlhf.cli import _read_bench_recipe, _resolve_recipe, main

SOURCES = Sources(read_recipe=_read_bench_recipe, load=ds_config.load)


def test_each_way_is_a_recipe_that_parses(tmp_path: Path) -> None:
    """Flags and JSONs of every strategy, for every step: the stage's own config and DeepSpeed's check accept them."""
    for number, sections in ((1, ["model"]), (2, ["model"]), (3, ["actor", "critic"])):
        known = strategies(number, 2, "fp32")
        assert len({strategy.name for strategy in known}) == len(known) and known[0].name == "ZeRO-0"
        recipe = SOURCES.read_recipe("tiny_cpu", [])
        for place, strategy in enumerate(known):
            work = tmp_path / f"{number}_{place}"
            flags = list(_flags(strategy, recipe, number, work, SOURCES))
            _, stages = _resolve_recipe("tiny_cpu", flags)
            config = stages[("sft", "reward", "ppo")[number - 1]]
            for section in sections:
                raw = ds_config.load(work / f"{section}.json")
                assert ds_config.zero_stage(raw) == strategy.zero["stage"]
                assert (ds_config.dtype_name(raw) == "bfloat16") == ("bf16" in strategy.json)
                assert all(config[section][key] == value for key, value in strategy.model.items())
            for size in ("sp", "pp"):
                assert config.get("parallel", {}).get(size, 1) == strategy.stage.get(f"parallel.{size}", 1)
            for key, value in strategy.stage.items():
                section, _, name = key.partition(".")
                assert config[section][name] == value


def test_optimisers_are_those_of_the_name() -> None:
    for number, keys in ((1, {"optim.name"}), (2, {"optim.name"}), (3, {"actor_optim.name", "critic_optim.name"})):
        by_name = {strategy.name: strategy.stage for strategy in strategies(number, 2, "fp32")}
        assert by_name["Muon"] == by_name["ZeRO-3, Muon"] == dict.fromkeys(keys, "muon")
        if "ZeRO-2, 8-bit moments" in by_name:
            assert by_name["ZeRO-2, 8-bit moments"] == dict.fromkeys(keys, "adamw_8bit")
        assert not by_name["ZeRO-0"]


def test_one_rank_has_no_second_shard() -> None:
    halves = {f"ZeRO-{stage}, TP 2" for stage in (0, 1, 3)}
    added = {s.name for s in strategies(2, 2, "fp32")} - {s.name for s in strategies(2, 1, "fp32")}
    rows = {"rows shared", "ZeRO-3, rows shared", "ZeRO-3, rows shared, recompute full"}
    assert added == {"ZeRO-3, hpZ", *halves, *rows}
    assert {s.name for s in strategies(2, 2, "bf16")} >= halves - {"ZeRO-0, TP 2"}, "not with 16 bits at stage 0"
    assert "ZeRO-0, TP 2" not in {s.name for s in strategies(2, 2, "bf16")}
    assert not any(key.startswith("parallel.") for s in strategies(1, 1, "fp32") for key in s.stage)
    with_stages = [{s.name for s in strategies(n, 2, "fp32") if "parallel.pp" in s.stage} for n in (1, 2, 3)]
    assert with_stages == [{"PP 2", "ZeRO-1, PP 2"}, set(), set()]


def test_a_recipe_in_bf16_stays_in_bf16(tmp_path: Path) -> None:
    recipe = SOURCES.read_recipe("opt_13b_350m_single_node", [])
    known = strategies(1, 8, "bf16")
    assert not any("bf16" in strategy.name for strategy in known)
    for strategy in known[:4]:
        list(_flags(strategy, recipe, 1, tmp_path, SOURCES))
        assert ds_config.dtype_name(ds_config.load(tmp_path / "model.json")) == "bfloat16"


def test_names_choose_and_keep_the_order() -> None:
    known = strategies(1, 2, "fp32")
    assert [s.name for s in select(known, "compile; ZeRO-1")] == ["ZeRO-1", "compile"]
    assert select(known, "") == known
    with pytest.raises(ValueError, match="--only 'ZeRO-4' is none of the strategies: ZeRO-0; ZeRO-1"):
        select(known, "ZeRO-0;ZeRO-4")


def test_the_table_by_hand(make_result: Callable[..., Result]) -> None:
    """1000 tokens on 2 ranks: 1 s is 500 tokens/s a rank; medians of rounds of 1, 2 and 4 s and of one that failed."""
    foreseen = Foreseen(device="d", step_seconds=1.0, phases={}, peak_bytes=1.0)
    base = make_result(
        tokens=1000.0, ranks=2, step_seconds=[2.0], memory={"peak": 2e9}, communication_frac=0.25, foreseen=foreseen
    )
    rounds = tuple(replace(base, step_seconds=(s,)) for s in (1.0, 2.0, 4.0))
    rows = [
        Row(strategy=Strategy(name="first", zero={"stage": 0}), results=rounds),
        Row(strategy=Strategy(name="second", zero={"stage": 3}), results=(replace(base, step_seconds=(1.0,)),)),
        Row(strategy=Strategy(name="third", zero={"stage": 3}), results=(), error="it broke"),
    ]
    lines = markdown(rows, 1).splitlines()
    assert lines[-3:] == [
        "| first | 2 s | 250 | 1.00 x | 2.00 GB | 25% | 0.50 x |",
        "| second | 1 s | 500 | 2.00 x | 2.00 GB | 25% | 1.00 x |",
        "| third | failed | - | - | - | - | - |",
    ]
    assert "medians of 3 rounds" in lines[0]
    found = json.loads(json.dumps(as_json(rows, 1)))["strategies"]
    assert [one["tokens_per_second_per_rank"] for one in found] == [250.0, 500.0, None]
    assert found[0]["step_seconds"] == [1.0, 2.0, 4.0] and found[2]["error"] == "it broke"


def test_the_printed_command_is_the_one_that_ran(tmp_path: Path) -> None:
    """All that changes the figures is in it; what is this machine's is not."""
    argv = ["bench", "strategies", "--recipe", "tiny_cpu", "--num_gpus", "2", "--step", "3", "--rounds", "5"]
    argv += ["--only", "ZeRO-0;Muon", "--hardware", str(tmp_path / "mine.yaml"), "--work", str(tmp_path)]
    arguments, overrides = cli._parser().parse_known_args(argv)
    said = _command(arguments, [*overrides, "--ppo.seed=7"])
    assert said == (
        "`rlhf bench strategies --recipe tiny_cpu --num_gpus 2 --step 3 --rounds 5 --warmup 3 --steps 10 --profile 2 "
        "--only 'ZeRO-0;Muon' --hardware mine.yaml --ppo.seed=7`:"
    )


def test_bad_flags_are_one_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "page.md").write_text("no markers")
    for flags, said in (
        (["--rounds", "0"], "--rounds=0"), (["--only", "no"], "--only 'no'"), (["--steps", "0"], "--steps=0"),
        (["--gpu", "h900"], "'h900' is not known"), (["--write", str(tmp_path / "page.md")], "does not hold the lines"),
        (["--write", str(tmp_path / "none.md")], "none.md cannot be read"),
    ):  # fmt: skip
        argv = ["bench", "strategies", "--recipe", "tiny_cpu", "--work", str(tmp_path / "work"), *flags]
        assert main(argv) == 2
        assert said in capsys.readouterr().err
    assert not (tmp_path / "work").exists()


def test_a_recipe_without_a_critic_has_none_in_any_way(tmp_path: Path) -> None:
    """Its sections may be missing: no flag names them."""
    said = ["--ppo.algorithm=reinforce_pp", "--ppo.critic_optim=null", "--ppo.deepspeed.critic=null"]
    recipe = SOURCES.read_recipe("tiny_cpu", said)
    known = [strategy for strategy in strategies(3, 2, "fp32") if strategy.name in ("ZeRO-0", "ZeRO-3, Muon")]
    assert len(known) == 2
    for place, strategy in enumerate(known):
        flags = list(_flags(strategy, recipe, 3, tmp_path / str(place), SOURCES))
        keys = [flag.partition("=")[0] for flag in flags]
        assert not any("critic" in key for key in keys) and "--ppo.deepspeed.actor" in keys
        config = _resolve_recipe("tiny_cpu", [*said, *flags])[1]["ppo"]
        assert config["critic_optim"] is None and config["deepspeed"]["critic"] is None
