#!/usr/bin/env bash
# Everything that only a GPU can show: the kernels' tests natively, the launch configs, the benchmarks.
# Usage: bash bench/gpu.sh [all|tests|ops|tune|bench|cuda|goals|sanitize] [output folder]
# Needs torch with CUDA, triton, transformers, pytest, pytest-benchmark; pytest-xdist and pytest-timeout if they are there.
# cuda wants nvcc and g++ besides: the library of csrc/, its tests, compute-sanitizer, its kernels' times beside Triton's.
#
# Each part ends within LIMIT seconds (540) and writes as it goes; called again it does what is left. What it wrote earlier
# is taken from the output folder ($OUT, else bench/results) or, if that is empty, from bench/results:
#   gpu-{clock,tests,ops,cuda}.xml   gpu-tiles.json (moe-runtime tune)   gpu.jsonl (benchmarks)   gpu.log
#   DATE-COMMIT-gpu.json and .md, and the pictures of it where matplotlib is installed
# SHAPES (all) and TOKENS (16384,4096,65536) of tune, WORKERS (8) of the tests, ARGS of the benchmarks, PYTHON (python3).
set -uo pipefail
cd "$(dirname "$0")/.."
part=all
case ${1:-} in all | tests | ops | tune | bench | cuda | goals | sanitize) part=$1; shift ;; esac
out=${1:-${OUT:-bench/results}}
limit=${LIMIT:-540}
python=${PYTHON:-python3}
mkdir -p "$out"
out=$(cd "$out" && pwd)
log=$out/gpu.log
tiles=$out/gpu-tiles.json
lines=$out/gpu.jsonl
for file in gpu-tiles.json gpu.jsonl; do
    [ -e "$out/$file" ] || [ ! -e "bench/results/$file" ] || cp "bench/results/$file" "$out/$file"
done
export PYTHONPATH="$PWD" HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1
# the user's own measured configs stay out of it: tests run the built-in ones, benchmarks those of gpu-tiles.json
XDG_CACHE_HOME=$(mktemp -d)
export XDG_CACHE_HOME
trap 'rm -rf "$XDG_CACHE_HOME"' EXIT
unset TRITON_INTERPRET
"$python" -c 'import torch; assert torch.cuda.is_available(), "no CUDA device"; print(torch.cuda.get_device_name(), torch.__version__)' | tee -a "$log"
[ "${PIPESTATUS[0]}" = 0 ] || exit 1

# a process that died, or whose CUDA context did (tune ends with 3 then, the benchmarks with 99): the rest goes on in a new one
died() { case $1 in 3 | 99 | 132 | 134 | 135 | 136 | 139) return 0 ;; *) return 1 ;; esac; }

# run SECONDS COMMAND...: ended by Ctrl-C's signal, so that it can write what it has
run() { timeout -s INT -k 30 "$@" 2>&1 | tee -a "$log"; return "${PIPESTATUS[0]}"; }

# pytest_on NAME SECONDS WORKERS PATHS...: the result goes to gpu-NAME.xml
pytest_on() {
    local name=$1 seconds=$2 workers=$3 options=()
    shift 3
    [ "$workers" -gt 1 ] && "$python" -c 'import xdist' 2>/dev/null && options+=(-n "$workers")
    "$python" -c 'import pytest_timeout' 2>/dev/null && options+=(--timeout 240)
    run "$seconds" "$python" -m pytest -q -p no:cacheprovider --tb=short -rf "${options[@]}" --junitxml "$out/gpu-$name.xml" "$@"
}

tests() {
    local status=0 end=$((SECONDS + limit))
    # what times the GPU wants it for itself
    pytest_on clock 90 1 tests/gpu/test_tuning.py || status=$?
    pytest_on tests $((end - SECONDS)) "${WORKERS:-8}" tests/gpu --ignore tests/gpu/test_tuning.py || status=$?
    return $status
}

ops() { pytest_on ops "$limit" "${WORKERS:-8}" tests/ops tests/modules tests/hf/dropin/test_experts.py; }

