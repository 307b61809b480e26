"""The benchmark's models and rows: sizes, lengths, texts. No torch.

Texts are drawn from a vocabulary of words with one token each, so that a row of n words has n tokens for everybody who
reads the files with the benchmark's tokenizer.
"""

import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SPECIAL_TOKENS = ("<bos>", "<eos>", "<pad>", "<unk>")
SEED = 1
MAX_PROMPT = 150
MAX_ANSWER = 200
LARGE_VOCABULARY = 50_272
"""OPT's own, in the line on memory."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How large the models and the measurements are."""

    name: str
    hidden: int
    layers: int
    heads: int
    reward_hidden: int
    reward_layers: int
    reward_heads: int
    vocabulary: int
    large_vocabulary: int
    positions: int
    length_scale: float
    """Lengths of rows, in units of the full benchmark's."""
    num_rows: int
    warmup_steps: int
    steps: int
    ppo_warmup_steps: int
    ppo_steps: int

    def length(self, tokens: int) -> int:
        """A length of the full benchmark at this size."""
        return max(2, round(tokens * self.length_scale))

    def actor(self, *, large_vocabulary: bool = False) -> dict[str, Any]:
        """Hugging Face config of the policy."""
        vocabulary = self.large_vocabulary if large_vocabulary else self.vocabulary
        return opt(self.hidden, self.layers, self.heads, vocabulary, self.positions)

    def reward(self, *, large_vocabulary: bool = False) -> dict[str, Any]:
        """Hugging Face config of the reward model and the critic."""
        vocabulary = self.large_vocabulary if large_vocabulary else self.vocabulary
        return opt(self.reward_hidden, self.reward_layers, self.reward_heads, vocabulary, self.positions)


FULL = Sizes(
    name="full",
    hidden=512,
    layers=8,
    heads=8,
    reward_hidden=256,
    reward_layers=4,
    reward_heads=4,
    vocabulary=8192,
    large_vocabulary=LARGE_VOCABULARY,
    positions=1024,
    length_scale=1.0,
    num_rows=512,
    warmup_steps=2,
    steps=6,
    ppo_warmup_steps=1,
    ppo_steps=2,
)
QUICK = Sizes(
    name="quick",
    hidden=128,
    layers=2,
    heads=2,
    reward_hidden=32,
    reward_layers=1,
    reward_heads=2,
    vocabulary=512,
    large_vocabulary=1024,
    positions=256,
    length_scale=0.1,
    num_rows=128,
    warmup_steps=1,
    steps=2,
    ppo_warmup_steps=1,
    ppo_steps=1,
)
SIZES = {sizes.name: sizes for sizes in (FULL, QUICK)}


def opt(hidden: int, layers: int, heads: int, vocabulary: int, positions: int) -> dict[str, Any]:
    """Hugging Face config of an OPT without dropout."""
    return {
        "model_type": "opt",
        "hidden_size": hidden,
        "word_embed_proj_dim": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "ffn_dim": 4 * hidden,
        "vocab_size": vocabulary,
        "max_position_embeddings": positions,
        "dropout": 0.0,
        "attention_dropout": 0.0,
        "activation_dropout": 0.0,
        "layerdrop": 0.0,
    }


def words(vocabulary: int) -> list[str]:
    """Words of a vocabulary, special tokens left out; a larger vocabulary starts with the words of a smaller one."""
    return [f"w{number}" for number in range(vocabulary - len(SPECIAL_TOKENS))]


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """Tokens of one row: its prompt and its answers, the stop token of each answer included."""

    prompt: int
    answers: tuple[int, ...]


def mixed_lengths(sizes: Sizes, num_rows: int, *, num_answers: int, seed: int) -> list[Lengths]:
    """Prompts of 10 to 150 tokens, uniform, and answers of 10 to 200, log-uniform: many short ones, few long ones."""
    rng = random.Random(seed)
    shortest, longest_prompt, longest = (sizes.length(tokens) for tokens in (10, MAX_PROMPT, MAX_ANSWER))

    def answer() -> int:
        return min(longest, int(shortest * math.exp(rng.random() * math.log((longest + 1) / shortest))))

    return [
        Lengths(prompt=rng.randint(shortest, longest_prompt), answers=tuple(answer() for _ in range(num_answers)))
        for _ in range(num_rows)
    ]


def long_lengths(sizes: Sizes, num_rows: int) -> list[Lengths]:
    """Rows of 1000 tokens, most of them answer: what the matrix products can do where nothing is ragged."""
    return [Lengths(prompt=sizes.length(100), answers=(sizes.length(900),))] * num_rows


def rows_of(sizes: Sizes) -> dict[str, list[Lengths]]:
    """Lengths of every file of rows."""
    return {
        "sft": mixed_lengths(sizes, sizes.num_rows, num_answers=1, seed=SEED),
        "pairs": mixed_lengths(sizes, sizes.num_rows, num_answers=2, seed=SEED + 1),
        "prompts": mixed_lengths(sizes, sizes.num_rows, num_answers=0, seed=SEED + 2),
        "long": long_lengths(sizes, sizes.num_rows // 4),
    }


def write_rows(path: Path, lengths: Sequence[Lengths], *, vocabulary: int, seed: int) -> None:
    """Write rows of random words: prompts alone, demonstrations (`response`) or pairs (`chosen`, `rejected`)."""
    rng = random.Random(seed)
    choices = words(vocabulary)
    names = {0: (), 1: ("response",), 2: ("chosen", "rejected")}
    lines = []
    for row in lengths:
        texts = {"prompt": _text(rng, choices, row.prompt)}
        for name, tokens in zip(names[len(row.answers)], row.answers, strict=True):
            texts[name] = _text(rng, choices, tokens - 1)  # the stop token is no word
        lines.append(json.dumps(texts) + "\n")
    path.write_text("".join(lines), encoding="utf-8")


def _text(rng: random.Random, choices: Sequence[str], count: int) -> str:
    return " ".join(rng.choices(choices, k=count))
