"""What is logged of a step and said of a run."""

from step3_ppo.drawing import Drawn
from step3_ppo.evaluate import describe
from step3_ppo.experience import Experience
from step3_ppo.rollout import Judges


def summarise(drawn: Drawn, experience: Experience | None, *, kl_coef: float, has_critic: bool) -> dict[str, float]:
    """Metrics of one step's rollout, of all ranks.

    Args:
        drawn: all responses; what is said of responses is of all of them, trained on or not.
        experience: of those that are trained on; None: of none.
        kl_coef: weight of the penalty.
        has_critic: whether values were estimated.
    """
    sequences = drawn.sequences
    values = {
        # The update measures the entropy: where the decoder's log-probs are the old ones, nothing else has seen it.
        **{f"ppo/{name}": value for name, value in describe(sequences).items() if name != "entropy"},
        "ppo/kl_coef": kl_coef,
        "ppo/model_score": sum(s.model_score for s in sequences) / len(sequences),
        **drawn.metrics,
    }
    if experience is not None:
        values["ppo/reward"] = float(experience.reward_BR.sum()) / len(experience.sequences)
        if has_critic:
            values["value/explained_variance"] = explained_variance(experience)
    return values


def explained_variance(experience: Experience) -> float:
    """1 - var(return - value) / var(return) over response tokens, of the values at rollout; 0 if returns are equal."""
    returns, values = experience.return_BR[experience.mask_BR], experience.old_value_BR[experience.mask_BR]
    variance = float(returns.var(correction=0))
    return 1.0 - float((returns - values).var(correction=0)) / variance if variance > 0 else 0.0


def headline(before: dict[str, float], after: dict[str, float], judges: Judges) -> dict[str, float]:
    """The stage's entries of summary.json; what was not measured is left out."""
    metrics: dict[str, float] = {}
    for name in ("gold", "score"):
        for short, values in (("sft", before), ("ppo", after)):
            if name in values:
                metrics[f"{name}_{short}"] = values[name]
    if judges.gold is not None:
        metrics["gold_max"] = judges.gold.maximum
    if "kl_ref" in after:
        metrics["kl"] = after["kl_ref"]
    for name in ("entropy", "distinct_frac", "response_length", "stop_frac"):
        if name in after:
            metrics[name] = after[name]
    return metrics
