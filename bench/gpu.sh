#!/usr/bin/env bash
# Everything that only a GPU can show, in one go: the kernels' tests natively, then the benchmarks, as dated JSON.
# Usage: bash bench/gpu.sh [output folder]; needs torch with CUDA, triton, transformers, pytest, pytest-benchmark.
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:-bench/results}
mkdir -p "$out"
export PYTHONPATH="$PWD" HF_HUB_OFFLINE=1
unset TRITON_INTERPRET
python3 -c 'import torch; assert torch.cuda.is_available(), "no CUDA device"; print(torch.cuda.get_device_name(), torch.__version__)'
python3 -m pytest -q -p no:cacheprovider tests/ops tests/modules tests/gpu || tests=$?
stamp=$(date +%Y-%m-%d)-$(git rev-parse --short HEAD 2>/dev/null || echo nogit)
python3 -m pytest -q -p no:cacheprovider bench --rounds 20 --benchmark-json "$out/$stamp-gpu.json"
exit "${tests:-0}"
