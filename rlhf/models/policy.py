"""A causal language model as a policy: log-probability and entropy of chosen tokens, without the logits of all.

Only the hidden states before target tokens go through the head, and of those only `chunk_tokens` at a time are ever
logits in float32; the backward pass multiplies again. Where the distribution is the model's own, or that at another
temperature, `token_stats` has the gradients in closed form; for the other transforms autograd finds them chunk by chunk
(torch.utils.checkpoint, non-reentrant).

All chunks are computed inside ONE call of the head module. Under ZeRO-3 a call of a module gathers its weights over all
ranks, so the number of calls has to be equal on all ranks, while the number of target tokens is not. One call is one
gather in the forward and one in the backward pass, however many chunks (or none: an empty micro-batch) a rank has.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rlhf import host
from rlhf.config import SamplingConfig
from rlhf.data.packing import PackedLayout
from rlhf.data.split_layout import SplitLayout
from rlhf.distributed import device_type
from rlhf.models.backbone import base_of, hidden_states
from rlhf.models.tensor_parallel import SplitHead
from rlhf.models.token_stats import TokenStats, token_stats
from rlhf.ops import entropy_from_logits, transform_logits

# Tokens whose logits exist at once, forward and backward.
CHUNK_TOKENS = 1024
# On a CPU a larger chunk is no faster, and a smaller one would be kept between smaller blocks.
_CPU_CHUNK_BYTES = host.KEPT_BLOCK_BYTES + (2 << 20)


class PolicyOutput(NamedTuple):
    """Statistics of target tokens, float32, nats; 0 at all other tokens. A tuple, so that ZeRO-3's hooks see in."""

    logprob_BT: Tensor
    """Log-probability of token t given the tokens before it, under the sampling distribution if one was given."""
    entropy_BT: Tensor
    """Entropy of the distribution that token t was drawn from."""
    greedy_BT: Tensor
    """bool: token t is the most likely one."""


class Policy(nn.Module):
    """Scores tokens under a Hugging Face causal LM (`.model`, adapters included)."""

    def __init__(
        self, model: nn.Module, *, chunk_tokens: int | None = None, closed_form: TokenStats = token_stats
    ) -> None:
        """Wrap a model.

        Args:
            model: the Hugging Face model.
            chunk_tokens: tokens whose logits exist at once; None: what suits device and vocabulary.
            closed_form: computes the statistics where the distribution is the model's own, or at another temperature,
                and the head is whole.
        """
        super().__init__()
        self.model = model
        self.chunk_tokens = chunk_tokens or _default_chunk(int(self.config.get_text_config().vocab_size))
        self.closed_form = closed_form

    @property
    def config(self) -> Any:
        """Config of the Hugging Face model."""
        return cast(Any, self.model).config

    def forward(  # noqa: PLR0913  what a micro-batch is made of, each by its name
        self,
        token_ids_BT: Tensor,
        attention_mask_BT: Tensor | None,
        position_ids_BT: Tensor,
        target_mask_BT: Tensor,
        layout: PackedLayout | SplitLayout | None = None,
        sampling: SamplingConfig | None = None,
        response_position_BT: Tensor | None = None,
        stop_token_ids: Sequence[int] = (),
        inputs_BTD: Tensor | None = None,
    ) -> PolicyOutput:
        """Score the tokens of `target_mask_BT`; of a row split over ranks, those that this rank's columns predict.

        Args:
            token_ids_BT: tokens, padded on either side, or one packed row.
            attention_mask_BT: True on real tokens; None for a packed row.
            position_ids_BT: `ops.position_ids_from_mask` of it, or positions inside the sequences of a packed row.
            target_mask_BT: True on tokens to score; never a sequence's first token, which nothing predicts.
            layout: of a packed row, whole here or split over ranks.
            sampling: score under the distribution that sampling draws from; None scores under the model's own.
            response_position_BT: index of a token in its response; needed if sampling has min_new_tokens.
            stop_token_ids: all ids that end a response.
            inputs_BTD: hidden states from another rank's layers, as in `hidden_states`.
        """
        hidden_BTD = hidden_states(
            self.model,
            token_ids_BT=token_ids_BT,
            attention_mask_BT=attention_mask_BT,
            position_ids_BT=position_ids_BT,
            layout=layout,
            inputs_BTD=inputs_BTD,
        )
        first = 0
        if isinstance(layout, SplitLayout):
            target_mask_BT = target_mask_BT & layout.predicted_T
            first = layout.first
        row_S, column_S = target_mask_BT[:, 1:].nonzero(as_tuple=True)
        column_S = column_S + 1
        before_S = column_S - 1 if layout is None else layout.before_T[column_S]
        token_S = token_ids_BT[row_S, column_S]
        position_S = (
            torch.zeros_like(token_S) if response_position_BT is None else response_position_BT[row_S, column_S]
        )

        def statistics(logits_CV: Tensor, token_C: Tensor, position_C: Tensor) -> tuple[Tensor, ...]:
            logits_CV = final_logits(self.config, logits_CV.float())
            if sampling is not None:
                logits_CV = transform_logits(
                    logits_CV,
                    sampling,
                    response_position_S=position_C,
                    stop_token_ids=stop_token_ids,
                    keep_token_S=token_C,
                )
            logprob_C = logits_CV.gather(-1, token_C[:, None]).squeeze(-1) - logits_CV.logsumexp(dim=-1)
            return logprob_C, entropy_from_logits(logits_CV), logits_CV.argmax(dim=-1) == token_C

        head = cast(Any, base_of(self.model)).get_output_embeddings()
        hidden_SD = hidden_BTD.flatten(0, 1).index_select(0, row_S * hidden_BTD.shape[1] + before_S - first)

        def in_closed_form(hidden_SD: Tensor) -> tuple[Tensor, ...]:
            temperature = 1.0 if sampling is None else sampling.temperature
            arguments = (hidden_SD, head.weight, head.bias, token_S, temperature, self.chunk_tokens)
            return token_stats(*arguments, head.part) if isinstance(head, SplitHead) else self.closed_form(*arguments)

        if (
            type(head) in (nn.Linear, SplitHead)
            and has_plain_logits(self.config)
            and (sampling is None or _only_scales(sampling))
        ):
            logprob_S, entropy_S, greedy_S = _call_once(head, in_closed_form, hidden_SD)
        else:
            logprob_S, entropy_S, greedy_S = _in_chunks(
                head, statistics, hidden_SD, token_S, position_S, chunk_tokens=self.chunk_tokens
            )
        zero_BT = torch.zeros(token_ids_BT.shape, dtype=torch.float32, device=token_ids_BT.device)
        return PolicyOutput(
            logprob_BT=zero_BT.index_put((row_S, column_S), logprob_S),
            entropy_BT=zero_BT.index_put((row_S, column_S), entropy_S),
            greedy_BT=torch.zeros_like(target_mask_BT).index_put((row_S, column_S), greedy_S),
        )


