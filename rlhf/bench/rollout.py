"""Program: our rollout on the benchmark's prompts, by the function that PPO calls.

It takes the arguments of the peers' programs (peers/arguments.py) and writes the same record.
"""

import sys

import numpy as np
from transformers import PreTrainedTokenizerBase

from rlhf import ds_config
from rlhf.bench.peers.arguments import parse, read_rows
from rlhf.bench.peers.recorder import Recorder
from rlhf.config import ModelConfig, SamplingConfig
from rlhf.data.dataset import PromptRow
from rlhf.data.template import load_template
from rlhf.distributed import shutdown
from rlhf.engine import FrozenEngine, setup
from rlhf.models.build import build_causal_lm, load_tokenizer
from rlhf.models.policy import Policy
from rlhf.rollout.answers import Voice, draw_responses

BATCH = 32


def main() -> int:
    """Generate and record; tokens are the responses' real ones."""
    arguments = parse("rlhf.bench.rollout")
    setup()
    tokenizer = load_tokenizer(arguments.model)
    template = load_template("auto", tokenizer)
    model = build_causal_lm(ModelConfig(path=arguments.model), tokenizer, seed=arguments.seed)
    ds = ds_config.load("cpu_frozen_bf16" if arguments.dtype == "bf16" else "cpu_frozen")
    engine = FrozenEngine(Policy(model), ds=ds, role="policy")
    voice = Voice(
        tokenizer=tokenizer,
        template=template,
        sampling=SamplingConfig(min_new_tokens=0 if arguments.stop else arguments.new_tokens),
        max_new_tokens=arguments.new_tokens,
        batch_size=BATCH,
    )
    texts = [row["prompt"] for row in read_rows(arguments.data)]
    recorder = Recorder(arguments.out)
    recorder.start()
    for step in range(arguments.steps):
        indices = [(step * arguments.rows + i) % len(texts) for i in range(arguments.rows)]
        rows = [_row(tokenizer, texts[index], index) for index in indices]
        responses = draw_responses(
            engine, voice, rows, sample_ids=[0] * len(rows), seed=arguments.seed, step=step
        )  # fmt: skip
        recorder.count(tokens=sum(len(response.token_ids) for response in responses), rows=len(responses))
        recorder.end_step()
    recorder.write()
    shutdown()
    return 0


def _row(tokenizer: PreTrainedTokenizerBase, text: str, index: int) -> PromptRow:
    ids = np.array(tokenizer(text)["input_ids"], dtype=np.int32)
    return PromptRow(prompt_ids=ids, meta={}, text=text, source=0, index=index, uid=index)


if __name__ == "__main__":
    sys.exit(main())
