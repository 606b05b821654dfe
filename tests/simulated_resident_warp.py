"""The NumPy twin of `pallas_kernels.resident.warp.ResidentWarp`, and the whole kernel run on it."""

import threading
import time
from collections.abc import Sequence

import numpy as np
from simulated_warp import SimulatedWarp, run_cluster, uniform
from simulated_wide_warp import Barriers, SimulatedWideWarp

from pallas_kernels.resident.layers import run_layers
from pallas_kernels.resident.plan import Plan
from pallas_kernels.resident.products import Arguments


class SimulatedResidentWarp(SimulatedWideWarp):
    """A pointer to an array is its number among those kept."""

    def __init__(self, warp: SimulatedWarp, barriers: Barriers, together: threading.Barrier):
        super().__init__(warp, barriers)
        self.together = together
        self.pointers = warp.cluster.__dict__.setdefault("pointers", {})

    def keep_pointer(self, address: np.ndarray, ref: np.ndarray, constant: int, predicate: np.ndarray) -> None:
        if predicate.any():
            self.pointers[self.block, int(address[0]) + constant] = ref

    def pointer_at(self, address: np.ndarray, constant: int) -> np.ndarray:
        return self.pointers[self.block, uniform(address) + constant]

    def load_words(
        self, ref: np.ndarray, offset: np.ndarray, count: int, predicate: np.ndarray | None, constant: int = 0
    ) -> tuple[np.ndarray, ...]:
        return super().load_words(ref.view(np.uint8), offset, count, predicate, constant)

    def store_words(
        self, ref: np.ndarray, offset: np.ndarray, words: Sequence[np.ndarray], predicate: np.ndarray
    ) -> None:
        self.store_bytes(ref.view(np.uint8), 2 * offset, words, predicate)

    @staticmethod
    def bits(number: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(number, np.float32).view(np.int32)

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


def simulate(
    plan: Plan,
    x: np.ndarray,
    layers: Sequence[Sequence[np.ndarray]],
    page_table: np.ndarray,
    position: int,
    cos: np.ndarray,
    sin: np.ndarray,
) -> np.ndarray:
    """What `pallas_kernels.resident.api.run` returns; `layers` as `Plan.kinds` has them, the pools changed in place."""
    out = np.full(x.size, np.nan, x.dtype)
    flat = [[array.reshape(-1) for array in arrays] for arrays in layers]
    arguments = Arguments(
        x.reshape(-1),
        page_table.astype(np.int32),
        np.array([position], np.int32),
        cos.reshape(-1),
        sin.reshape(-1),
        flat,
        np.zeros(plan.words["end"], np.int64),
        out,
    )
    barriers = Barriers()
    together = [threading.Barrier(plan.warps, timeout=60) for _ in range(plan.blocks)]

    def program(warp: SimulatedWarp, block: int) -> None:
        w = SimulatedResidentWarp(warp, barriers, together[block])
        run_layers(w, plan, arguments, w.integer(block))

    run_cluster(plan.blocks, plan.warps + 1, plan.shared_bytes, program)
    return out.reshape(x.shape)
