"""Runs the tests that need a GPU and records how many passed.

python -m benchmarks.gpu_tests [--results DIR] [pytest arguments]
"""

import argparse
import os
import pathlib
import re
import subprocess
import sys

from benchmarks.harness import RESULTS, ROOT, Recorder

FILES = (
    "test_decode_attention.py",
    "test_ordered_heads.py",
    "test_int4_matmul.py",
    "test_int4_fused.py",
    "test_int4_wide.py",
    "test_mlp_block.py",
    "test_attention_block.py",
    "test_next_token.py",
    "test_byte_matmul.py",
    "test_packed_products.py",
    "test_packed_weights.py",
    "test_paged_attention.py",
    "test_int4_triton.py",
    "test_paged_attention_triton.py",
    "test_chunk_attention.py",
    "test_paged_prefill.py",
    "test_tiers.py",
    "test_memory.py",
    "test_quantized_memory.py",
    "test_store_memory.py",
    "test_engine_results.py",
    "test_engine_tiers.py",
    "test_repeats.py",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=pathlib.Path, default=RESULTS)
    arguments, rest = parser.parse_known_args()
    # A process of its own: it must not share the card's memory with this one, which the recorder asks for its name.
    environment = os.environ | {"JAXINFER_TEST_PLATFORM": "cuda", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    paths = [str(ROOT.parent / "tests" / name) for name in FILES]
    # Without pytest-benchmark, where a machine has it: beside pytest-xdist it warns, and warnings are errors here.
    plugins = ["-p", "no:cacheprovider", "-p", "no:benchmark"]
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", *plugins, *paths, *rest]
    # Shown while it comes: a run that is cut short still says how far it came.
    process = subprocess.Popen(
        command, env=environment, cwd=ROOT.parent, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None
    last = ""
    for line in process.stdout:
        print(line, end="", flush=True)
        last = line
    counts = {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|error|skipped)", last)}
    metrics = {word: (float(counts.get(word, 0)), "tests") for word in ("passed", "failed", "error", "skipped")}
    Recorder("gpu_tests", arguments.results).record({"files": " ".join(FILES)}, metrics)
    sys.exit(process.wait())


if __name__ == "__main__":
    main()
