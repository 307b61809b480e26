"""Detectors of training that goes wrong: what each looks at, when it fires, and what is to be done. No torch.

All ranks give the same values in the same order, so all come to the same verdict without a collective. What a detector
remembers (a running median, the first step's numbers, steps over the limit) is part of every state: a resumed run
judges as the uninterrupted one.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf.health_config import (
    EntropyConfig,
    HealthConfig,
    KLConfig,
    LengthConfig,
    LossConfig,
    RepeatConfig,
    RewardConfig,
)

EXIT_UNHEALTHY = 78
"""Exit code of a stage that a detector has stopped: the same run would go wrong again."""
NGRAM = 4
"""Tokens of what counts as a repetition."""

_MEDIAN_FROM = 8
"""Steps after which a median is one."""

Memory = dict[str, Any]
Values = Mapping[str, float]


class UnhealthyError(RuntimeError):
    """Training went wrong; raised on all ranks. The message says what was seen and what is left."""

    exit_code = EXIT_UNHEALTHY


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """A detector has fired that stops the stage or turns it back."""

    step: int
    detector: str
    action: str
    since: int
    """First of the steps in a row over the limit. A step judges the weights that it begins with."""
    text: str
    """What was seen."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """A detector has begun to fire, or is within its limit again."""

    step: int
    detector: str
    fires: bool
    text: str


def _loss(config: LossConfig, values: Values, memory: Memory) -> str:
    value, history = values["loss"], memory.setdefault("history", [])
    if len(history) < min(config.window, _MEDIAN_FROM):
        limit, said = math.inf, ""
    else:
        median = statistics.median(history)
        limit = max(config.factor * median, config.floor)
        said = f", over {limit:.4g}: the median of the last {len(history)} healthy steps is {median:.4g}"
    if math.isfinite(value) and value <= limit:
        history.append(value)
        del history[: -config.window]
        return ""
    return f"the loss is {value:.4g}{said}"


def _kl(config: KLConfig, values: Values, memory: Memory) -> str:
    per_token = values["ppo/kl_ref"] / max(values["ppo/response_length"], 1.0)
    if abs(per_token) <= config.limit:
        return ""
    return f"KL to the reference is {per_token:.4g} nats per response token, beyond {config.limit:g}"


def _entropy(config: EntropyConfig, values: Values, memory: Memory) -> str:
    value = values["ppo/entropy"]
    if not math.isfinite(value):
        return f"ppo/entropy is {value:.4g}"
    start = memory.setdefault("start", value)
    if value >= config.frac * start:
        return ""
    return f"ppo/entropy is {value:.4g}, under {config.frac:g} of the {start:.4g} it began with"


def _repeats(config: RepeatConfig, values: Values, memory: Memory) -> str:
    value = values["ppo/repeat_frac"]
    return "" if value <= config.limit else f"ppo/repeat_frac is {value:.4g}, over {config.limit:g}"


def _length(config: LengthConfig, values: Values, memory: Memory) -> str:
    length, stop = values["ppo/response_length"], values["ppo/stop_frac"]
    if not (math.isfinite(length) and math.isfinite(stop)):
        return f"ppo/response_length is {length:.4g}, ppo/stop_frac {stop:.4g}"
    first, first_stop = memory.setdefault("start", [length, stop])
    if not first / config.factor <= length <= first * config.factor:
        return f"ppo/response_length is {length:.4g}, more than a factor {config.factor:g} from the first {first:.4g}"
    if stop < config.stop_frac * first_stop:
        return f"ppo/stop_frac is {stop:.4g}, under {config.stop_frac:g} of the {first_stop:.4g} it began with"
    return ""


def _reward(config: RewardConfig, values: Values, memory: Memory) -> str:
    value, low, high = values["ppo/model_score"], values["score_low"], values["score_high"]
    limit = high + config.margin * (high - low)
    if value <= limit:
        return ""
    return f"ppo/model_score is {value:.4g}, over {limit:.4g}: in step 2 the reward model gave {low:.4g} to {high:.4g}"


@dataclass(frozen=True)
class _Detector:
    look: Callable[[Any, Values, Memory], str]
    """What is wrong with the values, in words; empty if nothing is. A number that is not finite is."""
    needs: tuple[str, ...]
    """Values without which it does not look."""


_DETECTORS = {
    "loss_explosion": _Detector(_loss, ("loss",)),
    "kl_explosion": _Detector(_kl, ("ppo/kl_ref", "ppo/response_length")),
    "entropy_collapse": _Detector(_entropy, ("ppo/entropy",)),
    "repeated_text": _Detector(_repeats, ("ppo/repeat_frac",)),
    "length_drift": _Detector(_length, ("ppo/response_length", "ppo/stop_frac")),
    "reward_above_training": _Detector(_reward, ("ppo/model_score", "score_low", "score_high")),
}


class Health:
    """The detectors of one run."""

    def __init__(self, config: HealthConfig) -> None:
        self.config = config
        self.rollbacks = 0
        self.verdict: Verdict | None = None
        """Of the last step, until it is taken."""
        self._streaks = dict.fromkeys(_DETECTORS, 0)
        self._memories: dict[str, Memory] = {name: {} for name in _DETECTORS}

    def observe(self, step: int, values: Values) -> list[Change]:
        """Look at one step; equal on all ranks.

        Args:
            step: its number, from 1.
            values: of the step by metric name. A detector whose values are not there does not judge. `loss` is that of
                the step's optimiser, the critic's in step 3; `score_low` to `score_high` is the reward model's range.

        Returns:
            Detectors that have begun to fire or have ceased to. `verdict` says whether the run may go on.
        """
        changes = []
        verdicts = []
        for name, detector in _DETECTORS.items():
            config = getattr(self.config, name)
            if config.action == "off" or not all(need in values for need in detector.needs):
                continue
            text = detector.look(config, values, self._memories[name])
            before = self._streaks[name]
            now = self._streaks[name] = before + 1 if text else 0
            fired, fires = before >= config.patience, now >= config.patience
            text += f" ({now} steps in a row)" if now > 1 else ""
            if fires != fired:
                changes.append(Change(step=step, detector=name, fires=fires, text=text))
            if fires and config.action in ("stop", "rollback"):
                since = step - now + 1
                verdicts.append(Verdict(step=step, detector=name, action=config.action, since=since, text=text))
        # The one that ends the run, if there is one; else the first.
        self.verdict = min(verdicts, key=lambda verdict: verdict.action != "stop", default=None)
        return changes

    def not_finite(self, step: int, text: str) -> Change:
        """Note that a step could not be made; `non_finite` needs no patience."""
        action = self.config.non_finite.action
        self.verdict = Verdict(step=step, detector="non_finite", action=action, since=step, text=text)
        return Change(step=step, detector="non_finite", fires=True, text=text)

    def take_verdict(self) -> Verdict | None:
        """The verdict of the last step, once."""
        verdict, self.verdict = self.verdict, None
        return verdict

    @property
    def firing(self) -> list[str]:
        """Detectors that fire."""
        return [name for name, streak in self._streaks.items() if streak >= getattr(self.config, name).patience]

    @property
    def is_good(self) -> bool:
        """Whether a state saved now may be one to go back to: no detector that acts is over its limit.

        One that only warns does not count: who lets it warn goes on with what it warns of.
        """
        return not any(self._streaks.get(name) for name in self.config.with_action("stop", "rollback"))

    @property
    def lr_scale(self) -> float:
        """What learning rates are multiplied by after the rollbacks so far."""
        return self.config.rollback_lr_factor**self.rollbacks

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs, as JSON."""
        return {
            "good": self.is_good,
            "rollbacks": self.rollbacks,
            "streaks": self._streaks,
            "memories": self._memories,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Judge as the run that was saved; a state of before there were detectors has nothing to say."""
        self.rollbacks = int(state.get("rollbacks", 0))
        self._streaks = {name: int(state.get("streaks", {}).get(name, 0)) for name in _DETECTORS}
        self._memories = {name: dict(state.get("memories", {}).get(name, {})) for name in _DETECTORS}
        self.verdict = None

    def roll_back(self, state: Mapping[str, Any]) -> None:
        """Judge as when the state was saved, with one rollback more than there have been."""
        rollbacks = self.rollbacks + 1
        self.load_state_dict(state)
        self.rollbacks = rollbacks


def repeat_frac(responses: Sequence[Sequence[int]]) -> float:
    """Share of the responses' n-grams of tokens that stood in the same response before; 0 where none is so long."""
    total = repeated = 0
    for token_ids in responses:
        ngrams = [tuple(token_ids[i : i + NGRAM]) for i in range(len(token_ids) - NGRAM + 1)]
        total += len(ngrams)
        repeated += len(ngrams) - len(set(ngrams))
    return repeated / total if total else 0.0
