"""Loading from a store: against a plain read of its bytes, and against the safetensors that it was made from.

    python -m benchmarks.store                       # about 1 GB on this machine, which may be a CPU
    python -m benchmarks.store --shape llama-3-8b    # 6 GB; needs 13 GB of disk for a while
    python -m benchmarks.store --cached              # never from the disk: no time is spent on emptying the file cache

Writes a checkpoint of a shape with random codes (compressed-tensors, 4 bits, groups of 128), loads it in a process of
its own, which then saves it as a store, and loads that in another, each with nothing of it in the file cache. Then, in
one process and in turns, the store and a plain read of its arrays' files into memory of its own, by one thread and by
eight; the fastest of each counts.
Every line says whether its files were "cold" or "cached".
"""

import argparse
import concurrent.futures
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence

import jax
import ml_dtypes
import numpy as np

from benchmarks.harness import ROOT, Recorder
from checkpoints.export import ShardWriter

SHAPES = ROOT / "shapes"
SMALL = {"num_hidden_layers": 9, "vocab_size": 16384}
"""Of llama-3-8b: 1.25 GB."""
GROUP = 128
REPEATS = 2

LOAD = """
import json, sys, time
import jax
from jaxinfer.device import start_device
from jaxinfer.model import load
import numpy

def status(field):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(field + ":"))

start_device()
jax.block_until_ready(jax.device_put(numpy.zeros(1)))
before, start = status("VmRSS"), time.perf_counter()
model = load(sys.argv[1], dtype="bfloat16", packed=True, progress=False)
jax.block_until_ready(model.params)
seconds = time.perf_counter() - start
stats = jax.local_devices()[0].memory_stats() or {}
found = {
    "seconds": seconds, "host": status("VmHWM") - before, "device": stats.get("peak_bytes_in_use", 0),
    "model": sum(leaf.nbytes for leaf in jax.tree.leaves(model.params)), "layout": model.params.layers[0].o.layout,
}
if len(sys.argv) > 2:
    from jaxinfer.store.create import save

    start = time.perf_counter()
    save(model, sys.argv[2])
    found["save"] = time.perf_counter() - start
print(json.dumps(found))
"""


