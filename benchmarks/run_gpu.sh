#!/bin/sh
# Everything this project measures on one GPU, most telling first; about an hour on an H200.
#   benchmarks/run_gpu.sh [RESULTS_DIR [WORD]]     JSON lines go to RESULTS_DIR (default: benchmarks/results);
#                                                  only steps whose command contains WORD
# A step that fails or takes longer than its limit is reported and the next one runs.
set -u
results=${1:-benchmarks/results}
word=${2:-}
cd "$(dirname "$0")/.." || exit 1

step() {
    limit=$1
    module=$2
    shift 2
    case "$module $*" in *"$word"*) ;; *) return ;; esac
    echo "== $module $*"
    timeout "$limit" python3 -m "$module" --results "$results" "$@" || echo "-- exit $? (124: over $limit s): $module $*"
}

# Not measured yet, or not since it changed.
step 160 benchmarks.throughput --model llama-3-8b --int4 --order shortest --parts 32 --calls 16 --repeats 1
step 60 benchmarks.kernels_triton "m=256 k" "m=128 k" "m=192 k" "m=96 k" --seconds 50
step 60 benchmarks.kernels_int4_few --seconds 30 --words m=3 m=5 m=7 residual
step 120 benchmarks.decode --model llama-3-8b --int4 --batch 1 16 64 --first-token 128 2048
step 210 benchmarks.kernels_int4_wide_rows --seconds 180
step 200 benchmarks.gpu_tests -n 14
step 120 benchmarks.throughput --model llama-3-8b --order shortest --parts 32 --calls 16 --repeats 2
step 90 benchmarks.kernels_int4 --seconds 70
step 60 benchmarks.kernels_int4_few --seconds 25 --words k=12288
step 60 benchmarks.kernels_int4_crossover --matrices qkv --seconds 25
step 60 benchmarks.kernels_block --stamps
step 60 benchmarks.kernels_mlp_block --stamps
step 120 benchmarks.speculation machinery --target qwen3-8b --draft qwen3-0.6b --int4 --draft-head int4 --k 4 --batch 1 --output 513
step 60 benchmarks.kv_tiers_engine --model qwen3-0.6b --batch 32 --prompt 8192 --output 128 --kv tiered
step 300 benchmarks.serving --model qwen3-8b --policies --draft qwen3-0.6b --batch 8 --rate 3 --seconds 8
step 120 benchmarks.speculation greedy
step 120 benchmarks.speculation text
step 120 benchmarks.throughput --model llama-3-8b --int4 --repeats 1
step 30 benchmarks.kernels_attention --parts short --seconds 22
step 30 benchmarks.kernels_int4_layers --model 8b --kernels
step 60 benchmarks.decode --model llama-3-8b --int4 --head int8 --batch 1
step 90 benchmarks.decode --model llama-3-8b --ready
step 60 benchmarks.throughput --model qwen3-0.6b
step 90 benchmarks.kv_tiers speed --batch 1
step 60 benchmarks.kernels_int4_mlp --seconds 40
# Measured; again when what they measure has changed.
step 150 benchmarks.speculation machinery --target qwen3-8b --draft qwen3-0.6b --int4 --draft-head int8 --k 4 --batch 16 --output 513
step 60 benchmarks.kernels_int4_wide --tried --seconds 40
step 60 benchmarks.kernels_int4_few --stamps --seconds 30
step 60 benchmarks.kernels_triton bits=8 code_book context=2048 context=32768 tokens=5 kv=float8 "m=64 k" "m=256 k" --seconds 36
step 45 benchmarks.kernels_attention --parts many --seconds 30
step 60 benchmarks.kernels_int4_few --seconds 30 --words apart "m=8 k=14336"
step 120 benchmarks.speculation machinery --target qwen3-8b --draft qwen3-0.6b --int4 --draft-head int4 --k 4 --batch 1 --output 1025
step 120 benchmarks.throughput --model llama-3-8b --int4 --order longest --parts 32 --calls 16 --repeats 1
step 60 benchmarks.kernels_int4_mlp --rows 144 192
step 200 benchmarks.speculation lossy --repeats 1
step 60 benchmarks.kernels_bytes
step 120 benchmarks.speculation machinery --target llama-3-8b --self --acceptance 0.995 --k 4 --batch 1
step 100 benchmarks.store --shape llama-3-8b --repeats 2 --cached --folder /dev/shm
step 90 benchmarks.decode --model llama-3-8b --quantize benchmarks/plans/outer-int8.toml --batch 1 16
step 110 benchmarks.kv_tiers quality --windows 2 --length 32768 --kv bfloat16 int8 float8_e4m3fn int4 tiered
step 120 benchmarks.decode --model llama-3-8b --batch 1 16 64 --first-token 128 2048
step 120 benchmarks.throughput --model llama-3-8b --repeats 1
step 120 benchmarks.throughput --model llama-3-8b --int4 --kv int8 --repeats 1 --order shortest
step 120 benchmarks.scoring --model llama-3-8b --repeats 2
step 120 benchmarks.serving --model qwen3-8b --interference --int4 --batch 16 --readers 12 --seconds 6
step 60 benchmarks.host_tier --model qwen3-0.6b --prompt 8192 --turns 2
step 30 benchmarks.host_transfers --model qwen3-0.6b
step 180 benchmarks.train_pair "$results/pair"
step 60 benchmarks.kernels_int4_layers --model 0.6b --kernels
step 60 benchmarks.kernels_int4_mlp --layer --seconds 40
step 90 benchmarks.decode --model llama-3-8b --quantize seed-mixed --batch 1 16
step 60 benchmarks.decode --model llama-3.2-1b --batch 1 16 64 --first-token 128 2048
step 60 benchmarks.decode --model smollm2-135m-instruct --batch 1 64
step 60 benchmarks.kernels_packed --seconds 22
step 30 benchmarks.kernels_int4_layers --kernels
step 400 benchmarks.quality
step 90 benchmarks.kv_tiers speed --batch 8
step 90 benchmarks.kv_tiers quality --windows 8
step 60 benchmarks.prefill_schedules --seconds 36
step 60 benchmarks.kernels_int4_wide_parts --seconds 22
step 90 benchmarks.kernels_int4
step 150 benchmarks.kernels_int4_wide --seconds 120
step 90 benchmarks.kernels_int4_crossover --seconds 55
step 90 benchmarks.kernels_attention --seconds 60
step 60 benchmarks.kernels_attention --parts prefill --seconds 40
step 150 benchmarks.memory_plan
step 240 benchmarks.sensitivity --quick
step 120 benchmarks.kernels_triton
step 60 benchmarks.agreement --packed
