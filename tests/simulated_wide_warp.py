"""The NumPy twin of `pallas_kernels.int4_matmul.wide_warp.WideWarp`, and the whole kernel run on it.

What is asynchronous happens as late as it may: products read their registers and shared memory when a wait demands
their sums, so a slot that is given back too early shows as a wrong result. Copies start by poisoning their destination.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from simulated_barriers import Barriers
from simulated_int4_warp import DTYPES, SimulatedInt4Warp, flat_weights
from simulated_warp import LANE, SimulatedWarp, run_cluster, uniform

from pallas_kernels.int4_matmul import strip, wide, wide_arrange, wide_dequantize, wide_norm
from pallas_kernels.int4_matmul.packing_int8 import Packed
from pallas_kernels.int4_matmul.wide_plan import BOX, WidePlan, WideSchedule
from pallas_kernels.token_order import TokenOrder, image_shape, ordered

BF16 = ml_dtypes.bfloat16


def swizzled(addresses: np.ndarray) -> np.ndarray:
    """Where bytes lie: pieces of 16 bytes change places among eight, by the line of 128 bytes they are in."""
    return addresses ^ (addresses // 128 % 8 * 16)


class SimulatedWideWarp(SimulatedInt4Warp):
    def __init__(self, warp: SimulatedWarp, barriers: Barriers):
        super().__init__(warp)
        self.barriers = barriers
        self.issued: list[Callable[[], None]] = []
        self.products: list[list[Callable[[], None]]] = []

    # Two bfloat16 in a word
    def add_pairs(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return self._pairs_word(self._numbers(a) + self._numbers(b))

    def fma_pairs(self, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
        return self._pairs_word(self._numbers(a) * self._numbers(b) + self._numbers(c))

    def twice(self, number: np.ndarray) -> np.ndarray:
        return self._pairs_word(np.stack([number, number], -1))

    def low_number(self, word: np.ndarray) -> np.ndarray:
        return self._numbers(word)[:, 0].astype(np.float32)

    def half_number(self, word: np.ndarray, half: int) -> np.ndarray:
        return np.ascontiguousarray(word, np.int32).view(np.float16).reshape(32, 2)[:, half].astype(np.float32)

    def as_float(self, word: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(word, np.int32).view(np.float32)

    def permute(self, a: np.ndarray, b: int, selector: int) -> np.ndarray:
        other = np.full(32, np.int64(b).astype(np.int32))
        both = np.concatenate([self._octets(a), self._octets(other)], 1)
        picked = np.stack([both[:, (selector >> (4 * i)) & 15] for i in range(4)], 1)
        return np.ascontiguousarray(picked).view(np.int32)[:, 0]

    def shared_word(self, address: np.ndarray, constant: int = 0) -> np.ndarray:
        assert ((address + constant) % 4 == 0).all(), "unaligned shared read"
        return self.bytes.view(np.int32)[(address + constant) // 4]

    def shared_half(self, address: np.ndarray, constant: int = 0) -> np.ndarray:
        assert ((address + constant) % 2 == 0).all(), "unaligned shared read"
        return self.bytes.view(np.uint16)[(address + constant) // 2].astype(np.int32)

    # Global memory
    def global_words(self, ref: np.ndarray, offset: np.ndarray, count: int) -> list[np.ndarray]:
        assert (offset % (4 * count) == 0).all(), "unaligned read"
        assert (offset >= 0).all()
        assert (offset + 4 * count <= ref.nbytes).all(), "read past the end of an array"
        words = ref.view(np.uint8)[offset[:, None] + np.arange(4 * count)].view(np.int32)
        return [words[:, i] for i in range(count)]

    def global_half(self, ref: np.ndarray, offset: np.ndarray) -> np.ndarray:
        return ref.view(np.uint8)[offset[:, None] + np.arange(2)].copy().view(np.uint16)[:, 0].astype(np.int32)

    def store_words(
        self, ref: np.ndarray, offset: np.ndarray, words: Sequence[np.ndarray], predicate: np.ndarray
    ) -> None:
        numbers = np.stack(words, -1).view(np.uint16)
        for lane in np.flatnonzero(predicate):
            start = int(offset[lane])
            assert start % numbers.shape[1] == 0, "unaligned write"
            assert np.isnan(ref[start : start + numbers.shape[1]].astype(np.float32)).all(), "written twice"
            ref.view(np.uint16)[start : start + numbers.shape[1]] = numbers[lane]

    def give_up(self, ref: np.ndarray, offset: np.ndarray, size: int, predicate: np.ndarray) -> None:
        lines, there = ref.view(np.uint8).reshape(-1, 128), offset[predicate].astype(np.int64) * size
        assert (there % 128 == 0).all(), "not the start of a line"
        lines[there // 128] = 0xFF  # NaN

    # Copies
    def _start(self, destination: int, ref: np.ndarray, origin: int, size: int) -> np.ndarray:
        """The bytes of a copy, whose destination holds no numbers from now on."""
        flat = ref.view(np.uint8)
        assert destination % 16 == origin % 16 == size % 16 == 0, "unaligned copy"
        assert destination + size <= self.bytes.size
        assert 0 <= origin <= flat.size - size, "copy from outside the array"
        self.bytes[destination : destination + size] = 0xFF
        return flat[origin : origin + size]

    def copy_or_clear(
        self,
        address: np.ndarray,
        ref: np.ndarray,
        offset: np.ndarray,
        inside: np.ndarray | None,
        predicate: np.ndarray | None,
        to: int,
    ) -> None:
        for lane in range(32):
            if predicate is not None and not predicate[lane]:
                continue
            destination, keep = int(address[lane]) + to, inside is None or inside[lane]
            data = self._start(destination, ref, int(offset[lane]) if keep else 0, 16)
            self.open.append((destination, data if keep else np.zeros(16, np.uint8)))

    def arrive_when_copied(self, barrier: np.ndarray) -> None:
        self._place(self.open)
        self.open = []
        self.barriers.update(self.block, uniform(barrier), arrivals=32)

    def copy_to_cluster(
        self,
        address: np.ndarray,
        ref: np.ndarray,
        offset: np.ndarray,
        nbytes: int,
        barrier: np.ndarray,
        blocks: int,
        predicate: np.ndarray,
    ) -> None:
        for lane in np.flatnonzero(predicate):
            destination = int(address[lane])
            data = self._start(destination, ref, int(offset[lane]), nbytes)
            for block in range(blocks) if blocks > 1 else [self.block]:
                self.cluster.smem[block].view(np.uint8)[destination : destination + nbytes] = data
                self.barriers.update(block, int(barrier[lane]), nbytes=-nbytes)

    def copy_box(
        self,
        address: np.ndarray,
        boxes: tuple[np.ndarray, int, int],
        column: np.ndarray,
        row: np.ndarray,
        barrier: np.ndarray,
        blocks: int,
        predicate: np.ndarray,
    ) -> None:
        array, rows, columns = boxes
        for lane in np.flatnonzero(predicate):
            there = array[row[lane] :, column[lane] :][:rows, :columns]
            box = np.pad(there, ((0, rows - there.shape[0]), (0, columns - there.shape[1]))).view(np.uint8)
            places = swizzled(int(address[lane]) + np.arange(box.size))
            for block in range(blocks) if blocks > 1 else [self.block]:
                self.cluster.smem[block].view(np.uint8)[places] = box.reshape(-1)
                self.barriers.update(block, int(barrier[lane]), nbytes=-box.size)

    def copy_once(
        self,
        address: np.ndarray,
        ref: np.ndarray,
        offset: np.ndarray,
        nbytes: int,
        barrier: np.ndarray,
        predicate: np.ndarray,
    ) -> None:
        self.copy_to_cluster(address, ref, offset, nbytes, barrier, 1, predicate)

    def store_at(
        self,
        ref: np.ndarray,
        offset: np.ndarray,
        constant: int,
        value: np.ndarray,
        dtype: str,
        predicate: np.ndarray,
    ) -> None:
        self.store_number(ref, offset + constant, value, dtype, predicate)

    def pack(self, low: np.ndarray, high: np.ndarray, dtype: str) -> np.ndarray:
        return np.ascontiguousarray(np.stack([low, high], -1).astype(DTYPES[dtype])).view(np.int32)[:, 0]

    def store_transposed(self, address: np.ndarray, constant: int, words: Sequence[np.ndarray]) -> None:
        for matrix, word in enumerate(words):
            halves = np.ascontiguousarray(word, np.int32).view(np.uint16).reshape(8, 8)  # [row, column]
            for column in range(8):
                start = int(address[8 * matrix + column]) + constant
                assert start % 16 == 0, "unaligned shared write"
                self.bytes[start : start + 16] = np.ascontiguousarray(halves[:, column]).view(np.uint8)

    def warpgroup_barrier(self) -> None:
        self.barriers.together(self.block, int(self.warp[0]) // 4).wait()

    # Barriers
    def barrier_init(self, barrier: np.ndarray, arrivals: int, predicate: np.ndarray) -> None:
        for lane in np.flatnonzero(predicate):
            assert barrier[lane] % 8 == 0
            self.barriers.state[self.block, int(barrier[lane])] = [arrivals, arrivals, 0, 0]

    def barriers_ready(self) -> None:
        pass

    def expect_bytes(self, barrier: np.ndarray, nbytes: int, predicate: np.ndarray) -> None:
        for lane in np.flatnonzero(predicate):
            self.barriers.update(self.block, int(barrier[lane]), arrivals=1, nbytes=nbytes)

    def arrive_in(self, barrier: np.ndarray, block: np.ndarray | None, predicate: np.ndarray) -> None:
        for lane in np.flatnonzero(predicate):
            target = self.block if block is None else int(block[lane])
            self.barriers.update(target, int(barrier[lane]), arrivals=1)

    def barrier_wait(self, barrier: np.ndarray, parity: np.ndarray) -> None:
        self.barriers.wait(self.block, uniform(barrier), uniform(parity))

    def cluster_barrier(self) -> None:
        self.cluster.cluster_barrier.wait()

    def wait_turn(self, barrier: np.ndarray) -> None:
        self.barriers.turn(self.block, uniform(barrier), wait=True)

    def give_turn(self, barrier: np.ndarray) -> None:
        self.barriers.turn(self.block, uniform(barrier), wait=False)

    def send_words(
        self,
        address: np.ndarray,
        words: Sequence[np.ndarray],
        block: np.ndarray,
        barrier: int,
        predicate: np.ndarray | None = None,
    ) -> None:
        assert len(words) in (1, 2, 4)
        keep = np.ones(32, bool) if predicate is None else predicate
        assert (address[keep] + 4 * len(words) <= barrier).all()
        self._store_to(block, address, words, keep)
        for lane in np.flatnonzero(keep):
            self.barriers.update(int(block[lane]), barrier, nbytes=-4 * len(words))

    # Products
    def token_matrix(self, address: np.ndarray, tokens: int) -> tuple[int, int]:
        assert uniform(address) % 16 == 0
        return uniform(address), tokens

    def swizzled_matrix(self, address: np.ndarray) -> tuple[int, None]:
        assert uniform(address) % 1024 == 0
        return uniform(address), None

    def wgmma(
        self, acc: Sequence[np.ndarray], a: Sequence[np.ndarray], matrix: tuple[int, int | None], advance: int
    ) -> list[np.ndarray]:
        """This warp's 16 rows of the product; fragment layouts as the PTX manual gives them."""
        start, tokens = matrix[0] + advance, 2 * len(acc)
        apart = matrix[1]  # tokens from one piece of 8 inputs to the next
        sums = [np.full(32, np.nan, np.float32) for _ in acc]
        before, words = list(acc), [word.copy() for word in a]

        def run() -> None:
            group, quad = LANE // 4, LANE % 4
            left, total = np.zeros((16, 16), np.float32), np.zeros((16, tokens), np.float32)
            for i, word in enumerate(words):
                for half in range(2):
                    left[group + 8 * (i % 2), 8 * (i // 2) + 2 * quad + half] = self._numbers(word)[:, half]
            # 8 x 8 matrices of [8 tokens, 16 bytes]: the next tokens' follows, the next inputs' comes after all tokens.
            if apart is None:
                places = swizzled(start + np.arange(tokens)[:, None] * 128 + np.arange(32))
                right = self.bytes[places].view(BF16).astype(np.float32).T
            else:
                assert apart >= tokens
                piece = self.bytes[start:][: 16 * (apart + tokens)].copy().view(BF16).astype(np.float32).reshape(-1, 8)
                right = np.stack([piece[:tokens], piece[apart:]]).transpose(0, 2, 1).reshape(16, tokens)
            for i, value in enumerate(before):
                total[group + 8 * (i // 2 % 2), 8 * (i // 4) + 2 * quad + i % 2] = value
            total = total + left @ right
            for i, value in enumerate(sums):
                value[:] = total[group + 8 * (i // 2 % 2), 8 * (i // 4) + 2 * quad + i % 2]

        self.issued.append(run)
        return sums

    def wgmma_fence(self, values: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
        return values

    def wgmma_commit(self) -> None:
        self.products.append(self.issued)
        self.issued = []

    def wgmma_wait(self, pending: int, values: Sequence[np.ndarray] = ()) -> Sequence[np.ndarray]:
        while len(self.products) > pending:
            for run in self.products.pop(0):
                run()
        return values

    def set_registers(self, count: int, more: bool) -> None:
        assert count % 8 == 0
        assert 24 <= count <= 256


def simulate(x: np.ndarray, weight: Packed, schedule: WideSchedule, out_dtype: str = "float32") -> np.ndarray:
    """What the kernel returns for x [rows, in_features] (bfloat16): [slices, rows, out_features]."""
    plan = WidePlan.of(x.shape[0], weight, schedule)
    out = np.full(schedule.slices * plan.rows * plan.out_features, np.nan, DTYPES[out_dtype])
    if schedule.natural:
        image = (x, plan.box_tokens, BOX)
    else:
        image = np.asarray(ordered(jnp.asarray(x), plan.token_order)).reshape(-1)
    _run(plan, weight, image, out, out_dtype)
    return out.reshape(schedule.slices, plan.rows, plan.out_features)


def simulate_gated(
    x: np.ndarray, weight: Packed, schedule: WideSchedule, order: TokenOrder | None, out_dtype: str = "float32"
) -> np.ndarray:
    """silu(gate) * other: [rows, results], or bits of bfloat16 in the order of the next product's x."""
    plan = dataclasses.replace(WidePlan.of(x.shape[0], weight, schedule), gated=True, result_order=order)
    image = np.asarray(ordered(jnp.asarray(x), plan.token_order)).reshape(-1)
    if order is None:
        out = np.full(plan.rows * plan.results, np.nan, DTYPES[out_dtype])
        _run(plan, weight, image, out, out_dtype)
        return out.reshape(plan.rows, plan.results)
    shape = image_shape(plan.rows, plan.results, order)
    out = np.full(2 * np.prod(shape), np.nan, BF16)
    _run(plan, weight, image, out, "bfloat16")
    return out.view(np.int32).reshape(shape)


def simulate_dequantize(weight: Packed) -> np.ndarray:
    """What the kernel that only unpacks returns: bfloat16 [out_features, in_features]."""
    plan = WidePlan.of(1, weight, WideSchedule())
    out = np.full(weight.shape[0] * weight.shape[1], np.nan, BF16)
    arguments = _arguments(weight, None, out, "bfloat16")
    for block in range(wide_dequantize.blocks(plan)):

        def program(warp: SimulatedWarp, _: int, block: int = block) -> None:
            w = SimulatedWideWarp(warp, Barriers())
            wide_dequantize.unpack(w, plan, arguments, w.integer(block))

        run_cluster(1, wide_dequantize.WARPS, 4, program)
    return out.reshape(weight.shape)


def simulate_arrange(x: np.ndarray, plan: WidePlan) -> np.ndarray:
    """What the kernel that reorders x (bfloat16) returns."""

    def program(w: SimulatedWideWarp, given: Any, out: np.ndarray, block: np.ndarray) -> None:
        wide_arrange.reorder(w, plan, given, out, block)

    return _image(x, plan, wide_arrange.blocks(plan), wide_arrange.WARPS, program)


def simulate_normalise(
    x: np.ndarray, plan: WidePlan, norm: np.ndarray, eps: float, partial: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray, Any]:
    """What the kernel that normalises x (bfloat16) returns, x with slices [slices, rows, inputs] added, and what is
    left of the slices, if there are any."""
    slices, total = (0, x) if partial is None else (len(partial), np.full(x.shape, np.nan, BF16))
    own = wide_norm.NormPlan(plan)
    sums = None if partial is None else partial.copy().reshape(-1).view(np.uint8 if slices == 1 else np.float32)

    def program(w: SimulatedWideWarp, given: Any, out: np.ndarray, block: np.ndarray) -> None:
        wide_norm.normalise(w, own, given, norm, sums, slices, eps, (out, total.reshape(-1)), block)

    image = _image(x, plan, own.blocks, own.warps, program, own.shared_bytes)
    return image, total, None if partial is None or sums is None else sums.view(partial.dtype).reshape(partial.shape)


def _image(
    x: np.ndarray, plan: WidePlan, blocks: int, warps: int, program: Callable[..., None], shared: int = 256
) -> np.ndarray:
    # As 16-bit numbers, of which all ones are NaN: nothing is written twice.
    out = np.full(2 * np.prod(wide_arrange.shape_of(plan)), np.nan, BF16)
    bytes_ = np.ascontiguousarray(x).reshape(-1).view(np.uint8)
    for block in range(blocks):

        def run(warp: SimulatedWarp, _: int, block: int = block) -> None:
            w = SimulatedWideWarp(warp, Barriers())
            program(w, bytes_, out, w.integer(block))

        run_cluster(1, warps, shared, run)
    return out.view(np.int32).reshape(wide_arrange.shape_of(plan))


def _arguments(weight: Packed, x: Any, out: np.ndarray, out_dtype: str) -> strip.Arguments:
    return strip.arguments_of(weight, weights=flat_weights(weight), x=x, out=out, out_dtype=out_dtype)


def _run(plan: WidePlan, weight: Packed, image: Any, out: np.ndarray, out_dtype: str) -> None:
    arguments = _arguments(weight, image, out, out_dtype)
    for cluster in range(plan.clusters):
        barriers = Barriers()

        def program(warp: SimulatedWarp, rank: int, barriers: Barriers = barriers, cluster: int = cluster) -> None:
            w = SimulatedWideWarp(warp, barriers)
            wide.multiply(w, plan, arguments, w.integer(cluster), w.integer(rank))

        run_cluster(plan.schedule.cluster, plan.consumer_warps + 4, plan.shared_bytes, program)
