#!/usr/bin/env bash
# Install the programs that the tests on emulated hosts use (tests/hosts.py, tests/slurm.py), and the headers that the test
# of weights on a disk builds with, where they are missing: as root on Debian. Elsewhere it says so, and those tests skip
# with a reason. No service is started or left enabled.
set -euo pipefail

declare -A packages=(
  [sshd]=openssh-server [ssh]=openssh-client [pdsh]=pdsh [ip]=iproute2 [unshare]=util-linux [mpirun]=openmpi-bin
  [slurmctld]=slurmctld [slurmd]=slurmd [srun]=slurm-client [munged]=munge
)
PATH="$PATH:/usr/sbin:/sbin"
missing=()
for program in "${!packages[@]}"; do
  command -v "$program" > /dev/null || missing+=("${packages[$program]}")
done
[[ -e /usr/include/libaio.h ]] || missing+=(libaio-dev)
((${#missing[@]})) || exit 0

skipped="the tests that need them will be skipped"
if [[ $(id -u) != 0 ]] || ! command -v apt-get > /dev/null; then
  echo "install_programs.sh: not root, or no apt-get, to install ${missing[*]}: $skipped"
  exit 0
fi
policy=/usr/sbin/policy-rc.d
if [[ ! -e $policy ]]; then # what Debian asks before it starts the service of a new package
  trap 'rm -f "$policy"' EXIT
  printf '#!/bin/sh\nexit 101\n' > "$policy"
  chmod +x "$policy"
fi
export DEBIAN_FRONTEND=noninteractive
log=$(mktemp)
apt-get update > "$log" 2>&1 || tail -n 3 "$log"
for package in "${missing[@]}"; do # one by one: a distribution may lack some
  if apt-get install --yes --no-install-recommends "$package" > "$log" 2>&1; then
    echo "install_programs.sh: installed $package"
  else
    tail -n 1 "$log"
    echo "install_programs.sh: cannot install $package: $skipped"
  fi
done
rm -f "$log"
