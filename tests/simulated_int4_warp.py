"""The NumPy twin of `pallas_kernels.int4_matmul.warp.Int4Warp`, and the whole kernel run on it."""

from typing import Any

import ml_dtypes
import numpy as np
from simulated_warp import SimulatedWarp, run_cluster

from pallas_kernels.int4_matmul import PackedInt4, mosaic
from pallas_kernels.int4_matmul.plan import Plan, Schedule

DTYPES = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
    "uint8": np.dtype(np.uint8),
}


class SimulatedInt4Warp(SimulatedWarp):
    """Copies arrive as late as they may: when a wait demands them."""

    def __init__(self, warp: SimulatedWarp):
        self.__dict__ = warp.__dict__
        self.open: list[tuple[int, np.ndarray]] = []
        self.groups: list[list[tuple[int, np.ndarray]]] = []

    @property
    def bytes(self) -> np.ndarray:
        return self.cluster.smem[self.block].view(np.uint8)

    def integer(self, value: int) -> np.ndarray:
        return np.full(32, value, np.int32)

    def copy_async(
        self,
        address: np.ndarray,
        ref: np.ndarray,
        offset: np.ndarray,
        size: np.ndarray,
        *,
        to: int = 0,
        source: int = 0,
        predicate: np.ndarray | None = None,
    ) -> None:
        flat = ref.view(np.uint8)
        for lane in range(32) if predicate is None else np.flatnonzero(predicate):
            destination, origin = int(address[lane]) + to, int(offset[lane]) + source
            assert destination % 16 == 0, "unaligned copy"
            assert destination + 16 <= self.bytes.size
            data = np.zeros(16, np.uint8)
            if size[lane]:
                assert size[lane] == 16
                assert origin % 16 == 0, "unaligned copy"
                assert 0 <= origin <= flat.size - 16, "copy from outside the array"
                data = flat[origin : origin + 16].copy()
            self.bytes[destination : destination + 16] = 0xFF  # NaN until it arrives
            self.open.append((destination, data))

    def copy_commit(self) -> None:
        self.groups.append(self.open)
        self.open = []

    def copy_wait(self, pending: int) -> None:
        while len(self.groups) > pending:
            for destination, data in self.groups.pop(0):
                self.bytes[destination : destination + 16] = data

    def warp_barrier(self) -> None:
        pass  # the 32 lanes of a simulated warp are always together

    def early_launch_wait(self) -> None:
        pass

    def codes(self, word: np.ndarray) -> tuple[np.ndarray, ...]:
        bits = word.view(np.uint32)
        return tuple(
            (((bits >> np.uint32(4 * i)) & np.uint32(0x000F000F)) | np.uint32(0x43004300)).view(np.int32)
            for i in range(4)
        )

    def load_two_words(self, ref: np.ndarray, offset: np.ndarray, predicate: np.ndarray) -> tuple[np.ndarray, ...]:
        return self.load_words(ref, offset, 2, predicate)

    def shared_number(self, address: np.ndarray, dtype: str, constant: int = 0) -> np.ndarray:
        kind = DTYPES[dtype]
        assert (address + constant >= 0).all()
        assert ((address + constant) % kind.itemsize == 0).all(), "unaligned shared read"
        return self.bytes.view(kind)[(address + constant) // kind.itemsize].astype(np.float32)

    def store_number(
        self, ref: np.ndarray, offset: np.ndarray, value: np.ndarray, dtype: str, predicate: np.ndarray
    ) -> None:
        where = offset[predicate]
        assert (where >= 0).all()
        assert np.isnan(ref[where].astype(np.float32)).all(), "written twice"
        ref[where] = value[predicate].astype(DTYPES[dtype])


def simulate(x: np.ndarray, weight: PackedInt4, schedule: Schedule, out_dtype: str = "float32") -> np.ndarray:
    """What the kernel returns for x [rows, in_features] (bfloat16): [slices, rows, out_features]."""
    plan = mosaic.plan_for(x.shape[0], weight, schedule)
    out = np.full(plan.slices * plan.rows * plan.out_features, np.nan, DTYPES[out_dtype])
    arguments = mosaic.arguments_of(
        weight,
        words=np.ascontiguousarray(weight.codes).reshape(-1),
        scales=np.ascontiguousarray(weight.scales).reshape(-1),
        offsets=None if weight.offsets is None else np.ascontiguousarray(weight.offsets).reshape(-1),
        x=np.ascontiguousarray(x).reshape(-1).view(np.uint16),
        out=out,
        out_dtype=out_dtype,
    )
    for slice_ in range(plan.slices):
        for block in range(plan.blocks_per_slice):
            _run_block(plan, arguments, slice_, block)
    return out.reshape(plan.slices, plan.rows, plan.out_features)


def _run_block(plan: Plan, arguments: Any, slice_: int, block: int) -> None:
    def program(warp: SimulatedWarp, _: int) -> None:
        w = SimulatedInt4Warp(warp)
        mosaic.multiply(w, plan, arguments, w.integer(slice_), w.integer(block))

    run_cluster(1, plan.schedule.warps, plan.shared_bytes, program)


def in_float64(x: np.ndarray, values: np.ndarray) -> np.ndarray:
    return x.astype(np.float64) @ values.astype(np.float64).T


def relative_error(out: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(out.astype(np.float64) - expected) / np.linalg.norm(expected))
