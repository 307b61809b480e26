from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, PreTrainedModel, PreTrainedTokenizerFast

from rlhf.config import ModelConfig
from rlhf.models.build import build_reward_model
from rlhf.models.scalar_head import ScalarModel, normalise_scores, score_normalisation, scores_at

TOLERANCE = 1e-4  # fp32; attention sums in another order once there is padding


def reward_model(make: Any, config: dict[str, Any], **options: Any) -> PreTrainedModel:
    spread = {"init_std": 0.2, "initializer_range": 0.2}
    cfg = ModelConfig(config={**config, **spread}, **options)
    return build_reward_model(cfg, make.tokenizer, seed=1).eval()


def last_index(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Place of each row's last real token."""
    mask_BT = batch["attention_mask_BT"].long()
    num_rows, width = mask_BT.shape
    return (mask_BT * torch.arange(width)).argmax(-1) + width * torch.arange(num_rows)


def score(model: PreTrainedModel, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    with torch.no_grad():
        return scores_at(ScalarModel(model)(**batch), last_index(batch))


def test_scores_equal_hugging_faces_after_save_and_load(family: dict[str, Any], make: Any, tmp_path: Path):
    """C8, C10: one row at a time, and the padded batch, whose pad id no token shares."""
    model = reward_model(make, family)
    model.save_pretrained(tmp_path)
    reloaded = AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
    assert reloaded.config.num_labels == 1 and reloaded.config.pad_token_id == make.tokenizer.pad_token_id
    rows = make.rows(5, 1, 9)
    batch = make.pad(rows)
    score_B = score(model, batch)
    with torch.no_grad():
        alone_B = torch.cat([reloaded(input_ids=row[None]).logits[0] for row in rows])
        padded_B = reloaded(input_ids=batch["token_ids_BT"], attention_mask=batch["attention_mask_BT"].long()).logits[
            :, 0
        ]
    assert (score_B - alone_B).abs().max() < TOLERANCE
    assert (score_B - padded_B).abs().max() < TOLERANCE
    assert score_B.std() > 1e-3


@pytest.mark.parametrize("padding", [{"right": 6}, {"left": 7}])
def test_a23_padding_side_and_batch_mates_change_nothing(family: dict[str, Any], make: Any, padding: dict[str, int]):
    model = reward_model(make, family)
    rows = make.rows(6, 1, 11)
    together_B = score(model, make.pad(rows, **padding))
    for b, row in enumerate(rows):
        assert (together_B[b] - score(model, make.pad([row]))).abs().max() < TOLERANCE


@pytest.mark.parametrize("pad_id", [0, 1, 2], ids=["pad is bos", "pad is eos", "pad is its own"])
def test_a5_score_is_at_the_last_real_token_whatever_the_pad_id(families: Any, make: Any, pad_id: int):
    """A row that starts with bos (0) and ends with eos (1) scores as it does without padding."""
    model = reward_model(make, families["opt"])
    row = torch.tensor([0, 10, 11, 1])
    batch = make.pad([row, make.rows(9)[0]], pad_id=pad_id)
    assert last_index(batch).tolist() == [3, 9 + 8]
    assert score(model, batch)[0].item() == pytest.approx(score(model, make.pad([row]))[0].item(), abs=TOLERANCE)


def test_a5_shared_pad_and_eos_keeps_hugging_face_from_pooling_one_token_early(
    families: Any, make: Any, tmp_path: Path
):
    """config.pad_token_id is None then: HF scores the last column of a row and refuses a padded batch."""
    shared = PreTrainedTokenizerFast(
        tokenizer_object=make.tokenizer.backend_tokenizer, bos_token="<bos>", eos_token="<eos>", pad_token="<eos>"
    )
    model = build_reward_model(ModelConfig(config=families["opt"]), shared, seed=1).eval()
    model.save_pretrained(tmp_path)
    reloaded = AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
    assert reloaded.config.pad_token_id is None
    row = torch.tensor([0, 10, 11, 1])
    batch = make.pad([row], right=3, pad_id=1)
    assert score(model, batch).item() == pytest.approx(reloaded(input_ids=row[None]).logits.item(), abs=TOLERANCE)
    with pytest.raises(ValueError, match="padding token"):
        reloaded(input_ids=batch["token_ids_BT"].repeat(2, 1))
    reloaded.config.pad_token_id = 1  # what HF would do with the id set: not the same token
    assert abs(score(model, batch).item() - reloaded(input_ids=row[None]).logits.item()) > 1e-3


def test_only_the_value_at_the_last_token_gets_gradient():
    value_BT = torch.zeros(2, 4, requires_grad=True)
    scores_at(value_BT, torch.tensor([3, 5])).sum().backward()
    assert value_BT.grad is not None and value_BT.grad.tolist() == [[0, 0, 0, 1], [0, 1, 0, 0]]


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_has_no_influence_on_values_and_gradients(family: dict[str, Any], make: Any, side: str):
    model = reward_model(make, family)
    results = []
    for pad_id in (2, 7):
        batch = make.pad(make.rows(6, 1), **{side: 4}, pad_id=pad_id)
        model.zero_grad()
        value_BT = torch.where(batch["attention_mask_BT"], ScalarModel(model)(**batch), 0)
        value_BT.square().sum().backward()
        gradients = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        assert gradients.isfinite().all() and gradients.abs().sum() > 0
        results.append((value_BT.detach(), gradients))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.allclose(results[0][1], results[1][1], atol=1e-6)


def test_d22_bfloat16_gives_float32_values(family: dict[str, Any], make: Any):
    model = reward_model(make, family, dtype="bfloat16")
    batch = make.pad(make.rows(5, 2))
    value_BT = ScalarModel(model)(**batch)
    assert value_BT.dtype == torch.float32
    value_BT.sum().backward()


def test_normalised_scores_have_mean_0_and_deviation_1_also_the_second_time_and_after_loading(
    families: Any, make: Any, tmp_path: Path
):
    model = reward_model(make, families["llama"])
    batch = make.pad(make.rows(3, 5, 7, 4, 9, 2))
    raw_B = score(model, batch)
    normalise_scores(model.config, mean=raw_B.mean().item(), std=raw_B.std(unbiased=False).item())
    score_B = score(model, batch)
    assert score_B.mean().abs() < 1e-5 and abs(score_B.std(unbiased=False) - 1) < 1e-5
    normalise_scores(model.config, mean=2.0, std=4.0)
    assert torch.allclose(score(model, batch), (score_B - 2) / 4, atol=1e-5)
    model.save_pretrained(tmp_path)
    reloaded = build_reward_model(ModelConfig(path=str(tmp_path)), make.tokenizer, seed=5).eval()
    assert torch.equal(score(reloaded, batch), score(model, batch))
    assert score_normalisation(reloaded.config) == score_normalisation(model.config) != (0.0, 1.0)


@pytest.mark.parametrize(("mean", "std"), [(0.0, 0.0), (float("nan"), 1.0), (0.0, float("inf"))])
def test_scores_that_say_nothing_are_not_normalised(mean: float, std: float, families: Any, make: Any):
    with pytest.raises(ValueError, match="cannot be normalised"):
        normalise_scores(reward_model(make, families["opt"]).config, mean=mean, std=std)
