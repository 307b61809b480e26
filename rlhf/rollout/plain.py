"""The plain path: Hugging Face's own generate loop with our choice of tokens. Slower, and the fallback of the rollout.

Where our decoding disagrees with Hugging Face's on a model, that model is decoded by Hugging Face. The contract of
sampling stays: the token is a function of (seed, step, prompt, sample, position), drawn from the same transforms.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedTokenizerBase

from rlhf.config import SamplingConfig
from rlhf.data.collate import left_pad
from rlhf.models.backbone import base_of
from rlhf.rollout.decode import Response, inference
from rlhf.rollout.job import check_finite
from rlhf.rollout.sampling import TokenChooser, uniform
from rlhf.rollout.stopping import StopRule


def generate_plain(  # noqa: PLR0913  the signature of decode.generate, which it stands in for
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    *,
    uids: Sequence[int],
    sample_ids: Sequence[int],
    sampling: SamplingConfig,
    stop_token_ids: Sequence[int],
    max_new_tokens: int,
    seed: int,
    step: int,
    pad_id: int,
    batch_size: int,
    tokenizer: PreTrainedTokenizerBase | None = None,
    all_ranks_running: Callable[[bool], bool] | None = None,
) -> list[Response]:
    """As `decode.generate`, by the model's own `generate`.

    Raises:
        ValueError: the weights are sharded: ranks cannot be kept in step inside Hugging Face's loop.
        FloatingPointError: the model's logits are not finite.
    """
    if all_ranks_running is not None:
        raise ValueError(
            "the plain path cannot decode on sharded weights. Set rollout.weights=gathered, so that they are gathered "
            "for the rollout."
        )
    device = next(model.parameters()).device
    stops = StopRule(token_ids=frozenset(stop_token_ids), strings=tuple(sampling.stop_strings), tokenizer=tokenizer)
    responses: list[Response] = []
    with inference(model):
        for first in range(0, len(prompts), batch_size):
            rows = range(first, min(first + batch_size, len(prompts)))
            token_ids_BP, attention_mask_BP = left_pad([prompts[i] for i in rows], pad_id=pad_id, device=device)
            chooser = _Chooser(
                uniform(
                    seed,
                    step,
                    [uids[i] for i in rows],
                    [sample_ids[i] for i in rows],
                    positions=range(max_new_tokens),
                ).to(device),
                sampling,
                tuple(stop_token_ids),
                num_prompt_tokens=token_ids_BP.shape[1],
            )
            sequences_BT: Tensor = cast(Any, base_of(model)).generate(
                input_ids=token_ids_BP,
                attention_mask=attention_mask_BP.long(),
                generation_config=GenerationConfig(  # type: ignore[no-untyped-call]
                    max_new_tokens=max_new_tokens,
                    do_sample=False,
                    eos_token_id=list(stop_token_ids),
                    pad_token_id=pad_id,
                    stop_strings=sampling.stop_strings or None,
                ),
                logits_processor=LogitsProcessorList([chooser]),
                tokenizer=tokenizer,
                synced_gpus=False,
            )
            new_ids = sequences_BT[:, token_ids_BP.shape[1] :].tolist()
            logprobs = torch.stack(chooser.logprobs, dim=1).tolist()
            for ids, row_logprobs in zip(new_ids, logprobs, strict=True):
                end = stops.end(ids, num_seen=0)
                for position, logprob in enumerate(row_logprobs[:end]):
                    check_finite(math.isfinite(logprob), position)
                responses.append(Response(ids[:end], row_logprobs[:end], stopped=end is not None))
    return responses


class _Chooser(LogitsProcessor):
    """Leaves one token possible: ours. Remembers its log-probability."""

    def __init__(
        self, uniform_BR: Tensor, sampling: SamplingConfig, stop_token_ids: tuple[int, ...], *, num_prompt_tokens: int
    ) -> None:
        self.uniform_BR = uniform_BR
        self.choose = TokenChooser(sampling, stop_token_ids)
        self.num_prompt_tokens = num_prompt_tokens
        self.logprobs: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        position = input_ids.shape[1] - self.num_prompt_tokens
        position_B = torch.full((len(scores),), position, device=scores.device)
        token_B, logprob_B = self.choose(scores, position_B, self.uniform_BR[:, position])
        self.logprobs.append(logprob_B)
        return torch.full_like(scores, -torch.inf).scatter(1, token_B[:, None], 0.0)
