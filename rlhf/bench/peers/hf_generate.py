"""Program: plain Hugging Face `generate` on the benchmark's prompts, padded on the left, in batches of 32."""

import sys
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlhf.bench.peers.arguments import parse, read_rows
from rlhf.bench.peers.recorder import Recorder, response_length

BATCH = 32


def main() -> int:
    """Generate and record; tokens are the responses' real ones."""
    arguments = parse("rlhf.bench.peers.hf_generate")
    tokenizer = AutoTokenizer.from_pretrained(arguments.model, padding_side="left")
    dtype = torch.bfloat16 if arguments.dtype == "bf16" else torch.float32
    model: Any = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=dtype)
    prompts = [row["prompt"] for row in read_rows(arguments.data)]
    stop_id = tokenizer.eos_token_id
    torch.manual_seed(arguments.seed)
    recorder = Recorder(arguments.out)
    recorder.start()
    for step in range(arguments.steps):
        chosen = [prompts[(step * arguments.rows + i) % len(prompts)] for i in range(arguments.rows)]
        for first in range(0, len(chosen), BATCH):
            batch = tokenizer(chosen[first : first + BATCH], return_tensors="pt", padding=True)
            with torch.no_grad():
                output = model.generate(
                    input_ids=batch["input_ids"],
                    attention_mask=batch["attention_mask"],
                    do_sample=True,
                    temperature=1.0,
                    top_k=0,
                    max_new_tokens=arguments.new_tokens,
                    min_new_tokens=None if arguments.stop else arguments.new_tokens,
                    pad_token_id=tokenizer.pad_token_id,
                )
            responses = output[:, batch["input_ids"].shape[1] :].tolist()
            real = sum(response_length(row, stop_id) for row in responses)
            positions = len(responses) * len(responses[0])
            recorder.count(tokens=real, rows=len(responses), filled=real, positions=positions)
        recorder.end_step()
    recorder.write()
    return 0


if __name__ == "__main__":
    sys.exit(main())
