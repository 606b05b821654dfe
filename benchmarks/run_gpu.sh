#!/bin/sh
# Everything this project measures on one GPU, most telling first; about nine minutes on an H200.
#   benchmarks/run_gpu.sh [RESULTS_DIR]      JSON lines go there (default: benchmarks/results)
# A step that fails or takes longer than its limit is reported and the next one runs.
set -u
results=${1:-benchmarks/results}
cd "$(dirname "$0")/.." || exit 1

step() {
    limit=$1
    shift
    echo "== $*"
    timeout "$limit" python3 -m "$@" || echo "-- exit $? (124: over $limit s): $*"
}

step 90 benchmarks.kernels_int4 --results "$results"
step 90 benchmarks.kernels_attention --seconds 45 --results "$results"
step 120 benchmarks.decode --model llama-3-8b --batch 1 16 64 --first-token 128 2048 --results "$results"
step 120 benchmarks.decode --model llama-3-8b --int4 --batch 1 16 64 --results "$results"
step 60 benchmarks.decode --model llama-3.2-1b --batch 1 16 64 --first-token 128 2048 --results "$results"
step 90 benchmarks.decode --model llama-3-8b --ready --results "$results"
step 120 benchmarks.gpu_tests --results "$results"
step 60 benchmarks.agreement --packed --results "$results"
step 60 benchmarks.decode --model smollm2-135m-instruct --batch 1 64 --results "$results"
