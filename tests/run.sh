#!/usr/bin/env bash
# Install what the tests need into .venv and run them.
#   bash tests/run.sh              the default tests
#   bash tests/run.sh --all        the slow ones too
#   bash tests/run.sh ARGS...      ARGS go to pytest
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# One way to make the environment: the end-to-end script's.
bash launch/run_e2e.sh --install-only --extras dev,smollm2
# shellcheck disable=SC1091
source .venv/bin/activate
[[ "${1:-}" == "--install-only" ]] && exit 0

# One thread a process: tests start two ranks on machines with two cores.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
export TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 WANDB_MODE=offline
exec python -m pytest "$@"
