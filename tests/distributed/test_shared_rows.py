"""Steps 2 and 3 on rows that ranks share: one process with one unpadded sequence at a time, in fp32, at every stage.

The oracle is Hugging Face's model with its logits, the formulas written out and torch's AdamW: no batch, no layout, no
engine. What the ranks run is what the stages run.
"""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rlhf import distributed, ds_config, engine
from rlhf.config import LoRAConfig, ModelConfig, SamplingConfig
from rlhf.data.batching import Batching
from rlhf.data.collate import PreferenceBatch, collate_preferences
from rlhf.data.dataset import PreferenceRow
from rlhf.distributed import Group
from rlhf.models.build import build_causal_lm, build_reward_model, train_bpe
from rlhf.models.policy import Policy
from rlhf.models.scalar_head import ScalarModel, scores_at
from rlhf.rollout.weights import Lending
from rlhf.sharing import Sharing
from step2_reward.loss import ranking_loss_sum
from step3_ppo.algorithm import GAEConfig, KLConfig, Objective, UpdateConfig, choose_method
from step3_ppo.experience import Experience, ScoredSequence, to_experience
from step3_ppo.roles import Roles
from step3_ppo.update import update
from tests.distributed.harness import Ranks
from tests.distributed.test_sequence_parallel import CLIP, EPS, FAMILIES, STAGES, assert_equal, difference
from tests.distributed.tiny import engine_of

Case = tuple[str, str, dict[str, Any]]
CENTRING = 0.01
# Rows of a micro-batch as (prompt tokens, response tokens of each, ranks): ties, a cut that makes two equal, responses
# over the cut, more ranks than tokens, and no row at all.
PAIRS = (
    [(5, (3, 4, 1), (1.0, 0.0, 0.0)), (1, (2, 7), (0.0, 1.0))],
    [(9, (20, 6, 6, 2), (0.0, 2.0, 2.0, 3.0))],
    [(1, (1, 1), (1.0, 0.0))],
    [],
)
TEMPERATURE = 0.7
UPDATE = UpdateConfig(epochs=2, minibatch_size=4, clip_ratio=0.02, clip_value=0.05, entropy_coef=0.01)
METHOD = choose_method("ppo", UPDATE, KLConfig(), group_size=1, max_response_tokens=30)
# Prompt (by number) and response lengths of eight sequences, three of them of one prompt.
SEQUENCES = ((0, 5), (0, 1), (0, 9), (1, 4), (2, 12), (3, 2), (4, 1), (5, 30))


def build(case: Case, ds_name: str, *, scalar: bool) -> Any:
    family, _, settings = case
    cfg = ModelConfig(config={"model_type": family, **FAMILIES[family]}, dropout=0.0, **settings)
    tokenizer = train_bpe(["please answer politely"] * 3, vocab_size=300)
    with engine.zero3_init(ds_config.load(ds_name)):
        if scalar:
            return ScalarModel(build_reward_model(cfg, tokenizer, seed=2))
        return Policy(build_causal_lm(cfg, tokenizer, seed=1), chunk_tokens=6)


def adamw(model: Any) -> torch.optim.Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(trained, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0, eps=EPS)


def plain_update(model: Any, optimizer: torch.optim.Optimizer, loss: Tensor) -> float:
    optimizer.zero_grad()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    optimizer.step()
    return norm.item()


def value_T(model: Any, ids: list[int]) -> Tensor:
    """The head's output after each token of one sequence."""
    token_ids_BT = torch.tensor([ids])
    inner = model.model.get_base_model() if hasattr(model.model, "get_base_model") else model.model
    hidden_BTD = inner.base_model(input_ids=token_ids_BT, attention_mask=torch.ones_like(token_ids_BT))[0]
    return inner.score(hidden_BTD)[0, :, 0]  # type: ignore[no-any-return]


def weight_gap(trained: Any, plain: Any) -> float:
    state = trained.full_state_dict()
    return 0.0 if state is None else difference(state, plain)


# ---- step 2


def preferences(step: int) -> list[list[PreferenceRow]]:
    rng = np.random.default_rng(step)

    def ids(length: int) -> np.ndarray:
        return rng.integers(4, 250, length, dtype=np.int32)

    micros = [
        [
            PreferenceRow(ids(prompt), [ids(n) for n in lengths], list(ranks), margin=0.3, source=0, index=0)
            for prompt, lengths, ranks in rows
        ]
        for rows in PAIRS
    ]
    first = micros[0][0]
    first.responses[2] = first.responses[0]  # made equal by a cut: no pair, though their ranks differ
    return micros


