"""A model, ragged rows and a loss that are small enough for every combination of ranks, stages and micro-batches."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import OPTConfig, OPTForCausalLM

from rlhf import distributed, ds_config
from rlhf.config import OptimConfig
from rlhf.engine import TrainEngine

VOCAB = 64
# eos and pad share an id: nothing here may find padding by its id.
PAD = EOS = 2
LENGTHS = (12, 1, 5, 9, 3, 7, 2, 11)

# DeepSpeed's own thresholds keep every weight of a model this small gathered.
DEFAULT_THRESHOLDS = {
    "stage3_param_persistence_threshold": 100_000,
    "stage3_max_live_parameters": 1_000_000_000,
    "stage3_max_reuse_distance": 1_000_000_000,
    "stage3_prefetch_bucket_size": 50_000_000,
}


def opt_config(**changes: Any) -> OPTConfig:
    fields: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "word_embed_proj_dim": 32,
        "num_hidden_layers": 2,
        "ffn_dim": 48,
        "num_attention_heads": 2,
        "max_position_embeddings": 64,
        "dropout": 0.0,
        "attention_dropout": 0.0,
        "bos_token_id": EOS,
        "eos_token_id": EOS,
        "pad_token_id": None,
    }
    return OPTConfig(**{**fields, **changes})


def tiny_opt(seed: int = 0, **changes: Any) -> OPTForCausalLM:
    torch.manual_seed(seed)
    return OPTForCausalLM(opt_config(**changes))


def steps_of_rows(num_steps: int, *, lengths: tuple[int, ...] = LENGTHS, seed: int = 1) -> list[list[Tensor]]:
    """For each step the same ragged lengths with new tokens, the eos id among them."""
    generator = torch.Generator().manual_seed(seed)
    return [[torch.randint(2, VOCAB, (length,), generator=generator) for length in lengths] for _ in range(num_steps)]


def num_targets(rows: list[Tensor]) -> int:
    return sum(len(row) - 1 for row in rows)


def micro_batches(rows: list[Tensor], num_micro: int) -> list[list[Tensor]]:
    """This rank's rows in `num_micro` micro-batches, the last ones empty where rows run out."""
    mine = rows[distributed.rank() :: distributed.world_size()]
    return [mine[i::num_micro] for i in range(num_micro)]


def loss_sum(model: Any, rows: list[Tensor]) -> Tensor:
    """Summed next-token loss of ragged rows, padded on the right; 0 (with a graph) for none."""
    rows = rows or [torch.tensor([EOS])]
    width = max(len(row) for row in rows)
    token_ids_BT = torch.stack([F.pad(row, (0, width - len(row)), value=PAD) for row in rows])
    mask_BT = torch.stack([torch.arange(width) < len(row) for row in rows])
    output = model(
        input_ids=token_ids_BT,
        attention_mask=mask_BT.long(),
        position_ids=(mask_BT.long().cumsum(-1) - 1).clamp(min=0),
        use_cache=False,
    )
    loss_BT = F.cross_entropy(
        output.logits[:, :-1].float().flatten(0, 1), token_ids_BT[:, 1:].flatten(), reduction="none"
    )
    return (loss_BT * mask_BT[:, 1:].flatten()).sum() + 0.0 * output.logits.sum()


def engine_of(
    model: nn.Module, name: str, /, *, num_steps: int = 20, role: str = "policy", changes: dict[str, Any] | None = None,
    tensor: distributed.Group | None = None, **optim: Any,
) -> TrainEngine:  # fmt: skip
    """A TrainEngine on a packaged JSON, with changes to its `zero_optimization` and other sections."""
    ds = ds_config.load(name)
    for section, values in (changes or {}).items():
        ds[section] = {**ds.get(section, {}), **values} if isinstance(values, dict) else values
    fields = {"lr": 1e-3, "schedule": "constant", "warmup_frac": 0.0, "clip_norm": 0.0}
    settings = OptimConfig(**{**fields, **optim})
    return TrainEngine(model, ds=ds, optim=settings, role=role, num_steps=num_steps, tensor=tensor)


def train_step(engine: TrainEngine, rows: list[Tensor], num_micro: int = 1) -> tuple[float, Any]:
    """One optimiser step on rows; the mean loss over all ranks, and the step's statistics."""
    count, total = num_targets(rows), torch.zeros(())
    for i, micro in enumerate(micro_batches(rows, num_micro)):
        loss = loss_sum(engine, micro)
        engine.accumulate(loss, count=count, last=i == num_micro - 1)
        total += loss.detach()
    stats = engine.step()
    return distributed.all_sum(total).item() / count, stats


class PlainTorch:
    """The oracle: the same steps by torch alone, all rows in one batch on this process."""

    def __init__(self, model: nn.Module, *, lr: float = 1e-3, clip_norm: float = 0.0, eps: float = 1e-8) -> None:
        self.model = model
        self.clip_norm = clip_norm
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), eps=eps, weight_decay=0.0)

    def step(self, rows: list[Tensor]) -> tuple[float, float]:
        """Mean loss and gradient norm before clipping."""
        loss = loss_sum(self.model, rows) / num_targets(rows)
        self.optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_norm or float("inf"))
        self.optimizer.step()
        return loss.item(), norm.item()


def max_difference(state: dict[str, Tensor] | None, model: nn.Module) -> float:
    """Largest difference of exported weights (None on other ranks: 0) to a model's."""
    if state is None:
        return 0.0
    own = model.state_dict()
    assert state.keys() == own.keys()
    return max((state[name].float() - own[name].float()).abs().max().item() for name in own)
