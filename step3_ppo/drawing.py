"""The responses of one step: drawn, scored, and those that teach nothing left out or made up for by other prompts.

Every rank holds all sequences and decides alike, so neither groups nor what is left out depend on the number of ranks.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rlhf.data.dataset import PromptRow
from rlhf.rollout.decode import RolloutStats
from step3_ppo.advantages import flat_groups
from step3_ppo.config import RolloutConfig, ShapingConfig
from step3_ppo.experience import ScoredSequence
from step3_ppo.rewards import RunningScale, overlong_penalty, shape_score


@dataclass(frozen=True, kw_only=True)
class Draw:
    """One rollout, on every rank: whole groups one after the other, in order of their keys."""

    sequences: list[ScoredSequence]
    score_B: Tensor
    """Shaped."""
    decoded: list[RolloutStats]


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """All that was drawn in one step, and which of it is trained on."""

    sequences: list[ScoredSequence]
    score_B: Tensor
    """Shaped score of each."""
    kept: list[int]
    """Numbers of the sequences that are trained on: whole groups, in order of their keys."""
    decoded: list[RolloutStats]
    """What the first rollout's decoders counted."""
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def kept_sequences(self) -> list[ScoredSequence]:
        """Those that are trained on."""
        return [self.sequences[i] for i in self.kept]

    @property
    def kept_score_B(self) -> Tensor:
        """Their shaped scores."""
        return self.score_B[self.kept]


def draw_step(
    draw: Callable[[list[list[PromptRow]], Counter[int]], Draw],
    prompts: list[list[PromptRow]],
    more_prompts: Callable[[int], list[list[PromptRow]]],
    config: RolloutConfig,
) -> Drawn:
    """Draw and score the responses of one step. Collective.

    With `flat_groups` other than keep, groups are left out whose shaped scores are equal: their advantages are 0. With
    `refill` other prompts are drawn, a whole step's at a time, until prompts_per_step groups are left or most_draws
    rollouts are made; of more, those drawn first stay.

    Args:
        draw: this rank's prompts, and how often each row was drawn in this step, to scored responses of all ranks.
        prompts: this rank's, of the step, as the loader gives them.
        more_prompts: number of a further rollout, from 1, to this rank's prompts of it.
        config: of the rollout.
    """
    size, num_wanted = config.samples_per_prompt, config.prompts_per_step
    seen: Counter[int] = Counter()
    draws = [draw(prompts, seen)]
    if config.flat_groups == "keep":
        return _joined(draws, list(range(len(draws[0].sequences))))
    flat = flat_groups(draws[0].score_B, size).tolist()
    while config.flat_groups == "refill" and flat.count(False) < num_wanted and len(draws) < config.most_draws:
        draws.append(draw(more_prompts(len(draws)), seen))
        flat += flat_groups(draws[-1].score_B, size).tolist()
    groups = [number for number, is_flat in enumerate(flat) if not is_flat][:num_wanted]
    kept = [number * size + i for number in groups for i in range(size)]
    metrics = {
        "ppo/flat_groups_frac": flat.count(True) / len(flat),
        "ppo/draws": float(len(draws)),
        "ppo/trained_groups": float(len(groups)),
    }
    return _joined(draws, kept, metrics)


def _joined(draws: Sequence[Draw], kept: list[int], metrics: dict[str, float] | None = None) -> Drawn:
    sequences = [sequence for one in draws for sequence in one.sequences]
    # A minibatch is drawn from sequences in order of their keys, whichever rollout they come from.
    return Drawn(
        sequences=sequences,
        score_B=torch.cat([one.score_B for one in draws]),
        kept=sorted(kept, key=lambda i: sequences[i].key),
        decoded=draws[0].decoded,
        metrics=metrics or {},
    )


def shaped_scores(
    sequences: Sequence[ScoredSequence], scale: RunningScale, config: ShapingConfig, *, max_response_tokens: int
) -> Tensor:
    """score_B after scaling, clipping and penalties; the running scale takes in these scores first."""
    score_B = torch.tensor([s.score for s in sequences])
    length_B = torch.tensor([len(s.response_ids) for s in sequences])
    if config.scale == "running":
        scale.update(len(score_B), float(score_B.double().sum()), float(score_B.double().square().sum()))
        score_B = score_B / scale.std
    score_B = shape_score(
        score_B,
        stopped_B=torch.tensor([s.stopped for s in sequences]),
        length_B=length_B,
        clip=config.clip,
        missing_stop_penalty=config.missing_stop_penalty,
        length_penalty=config.length_penalty,
    )
    return score_B - overlong_penalty(
        length_B, most=max_response_tokens, tokens=config.overlong_tokens, penalty=config.overlong_penalty
    )