tune() {
    local end=$((SECONDS + limit)) left status=0 try
    for try in 1 2 3 4 5 6; do
        left=$((end - SECONDS))
        [ "$left" -gt 30 ] || break
        run "$left" "$python" -m moe_runtime.cli tune --shape "${SHAPES:-all}" --tokens "${TOKENS:-16384,4096,65536}" \
            --seconds $((left - 30)) --out "$tiles"
        status=$?
        died $status || break
    done
    return $status
}

# bench_on SECONDS END FILE...: bench/bench_FILE.py one after the other, SECONDS of timing per benchmark, until END
bench_on() {
    local seconds=$1 end=$2 left file status worst=0 try
    shift 2
    for file in "$@"; do
        for try in 1 2 3 4; do
            left=$((end - SECONDS))
            [ "$left" -gt 30 ] || break
            # shellcheck disable=SC2086
            run "$left" "$python" -m pytest -q -p no:cacheprovider --tb=short --benchmark-columns=median --seconds "$seconds" \
                --budget $((left - 30)) --results "$lines" ${ARGS:-} "bench/bench_$file.py"
            status=$?
            died $status || break
        done
        [ "${status:-0}" = 0 ] || [ "$status" = 5 ] || worst=$status
    done
    return $worst
}

bench() {
    local end=$((SECONDS + limit)) worst=0
    if [ -e "$tiles" ]; then
        mkdir -p "$XDG_CACHE_HOME/moe_runtime"
        cp "$tiles" "$XDG_CACHE_HOME/moe_runtime/tiles.json"
    fi
    bench_on 3 "$end" layer xft step || worst=$?
    bench_on 1 "$end" tokens memory breakdown routing merging mixing averaging trainable fusion lora expansion methods kernels \
        tokens_backward || worst=$?
    return $worst
}

# builds into the folder that XDG_CACHE_HOME names, for this GPU alone
cuda() {
    local worst=0 end=$((SECONDS + limit)) arch tool
    arch=$("$python" -c 'import torch; print(*torch.cuda.get_device_capability(), sep="")')
    run 120 "$python" -m moe_runtime.native.build_cuda --archs "${ARCHS:-$arch}" || return 1
    "$python" -c 'from moe_runtime.native import cuda; cuda.library(); print(cuda.describe())' 2>&1 | tee -a "$log"
    [ "${PIPESTATUS[0]}" = 0 ] || return 1
    pytest_on cuda 150 "${WORKERS:-8}" tests/gpu/test_cuda.py || worst=$?
    if command -v compute-sanitizer >/dev/null; then
        for tool in memcheck racecheck; do
            sanitizer "$tool" 60 tests/gpu/test_cuda.py -k sanitizer || worst=$?
        done
    else
        echo "compute-sanitizer is missing: memcheck and racecheck did not run" | tee -a "$log"
        worst=1
    fi
    bench_on 0.3 "$end" cuda || worst=$?
    "$python" -m moe_runtime.bench.report "$lines" --cuda-table "$out/cuda_table.json" 2>&1 | tee -a "$log"
    return $worst
}

goals() {
    [ -e "$lines" ] || return 0
    local stamp
    stamp=$(date +%Y-%m-%d)-$(git rev-parse --short HEAD 2>/dev/null || echo nogit)
    "$python" -m moe_runtime.bench.report "$lines" --out "$out/$stamp-gpu.json" >"$out/$stamp-gpu.md"
    "$python" -c 'import matplotlib' 2>/dev/null && "$python" -m moe_runtime.bench.pictures "$out/$stamp-gpu.json" -o "$out"
    "$python" -m moe_runtime.bench.report "$lines" --goals
}

# sanitizer TOOL SECONDS PYTEST-ARGUMENTS...
sanitizer() {
    local tool=$1 seconds=$2
    shift 2
    # every allocation its own, or a read behind a tensor hits the next one
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 run "$seconds" compute-sanitizer --tool "$tool" --error-exitcode 1 \
        "$python" -m pytest -q -x -p no:cacheprovider --tb=short "$@"
}

sanitize() { sanitizer memcheck "$limit" tests/gpu/test_moe_mlp.py -k "few_rows or user_gets"; }

worst=0
case $part in
all) for each in tests ops tune bench cuda; do $each || worst=$?; done; goals ;;
bench | cuda) $part || worst=$?; goals ;;
*) $part || worst=$? ;;
esac
exit $worst
