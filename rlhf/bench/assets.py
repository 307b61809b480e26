"""Program: write the benchmark's tokenizers, models and rows into a folder, as a user would have them.

python -m rlhf.bench.assets --out DIR --sizes full
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from rlhf import artifacts
from rlhf.artifacts import Kind
from rlhf.bench.workload import (
    MAX_ANSWER,
    SEED,
    SIZES,
    SPECIAL_TOKENS,
    Sizes,
    rows_of,
    words,
    write_rows,
)
from rlhf.config import ModelConfig
from rlhf.data.template import load_template
from rlhf.model_folder import save_model_folder
from rlhf.models.build import build_causal_lm, build_reward_model
from rlhf.stage import Language

MEAN_RAGGED_ANSWER = 60
"""Tokens of an answer whose end is drawn: about geometric, so a few reach the limit of 200."""
_BIAS_SIZE = 8.0
"""Length of the last norm's bias; what comes out of the norm has length 1 along any direction."""
_CALIBRATION_ROWS = 16


def main(argv: Sequence[str] | None = None) -> int:
    """Write everything; a folder that is complete and of these sizes is left as it is."""
    parser = argparse.ArgumentParser(prog="rlhf.bench.assets", allow_abbrev=False)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--sizes", choices=sorted(SIZES), required=True)
    arguments = parser.parse_args(argv)
    sizes = SIZES[arguments.sizes]
    stamp = arguments.out / "sizes.json"
    if not stamp.is_file() or json.loads(stamp.read_text(encoding="utf-8")) != asdict(sizes):
        stamp.unlink(missing_ok=True)
        write_assets(arguments.out, sizes)
        artifacts.write_json(stamp, asdict(sizes))
    return 0


def write_assets(folder: Path, sizes: Sizes) -> None:
    """Models `actor`, `reward` (with `_stops`: stops by itself; `_large`: large vocabulary) and the JSONL files."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, (name, lengths) in enumerate(rows_of(sizes).items()):
        write_rows(folder / f"{name}.jsonl", lengths, vocabulary=sizes.vocabulary, seed=SEED + 10 + number)
    for suffix, large in (("", False), ("_large", True)):
        language = make_language(sizes.large_vocabulary if large else sizes.vocabulary)
        actor_config, reward_config = sizes.actor(large_vocabulary=large), sizes.reward(large_vocabulary=large)
        actor = build_causal_lm(ModelConfig(config=actor_config), language.tokenizer, seed=SEED)
        _save(actor, language, folder / f"actor{suffix}", "policy")
        reward = build_reward_model(ModelConfig(config=reward_config), language.tokenizer, seed=SEED)
        _save(reward, language, folder / f"reward{suffix}", "reward")
        if not large:
            mean, longest = sizes.length(MEAN_RAGGED_ANSWER), sizes.length(MAX_ANSWER)
            make_stop(actor, language.template.stop_token_id, mean_length=mean, longest=longest)
            _save(actor, language, folder / "actor_stops", "policy")


def make_tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """One token a word, words apart by spaces; nothing is put before a text."""
    entries = [*SPECIAL_TOKENS, *words(vocabulary)]
    tokenizer = Tokenizer(models.WordLevel({entry: number for number, entry in enumerate(entries)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    bos, eos, pad, unk = SPECIAL_TOKENS
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, bos_token=bos, eos_token=eos, pad_token=pad, unk_token=unk
    )


def make_language(vocabulary: int) -> Language:
    """The tokenizer with the template that adds nothing: a prompt's ids are its words'."""
    tokenizer = cast(PreTrainedTokenizerBase, make_tokenizer(vocabulary))
    return Language(tokenizer=tokenizer, template=load_template("plain", tokenizer))


@torch.no_grad()
def make_stop(model: PreTrainedModel, stop_token_id: int, *, mean_length: int, longest: int) -> None:
    """Change an OPT model's weights so that its random answers end, after `mean_length` tokens on average.

    The last norm's bias gets a direction of its own, the stop token's embedding points along it and the others hardly
    do, so the stop token's logit is about the same at every position. How large it has to be is measured on answers
    that the model draws without it: a random model repeats itself, which no formula knows.

    Args:
        model: is changed in place.
        stop_token_id: ends an answer.
        mean_length: of answers that are cut at `longest`.
        longest: tokens of the longest answer.
    """
    embedding = cast(nn.Embedding, model.get_input_embeddings()).weight
    vocabulary, hidden = embedding.shape
    generator = torch.Generator().manual_seed(SEED)
    direction = torch.randn(hidden, generator=generator)
    direction /= direction.norm()
    cast(Any, model).model.decoder.final_layer_norm.bias += _BIAS_SIZE * direction
    embedding[stop_token_id] = 0.0
    prompt_BP = torch.randint(len(SPECIAL_TOKENS), vocabulary, (_CALIBRATION_ROWS, 4), generator=generator)
    with torch.random.fork_rng([]):
        torch.manual_seed(SEED)
        token_ids_BT = cast(Any, model).generate(
            input_ids=prompt_BP, attention_mask=torch.ones_like(prompt_BP), do_sample=True, top_k=0,
            max_new_tokens=longest, min_new_tokens=longest,
        )  # fmt: skip
    hidden_BRD = cast(Any, model).model(token_ids_BT).last_hidden_state[:, prompt_BP.shape[1] - 1 : -1]
    others_BRV = hidden_BRD @ embedding.T
    others_BRV[..., stop_token_id] = -torch.inf
    along_BR, others_BR = hidden_BRD @ direction, others_BRV.logsumexp(-1)
    low, high = 0.0, 10.0
    for _ in range(40):
        size = (low + high) / 2
        running_BR = (1 - torch.sigmoid(size * along_BR - others_BR)).cumprod(-1)
        length = 1 + float(running_BR[:, :-1].sum(-1).mean())
        low, high = (size, high) if length > mean_length else (low, size)
    embedding[stop_token_id] = low * direction


def _save(model: PreTrainedModel, language: Language, folder: Path, kind: Kind) -> None:
    language.tokenizer.chat_template = language.template.jinja

    def finish(part: Path) -> None:
        artifacts.write_manifest(part, kind=kind, stage="benchmark", contract=language.contract, seed=SEED)

    save_model_folder(
        model, model.state_dict(), language.tokenizer, folder, stop_token_id=language.template.stop_token_id,
        finish=finish,
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
