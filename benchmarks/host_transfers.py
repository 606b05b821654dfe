"""What a call of the host tier is made of: 16 pages of a cache between device and pinned host memory, part by part.

    python -m benchmarks.host_transfers --model qwen3-0.6b

`out` and `back` copy 16 arrays, a page each, as the host tier does; `out_whole` and `back_whole` the same bytes as one
array; `back_in_program` leaves the copies to the program that writes the pages. Each is the mean of calls dispatched
one after the other, so that of what host and device do the longer counts; `dispatch_` is what the host does.
"""

import argparse
import functools
import json
import pathlib
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.decode import SHAPES
from benchmarks.harness import RESULTS, Recorder
from jaxinfer import kv_cache
from jaxinfer.config_hf import from_hugging_face
from jaxinfer.engine.host_store import MOVES, Page, gather_pages, scatter_pages
from jaxinfer.kv_cache import PagedKVCache

CALLS = 16


@functools.partial(jax.jit, donate_argnames="cache", static_argnames="device")
def scatter_from_host(
    cache: PagedKVCache, contents: list[Page], pages: jax.Array, *, device: jax.sharding.Sharding
) -> PagedKVCache:
    """`scatter_pages` of contents in host memory."""
    return scatter_pages(cache, jax.device_put(contents, device), pages)


def timed(call: Callable[[], Any]) -> tuple[float, float]:
    """Milliseconds a call, until its results are there and until it has been dispatched."""
    jax.block_until_ready([call() for _ in range(CALLS)])  # as many at once: the driver takes long to pin memory
    start = time.perf_counter()
    results = [call() for _ in range(CALLS)]
    dispatched = time.perf_counter()
    jax.block_until_ready(results)
    return 1e3 * (time.perf_counter() - start) / CALLS, 1e3 * (dispatched - start) / CALLS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, choices=sorted(path.name for path in SHAPES.iterdir()))
    parser.add_argument("--results", type=pathlib.Path, default=RESULTS, help="folder for the JSON lines")
    options = parser.parse_args()
    config = from_hugging_face(json.loads((SHAPES / options.model / "config.json").read_text()))
    device = jax.local_devices()[0]
    pinned = jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")
    on_device = jax.sharding.SingleDeviceSharding(device, memory_kind=device.default_memory().kind)
    cache = kv_cache.create(config, 4 * MOVES, 16, jnp.bfloat16)
    pages = np.arange(1, 1 + MOVES, dtype=np.int32)
    gathered = gather_pages(cache, pages)
    on_host = jax.device_put(gathered, pinned)
    whole = jnp.concatenate([jnp.ravel(page[0]) for page in gathered])
    whole_on_host = jax.device_put(whole, pinned)
    held = [cache]

    def write(program: Callable[..., PagedKVCache], contents: list[Page]) -> jax.Array:
        held[0] = program(held[0], contents, pages)
        return held[0].keys[0][0, 0, 0, :1]

    from_host = functools.partial(scatter_from_host, device=on_device)
    calls: dict[str, Callable[[], Any]] = {
        "gather": lambda: gather_pages(held[0], pages),
        "out": lambda: jax.device_put(gathered, pinned),
        "out_whole": lambda: jax.device_put(whole, pinned),
        "back": lambda: jax.device_put(on_host, on_device),
        "back_whole": lambda: jax.device_put(whole_on_host, on_device),
        "scatter": lambda: write(scatter_pages, gathered),
        "back_in_program": lambda: write(from_host, on_host),
    }
    metrics = {"mb": (whole.nbytes / 1e6, "MB")}
    for name, call in calls.items():
        done, dispatched = timed(call)
        metrics |= {f"{name}_ms": (done, "ms"), f"dispatch_{name}_ms": (dispatched, "ms")}
    Recorder("host_transfers", options.results).record({"model": options.model, "pages": MOVES}, metrics)


if __name__ == "__main__":
    main()
