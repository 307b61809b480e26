"""Memory of the data layer does not grow with the rows, but for the leak report's 24 bytes each."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import json, re, sys
from pathlib import Path
from rlhf.config import DataConfig, SourceConfig, SplitConfig
from rlhf.data.dataset import build_dataset
from rlhf.data.template import load_template
from rlhf.models.build import train_bpe

def anonymous():
    return int(re.search(r"RssAnon:\\s+(\\d+)", Path("/proc/self/status").read_text()).group(1)) * 1024

folder, rows = Path(sys.argv[1]), int(sys.argv[2])
tokenizer = train_bpe([f"What is {i}?" for i in range(200)], vocab_size=300)
cfg = DataConfig(sources=[SourceConfig(path=str(folder / f"{rows}.jsonl"))], max_prompt_tokens=32,
                 max_response_tokens=16, cache_dir=str(folder / "cache"), split=SplitConfig(sft=0, reward=0, ppo=1))
template = load_template("plain", tokenizer)
before = anonymous()
data = build_dataset(cfg, stage="ppo", part="train", template=template, tokenizer=tokenizer)
for i in range(0, len(data), 101):
    data[i]
print(json.dumps({"rows": len(data), "grown": anonymous() - before}))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="needs Linux's /proc")
def test_a_hundred_thousand_rows_take_no_more_than_ten_thousand(tmp_path: Path) -> None:
    grown = {}
    for rows in (10_000, 100_000):
        with (tmp_path / f"{rows}.jsonl").open("w") as file:
            for i in range(rows):
                file.write(json.dumps({"prompt": f"What is {i} plus {i % 97}?", "note": i}) + "\n")
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, str(tmp_path), str(rows)], capture_output=True, text=True, check=True
        )
        found = json.loads(done.stdout.splitlines()[-1])
        assert found["rows"] > 0.9 * rows  # the rest is held out
        grown[rows] = found["grown"]
    # 24 bytes a row of the report, as much again while it is sorted, 8 of the repeated prompts' numbers.
    assert grown[100_000] - grown[10_000] < 90_000 * 200, grown
