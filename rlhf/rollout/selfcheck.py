"""Does our decoding say what Hugging Face's generate says? Asked before a rollout is trusted."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import GenerationConfig

from rlhf.config import SamplingConfig
from rlhf.data.collate import left_pad
from rlhf.models.backbone import base_of
from rlhf.rollout.decode import generate, inference

# Two candidates whose logits differ by less than this share of the largest logit are a tie: rounding decides. About ten
# times the difference seen between batch shapes in float32, eight units in the last place of the narrow types.
NEAR_TIE = {torch.float32: 1e-4, torch.bfloat16: 2**-5, torch.float16: 2**-8}


@dataclass(frozen=True)
class Mismatch:
    """The first token at which the two disagree, and not for a near-tie."""

    row: int
    """Index of the prompt."""
    position: int
    """Index in the response."""
    ours: int | None
    """Our token; None: our response has ended."""
    reference: int | None
    """Hugging Face's token; None: its response has ended."""
    gap: float
    """Hugging Face's logit of its token less that of ours; NaN where one has ended."""


@dataclass(frozen=True)
class SelfCheck:
    """Outcome of a comparison."""

    ok: bool
    message: str
    """One line for the log."""
    mismatch: Mismatch | None = None
    num_near_ties: int = 0
    """Rows that were compared up to a near-tie only."""


def check_greedy(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    *,
    stop_token_ids: Sequence[int],
    max_new_tokens: int,
    pad_id: int,
    tolerance: float | None = None,
    all_ranks_running: Callable[[bool], bool] | None = None,
    graphs: bool = False,
) -> SelfCheck:
    """Decode the prompts greedily with `generate` and with Hugging Face's generate, on one left-padded batch.

    Args:
        model: Hugging Face causal LM, as `generate` takes it; its own generation config plays no part.
        prompts: at least one; of different length, so that padding is tested.
        stop_token_ids: all ids that end a response.
        max_new_tokens: limit on the response.
        pad_id: any valid id.
        tolerance: logits that differ by less than this share are a tie; None: `NEAR_TIE` of the model's type.
        all_ranks_running: as in `generate`; every rank then has to call this with its own prompts.
        graphs: as in `generate`.

    Raises:
        ValueError: no prompts.
    """
    ours = generate(
        model,
        prompts,
        uids=range(len(prompts)),
        sample_ids=[0] * len(prompts),
        sampling=SamplingConfig(temperature=0),
        stop_token_ids=stop_token_ids,
        max_new_tokens=max_new_tokens,
        seed=0,
        step=0,
        pad_id=pad_id,
        batch_size=max(1, len(prompts)),
        all_ranks_running=all_ranks_running,
        graphs=graphs,
    )
    return compare_greedy(
        [response.token_ids for response in ours],
        model,
        prompts,
        stop_token_ids=stop_token_ids,
        max_new_tokens=max_new_tokens,
        pad_id=pad_id,
        tolerance=tolerance,
        synced_ranks=all_ranks_running is not None,
    )


def compare_greedy(
    decoded: Sequence[Sequence[int]],
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    *,
    stop_token_ids: Sequence[int],
    max_new_tokens: int,
    pad_id: int,
    tolerance: float | None = None,
    synced_ranks: bool = False,
) -> SelfCheck:
    """Compare responses, however they were decoded, with Hugging Face's greedy ones; see `check_greedy`.

    Args:
        synced_ranks: all ranks keep making forwards until the last one is finished (sharded ZeRO-3).
    """
    if not prompts:
        raise ValueError("the self-check got no prompts. Give each rank at least one.")
    reference, logits_BRV = _reference(
        model,
        prompts,
        stop_token_ids=stop_token_ids,
        max_new_tokens=max_new_tokens,
        pad_id=pad_id,
        synced_ranks=synced_ranks,
    )
    if tolerance is None:
        tolerance = NEAR_TIE.get(next(model.parameters()).dtype, NEAR_TIE[torch.float32])
    num_near_ties = 0
    for row, (mine, theirs) in enumerate(zip(decoded, reference, strict=True)):
        mismatch = _first_difference(row, mine, theirs, logits_BRV[row])
        if mismatch is None:
            continue
        size = float(logits_BRV[row, min(mismatch.position, len(theirs) - 1)].abs().max())
        if mismatch.gap <= tolerance * size:
            num_near_ties += 1
            continue
        return SelfCheck(
            False,
            f"greedy decoding differs from Hugging Face generate: prompt {row}, response token {mismatch.position} is "
            f"{mismatch.ours}, expected {mismatch.reference} (logit gap {mismatch.gap:.3g}).",
            mismatch,
            num_near_ties,
        )
    num_tokens = sum(map(len, reference))
    ties = f", {num_near_ties} rows up to a near-tie" if num_near_ties else ""
    return SelfCheck(
        True,
        f"greedy decoding equals Hugging Face generate on {len(prompts)} prompts, {num_tokens} tokens{ties}.",
        None,
        num_near_ties,
    )


def _first_difference(row: int, ours: Sequence[int], reference: Sequence[int], logits_RV: Tensor) -> Mismatch | None:
    for position, (mine, theirs) in enumerate(zip(ours, reference, strict=False)):
        if mine != theirs:
            gap = float(logits_RV[position, theirs] - logits_RV[position, mine])
            return Mismatch(row, position, mine, theirs, gap)
    position = min(len(ours), len(reference))
    if len(ours) == len(reference):
        return None
    longer = (list(ours) + [None])[position], (list(reference) + [None])[position]
    return Mismatch(row, position, *longer, gap=float("nan"))


def _reference(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    *,
    stop_token_ids: Sequence[int],
    max_new_tokens: int,
    pad_id: int,
    synced_ranks: bool,
) -> tuple[list[list[int]], Tensor]:
    """Hugging Face's greedy responses and the logits they were chosen from, logits_BRV float32 on the CPU."""
    base = cast(Any, base_of(model))
    device = next(model.parameters()).device
    token_ids_BP, mask_BP = left_pad([list(prompt) for prompt in prompts], pad_id=pad_id, device=device)
    own_config = base.generation_config
    # generate fills what the call leaves open from the model's own generation config: penalties, forced tokens.
    base.generation_config = GenerationConfig()  # type: ignore[no-untyped-call]
    try:
        with inference(model):
            output = base.generate(
                token_ids_BP,
                attention_mask=mask_BP.long(),
                generation_config=GenerationConfig(  # type: ignore[no-untyped-call]
                    do_sample=False,
                    num_beams=1,
                    max_new_tokens=max_new_tokens,
                    eos_token_id=list(stop_token_ids) or None,
                    pad_token_id=pad_id,
                    return_dict_in_generate=True,
                    output_logits=True,
                ),
                synced_gpus=synced_ranks,
            )
    finally:
        base.generation_config = own_config
    logits_BRV = torch.stack([logits_BV.float().cpu() for logits_BV in output.logits], 1)
    responses = []
    for token_ids in output.sequences[:, token_ids_BP.shape[1] :].tolist():
        end = next((i + 1 for i, token in enumerate(token_ids) if token in set(stop_token_ids)), len(token_ids))
        responses.append(token_ids[:end])
    return responses, logits_BRV
