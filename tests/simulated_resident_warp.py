"""The NumPy twin of `pallas_kernels.resident.warp.ResidentWarp`, and the whole kernel run on it."""

import threading
import time
from collections.abc import Sequence

import numpy as np
from simulated_warp import SimulatedWarp, run_cluster
from simulated_wide_warp import Barriers, SimulatedWideWarp

from pallas_kernels.resident.chain import Arguments, Chain, run_layers


class SimulatedResidentWarp(SimulatedWideWarp):
    def __init__(self, warp: SimulatedWarp, barriers: Barriers, together: threading.Barrier):
        super().__init__(warp, barriers)
        self.together = together

    def poll(
        self, ref: np.ndarray, first: np.ndarray, starts: Sequence[int], count: int, tag: np.ndarray
    ) -> tuple[np.ndarray, ...]:
        assert (first % 2 == 0).all(), "unaligned read"
        places = first[:, None] + np.concatenate([start + np.arange(count) for start in starts])
        end = time.monotonic() + 60
        while True:
            got = ref[places].view(np.int32).reshape(32, -1, 2)
            if (got[:, :, 1] == tag[:, None]).all():
                return tuple(np.ascontiguousarray(got[:, i, 0]) for i in range(got.shape[1]))
            assert time.monotonic() < end, "a word never came"
            assert (got[:, :, 1] <= tag[:, None]).all(), "overwritten before it was read"
            time.sleep(0.001)

    def publish(
        self, ref: np.ndarray, place: np.ndarray, word: np.ndarray, tag: np.ndarray, predicate: np.ndarray
    ) -> None:
        tagged = np.ascontiguousarray(np.stack([word, tag], -1).astype(np.int32)).view(np.int64)[:, 0]
        ref[place[predicate]] = tagged[predicate]

    def some_warps_barrier(self, warps: int) -> None:
        assert self.together.parties == warps
        self.together.wait()


def simulate(x: np.ndarray, norms: Sequence[np.ndarray], weights: Sequence[np.ndarray], plan: Chain) -> np.ndarray:
    """What the kernel returns; arrays as `chain` takes them."""
    plan.check()
    out = np.full(plan.hidden, np.nan, np.float32)
    flat = [np.ascontiguousarray(a).reshape(-1) for a in (x, *norms, *weights)]
    arguments = Arguments(flat[3:], flat[1:3], flat[0], np.zeros(plan.places[-1], np.int64), out)
    barriers = Barriers()
    together = [threading.Barrier(plan.warps, timeout=60) for _ in range(plan.blocks)]

    def program(warp: SimulatedWarp, block: int) -> None:
        w = SimulatedResidentWarp(warp, barriers, together[block])
        run_layers(w, plan, arguments, w.integer(block))

    run_cluster(plan.blocks, plan.warps + 1, plan.shared_bytes, program)
    return out
