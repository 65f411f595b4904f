#!/usr/bin/env bash
# GPU tests, benchmarks, hardware counters and launch configs, in parts of less than ten minutes each.
#
#   COMMIT=12297f0 OUT=results bash bench/gpu.sh first               # the most important, for the first ten minutes on a new GPU
#   COMMIT=12297f0 OUT=results bash bench/gpu.sh second third        # the rest; without arguments, all three
#   bash bench/gpu.sh bench                                          # one kind: tests, ops, tune, bench, cuda, sanitize, goals
#
# A part ends within LIMIT seconds (570), even if a step hangs. Its steps run in order of importance; each has a share of the time,
# and the next step gets what is left of it. Results are saved immediately: a run that is killed keeps them, and a process that
# dies is restarted after the item that killed it. At most 8 files in OUT (bench/results):
#
#   gpu.jsonl        the device, outcomes of tests, benchmarks      gpu-tiles.json   moe-runtime tune
#   gpu.log          output of the steps                            gpu-ncu.csv      counters of the six matrix products
#   DATE-COMMIT-gpu.json and .md                                    benchmarks and report, made from gpu.jsonl
#
# A rerun with the same OUT resumes; RESUME is a folder from which gpu.jsonl and gpu-tiles.json are copied first.
# Pictures: python -m moe_runtime.bench.pictures DATE-COMMIT-gpu.json -o pictures
# cuda_table.json: python -m moe_runtime.bench.report gpu.jsonl --cuda-table moe_runtime/native/cuda_table.json
#
# Needs torch with CUDA, triton, pytest, pytest-benchmark; transformers, pytest-xdist, pytest-timeout, ncu, nvcc with g++, and
# compute-sanitizer are used if available. COMMIT is the commit of the results (by default, git's HEAD).
# Also: WORKERS of the tests (by default the cores, at most 16), ARGS of the benchmarks, PYTHON (python3).
# Without a GPU: python -m tests.support.dry_run FOLDER [PART ...] uses stand-ins for the programs and a simulated clock.
set -uo pipefail
cd "$(dirname "$0")/.."

# steps and the seconds guaranteed to each. Estimated with cold caches, 1.1 s of a core per kernel variant, 16 cores:
#   ops_check   about 560 variants, one process per op
#   smoke       327 variants: 23 s, 15 s of imports in every worker, 15 s of work
#   repeats     8 s of imports; for each of two layers 13 variants in sequence, 14.4 s, and 12 s of work
plan_of() {
    case $1 in
    first) echo "check=25 ops_check=85 smoke=80 repeats=70 layers=130 kernels=50 counters=50 tune_qwen3=70 report=10" ;;
    second) echo "check=20 tests=210 clock=40 ops=120 tune=130 memcheck=40 report=10" ;;
    third) echo "check=20 adapters=110 bench=190 build_cuda=60 cuda_tests=45 cuda_memcheck=25 cuda_racecheck=25 cuda_bench=55 counters_all=30 report=10" ;;
    tests) echo "check=20 tests=450 clock=90 report=10" ;;
    ops) echo "check=20 ops=540 report=10" ;;
    tune) echo "check=20 tune=550" ;;
    bench) echo "check=20 bench=540 report=10" ;;
    cuda) echo "check=20 build_cuda=120 cuda_tests=150 cuda_memcheck=60 cuda_racecheck=60 cuda_bench=150 report=10" ;;
    sanitize) echo "check=20 memcheck=550" ;;
    goals) echo "report=30" ;;
    *) return 1 ;;
    esac
}

