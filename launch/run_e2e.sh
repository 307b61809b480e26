#!/usr/bin/env bash
# From a fresh checkout to a finished run: makes .venv, installs the pinned dependencies, runs a recipe (tiny_cpu).
#
#   bash launch/run_e2e.sh                                      three stages and the report, on 2 CPU cores
#   bash launch/run_e2e.sh --seed 2 --out runs/second           arguments are those of `rlhf run`
#   bash launch/run_e2e.sh --recipe gsm8k_small --data DIR      another recipe
#   bash launch/run_e2e.sh --install-only --extras dev          only make the environment, with more packages in it
#
# PYTHON names the interpreter that .venv is made from (default: python3); it must be 3.10 or newer.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv="$root/.venv"
python=${PYTHON:-python3}
torch_version=2.13.0

install_only=false
extras=""
arguments=()
has_recipe=false
while (($#)); do
  case $1 in
    --install-only) install_only=true ;;
    --extras)
      [[ $# -ge 2 ]] || { echo "run_e2e.sh: --extras needs names, for example --extras dev,smollm2" >&2; exit 2; }
      extras=$2
      shift
      ;;
    --recipe | --recipe=*) has_recipe=true; arguments+=("$1") ;;
    *) arguments+=("$1") ;;
  esac
  shift
done

# Asked for pip too: a venv whose making was cut short has a python already.
if ! "$venv/bin/python" -m pip --version > /dev/null 2>&1; then
  if ! command -v "$python" > /dev/null; then
    echo "run_e2e.sh: $python is not on PATH. Install Python 3.10 or newer, or name one: PYTHON=/path/to/python3" >&2
    exit 2
  fi
  if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))'; then
    version=$("$python" -c 'import platform; print(platform.python_version())')
    echo "run_e2e.sh: $python is Python $version, but 3.10 or newer is needed. Name one: PYTHON=/path/to/python3" >&2
    exit 2
  fi
  echo "run_e2e.sh: making $venv"
  "$python" -m venv "$venv"
fi

# The stamp holds what was installed last: a hash of setup.py and constraints.txt, then the extras.
stamp="$venv/.installed"
wanted=$(cat "$root/setup.py" "$root/constraints.txt" | "$venv/bin/python" -c \
  'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())')
installed=$(sed -n 1p "$stamp" 2> /dev/null || true)
have=$(sed -n 2p "$stamp" 2> /dev/null || true)
missing=false
for extra in ${extras//,/ }; do
  [[ ",$have," == *",$extra,"* ]] || { missing=true; have="${have:+$have,}$extra"; }
done
if [[ "$installed" != "$wanted" || $missing == true ]]; then
  echo "run_e2e.sh: installing into $venv (minutes the first time)"
  pip=("$venv/bin/python" -m pip install --quiet --disable-pip-version-check)
  # torch first and by itself: it decides which of its builds (CPU or CUDA) the index gives.
  "${pip[@]}" "torch==$torch_version"
  "${pip[@]}" -c "$root/constraints.txt" -e "$root${have:+[$have]}"
  printf '%s\n%s\n' "$wanted" "$have" > "$stamp"
fi
$install_only && exit 0

$has_recipe || arguments=(--recipe tiny_cpu "${arguments[@]+"${arguments[@]}"}")
exec "$venv/bin/rlhf" run "${arguments[@]+"${arguments[@]}"}"
