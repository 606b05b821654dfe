"""The NumPy twin of `pallas_kernels.int4_matmul.warp.Int4Warp`, and the whole kernel run on it."""

from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np
from simulated_code_words import SimulatedCodeWords
from simulated_warp import LANE, SimulatedWarp, run_cluster, uniform

from pallas_kernels.int4_matmul import apart, mosaic, once, strip
from pallas_kernels.int4_matmul.packing_int8 import Packed
from pallas_kernels.int4_matmul.plan import PLAIN, Fusion, Plan, Schedule
from pallas_kernels.int4_matmul.stream import Weights

DTYPES = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
    "uint8": np.dtype(np.uint8),
}


class SimulatedInt4Warp(SimulatedCodeWords, SimulatedWarp):
    """Copies arrive as late as they may: when a wait demands them. Until then their destination is NaN."""

    def __init__(self, warp: SimulatedWarp):
        self.__dict__ = warp.__dict__
        self.open: list[tuple[int, np.ndarray]] = []
        self.groups: list[list[tuple[int, np.ndarray]]] = []

    @property
    def bytes(self) -> np.ndarray:
        return self.cluster.smem[self.block].view(np.uint8)

    def integer(self, value: int) -> np.ndarray:
        return np.full(32, value, np.int32)

    def number(self, value: float) -> np.ndarray:
        return np.full(32, value, np.float32)

    def _fetch(self, destination: int, ref: np.ndarray, origin: int, size: int) -> tuple[int, np.ndarray]:
        flat = ref.view(np.uint8)
        unit = min(size, 16)
        assert destination % unit == origin % unit == size % unit == 0, "unaligned copy"
        assert destination + size <= self.bytes.size
        assert 0 <= origin <= flat.size - size, "copy from outside the array"
        self.bytes[destination : destination + size] = 0xFF
        return destination, flat[origin : origin + size].copy()

    def _place(self, copies: list[tuple[int, np.ndarray]]) -> None:
        for destination, data in copies:
            self.bytes[destination : destination + data.size] = data

    def copy_async(
        self,
        address: np.ndarray,
        ref: np.ndarray,
        offset: np.ndarray,
        predicate: np.ndarray,
        *,
        to: int = 0,
        source: int = 0,
        nbytes: int = 16,
        inside: np.ndarray | None = None,
    ) -> None:
        for lane in np.flatnonzero(predicate):
            destination = int(address[lane]) + to
            if inside is None or inside[lane]:
                self.open.append(self._fetch(destination, ref, int(offset[lane]) + source, nbytes))
            else:
                self.open.append((destination, np.zeros(nbytes, np.uint8)))

    def copy_commit(self) -> None:
        self.groups.append(self.open)
        self.open = []

    def copy_wait(self, pending: int) -> None:
        while len(self.groups) > pending:
            self._place(self.groups.pop(0))

    def warp_barrier(self) -> None:
        pass  # the 32 lanes of a simulated warp are always together

    def fma(self, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
        assert a.dtype == b.dtype == c.dtype == np.float32
        return (a.astype(np.float64) * b + c).astype(np.float32)

    def code_bytes(self, word: np.ndarray) -> tuple[np.ndarray, ...]:
        bits = word.view(np.uint32)
        return tuple(((bits >> np.uint32(shift)) & np.uint32(0x0F0F0F0F)).view(np.int32) for shift in (0, 4))

    def mma_bytes(
        self, acc: list[np.ndarray], a: list[np.ndarray], b: list[np.ndarray], *, signed: tuple[bool, bool]
    ) -> tuple[np.ndarray, ...]:
        """The fragment layouts of mma.m16n8k32 for bytes as the PTX manual gives them; m16n8k16 is its first half."""
        group, quad = LANE // 4, LANE % 4
        left, right = np.zeros((16, 32), np.int64), np.zeros((32, 8), np.int64)
        for i, words in enumerate(a):
            numbers = self._bytes(words).view(np.int8 if signed[0] else np.uint8)
            for byte in range(4):
                left[group + 8 * (i % 2), 16 * (i // 2) + 4 * quad + byte] = numbers[:, byte]
        for i, words in enumerate(b):
            numbers = self._bytes(words).view(np.int8 if signed[1] else np.uint8)
            for byte in range(4):
                right[16 * i + 4 * quad + byte, group] = numbers[:, byte]
        product = left @ right
        # The bits of float32 numbers around 1.5 x 2^23: beyond 2^22 they are no integers any more.
        assert (np.abs(product) < 1 << 22).all()
        return tuple((acc[e] + product[group + 8 * (e // 2), 2 * quad + e % 2]).astype(np.int32) for e in range(4))

    def as_number(self, bits: np.ndarray) -> np.ndarray:
        return bits.view(np.float32)

    def largest(self, words: list[np.ndarray]) -> np.ndarray:
        magnitudes = np.concatenate([self._halves(word) & 0x7FFF for word in words], axis=1)
        return magnitudes.max(axis=1).astype(np.int32)

    def factor_to_integers(self, bits: np.ndarray) -> np.ndarray:
        return np.exp2(148 - np.maximum(bits >> 7, 30).astype(np.float32))

    def factor_from_integers(self, bits: np.ndarray) -> np.ndarray:
        factor = np.exp2(np.maximum(bits >> 7, 30).astype(np.float32) - 148)
        return np.where(bits < 0x7F80, factor, np.float32(np.nan))

    def factor_to_halves(self, bits: np.ndarray) -> np.ndarray:
        return np.exp2(141 - np.maximum(bits >> 7, 15).astype(np.float32))

    def factor_from_halves(self, bits: np.ndarray) -> np.ndarray:
        factor = np.exp2(np.maximum(bits >> 7, 15).astype(np.float32) - 141)
        return np.where(bits < 0x7F80, factor, np.float32(np.nan))

    def half_pair(self, low: np.ndarray, high: np.ndarray) -> np.ndarray:
        return self.pack_f16(low, high)

    def byte_pairs(self, word: np.ndarray, kind: str) -> tuple[np.ndarray, ...]:
        dtype = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2, "s8": np.int8}[kind]
        halves = self._bytes(word).view(dtype).astype(np.float16)
        return tuple(np.ascontiguousarray(halves[:, i : i + 2]).view(np.int32)[:, 0] for i in (0, 2))

    def digits(self, words: list[np.ndarray], factor: np.ndarray, *, balanced: bool = False) -> tuple[np.ndarray, ...]:
        numbers = np.concatenate([self._halves(word) for word in words], axis=1).view(ml_dtypes.bfloat16)
        scaled = np.nan_to_num(np.rint(numbers.astype(np.float64) * factor[:, None])).astype(np.int32)
        assert (np.abs(scaled) < 1 << (21 if balanced else 22)).all()
        in_order = scaled[:, [0, 2, 1, 3]]
        if balanced:
            in_order = (in_order + 0x8080) ^ 0x8080
        bytes_ = [(in_order >> 8 * i).astype(np.int8) for i in range(3)]
        return tuple(np.ascontiguousarray(byte).view(np.int32)[:, 0] for byte in bytes_)

    def mma(
        self, acc: Sequence[np.ndarray], a: Sequence[np.ndarray], b: Sequence[np.ndarray], kind: str = "bf16"
    ) -> tuple[np.ndarray, ...]:
        return super().mma(acc, a, b, kind)

    def codes(self, word: np.ndarray) -> tuple[np.ndarray, ...]:
        bits = word.view(np.uint32)
        return tuple(
            (((bits >> np.uint32(4 * i)) & np.uint32(0x000F000F)) | np.uint32(0x43004300)).view(np.int32)
            for i in range(4)
        )

    def load_words(
        self, ref: np.ndarray, offset: np.ndarray, count: int, predicate: np.ndarray | None, constant: int = 0
    ) -> tuple[np.ndarray, ...]:
        keep = np.ones(32, bool) if predicate is None else predicate
        return super().load_words(ref, offset + constant, count, keep)

    def load_four(
        self, ref: np.ndarray, offset: np.ndarray, predicate: np.ndarray | None, constant: int = 0
    ) -> tuple[np.ndarray, ...]:
        keep = np.ones(32, bool) if predicate is None else predicate
        assert ref.dtype == np.float32 and ((offset + constant) % 4 == 0).all(), "unaligned read"
        places = np.where(keep, offset + constant, 0)
        assert (places + 3 < ref.size).all(), "read outside the array"
        return tuple(np.where(keep, ref[places + i], np.float32(0)) for i in range(4))

    def load_number(self, ref: np.ndarray, offset: np.ndarray, dtype: str, predicate: np.ndarray) -> np.ndarray:
        assert ref.dtype == DTYPES[dtype] and (offset[predicate] < ref.size).all()
        return np.where(predicate, ref[np.where(predicate, offset, 0)].astype(np.float32), np.float32(0))

    def numbers_of(self, word: np.ndarray) -> tuple[np.ndarray, ...]:
        return self.unpack_bf16(word)

    def sigmoid(self, x: np.ndarray) -> np.ndarray:
        with np.errstate(over="ignore"):
            return np.float32(1) / (np.float32(1) + np.exp(-x))

    def shared_words(self, address: np.ndarray, constant: int = 0, count: int = 4) -> tuple[np.ndarray, ...]:
        address = address + constant
        assert (address % (4 * count) == 0).all(), "unaligned shared read"
        words = self.bytes.view(np.int32)
        return tuple(words[address // 4 + i] for i in range(count))

    def load_pair(self, ref: np.ndarray, offset: np.ndarray, dtype: str, constant: int = 0) -> tuple[np.ndarray, ...]:
        places = offset + constant
        assert ref.dtype == DTYPES[dtype] and (places % 2 == 0).all() and (places + 1 < ref.size).all()
        return tuple(ref[places + i].astype(np.float32) for i in range(2))

    def pair_numbers(self, words: Sequence[np.ndarray], dtype: str) -> Sequence[np.ndarray]:
        return words

    def shared_store_words(self, address: np.ndarray, words: Sequence[np.ndarray], constant: int = 0) -> None:
        address = address + constant
        assert (address % (4 * len(words)) == 0).all(), "unaligned shared write"
        for i, word in enumerate(words):
            self.bytes.view(np.int32)[address // 4 + i] = word

    def shared_store(
        self, address: np.ndarray, value: np.ndarray, predicate: np.ndarray | None = None, constant: int = 0
    ) -> None:
        assert value.dtype == np.float32
        keep = np.ones(32, bool) if predicate is None else predicate
        self.bytes.view(np.float32)[(address[keep] + constant) // 4] = value[keep]

    def when(self, condition: np.ndarray, body: Callable[[], None]) -> None:
        if uniform(condition):
            body()

    def shared_number(self, address: np.ndarray, constant: int = 0) -> np.ndarray:
        assert ((address + constant) % 4 == 0).all(), "unaligned shared read"
        return self.bytes.view(np.float32)[(address + constant) // 4]

    def shared_pair(self, address: np.ndarray, dtype: str, constant: int = 0) -> tuple[np.ndarray, ...]:
        kind = DTYPES[dtype]
        # Two numbers come in one read, except two float32.
        assert ((address + constant) % min(4, 2 * kind.itemsize) == 0).all(), "unaligned shared read"
        first = (address + constant) // kind.itemsize
        return tuple(self.bytes.view(kind)[first + i].astype(np.float32) for i in range(2))

    def store_number(
        self, ref: np.ndarray, offset: np.ndarray, value: np.ndarray, dtype: str, predicate: np.ndarray
    ) -> None:
        where = offset[predicate]
        assert (where >= 0).all()
        assert np.isnan(ref[where].astype(np.float32)).all(), "written twice"
        ref[where] = value[predicate].astype(DTYPES[dtype])


def simulate(
    x: np.ndarray,
    weight: Packed,
    schedule: Schedule,
    out_dtype: str = "float32",
    *,
    fusion: Fusion = PLAIN,
    norm: np.ndarray | None = None,
    residual: np.ndarray | None = None,
) -> np.ndarray:
    """What the kernel returns for x [rows, in_features] (bfloat16): [slices, rows, results]."""
    plan = Plan.of(x.shape[0], weight, schedule, fusion)
    out = np.full(plan.partials * plan.all_rows * plan.results, np.nan, DTYPES[out_dtype])
    arguments = strip.arguments_of(
        weight,
        weights=flat_weights(weight),
        x=np.ascontiguousarray(x).reshape(-1).view(np.uint8),
        norm=norm,
        residual=None if residual is None else residual.reshape(-1),
        out=out,
        out_dtype=out_dtype,
    )
    slices = [range(plan.slices)] if schedule.joined else [range(i, i + 1) for i in range(plan.slices)]
    for cluster in slices:
        for block in range(plan.blocks_per_slice * schedule.tiles):
            _run_blocks(plan, arguments, cluster, block)
    return out.reshape(plan.partials, plan.all_rows, plan.results)


def flat_weights(weight: Packed) -> Weights:
    arrays = (weight.codes, weight.scales, weight.offsets, weight.book)
    return Weights(*(None if a is None else np.ascontiguousarray(a).reshape(-1) for a in arrays))


def _run_blocks(plan: Plan, arguments: Any, slices: range, block: int) -> None:
    """The blocks of some slices, as a cluster."""
    from simulated_cluster_warp import SimulatedClusterWarp  # these import this module
    from simulated_wide_warp import Barriers

    barriers = Barriers()

    def program(warp: SimulatedWarp, rank: int) -> None:
        w = SimulatedClusterWarp(warp, barriers)
        program = once.multiply if plan.schedule.once else mosaic.multiply
        program = apart.multiply if plan.schedule.apart else program
        program(w, plan, arguments, w.integer(slices[rank]), w.integer(block))

    run_cluster(len(slices), plan.threads // 32, plan.shared_bytes, program)


def in_float64(x: np.ndarray, values: np.ndarray) -> np.ndarray:
    return x.astype(np.float64) @ values.astype(np.float64).T


def relative_error(out: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(out.astype(np.float64) - expected) / np.linalg.norm(expected))