def pair_loss(model: Any, rows: list[PreferenceRow]) -> Tensor:
    """Mean over prompts of the mean over its pairs."""
    total, num_prompts = torch.zeros(()), 0
    for row in rows:
        score = [value_T(model, [*row.prompt_ids, *response])[-1] for response in row.responses]
        losses = []
        for i, better in enumerate(row.ranks):
            for j, worse in enumerate(row.ranks):
                if better > worse and not np.array_equal(row.responses[i], row.responses[j]):
                    margin = torch.nn.functional.softplus(-(score[i] - score[j] - row.margin))
                    losses.append(margin + CENTRING * (score[i] + score[j]) ** 2)
        total, num_prompts = total + torch.stack(losses).mean(), num_prompts + 1
    return total / num_prompts


def collate(rows: list[PreferenceRow], group: Group) -> PreferenceBatch:
    return collate_preferences(rows, pad_id=0, device="cpu", packed=True, group=group)


def scores(trained: Any, batch: PreferenceBatch) -> Tensor:
    return batch.sequences.summed(scores_at(trained(**batch.sequences.inputs), batch.sequences.last_S))


def split_step(trained: Any, group: Group, micros: list[list[PreferenceRow]]) -> tuple[float, float, float]:
    """Loss, norm, and pairs that are right in all, each counted by one rank."""
    batches = [collate(rows, group) for rows in micros[group.number :: group.count]]
    count = distributed.all_sum(torch.stack([batch.weight_N.sum() for batch in batches]).sum())
    pairs = torch.zeros(2)
    for i, batch in enumerate(batches):
        loss, stats = ranking_loss_sum(
            scores(trained, batch),
            chosen_N=batch.chosen_N,
            rejected_N=batch.rejected_N,
            weight_N=batch.weight_N,
            margin_N=batch.margin_N,
            centring_coef=CENTRING,
        )
        trained.accumulate(loss, count=count, last=i == len(batches) - 1)
        pairs += torch.stack([torch.as_tensor(x) for x in stats["train/pair_accuracy"]])
    found = trained.step()
    right, num_pairs = distributed.all_sum(pairs).tolist()
    assert num_pairs == 2 + 1 - 1 + 5 + 1, "each pair once"
    return found.loss, found.grad_norm, right


def score_gap(trained: Any, plain: Any, group: Group, rows: list[PreferenceRow]) -> float:
    batch = collate(rows, group)
    with torch.no_grad():
        score_S = scores(trained, batch)
        expected = [value_T(plain, [*row.prompt_ids, *r])[-1] for row in rows for r in row.responses]
    assert int(group.sum_(batch.counted_S.long().sum())) == len(expected)
    return max([abs(a.item() - b.item()) for a, b in zip(score_S, expected, strict=False)], default=0.0)


def reward_job(cases: list[Case], *, sp: int, num_steps: int = 3) -> list[dict[str, float]]:
    """For each case the largest differences of step 2 to plain torch."""
    engine.setup(timeout_seconds=60)
    group = distributed.group_of(sp)
    found = []
    for case in cases:
        plain = build(case, "cpu_zero0", scalar=True).train()
        optimizer = adamw(plain)
        trained = engine_of(build(case, case[1], scalar=True), case[1], clip_norm=CLIP, eps=EPS, role="reward")
        gaps = {"score": max(score_gap(trained, plain, group, rows) for rows in preferences(0)), "loss": 0.0, "norm": 0}
        for step in range(num_steps):
            loss, norm, _ = split_step(trained, group, preferences(step))
            expected = pair_loss(plain, [row for rows in preferences(step) for row in rows])
            expected_norm = plain_update(plain, optimizer, expected)
            assert expected_norm > CLIP, "the clip is on"
            gaps["loss"] = max(gaps["loss"], abs(loss - expected.item()))
            gaps["norm"] = max(gaps["norm"], abs(norm - expected_norm))
        gaps["trained_score"] = max(score_gap(trained, plain, group, rows) for rows in preferences(0))
        gaps["weight"] = weight_gap(trained, plain)
        found.append(gaps)
    return found


# ---- step 3


