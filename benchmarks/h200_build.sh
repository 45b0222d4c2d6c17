#!/bin/bash
# Build mla_ops with its GPU kernels on a machine with a card and no network, and test them there.
#
#   benchmarks/h200_build.sh [FOLDER]     the package goes to FOLDER/site (default /tmp/mla_ops)
#
# It takes the python3 that is there, with its torch, nvcc or hipcc, ninja, pytest and setuptools,
# and installs nothing into it. Afterwards: PYTHONPATH=FOLDER/site python3 -P ...
# PYTEST_ARGS is handed on to pytest, SKIP_TESTS=1 builds only. MLA_OPS_* and TORCH_CUDA_ARCH_LIST
# work as in any build; the architecture is that of the card where none is named.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
folder=${1:-/tmp/mla_ops}
python=${PYTHON:-python3}
mkdir -p "$folder"
tree=$folder/tree
rm -rf "$tree" "$folder/site"
mkdir -p "$tree"
(cd "$root" && tar cf - setup.py pyproject.toml README.md CHANGELOG.md LICENSE Makefile \
  csrc build_tools mla_ops tests docs benchmarks) |
  tar xf - -C "$tree" --exclude='*.so' --exclude=__pycache__

"$python" - <<'END'
import shutil, sys
import setuptools, torch
print("python", sys.version.split()[0], "torch", torch.__version__, "setuptools", setuptools.__version__)
print("nvcc", shutil.which("nvcc"), "hipcc", shutil.which("hipcc"), "c++", shutil.which("c++"))
print("ninja", shutil.which("ninja"))
if torch.cuda.is_available():
    print(torch.cuda.get_device_name(), torch.cuda.get_device_capability())
END

# pyproject.toml states the licence as setuptools 77 and newer want it. Where nothing newer can be
# had, the copy that is built here says it as older ones do; the checkout stays as it is.
if ! "$python" -c 'import setuptools, sys; sys.exit(int(setuptools.__version__.split(".")[0]) < 77)'; then
  echo "setuptools is older than 77: building from a copy with the older form of the licence field"
  sed -i 's/^license = .*/license = { text = "Apache-2.0" }/; /^license-files/d' "$tree/pyproject.toml"
  sed -i 's/^if int(setuptools.__version__.*/if False:/' "$tree/setup.py"
fi

# The card that is there only: a third of the time of all architectures.
if [ -z "${TORCH_CUDA_ARCH_LIST:-}" ] && [ -z "${PYTORCH_ROCM_ARCH:-}" ]; then
  arch=$("$python" -c '
import torch
if torch.version.hip is None and torch.cuda.is_available():
    major, minor = torch.cuda.get_device_capability()
    print(f"{major}.{minor}" + ("a" if major >= 9 else ""))')
  if [ -n "$arch" ]; then export TORCH_CUDA_ARCH_LIST=$arch; fi
fi

log=$folder/build.log
begin=$SECONDS
if ! MLA_OPS_GPU=${MLA_OPS_GPU:-1} MLA_OPS_BUILD_DIR=$folder/build "$python" -m pip install -v \
  --no-build-isolation --no-deps --no-index --no-cache-dir --target "$folder/site" "$tree" \
  >"$log" 2>&1; then
  tail -60 "$log"
  echo "the build failed; all of its output: $log"
  exit 1
fi
echo "built in $((SECONDS - begin)) s"
grep -n 'warning' "$log" | head -20 || true

# From here on the installed package: the checkout's folder is not on the path.
cd "$folder"
export PYTHONPATH=$folder/site${PYTHONPATH:+:$PYTHONPATH}
"$python" -P - <<'END'
import torch, mla_ops
from mla_ops import _C, reference
info = _C.build_info()
for name, value in info.items():
    print(f"    {name:18} {value}")
assert info["gpu_architectures"], "no GPU kernels were compiled"
assert torch._C._dispatch_has_kernel_for_dispatch_key("mla::_quantize_fp8", "CUDA")
if torch.cuda.is_available():
    x = torch.randn(300, 576, dtype=torch.bfloat16, device="cuda")
    codes, scale = mla_ops.quantize_fp8(x, dtype=torch.float8_e4m3fn)
    want, want_scale = reference.quantize_fp8(x.cpu(), None, torch.float8_e4m3fn)
    assert torch.equal(codes.cpu().view(torch.uint8), want.view(torch.uint8))
    assert torch.equal(scale.cpu(), want_scale)
    print("smoke test passed on", torch.cuda.get_device_name())
else:
    print("no card: built and loaded, not run")
END
if [ "${SKIP_TESTS:-0}" = 1 ]; then exit 0; fi
cd "$tree"
# The copy's own mla_ops must not be what is tested.
mv mla_ops ../mla_ops.source.$$ && rm -rf ../mla_ops.source.$$
# shellcheck disable=SC2086
"$python" -P -m pytest -p no:cacheprovider tests/test_gpu_*.py -m gpu -q ${PYTEST_ARGS:-}
