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
        self,
        ref: np.ndarray,
        pairs: Sequence[tuple[np.ndarray, int]],
        tag: np.ndarray,
        wanted: np.ndarray | None = None,
    ) -> tuple[np.ndarray, ...]:
        places = np.stack([place + constant + i for place, constant in pairs for i in (0, 1)], 1)
        assert (places[:, ::2] % 2 == 0).all(), "unaligned read"
        lanes = np.ones(32, bool) if wanted is None else wanted
        end = time.monotonic() + 60
        while True:
            got = np.zeros((32, places.shape[1], 2), np.int32)
            got[lanes] = ref[places[lanes]].view(np.int32).reshape(-1, places.shape[1], 2)
            missing = got[lanes, :, 1] - tag[lanes, None]
            if (missing == 0).all():
                return tuple(np.ascontiguousarray(got[:, i, 0]) for i in range(got.shape[1]))
            assert time.monotonic() < end, "a word never came"
            assert (missing <= 0).all(), "overwritten before it was read"
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
