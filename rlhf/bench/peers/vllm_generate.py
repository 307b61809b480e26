"""Program: vLLM on the benchmark's prompts, all of a step's handed over at once."""

import sys

from transformers import AutoConfig, AutoTokenizer
from vllm import LLM, SamplingParams

from rlhf.bench.peers.arguments import parse, read_rows
from rlhf.bench.peers.recorder import Recorder


def main() -> int:
    """Generate and record; tokens are the responses' real ones."""
    arguments = parse("rlhf.bench.peers.vllm_generate")
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    prompts = [tokenizer(row["prompt"])["input_ids"] for row in read_rows(arguments.data)]
    engine = LLM(
        model=arguments.model,
        dtype="bfloat16" if arguments.dtype == "bf16" else "float32",
        max_model_len=AutoConfig.from_pretrained(arguments.model).max_position_embeddings,
        max_num_seqs=32,
        seed=arguments.seed,
        disable_log_stats=True,
    )
    sampling = SamplingParams(
        temperature=1.0,
        max_tokens=arguments.new_tokens,
        min_tokens=0 if arguments.stop else arguments.new_tokens,
        detokenize=False,
        # The rollout of PPO needs the drawn tokens' log-probabilities, as ours returns them.
        logprobs=0,
    )
    recorder = Recorder(arguments.out)
    recorder.start()
    for step in range(arguments.steps):
        chosen = [
            {"prompt_token_ids": prompts[(step * arguments.rows + i) % len(prompts)]} for i in range(arguments.rows)
        ]
        outputs = engine.generate(chosen, sampling, use_tqdm=False)
        recorder.count(tokens=sum(len(output.outputs[0].token_ids) for output in outputs), rows=len(outputs))
        recorder.end_step()
    recorder.write()
    return 0


if __name__ == "__main__":
    sys.exit(main())