parts=("$@")
[ $# -gt 0 ] || parts=(first second third)
for part in "${parts[@]}"; do
    plan_of "$part" >/dev/null || { echo "PART is $part. Choose from first, second, third, tests, ops, tune, bench, cuda, sanitize, goals." >&2; exit 2; }
done

# all times are milliseconds since the start; a plan's seconds are scaled to LIMIT. In a dry run, CLOCK is a file with the time
now() {
    local t=${EPOCHREALTIME/[.,]/}
    [ -z "${CLOCK:-}" ] || { read -r t <"$CLOCK" && t=${t}000; }
    echo $((10#$t / 1000 - began))
}
began=0
began=$(now)
limit=$((${LIMIT:-570} * 1000))
grace=$((limit / 70)) # from SIGINT to SIGKILL
seconds() { printf '%d.%03d' $(($1 / 1000)) $(($1 % 1000)); }

python=${PYTHON:-python3}
cores=$(nproc)
workers=${WORKERS:-$((cores < 16 ? cores : 16))}
out=${OUT:-bench/results}
mkdir -p "$out" 2>/dev/null && out=$(cd "$out" && pwd) && log=$out/gpu.log && lines=$out/gpu.jsonl &&
    { : >>"$log" && : >>"$lines"; } 2>/dev/null ||
    { echo "OUT is ${OUT:-bench/results}, where gpu.log and gpu.jsonl cannot be written. Name another folder." >&2; exit 2; }
tiles=$out/gpu-tiles.json
counts=$out/gpu-ncu.csv
if [ -n "${RESUME:-}" ]; then
    for file in gpu.jsonl gpu-tiles.json; do
        [ -s "$out/$file" ] || [ ! -e "$RESUME/$file" ] || cp "$RESUME/$file" "$out/$file"
    done
fi
# a copy without .git may be inside another repository
[ ! -e .git ] || COMMIT=${COMMIT:-$(git describe --always --dirty '--exclude=*' 2>/dev/null)}
COMMIT=${COMMIT:-unknown}
export COMMIT HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1 PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
export PATH="$PATH:/usr/local/cuda/bin" # where a toolkit has nvcc, ncu and compute-sanitizer
# tests use the built-in configs instead of those in the user's cache; benchmarks use gpu-tiles.json
XDG_CACHE_HOME=$(mktemp -d)
export XDG_CACHE_HOME
trap 'rm -rf "$XDG_CACHE_HOME"' EXIT
unset TRITON_INTERPRET

say() { echo "$*" | tee -a "$log"; }

# run COMMAND...: stops at the step's deadline. The output goes to the log, not through a pipe, which a remaining child process
# would keep open; its last lines are printed.
run() {
    local left=$((deadline - $(now) - grace)) from status
    [ $left -gt 0 ] || return 124
    from=$(wc -l <"$log")
    timeout -s INT -k "$(seconds $grace)" "$(seconds $left)" "$@" >>"$log" 2>&1 </dev/null
    status=$?
    tail -n "+$((from + 1))" "$log" | tail -n "${SHOWN:-12}" | cut -c 1-300
    return $status
}

# Whether a process died or lost its CUDA context, for which tune exits with 3, tests and benchmarks with 99. pytest-timeout exits
# with 1, in the middle of a test.
died() {
    case $1 in
    3 | 99 | 132 | 134 | 135 | 136 | 139) return 0 ;;
    1) tail -n 1 "$lines" | grep -q '"began": true' ;;
    *) return 1 ;;
    esac
}

# again FLAG COMMAND...: runs a command, and restarts it with FLAG if it dies. In its arguments, BUDGET is replaced by the seconds
# after which nothing new starts, PATIENCE by the seconds that one test may take.
again() {
    local flag=$1 more=() words status=124 budget patience
    shift
    for _ in 1 2 3 4 5 6; do
        budget=$(((deadline - $(now) - grace) * 8 / 10))
        [ $budget -gt 0 ] || break
        patience=$((budget * 5 / 8 < 120000 ? budget * 5 / 8 : 120000))
        words=("${@/#BUDGET/$(seconds $budget)}")
        run "${words[@]/#PATIENCE/$(seconds $patience)}" "${more[@]}"
        status=$?
        [ $status != 98 ] || { say "the results cannot be written, so later ones would be lost"; exit 98; }
        died $status || break
        more=(${flag:+"$flag"})
    done
    return $status
}

has() {
    timeout -k 1 "$(seconds $grace)" "$python" -c "import sys, importlib.util; sys.exit(importlib.util.find_spec('$1') is None)"
}

