"""A NumPy twin of `pallas_kernels.paged_attention.warp.Warp`: 32-element arrays stand for the lanes' values.

Runs the kernel's own description (`mosaic.attend`) with no GPU. Each warp is a thread of this process, so barriers
are real. Shared memory starts as NaN, addresses are checked, and lanes that disagree where they must not are an error.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np

KINDS = {"i1": np.bool_, "i32": np.int32, "i64": np.int64, "f32": np.float32}
LANE = np.arange(32, dtype=np.int32)


def uniform(x: np.ndarray) -> Any:
    assert (x == x[0]).all(), "this value must be the same in all lanes"
    return x[0]


class Cluster:
    """Shared memory and barriers of the blocks that run together."""

    def __init__(self, blocks: int, warps: int, smem_bytes: int):
        self.smem = [np.full(smem_bytes // 4, np.nan, np.float32) for _ in range(blocks)]
        self.block_barriers = [threading.Barrier(warps, timeout=60) for _ in range(blocks)]
        self.cluster_barrier = threading.Barrier(blocks * warps, timeout=60)
        self.sent = threading.Condition()
        self.awaited: dict[tuple[int, int], int] = {}  # bytes that are still to be sent, by (block, barrier)


class SimulatedWarp:
    def __init__(self, cluster: Cluster, block: int, warp: int):
        self.cluster, self.block = cluster, block
        self.warp = np.full(32, warp, np.int32)
        self.lane = LANE
        self.thread = LANE + 32 * self.warp

    def const(self, value: float, kind: str = "f32") -> np.ndarray:
        return np.full(32, value, KINDS[kind])

    def wide(self, value: np.ndarray) -> np.ndarray:
        assert (value >= 0).all()
        return value.astype(np.int64)

    select = staticmethod(np.where)
    maximum = staticmethod(np.maximum)  # both spread NaN
    minimum = staticmethod(np.minimum)

    def exp2(self, x: np.ndarray) -> np.ndarray:
        assert x.dtype == np.float32
        return np.exp2(x)

    log2 = staticmethod(np.log2)

    def reciprocal(self, x: np.ndarray) -> np.ndarray:
        return np.float32(1) / x

    @staticmethod
    def rsqrt(x: np.ndarray) -> np.ndarray:
        return np.float32(1) / np.sqrt(x)

    exact_reciprocal = reciprocal

    def unpack_bf16(self, word: np.ndarray) -> tuple[np.ndarray, ...]:
        return tuple(self._halves(word)[:, i].view(ml_dtypes.bfloat16).astype(np.float32) for i in range(2))

    def unpack_f16(self, word: np.ndarray) -> tuple[np.ndarray, ...]:
        return tuple(self._halves(word)[:, i].view(np.float16).astype(np.float32) for i in range(2))

    def pack_bf16(self, low: np.ndarray, high: np.ndarray) -> np.ndarray:
        pair = np.stack([low, high], -1).astype(ml_dtypes.bfloat16)
        return pair.view(np.int32)[:, 0]

    def pack_f16(self, low: np.ndarray, high: np.ndarray) -> np.ndarray:
        return np.stack([low, high], -1).astype(np.float16).view(np.int32)[:, 0]

    def int8_to_f16(self, word: np.ndarray) -> tuple[np.ndarray, ...]:
        return self._pairs(self._bytes(word).view(np.int8))

    def uint8_to_f16(self, word: np.ndarray, bias: int) -> tuple[np.ndarray, ...]:
        return self._pairs(self._bytes(word).astype(np.int32) - bias)

    def e4m3_to_f16(self, word: np.ndarray) -> tuple[np.ndarray, ...]:
        return self._pairs(self._bytes(word).view(ml_dtypes.float8_e4m3fn))

    @staticmethod
    def _pairs(numbers: np.ndarray) -> tuple[np.ndarray, ...]:
        words = np.ascontiguousarray(numbers.astype(np.float16)).view(np.int32)
        return words[:, 0], words[:, 1]

    def nibbles(self, word: np.ndarray) -> tuple[np.ndarray, ...]:
        numbers = self._bytes(word)
        return tuple(np.ascontiguousarray(part).view(np.int32)[:, 0] for part in (numbers % 16, numbers // 16))

    def interleave(self, a: np.ndarray, b: np.ndarray, pair: int) -> np.ndarray:
        both = np.stack([self._bytes(a), self._bytes(b)], -1)[:, 2 * pair : 2 * pair + 2]
        return np.ascontiguousarray(both).reshape(32, 4).view(np.int32)[:, 0]

    def pack_int8(self, values: Sequence[np.ndarray]) -> np.ndarray:
        numbers = np.nan_to_num(np.rint(np.stack(values, -1)))
        return np.clip(numbers, -128, 127).astype(np.int8).view(np.int32)[:, 0]

    def pack_e4m3(self, values: Sequence[np.ndarray]) -> np.ndarray:
        return np.stack(values, -1).astype(ml_dtypes.float8_e4m3fn).view(np.int32)[:, 0]

    @staticmethod
    def _bytes(words: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(words, np.int32).view(np.uint8).reshape(32, 4)

    def upper_half(self, word: np.ndarray) -> np.ndarray:
        return self._halves(word)[:, 1].astype(np.int32)

    def low_halves(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return np.stack([self._halves(a)[:, 0], self._halves(b)[:, 0]], -1).view(np.int32)[:, 0]

    def high_halves(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return np.stack([self._halves(a)[:, 1], self._halves(b)[:, 1]], -1).view(np.int32)[:, 0]

    @staticmethod
    def _halves(words: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(words, np.int32).view(np.uint16).reshape(32, 2)

    def shuffle_xor(self, x: np.ndarray, mask: int) -> np.ndarray:
        return x[LANE ^ mask]

    def shuffle(self, x: np.ndarray, source_lane: np.ndarray) -> np.ndarray:
        return x[source_lane]

    def mma(
        self, acc: Sequence[np.ndarray], a: Sequence[np.ndarray], b: Sequence[np.ndarray], kind: str
    ) -> tuple[np.ndarray, ...]:
        """The fragment layouts of mma.m16n8k16 as the PTX manual gives them."""
        group, quad = LANE // 4, LANE % 4
        left, right = np.zeros((16, 16), np.float32), np.zeros((16, 8), np.float32)
        total = np.zeros((16, 8), np.float32)

        def numbers(words: np.ndarray, half: int) -> np.ndarray:
            dtype = {"bf16": ml_dtypes.bfloat16, "f16": np.float16}[kind]
            return self._halves(words)[:, half].view(dtype).astype(np.float32)

        for half in range(2):
            left[group, 2 * quad + half] = numbers(a[0], half)
            left[group + 8, 2 * quad + half] = numbers(a[1], half)
            left[group, 2 * quad + half + 8] = numbers(a[2], half)
            left[group + 8, 2 * quad + half + 8] = numbers(a[3], half)
            right[2 * quad + half, group] = numbers(b[0], half)
            right[2 * quad + half + 8, group] = numbers(b[1], half)
            total[group, 2 * quad + half] = acc[half]
            total[group + 8, 2 * quad + half] = acc[2 + half]
        total = total + left @ right
        return tuple(total[group + 8 * (i // 2), 2 * quad + i % 2] for i in range(4))

    def load_words(
        self, ref: np.ndarray, offset: np.ndarray, count: int, predicate: np.ndarray
    ) -> tuple[np.ndarray, ...]:
        """`ref` is the bytes of bfloat16 elements."""
        return self.load_bytes(ref, 2 * offset, 4 * count, predicate, 0)

    def load_bytes(
        self, ref: np.ndarray, offset: np.ndarray, size: int, predicate: np.ndarray, constant: int
    ) -> tuple[np.ndarray, ...]:
        """`ref` is a flat array of bytes."""
        offset = np.where(predicate, offset + constant, 0).astype(np.int64)
        assert (offset % size == 0).all(), "unaligned read"
        assert (offset >= 0).all()
        assert (offset + size <= ref.size).all(), "read past the end of an array"
        got = np.zeros((32, max(size, 4)), np.uint8)
        got[:, :size] = np.where(predicate[:, None], ref[offset[:, None] + np.arange(size)], 0)
        return tuple(got.view(np.int32)[:, i] for i in range(max(1, size // 4)))

    def load_scale(self, ref: np.ndarray, offset: np.ndarray, predicate: np.ndarray, constant: int) -> np.ndarray:
        return self._load(ref, offset + constant, 1, predicate)[0]

    def load_i32(self, ref: np.ndarray, offset: np.ndarray, predicate: np.ndarray) -> np.ndarray:
        return self._load(ref, offset, 1, predicate)[0]

    def load_floats(
        self, ref: np.ndarray, offset: np.ndarray, count: int, predicate: np.ndarray
    ) -> tuple[np.ndarray, ...]:
        return self._load(ref, offset, count, predicate)

    def _load(self, ref: np.ndarray, offset: np.ndarray, count: int, predicate: np.ndarray) -> tuple[np.ndarray, ...]:
        assert (offset[predicate] >= 0).all()
        assert (offset[predicate] % count == 0).all(), "unaligned read"
        assert (offset[predicate] + count <= ref.size).all(), "read past the end of an array"
        return tuple(
            np.where(predicate, ref[np.where(predicate, offset + i, 0)], 0).astype(ref.dtype) for i in range(count)
        )

    def store_words(
        self, ref: np.ndarray, offset: np.ndarray, words: Sequence[np.ndarray], predicate: np.ndarray
    ) -> None:
        self.store_bytes(ref, 2 * offset, words, predicate)

    def store_bytes(
        self, ref: np.ndarray, offset: np.ndarray, words: Sequence[np.ndarray], predicate: np.ndarray
    ) -> None:
        assert (offset[predicate] % (4 * len(words)) == 0).all(), "unaligned write"
        for lane in np.flatnonzero(predicate):
            for i, word in enumerate(words):
                ref[offset[lane] + 4 * i : offset[lane] + 4 * i + 4] = self._bytes(word)[lane]

    def store_f32(self, ref: np.ndarray, offset: np.ndarray, value: np.ndarray, predicate: np.ndarray) -> None:
        ref[offset[predicate]] = value[predicate]

    def shared_load(self, address: np.ndarray, count: int, kind: str) -> tuple[np.ndarray, ...]:
        assert (address % (4 * count) == 0).all(), "unaligned shared read"
        smem = self.cluster.smem[self.block].view(KINDS[kind])
        return tuple(smem[address // 4 + i] for i in range(count))

    def shared_store(
        self, address: np.ndarray, values: Sequence[np.ndarray], predicate: np.ndarray | None = None
    ) -> None:
        keep = np.ones(32, bool) if predicate is None else predicate
        self._store_to(np.full(32, self.block), address, values, keep)

    def _store_to(self, block: np.ndarray, address: np.ndarray, values: Sequence[np.ndarray], keep: np.ndarray) -> None:
        assert (address[keep] % (4 * len(values)) == 0).all(), "unaligned shared write"
        assert (address[keep] >= 0).all()
        for lane in np.flatnonzero(keep):
            smem = self.cluster.smem[block[lane]]
            for i, value in enumerate(values):
                smem.view(value.dtype)[address[lane] // 4 + i] = value[lane]

    def open_inbox(self, barrier: int, num_bytes: np.ndarray) -> None:
        assert barrier % 8 == 0 and barrier + 8 <= self.cluster.smem[self.block].nbytes, "no place for a barrier"
        if self.warp[0] == 0:
            self.cluster.awaited[self.block, barrier] = uniform(num_bytes)

    def send(
        self, address: np.ndarray, values: Sequence[np.ndarray], keep: np.ndarray, block: np.ndarray, barrier: int
    ) -> None:
        assert len(values) in (2, 4) and (address[keep] + 4 * len(values) <= barrier).all()
        with self.cluster.sent:
            self._store_to(block, address, values, keep)
            for lane in np.flatnonzero(keep):
                self.cluster.awaited[int(block[lane]), barrier] -= 4 * len(values)
            self.cluster.sent.notify_all()

    def wait_inbox(self, barrier: int, scope: str = "cluster") -> None:
        assert scope in ("cta", "cluster")
        awaited, inbox = self.cluster.awaited, (self.block, barrier)
        with self.cluster.sent:
            assert self.cluster.sent.wait_for(lambda: awaited[inbox] <= 0, timeout=60)
            assert awaited[inbox] == 0, "more was sent than expected"

    def loop(
        self, count: np.ndarray, carry: Sequence[Any], body: Callable[[np.ndarray, Sequence[Any]], Sequence[Any]]
    ) -> Sequence[Any]:
        for i in range(uniform(count)):
            carry = body(np.full(32, i, np.int32), carry)
        return carry

    def when(self, condition: np.ndarray, carry: Sequence[Any], body: Callable[[], Sequence[Any]]) -> Sequence[Any]:
        return body() if uniform(condition) else carry

    def block_barrier(self) -> None:
        self.cluster.block_barriers[self.block].wait()

    def cluster_arrive(self) -> None:
        """Arriving and waiting come in pairs, so the whole barrier may stand where the wait is."""

    def cluster_wait(self) -> None:
        self.cluster.cluster_barrier.wait()


def run_cluster(blocks: int, warps: int, smem_bytes: int, program: Callable[[SimulatedWarp, int], None]) -> None:
    """Runs `program(warp, block)` for every warp of a cluster of `blocks` blocks; the first error is raised."""
    cluster = Cluster(blocks, warps, smem_bytes)
    errors: list[BaseException] = []

    def run(block: int, warp: int) -> None:
        try:
            with np.errstate(all="ignore"):
                program(SimulatedWarp(cluster, block, warp), block)
        except BaseException as error:
            errors.append(error)
            for barrier in (*cluster.block_barriers, cluster.cluster_barrier):
                barrier.abort()

    threads = [threading.Thread(target=run, args=(b, w)) for b in range(blocks) for w in range(warps)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    real = [e for e in errors if not isinstance(e, threading.BrokenBarrierError)]
    if errors:
        raise (real or errors)[0]
