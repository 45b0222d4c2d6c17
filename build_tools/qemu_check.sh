#!/bin/bash
# Run the core of the suite as older processors would: usage: qemu_check.sh [python]
set -euo pipefail
cd "$(dirname "$0")/.."
python=${1:-python3}

qemu=$(command -v qemu-x86_64 || command -v qemu-x86_64-static || true)
if [[ -z $qemu ]]; then
  echo "qemu-x86_64 is missing. Run: apt-get install qemu-user" >&2
  exit 77
fi

# Set on machines whose OpenBLAS cannot tell their processor; here it would make numpy run
# instructions the emulated one does not have.
unset OPENBLAS_CORETYPE

# The processor, and the instruction set that has to be chosen on it.
while read -r cpu isa; do
  echo "== $cpu: $isa"
  "$qemu" -cpu "$cpu" "$python" -P tests/qemu_core.py --expect "$isa"
done <<'CPUS'
Nehalem baseline
Haswell avx2
CPUS