def _only_scales(sampling: SamplingConfig) -> bool:
    """Whether the sampling distribution is the model's own but for the temperature."""
    return sampling.temperature > 0 and not sampling.top_k and sampling.top_p == 1 and not sampling.min_new_tokens


def has_plain_logits(config: Any) -> bool:
    """Whether the head's output is the logits: nothing for `final_logits` to do."""
    names = ("logit_scale", "logits_scaling", "lm_head_multiplier", "final_logit_softcapping")
    return all(getattr(config, name, None) is None for name in names)


def final_logits(config: Any, logits_SV: Tensor) -> Tensor:
    """Logits of the model from its head's output: the scaling or capping some families put between the two."""
    if (scale := getattr(config, "logit_scale", None)) is not None:  # Cohere
        logits_SV = logits_SV * scale
    if (divisor := getattr(config, "logits_scaling", None)) is not None:  # Granite
        logits_SV = logits_SV / divisor
    if (multiplier := getattr(config, "lm_head_multiplier", None)) is not None:  # Falcon-H1
        logits_SV = logits_SV * multiplier
    if (cap := getattr(config, "final_logit_softcapping", None)) is not None:  # Gemma 2
        logits_SV = torch.tanh(logits_SV / cap) * cap
    return logits_SV


def _in_chunks(
    head: nn.Module,
    statistics: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, ...]],
    hidden_SD: Tensor,
    token_S: Tensor,
    position_S: Tensor,
    *,
    chunk_tokens: int,
) -> tuple[Tensor, ...]:
    """Statistics of the head's logits, chunk by chunk, inside one call of the head (see the module's docstring)."""
    to_logits = head.forward

    def chunk(hidden_CD: Tensor, token_C: Tensor, position_C: Tensor) -> tuple[Tensor, ...]:
        return statistics(to_logits(hidden_CD), token_C, position_C)

    def all_chunks(hidden_SD: Tensor) -> tuple[Tensor, ...]:
        pieces = zip(*(torch.split(x, chunk_tokens) for x in (hidden_SD, token_S, position_S)), strict=True)
        if torch.is_grad_enabled():
            outputs = [checkpoint(chunk, *piece, use_reentrant=False, preserve_rng_state=False) for piece in pieces]
        else:
            outputs = [chunk(*piece) for piece in pieces]
        return tuple(torch.cat(parts) for parts in zip(*outputs, strict=True))

    return _call_once(head, all_chunks, hidden_SD)


def _call_once(
    head: nn.Module, forward: Callable[[Tensor], tuple[Tensor, ...]], hidden_SD: Tensor
) -> tuple[Tensor, ...]:
    """Call the head with another `forward`, so that its hooks see one call.

    The weights then stay gathered for all that `forward` does with them, and again for its backward pass.
    """
    replaced = head.__dict__.get("forward")
    head.forward = forward
    try:
        return cast(tuple[Tensor, ...], head(hidden_SD))
    finally:
        if replaced is None:
            del head.forward  # the class's own method shows again
        else:
            head.forward = replaced


def _default_chunk(vocab_size: int) -> int:
    if device_type() != "cpu":
        return CHUNK_TOKENS
    return max(1, min(CHUNK_TOKENS, _CPU_CHUNK_BYTES // (4 * vocab_size)))
