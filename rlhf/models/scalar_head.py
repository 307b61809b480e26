"""A sequence-classification model with one label as reward model and as critic: one value for each token."""

from typing import Any, cast

import torch
from torch import Tensor, nn

from rlhf.data.packing import PackedLayout
from rlhf.data.split_layout import SplitLayout
from rlhf.models.backbone import base_of, hidden_states


class ScalarModel(nn.Module):
    """Values under a Hugging Face `ForSequenceClassification` model (`.model`, adapters included).

    A value is (head output - rlhf_score_mean) / rlhf_score_std, the two constants being part of the model's config (0
    and 1 if they are not there). A reward model and the critic that starts from it are so in the same unit.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    @property
    def config(self) -> Any:
        """Config of the Hugging Face model."""
        return cast(Any, self.model).config

    def forward(
        self,
        token_ids_BT: Tensor,
        attention_mask_BT: Tensor | None,
        position_ids_BT: Tensor,
        layout: PackedLayout | SplitLayout | None = None,
    ) -> Tensor:
        """Value after each token, float32; columns of padding hold numbers without meaning. Arguments as `Policy`'s.

        Of a row split over ranks, the columns of others hold 0: the values are the sum over the ranks.
        """
        hidden_BTD = hidden_states(
            self.model,
            token_ids_BT=token_ids_BT,
            attention_mask_BT=attention_mask_BT,
            position_ids_BT=position_ids_BT,
            layout=layout,
        )
        raw_BT = cast(Any, base_of(self.model)).score(hidden_BTD).squeeze(-1).float()
        mean, std = score_normalisation(self.config)
        value_BT = cast(Tensor, (raw_BT - mean) / std)
        return layout.whole(value_BT) if isinstance(layout, SplitLayout) else value_BT


def scores_at(value_BT: Tensor, last_S: Tensor) -> Tensor:
    """The score of each sequence: its value at its last real token, whose place comes from lengths, never from ids.

    Args:
        value_BT: of padded rows or a packed one.
        last_S: place of each sequence's last token, counted through all rows (`Sequences.last_S`).
    """
    return value_BT.flatten()[last_S]


def score_normalisation(config: Any) -> tuple[float, float]:
    """Mean and standard deviation that turn the head's output into a score."""
    return float(getattr(config, "rlhf_score_mean", 0.0)), float(getattr(config, "rlhf_score_std", 1.0))


def normalise_scores(config: Any, *, mean: float, std: float) -> None:
    """Make scores that have this mean and standard deviation now have mean 0 and deviation 1 from here on.

    Raises:
        ValueError: the deviation is not a positive number, so the scores say nothing.
    """
    if not (torch.isfinite(torch.tensor([mean, std])).all() and std > 0):
        raise ValueError(
            f"scores cannot be normalised: mean {mean}, standard deviation {std}; the deviation must be above 0. "
            "The reward model gives all answers the same score: train it longer, or leave the normalisation out."
        )
    old_mean, old_std = score_normalisation(config)
    config.rlhf_score_mean = old_mean + old_std * mean
    config.rlhf_score_std = old_std * std
