"""How a weight is divided, and the statistics of tokens from shares of a head, by groups of one process."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from rlhf.models.split import FAMILIES
from rlhf.models.tensor_parallel import Cut, Shares
from rlhf.models.token_stats import VocabularyPart, token_stats


def test_cuts_worked_by_hand() -> None:
    """Three blocks of 2 over 2 ranks; five rows over 2, and over 4, where the last rank has none."""
    assert [Cut(0, 6, blocks=3).share(torch.arange(6), rank, 2).tolist() for rank in range(2)] == [[0, 2, 4], [1, 3, 5]]
    rows = torch.arange(1, 6)
    assert [Cut(0, 5).share(rows, rank, 2).tolist() for rank in range(2)] == [[1, 2, 3], [4, 5, 0]]
    assert [Cut(0, 5).share(rows, rank, 4).tolist() for rank in range(4)] == [[1, 2], [3, 4], [5, 0], [0, 0]]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_shares_joined_are_the_whole(family: str, size: int) -> None:
    """Every weight of a model, and most of them are divided; vocabulary 37 divides by nothing."""
    config = AutoConfig.for_model(
        family, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, vocab_size=37, tie_word_embeddings=False
    )
    model = AutoModelForCausalLM.from_config(config)
    shares = [Shares(model, rank, size) for rank in range(size)]
    divided = 0
    for name, weight in model.named_parameters():
        cut = shares[0].cut_of(name, weight.shape)
        parts = [one.cut(name, weight) for one in shares]
        assert torch.equal(parts[0] if cut is None else cut.join(parts), weight), name
        assert (cut is None) == (parts[0].shape == weight.shape), name
        divided += cut is not None and weight.numel()
    whole = sum(p.numel() for n, p in model.named_parameters() if "embed_positions" not in n and "wpe" not in n)
    assert divided > 0.9 * whole


@dataclass
class Recorded:
    """A group of one process: each member's sums and maxima are recorded, then given to all in another round."""

    rank: int
    size: int
    told: list[Tensor]
    answers: list[Tensor]

    def _tell(self, x: Tensor) -> Tensor:
        self.told.append(x.clone())
        return x.copy_(self.answers[len(self.told) - 1]) if len(self.told) <= len(self.answers) else x

    def sum_(self, x: Tensor) -> Tensor:
        return self._tell(x)

    def max_(self, x: Tensor) -> Tensor:
        return self._tell(x)


def split_stats(
    hidden_SD: Tensor, weight_VD: Tensor, bias_V: Tensor, token_S: Tensor, size: int, temperature: float
) -> list[tuple[Any, ...]]:
    """Outputs and gradients of all members, their collectives played one after another until none is new."""
    vocab_size = len(weight_VD)
    cut = Cut(0, vocab_size)
    answers: list[Tensor] = []
    num_forward = 2 * -(-len(token_S) // 3)
    while True:
        members, results = [], []
        for rank in range(size):
            group = Recorded(rank, size, [], answers)
            weight, bias = (cut.share(x, rank, size).clone().requires_grad_() for x in (weight_VD, bias_V))
            hidden = hidden_SD.clone().requires_grad_()
            part = VocabularyPart.of(group, num_rows=len(weight), vocab_size=vocab_size)  # type: ignore[arg-type]
            logprob, entropy, greedy = token_stats(hidden, weight, bias, token_S, temperature, 3, part)
            (logprob * torch.linspace(1, 2, len(token_S)) + 0.3 * entropy).sum().backward()
            members.append(group)
            results.append((logprob, entropy, greedy, hidden.grad, weight.grad, bias.grad))
        if len(answers) == num_forward + 1:
            return results
        number = len(answers)
        said = torch.stack([member.told[number] for member in members])
        is_maximum = number < num_forward and number % 2 == 0
        answers.append(said.amax(dim=0) if is_maximum else said.sum(dim=0))


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_statistics_of_shares_are_those_of_the_whole(size: int, temperature: float) -> None:
    """Seven tokens in chunks of 3, vocabulary 5: with four ranks the last has no token. Gradients too."""
    generator = torch.Generator().manual_seed(0)
    hidden_SD, weight_VD, bias_V = (3 * torch.randn(shape, generator=generator) for shape in ((7, 4), (5, 4), (5,)))
    token_S = torch.tensor([0, 4, 2, 2, 3, 1, 4])
    hidden, weight, bias = (x.clone().requires_grad_() for x in (hidden_SD, weight_VD, bias_V))
    logits_SV = (hidden @ weight.T + bias) / temperature
    all_S = logits_SV.log_softmax(-1)
    logprob = all_S.gather(-1, token_S[:, None]).squeeze(-1)
    entropy = -(all_S.exp() * all_S).sum(-1)
    (logprob * torch.linspace(1, 2, 7) + 0.3 * entropy).sum().backward()
    found = split_stats(hidden_SD, weight_VD, bias_V, token_S, size, temperature)
    for own in found:
        for value, expected in zip(
            own[:4], (logprob, entropy, logits_SV.argmax(-1) == token_S, hidden.grad), strict=True
        ):
            torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-5)
    for number, expected in ((4, weight.grad), (5, bias.grad)):
        joined = Cut(0, 5).join([own[number] for own in found])
        torch.testing.assert_close(joined, expected, rtol=1e-5, atol=1e-5)
    num_padding = {2: 1, 4: 2}[size]
    assert found[-1][4][-num_padding:].count_nonzero() == 0


def test_a_classifier_has_no_shared_head() -> None:
    config = AutoConfig.for_model(
        "llama", hidden_size=32, num_hidden_layers=1, num_attention_heads=4, vocab_size=8, num_labels=1
    )
    with torch.device("meta"):
        model = AutoModelForSequenceClassification.from_config(config)
    shares = Shares(model, 1, 2)
    assert shares.cut_of("score.weight", (1, 32)) is None
    assert shares.cut_of("model.embed_tokens.weight", (8, 32)) == Cut(0, 8)
    assert isinstance(model.score, nn.Linear)