# pytest_on WORKERS ARGUMENTS...: one process for all files; it continues after a file that cannot be imported
pytest_on() {
    local workers=$1 options=() status
    shift
    [ "$workers" -gt 1 ] && has xdist && options+=(-n "$workers")
    has pytest_timeout && options+=(--timeout PATIENCE)
    again --restarted "$python" -m pytest -q -p no:cacheprovider -p tests.support.outcomes --results "$lines" --tb=short -rf \
        --continue-on-collection-errors "${options[@]}" "$@"
    status=$?
    [ $status = 5 ] || return $status # nothing left to run
}

# bench_on SECONDS ARGUMENTS...: SECONDS of timing per benchmark
bench_on() {
    local time=$1 options=() status
    shift
    has pytest_timeout && options+=(--timeout PATIENCE)
    # shellcheck disable=SC2086
    again --restarted "$python" -m pytest -q -p no:cacheprovider --tb=short --benchmark-columns=median \
        --continue-on-collection-errors --seconds "$time" --budget BUDGET --results "$lines" "${options[@]}" ${ARGS:-} "$@"
    status=$?
    [ $status = 5 ] || return $status # nothing left to run
}

check() {
    SHOWN=40 run "$python" -m moe_runtime.bench.device_check "$lines"
    local status=$?
    [ $status != 77 ] || { say "no GPU that runs the kernels"; exit 1; }
    return $status
}

# every op and backend against float64
ops_check() { SHOWN=60 again "" "$python" -m moe_runtime.tools.check --seconds BUDGET; }
smoke() { pytest_on "$workers" tests/gpu/test_moe_mlp.py tests/gpu/test_every_op.py -k "frozen or user_gets or few_rows or poisoned or twenty or cuda_graph or host_waits"; }
repeats() { pytest_on 1 tests/gpu/test_repeats.py -o timeout_func_only=true; } # its fixture compiles
layers() {
    bench_on 1.5 bench/bench_layer.py --shapes Qwen3-30B-A3B-16384,Mixtral-8x7B-16384,XFT-DSCoder-1.3B-16384,OLMoE-16384,Qwen3-30B-A3B-4096,OLMoE-4096,XFT-DSCoder-1.3B-4096,Mixtral-8x7B-4096
}
kernels() {
    bench_on 0.5 bench/bench_kernels.py --shapes Qwen3-30B-A3B-16384,Mixtral-8x7B-16384 &&
        bench_on 0.3 bench/bench_tokens.py --shapes Qwen3-30B-A3B-1 # a token of a generation
}
counters() { counters_of Qwen3-30B-A3B; }
counters_all() { counters_of Mixtral-8x7B && counters_of XFT-DSCoder-1.3B && counters_of OLMoE; }

# sections instead of metrics, whose names differ between GPUs, and ncu rejects unknown names
counters_of() {
    command -v ncu >/dev/null || { say "ncu is missing: no counters"; return 0; }
    local status
    run ncu --clock-control none --profile-from-start off --kernel-name regex:^_ --csv --page raw --section SpeedOfLight \
        --section ComputeWorkloadAnalysis --section MemoryWorkloadAnalysis --section MemoryWorkloadAnalysis_Tables \
        --section WarpStateStats --section LaunchStats --section Occupancy --log-file "$XDG_CACHE_HOME/ncu.csv" \
        "$python" -m moe_runtime.bench.profile_products "$1"
    status=$?
    if [ -e "$XDG_CACHE_HOME/ncu.csv" ]; then
        echo "# $1, commit $COMMIT; the rows are up, down, dz, dx, dw_up, dw_down" >>"$counts"
        cat "$XDG_CACHE_HOME/ncu.csv" >>"$counts"
        rm "$XDG_CACHE_HOME/ncu.csv"
    fi
    return $status
}

# not `moe-runtime tune`, whose packages may be missing
tune_on() { again "" "$python" -m moe_runtime.bench.tune_layers "$tiles" --seconds BUDGET "$@"; }
tune_qwen3() { tune_on --shape qwen3-30b-a3b --tokens 16384,4096; }
tune() {
    tune_on --shape qwen3-30b-a3b,olmoe,mixtral-8x7b,xft-dscoder-1.3b --tokens 16384,4096 &&
        tune_on --shape all --tokens 16384,4096,65536
}