def token_logprobs(model: Any, prompt: list[int], response: list[int]) -> tuple[Tensor, Tensor]:
    """Log-prob of each response token and entropy of its distribution, at the sampling temperature."""
    token_ids_BT = torch.tensor([prompt + response])
    inner = model.model.get_base_model() if hasattr(model.model, "get_base_model") else model.model
    logits_TV = inner(input_ids=token_ids_BT, attention_mask=torch.ones_like(token_ids_BT)).logits[0]
    log_TV = (logits_TV[len(prompt) - 1 : -1] / TEMPERATURE).log_softmax(dim=-1)
    return log_TV.gather(1, torch.tensor(response)[:, None])[:, 0], -(log_TV.exp() * log_TV).sum(dim=-1)


def values_before(model: Any, prompt: list[int], response: list[int]) -> Tensor:
    return value_T(model, prompt + response)[len(prompt) - 1 : -1]


def experience_of(actor: Any, critic: Any) -> Experience:
    """What the plain models say of sequences that they have not drawn; scores as a reward model might give them."""
    rng = np.random.default_rng(7)
    prompts = [rng.integers(4, 250, n).tolist() for n in (6, 1, 3, 17, 2, 4)]
    sequences = []
    for number, (prompt, length) in enumerate(SEQUENCES):
        ids = rng.integers(4, 250, length).tolist()
        with torch.no_grad():
            logprob_R, _ = token_logprobs(actor, prompts[prompt], ids)
            value_R = values_before(critic, prompts[prompt], ids)
        sequences.append(
            ScoredSequence(
                key=(prompt, number), prompt_ids=prompts[prompt], response_ids=ids, text="", stopped=True,
                rollout_logprob_R=logprob_R, old_logprob_R=logprob_R, ref_logprob_R=logprob_R - 0.1,
                old_value_R=value_R, entropy=None, score=0.0, model_score=0.0, gold=None,
            )
        )  # fmt: skip
    score_B = torch.from_numpy(rng.normal(size=len(sequences))).float()
    return to_experience(sequences, score_B, kl_coef=0.1, method=METHOD, gae_config=GAEConfig())


class Recorder:
    """A run that keeps what it is told."""

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}
        self.norms: dict[str, list[float]] = {"train/grad_norm": [], "critic/grad_norm": []}
        self.metrics = self

    def add(self, stats: dict[str, tuple[Any, Any]]) -> None:
        for name, pair in stats.items():
            found = torch.stack([torch.as_tensor(x, dtype=torch.float64) for x in pair])
            self.sums[name] = self.sums.get(name, torch.zeros(2, dtype=torch.float64)) + found

    def set(self, values: dict[str, float]) -> None:
        for name, norms in self.norms.items():
            if name in values:
                norms.append(values[name])

    def count_padding(self, sequences: Any) -> None:
        self.add({"tokens": (sequences.num_tokens, 1)})

    def seed_for(self, name: str, step: int) -> int:
        return len(name) + step + int(name[-1])

    def mean(self, name: str) -> float:
        total, count = distributed.all_sum(self.sums[name]).tolist()
        return float(total / count)


def plain_epochs(actor: Any, critic: Any, experience: Experience) -> dict[str, Any]:
    """The update of step 3 by torch alone."""
    optimizers, run = {"actor": adamw(actor), "critic": adamw(critic)}, Recorder()
    norms: dict[str, list[float]] = {"train/grad_norm": [], "critic/grad_norm": []}
    losses = []
    for epoch in range(UPDATE.epochs):
        minibatches = experience.minibatches(
            minibatch_size=UPDATE.minibatch_size, batching=Batching(max_rows=9), rank=0, world_size=1,
            seed=run.seed_for(f"shuffle {epoch}", 1),
        )  # fmt: skip
        for (rows,) in minibatches:
            policy_loss, value_loss, clipped, count = torch.zeros(()), torch.zeros(()), 0.0, 0
            for k in rows:
                s, n = experience.sequences[k], len(experience.sequences[k].response_ids)
                advantage, old = experience.advantage_BR[k, :n], experience.old_logprob_BR[k, :n]
                logprob, entropy = token_logprobs(actor, s.prompt_ids, s.response_ids)
                ratio = (logprob - old).exp()
                plain, cut = ratio * advantage, ratio.clamp(1 - UPDATE.clip_ratio, 1 + UPDATE.clip_ratio) * advantage
                policy_loss = policy_loss - torch.minimum(plain, cut).sum() - UPDATE.entropy_coef * entropy.sum()
                clipped += float((cut < plain).sum())
                value, target = values_before(critic, s.prompt_ids, s.response_ids), experience.return_BR[k, :n]
                near = s.old_value_R + (value - s.old_value_R).clamp(-UPDATE.clip_value, UPDATE.clip_value)
                value_loss = value_loss + 0.5 * torch.maximum((value - target) ** 2, (near - target) ** 2).sum()
                count += n
            norms["train/grad_norm"].append(plain_update(actor, optimizers["actor"], policy_loss / count))
            norms["critic/grad_norm"].append(plain_update(critic, optimizers["critic"], value_loss / count))
            losses.append((value_loss.item(), clipped, count))
    total, clipped, count = (sum(column) for column in zip(*losses, strict=True))
    return {"norms": norms, "loss": total / count, "clip_frac": clipped / count}


