"""The NumPy twin of `pallas_kernels.paged_prefill.warp.PrefillWarp`, and the whole kernel run on it.

As in `simulated_wide_warp.py`, products read shared memory and copies write it as late as they may. Sums of products
that are still under way are NaN.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from simulated_warp import LANE, SimulatedWarp, run_cluster, uniform
from simulated_wide_warp import BF16, Barriers, SimulatedWideWarp

from pallas_kernels.paged_prefill import mosaic
from pallas_kernels.paged_prefill.parts import Arguments
from pallas_kernels.paged_prefill.plan import CONSUMER_WARPS, PRODUCERS, PrefillPlan


class Matrix(NamedTuple):
    """A descriptor: bytes from the block's scratch, which begins at a multiple of 1024."""

    start: int
    leading: int
    stride: int
    swizzle: int


class SimulatedPrefillWarp(SimulatedWideWarp):
    @staticmethod
    def maximum(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return np.fmax(a, b)

    @staticmethod
    def minimum(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return np.fmin(a, b)

    def broadcast(self, x: np.ndarray, lane: int) -> np.ndarray:
        return np.full(32, x[lane])

    def either(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return a ^ b

    def pick(self, x: np.ndarray, lane: np.ndarray) -> np.ndarray:
        return x[lane]

    def shift_right(self, word: np.ndarray, bits: np.ndarray) -> np.ndarray:
        return (word.view(np.uint32) >> bits.astype(np.uint32)).view(np.int32)

    def store_shared(
        self, address: np.ndarray, to: int, words: Sequence[np.ndarray], predicate: np.ndarray | None
    ) -> None:
        address = address + to
        for lane in range(32) if predicate is None else np.flatnonzero(predicate):
            assert address[lane] % 16 == 0, "unaligned shared write"
            for i, word in enumerate(words):
                self.bytes.view(np.int32)[address[lane] // 4 + i] = word[lane]

    def any(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return a | b

    def choose(self, condition: np.ndarray, carry: Sequence[Any], body: Callable[[], Sequence[Any]]) -> Sequence[Any]:
        return body() if uniform(condition) else carry

    def any_lane(self, condition: np.ndarray) -> np.ndarray:
        return np.full(32, condition.any())

    def load_integer(self, ref: np.ndarray, offset: np.ndarray, predicate: np.ndarray) -> np.ndarray:
        return self._load(ref, offset, 1, np.broadcast_to(predicate, 32))[0].view(np.int32)

    def copy_chunk(
        self,
        address: np.ndarray,
        to: int,
        ref: np.ndarray,
        chunk: np.ndarray,
        skip: int,
        inside: np.ndarray,
        predicate: np.ndarray | None,
    ) -> None:
        offset = chunk * 16 + skip
        self.copy_or_clear(address, ref, offset, np.broadcast_to(inside, 32), predicate, to)

    def store_pair(
        self, ref: np.ndarray, offset: np.ndarray, skip: int, word: np.ndarray, predicate: np.ndarray
    ) -> None:
        for lane in np.flatnonzero(predicate):
            place = offset[lane] + skip
            assert np.isnan(ref[place : place + 2].astype(np.float32)).all(), "written twice"
            ref.view(np.int32)[place // 2] = word[lane]

    def copies_to_products(self) -> None:
        pass

    def matrix(self, address: np.ndarray, leading: int, stride: int, swizzle: int) -> Matrix:
        return Matrix(int(uniform(address)), leading, stride, swizzle)

    def ahead(self, matrix: Matrix, nbytes: int) -> Matrix:
        return matrix._replace(start=matrix.start + nbytes)

    def _read(self, matrix: Matrix, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
        """Elements [rows, columns], columns being neighbours in memory within a piece."""
        within = matrix.swizzle // 2
        place = rows // 8 * matrix.stride + rows % 8 * matrix.swizzle
        place = place[:, None] + (columns // within * matrix.leading + columns % within * 2)[None, :]
        place += matrix.start
        place ^= (place // 128 % (matrix.swizzle // 16)) * 16
        return self.bytes.view(BF16)[place // 2].astype(np.float32)

    def hold_back(self, value: np.ndarray, address: np.ndarray) -> None:
        assert not (value < 0).any()

    def product(
        self, acc: Sequence[np.ndarray] | None, a: Any, b: Matrix, columns: int, *, transposed: bool
    ) -> list[np.ndarray]:
        """This warp's 16 rows of the product."""
        sums = [np.full(32, np.nan, np.float32) for _ in range(columns // 2)]
        before = None if acc is None else list(acc)
        words = None if isinstance(a, Matrix) else [word.copy() for word in a]
        rows = 16 * (int(self.warp[0]) % 4) + np.arange(16)
        depth, every = np.arange(16), np.arange(columns)

        def run() -> None:
            group, quad = LANE // 4, LANE % 4
            if words is None:
                left = self._read(a, rows, depth)
            else:
                left = np.zeros((16, 16), np.float32)
                for i, word in enumerate(words):
                    for half in range(2):
                        left[group + 8 * (i % 2), 8 * (i // 2) + 2 * quad + half] = self._numbers(word)[:, half]
            right = self._read(b, depth, every) if transposed else self._read(b, every, depth).T
            total = np.zeros((16, columns), np.float32)
            for i, value in enumerate(before or []):
                total[group + 8 * (i // 2 % 2), 8 * (i // 4) + 2 * quad + i % 2] = value
            total = total + left @ right
            for i, value in enumerate(sums):
                value[:] = total[group + 8 * (i // 2 % 2), 8 * (i // 4) + 2 * quad + i % 2]

        self.issued.append(run)
        return sums


def simulate(
    plan: PrefillPlan,
    q: np.ndarray,
    k_pages: np.ndarray,
    v_pages: np.ndarray,
    page_table: np.ndarray,
    starts: np.ndarray,
    lengths: np.ndarray,
    sinks: np.ndarray | None,
    scales: tuple[np.ndarray, np.ndarray] | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """What the kernel returns: output and log-sum-exp."""
    out, lse = np.full(q.size, np.nan, BF16), np.full(q.size // plan.head_dim, np.nan, np.float32)
    k_scales, v_scales = (None, None) if scales is None else [x.reshape(-1) for x in scales]
    if scales is not None:
        k_pages, v_pages = k_pages.view(np.uint8), v_pages.view(np.uint8)
    flat = [np.ascontiguousarray(x).reshape(-1) for x in (q, k_pages, v_pages, page_table, starts, lengths)]
    arguments = Arguments(*flat, sinks=sinks, out=out, lse=lse, k_scales=k_scales, v_scales=v_scales)
    for block in range(plan.launched):
        barriers = Barriers()

        def program(warp: SimulatedWarp, _: int, block: int = block, barriers: Barriers = barriers) -> None:
            w = SimulatedPrefillWarp(warp, barriers)
            mosaic.prefill(w, plan, arguments, w.integer(block))

        run_cluster(1, CONSUMER_WARPS + PRODUCERS // 32, plan.shared_bytes, program)
    return out.reshape(q.shape), lse.reshape(q.shape[:3])
