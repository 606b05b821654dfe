"""What the benchmarks share: records, the card's measured read rate, medians."""

import dataclasses
import datetime
import json
import os
import pathlib
import re
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp

ROOT = pathlib.Path(__file__).parent
RESULTS = ROOT / "results"


def device_name() -> str:
    """The device's own name: "NVIDIA H200", or the processor's model for a CPU with the number of cores."""
    device = jax.devices()[0]
    if device.platform != "cpu":
        return device.device_kind
    model = "CPU"
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    if cpuinfo.exists():
        found = re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(), re.MULTILINE)
        model = found.group(1).strip() if found else model
    return f"{model}, {os.cpu_count()} cores"


def slug(name: str) -> str:
    """A file name for a device: lower case, other characters than letters and digits as dashes."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def commit() -> str:
    """The commit that is measured: from git, or from JAXINFER_COMMIT where the tree is a bare copy."""
    given = os.environ.get("JAXINFER_COMMIT")
    if given:
        return given
    answer = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return answer.stdout.strip() or "unknown"


@dataclasses.dataclass
class Recorder:
    """Prints measurements and appends them to `<folder>/<device>.jsonl`, one JSON object a line."""

    benchmark: str
    folder: pathlib.Path = RESULTS

    def record(self, case: dict[str, object], metrics: dict[str, tuple[float, str]]) -> None:
        """`metrics` maps a name to (value, unit)."""
        device = device_name()
        self.folder.mkdir(parents=True, exist_ok=True)
        shown = "  ".join(f"{name} {value:.4g} {unit}".rstrip() for name, (value, unit) in metrics.items())
        print(
            f"{self.benchmark} " + " ".join(f"{key}={value}" for key, value in case.items()) + f": {shown}", flush=True
        )
        with (self.folder / f"{slug(device)}.jsonl").open("a") as file:
            for metric, (value, unit) in metrics.items():
                line = {
                    "benchmark": self.benchmark,
                    "case": case,
                    "metric": metric,
                    "value": float(f"{value:.6g}"),
                    "unit": unit,
                    "device": device,
                    "jax": jax.__version__,
                    "commit": commit(),
                    "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
                }
                file.write(json.dumps(line) + "\n")


def seconds(function: Callable[[], object], repeats: int) -> list[float]:
    """Wall-clock seconds of each call, the result waited for."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(function())
        times.append(time.perf_counter() - start)
    return times


def run_each(jobs: Iterable[tuple[str, Callable[[], None]]], started: float, limit: float) -> None:
    """Runs jobs by name, starting none after `limit` seconds from `started` (of `time.perf_counter`) on.

    One that fails does not cost the others, whatever it raised; the process ends with their names then.
    """
    failed: list[str] = []
    for name, job in jobs:
        if time.perf_counter() - started > limit:
            print(f"{name}: left out, the time is up", flush=True)
            continue
        try:
            job()
        except Exception:
            failed.append(name)
            print(f"{name}: FAILED", flush=True)
            traceback.print_exc()
    print(f"total {time.perf_counter() - started:.0f} s", flush=True)
    if failed:
        sys.exit(f"{len(failed)} cases failed: " + "; ".join(failed))


def read_rate() -> float:
    """The largest rate in bytes/s at which this device reads memory: sums of rows over a large array.

    Eight passes in one program, each with another factor so that none can be left out: a single pass of half a
    millisecond would time its own dispatch too.
    """
    passes, columns = 8, 8192
    rows = (1 << 28 if jax.default_backend() == "cpu" else 1 << 31) // (4 * columns)
    data = jax.jit(lambda: jnp.ones((rows, columns), jnp.float32))()

    @jax.jit
    def reduce(data: jax.Array) -> jax.Array:
        def one(index: jax.Array, total: jax.Array) -> jax.Array:
            return total + jnp.sum(data * (1.0 + index.astype(jnp.float32)), axis=1)

        return jax.lax.fori_loop(0, passes, one, jnp.zeros(rows, jnp.float32))

    seconds(lambda: reduce(data), 2)
    return passes * data.nbytes / min(seconds(lambda: reduce(data), 10))


def median(values: list[float]) -> float:
    return statistics.median(values)