def ppo_job(cases: list[Case], *, sp: int) -> list[dict[str, float]]:
    """For each case the largest differences of step 3's update to plain torch."""
    engine.setup(timeout_seconds=60)
    voice: Any = SimpleNamespace(
        sampling=SamplingConfig(temperature=TEMPERATURE), stop_token_ids=(0,),
        tokenizer=SimpleNamespace(pad_token_id=0),
        lending=Lending(),
    )  # fmt: skip
    found = []
    for case in cases:
        plain = [build(case, "cpu_zero0", scalar=scalar).train() for scalar in (False, True)]
        experience, run = experience_of(*plain), Recorder()
        trained = [
            engine_of(build(case, case[1], scalar=scalar), case[1], clip_norm=CLIP, eps=EPS, role=role)
            for scalar, role in ((False, "actor"), (True, "critic"))
        ]
        nobody: Any = None
        roles = Roles(
            actor=trained[0],
            critic=trained[1],
            reference=nobody,
            reward=nobody,
            sharing=Sharing(sequence=distributed.group_of(sp)),
        )
        said = update(
            roles, experience, voice, Objective(update=UPDATE, method=METHOD, kl_coef=0.1), run,  # type: ignore[arg-type]
            batching=Batching(max_rows=1, max_tokens=24), step=1, dtype="float32",
        )  # fmt: skip
        expected = plain_epochs(*plain, experience)
        assert 0 < expected["clip_frac"] < 1 and max(expected["norms"]["train/grad_norm"]) > CLIP
        tokens = distributed.all_sum(run.sums["tokens"])[0].item()
        assert tokens == 2 * sum(len(s.prompt_ids) + len(s.response_ids) for s in experience.sequences), "each once"
        gaps = {
            "loss": abs(said["loss"] - expected["loss"]),
            "clip_frac": abs(run.mean("policy/clip_frac") - expected["clip_frac"]),
            "actor": weight_gap(trained[0], plain[0]),
            "critic": weight_gap(trained[1], plain[1]),
        }
        for name, norms in expected["norms"].items():
            gaps[name] = max(abs(a - b) for a, b in zip(run.norms[name], norms, strict=True))
        found.append(gaps)
    return found


def ways(family: str) -> list[Case]:
    return [(family, stage, {}) for stage in STAGES]


SETTINGS: list[Case] = [
    ("llama", "cpu_zero3", {"lora": LoRAConfig(rank=4)}),
    ("opt", "cpu_zero2", {"lora": LoRAConfig(rank=4), "recompute": "full"}),
    ("llama", "cpu_zero3", {"recompute": "selective"}),
]


@pytest.mark.parametrize("job", [reward_job, ppo_job])
@pytest.mark.parametrize("cases", [ways("opt"), ways("llama"), SETTINGS], ids=["opt", "llama", "settings"])
def test_two_ranks_on_one_row(ranks: Ranks, job: Any, cases: list[Case]) -> None:
    """Scores, pair loss; ratios, values, both losses; norms with the clip on; weights after 3 and 4 AdamW steps."""
    assert_equal(ranks(job, cases=cases, sp=2), cases)


FOUR = {"two of two": ([("llama", "cpu_zero2", {}), ("opt", "cpu_zero3", {})], 2), "one of four": (ways("opt")[::2], 4)}


@pytest.mark.parametrize("job", [reward_job, ppo_job])
@pytest.mark.parametrize("groups", FOUR)
def test_groups_of_four_ranks(ranks: Ranks, job: Any, groups: str) -> None:
    """Last ranks of a group of four have nothing but padding of short rows, and no pair of few."""
    cases, sp = FOUR[groups]
    assert_equal(ranks(job, cases=cases, sp=sp, world_size=4, timeout=120), cases)