def write_checkpoint(folder: pathlib.Path, shape: str, small: bool) -> int:
    """A folder of random codes; every layer has the same ones. Returns its bytes."""
    config = json.loads((SHAPES / shape / "config.json").read_text()) | (SMALL if small else {})
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP, "symmetric": True}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head"],
    }
    (folder / "config.json").write_text(json.dumps(config))
    rng = np.random.default_rng(0)
    hidden, ff, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    kv = config["num_key_value_heads"] * config.get("head_dim", hidden // config["num_attention_heads"])
    shapes = {
        "self_attn.q_proj": (hidden, hidden), "self_attn.k_proj": (kv, hidden), "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, hidden), "mlp.gate_proj": (ff, hidden), "mlp.up_proj": (ff, hidden),
        "mlp.down_proj": (hidden, ff),
    }  # fmt: skip
    norms = ("input_layernorm", "post_attention_layernorm")
    layer: dict[str, np.ndarray] = {f"{norm}.weight": np.ones(hidden, ml_dtypes.bfloat16) for norm in norms}
    for name, (out, inputs) in shapes.items():
        words = rng.integers(0, 2**32, (out, inputs // 8), np.uint32)
        layer[f"{name}.weight_packed"] = words.view(np.int32)
        layer[f"{name}.weight_scale"] = np.full((out, inputs // GROUP), 0.002, ml_dtypes.bfloat16)
        layer[f"{name}.weight_shape"] = np.array([out, inputs], np.int64)
    rows = (rng.standard_normal((1024, hidden)) * 0.02).astype(ml_dtypes.bfloat16)
    rows = np.tile(rows, (-(-vocab // 1024), 1))[:vocab]
    top = {"model.embed_tokens.weight": rows, "model.norm.weight": np.ones(hidden, ml_dtypes.bfloat16)}
    if not config.get("tie_word_embeddings", False):
        top["lm_head.weight"] = rows
    groups = [top]
    for index in range(config["num_hidden_layers"]):
        groups.append({f"model.layers.{index}.{name}": array for name, array in layer.items()})
    writer = ShardWriter(folder, len(groups))
    for group in groups:
        writer.write(group)
    writer.finish()
    return writer.nbytes


def evict(files: Iterable[pathlib.Path]) -> None:
    """Takes files out of the cache of the operating system."""
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def plain_read(files: list[pathlib.Path], threads: int) -> float:
    """Seconds to read whole files into fresh memory."""
    start = time.perf_counter()
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        kept = list(pool.map(lambda file: np.fromfile(file, np.uint8), files))
    elapsed = time.perf_counter() - start
    del kept
    return elapsed


def rates(store: pathlib.Path, repeats: int, states: Sequence[str]) -> dict[str, float]:
    """Seconds of a load of the store and of plain reads, cold and cached, the least of some in turns."""
    from jaxinfer.model import load  # this process may take the device only now

    files = arrays_of(store)

    def loaded() -> float:
        start = time.perf_counter()
        model = load(store, dtype="bfloat16", progress=False)
        jax.block_until_ready(model.params)
        return time.perf_counter() - start

    runs = {"plain_1_thread": lambda: plain_read(files, 1), "plain_8_threads": lambda: plain_read(files, 8)}
    runs["store"] = loaded
    loaded()  # compiles what repacking or converting takes
    found: dict[str, float] = {}
    for _ in range(repeats):
        for name, run in runs.items():
            for state in states:
                if state == "cold":
                    evict(files)
                found[f"{name}_{state}"] = min(found.get(f"{name}_{state}", float("inf")), run())
    return found


def arrays_of(store: pathlib.Path) -> list[pathlib.Path]:
    """The files with the bytes of the arrays: zarr calls an array's only chunk 0, 0.0, ..."""
    return sorted(file for file in (store / "weights").glob("*/*/*") if set(file.name) <= {"0", "."})


def in_own_process(program: str, *arguments: str) -> str:
    command = [sys.executable, "-c", program, *arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT.parent)
    if result.returncode:
        raise SystemExit(result.stderr)
    return result.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", help="of benchmarks/shapes; default: nine layers of llama-3-8b")
    parser.add_argument("--folder", type=pathlib.Path, help="where to write; default: the temporary folder")
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--cached", action="store_true", help="files stay in the file cache; nothing is read cold")
    parser.add_argument("--results", type=pathlib.Path, default=None, help="folder for the JSON lines")
    arguments = parser.parse_args()
    folder = pathlib.Path(tempfile.mkdtemp(dir=arguments.folder))
    try:
        states = ("cached",) if arguments.cached else ("cold", "cached")
        measure(folder, arguments.shape, arguments.repeats, states, arguments.results)
    finally:
        shutil.rmtree(folder)


def measure(
    folder: pathlib.Path, shape: str | None, repeats: int, states: Sequence[str], results: pathlib.Path | None
) -> None:
    """What other processes measure comes first: they need the device that this one holds afterwards."""
    source, store = folder / "checkpoint", folder / "store"
    source.mkdir()
    start = time.perf_counter()
    size = write_checkpoint(source, shape or "llama-3-8b", small=shape is None)
    print(f"wrote {size / 1e9:.2f} GB of safetensors in {time.perf_counter() - start:.1f} s", flush=True)
    loads = {}
    for name, arguments in (("safetensors", (source, store)), ("store", (store,))):
        if states[0] == "cold":
            evict(source.glob("*.safetensors") if name == "safetensors" else arrays_of(store))
        loads[name] = json.loads(in_own_process(LOAD, *map(str, arguments)))
        print(f"loaded from {name} in {loads[name]['seconds']:.1f} s", flush=True)
    save_seconds = loads["safetensors"]["save"]
    print(f"saved the store in {save_seconds:.1f} s", flush=True)
    shutil.rmtree(source)
    stored = sum(file.stat().st_size for file in arrays_of(store)) / 1e9
    seconds = rates(store, repeats, states)
    recorder = Recorder("store", results) if results else Recorder("store")
    case: dict[str, object] = {"shape": shape or "llama-3-8b, 9 layers", "weights": "int4 g128", "gb": round(stored, 2)}
    for state in states:
        here = {name: seconds[f"{name}_{state}"] for name in ("store", "plain_1_thread", "plain_8_threads")}
        metrics = {f"{name}_gb_per_s": (stored / taken, "GB/s") for name, taken in here.items()}
        plain = min(here["plain_1_thread"], here["plain_8_threads"])
        recorder.record({**case, "files": state}, {**metrics, "share_of_plain_read": (plain / here["store"], "")})
    for name, load in loads.items():
        metrics = {"load_s": (load["seconds"], "s"), "model_gb": (load["model"] / 1e9, "GB")}
        metrics |= {f"peak_{place}_gb": (load[place] / 1e9, "GB") for place in ("host", "device") if load[place]}
        recorder.record({**case, "files": states[0], "from": name, "layout": load["layout"]}, metrics)
    recorder.record(case, {"save_s": (save_seconds, "s")})


if __name__ == "__main__":
    main()