tests() {
    pytest_on "$workers" tests/gpu --ignore tests/gpu/test_tuning.py --ignore tests/gpu/test_repeats.py \
        --ignore tests/gpu/test_cuda.py
}
clock() { pytest_on 1 tests/gpu/test_tuning.py; } # it times the GPU, so nothing else may use it
ops() { # the kernels of frozen experts first: tests/gpu covers few of their sizes
    pytest_on "$workers" tests/ops/test_frozen_mlp.py tests/ops/test_frozen_mlp_packed.py -k triton
    local status=$?
    pytest_on "$workers" tests/ops tests/modules tests/hf/dropin/test_experts.py -k "(triton or kernel) and not cpp" &&
        return $status
}

use_tiles() {
    [ ! -e "$tiles" ] || { mkdir -p "$XDG_CACHE_HOME/moe_runtime" && cp "$tiles" "$XDG_CACHE_HOME/moe_runtime/tiles.json"; }
}

# LoRA on a layer, then the peak memory of training a model, with a few of its layers and with all
adapters() {
    use_tiles
    bench_on 1 bench/bench_adapters.py bench/bench_qlora.py --shapes Qwen3-30B-A3B-4096,Qwen3-30B-A3B-4-layers,Qwen3-30B-A3B
}

bench() {
    use_tiles
    bench_on 1 bench/bench_layer.py bench/bench_xft.py bench/bench_step.py bench/bench_tokens.py bench/bench_memory.py \
        bench/bench_breakdown.py bench/bench_routing.py bench/bench_merging.py bench/bench_mixing.py \
        bench/bench_trainable.py bench/bench_fusion.py bench/bench_lora.py bench/bench_adapters.py \
        bench/bench_methods.py bench/bench_kernels.py bench/bench_tokens_backward.py bench/bench_qlora.py
}

# builds into XDG_CACHE_HOME, for this GPU only
build_cuda() {
    local arch
    arch=$(timeout -k 1 "$(seconds $grace)" nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -n 1 | tr -d .)
    run "$python" -m moe_runtime.native.build cuda --archs "$arch"
}
cuda_tests() { pytest_on "$workers" tests/gpu/test_cuda.py; }
cuda_bench() { bench_on 0.3 bench/bench_cuda.py; }
cuda_memcheck() { sanitizer memcheck tests/gpu/test_cuda.py -k sanitizer; }
cuda_racecheck() { sanitizer racecheck tests/gpu/test_cuda.py -k sanitizer; }
memcheck() { sanitizer memcheck tests/gpu/test_moe_mlp.py -k "few_rows or user_gets"; }

# sanitizer TOOL PYTEST-ARGUMENTS...
sanitizer() {
    command -v compute-sanitizer >/dev/null || { say "compute-sanitizer is missing: no $1"; return 0; }
    # without caching, as a read beyond a tensor would otherwise hit the next one
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 run compute-sanitizer --tool "$1" --error-exitcode 1 \
        "$python" -m pytest -q -x -p no:cacheprovider --tb=short "${@:2}"
}

report() {
    [ -s "$lines" ] || return 0
    local stem
    stem=$out/$(date +%Y-%m-%d)-${COMMIT//[!A-Za-z0-9._-]/_}-gpu
    SHOWN=60 run "$python" -m moe_runtime.bench.report "$lines" --out "$stem.json" --markdown "$stem.md"
}

worst=0
start=0
for part in "${parts[@]}"; do
    plan=$(plan_of "$part")
    total=0
    for item in $plan; do total=$((total + ${item#*=})); done
    later=$total
    say "$part of commit $COMMIT, $(date +%Y-%m-%d), at most $(seconds $limit) s"
    for item in $plan; do
        step=${item%=*}
        later=$((later - ${item#*=}))
        # all time that is not guaranteed to later steps
        deadline=$((start + limit - later * limit / total))
        at=$(now)
        $step
        status=$?
        say "$step: exit status $status after $(seconds $(($(now) - at))) s"
        [ $status = 0 ] || worst=$status
    done
    start=$(now)
done
exit $worst
