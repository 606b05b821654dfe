"""One warp's instructions for kernels whose blocks send each other numbers: clusters of blocks.

What is sent goes to an inbox in the other block's shared memory, whose barrier counts the bytes that came: a sender
needs no fence, and no block need outlive another, as each waits for all that it is sent.
"""

from collections.abc import Sequence

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, llvm

from pallas_kernels.int4_matmul.wide_warp import WideWarp
from pallas_kernels.paged_attention.warp import Value, Words


class ClusterWarp(WideWarp):
    """Emits at MLIR's current insertion point. The tests have a NumPy twin."""

    def block(self) -> Value:
        """The block's number; `lax.axis_index` of a kernel of clusters would divide for it, in 250 clocks."""
        return Value(arith.index_cast(ir.IntegerType.get_signless(32), gpu.block_id(gpu.Dimension.x)))

    def expect_sent(self, barrier: int, nbytes: int, warp: int = 0) -> None:
        """Lets `nbytes` be sent here, once `cluster_arrive` and `cluster_wait` followed in all blocks.

        One warp does it: it takes a hundred clocks.
        """
        first = self.thread < 1
        if warp:
            first = (self.thread < 32 * warp + 1) & (self.integer(32 * warp - 1) < self.thread)
        self.barrier_init(self.integer(barrier), 1, first)
        self.expect_bytes(self.integer(barrier), nbytes, first)
        self._emit("fence.mbarrier_init.release.cluster;", "")

    def cluster_arrive(self) -> None:
        """Says that this warp came here. Of what it wrote, those that wait for it see opened inboxes only."""
        self._emit("barrier.cluster.arrive.relaxed.aligned;", "")

    def cluster_wait(self) -> None:
        """Waits until every warp of the cluster arrived; it empties the L1 cache."""
        self._emit("barrier.cluster.wait.acquire.aligned;", "")

    def wait_sent(self, barrier: int) -> None:
        """Waits until all that this block's inbox was opened for has come.

        What came is in shared memory, so that the block's scope will do; the cluster's would empty the L1 cache.
        """
        ptx = (
            "{ .reg .pred done; again: mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 done, [$0], 0; "
            "@!done bra again; }"
        )
        self._emit(ptx, "r", self._shared(self.integer(barrier)))

    def computed(self, words: Sequence[Value]) -> None:
        """Has words computed here, and not behind a wait that follows, where ptxas puts what is used there.

        It stores them on a card that has room for no warp, as ptxas cannot know that there is none.
        """
        none = llvm.inline_asm(
            ir.IntegerType.get_signless(1),
            [],
            "{ .reg .b32 room; mov.u32 room, %nwarpid; setp.eq.u32 $0, room, 0; }",
            "=b",
        )
        for first in range(0, len(words), 4):
            some = words[first : first + 4]
            names = ", ".join(f"${i + 1}" for i in range(len(some)))
            ptx = f"@${len(some) + 1} st.shared.v{len(some)}.b32 [$0], {{{names}}};"
            self._emit(ptx, ",".join(["r"] * (len(some) + 1) + ["b"]), self._scratch, *(word.ir for word in some), none)

    # Integers
    def order_of(self, number: Value) -> Value:
        """An integer that is the larger, the larger the float32 number is."""
        ptx = (
            "{ .reg .b32 bits, lower; mov.b32 bits, $1; shr.s32 lower, bits, 31; and.b32 lower, lower, 0x7FFFFFFF; "
            "xor.b32 $0, bits, lower; }"
        )
        return self._word(ptx, number)

    def largest_integer(self, x: Value) -> Value:
        """The largest of all lanes' integers."""
        return self._over_lanes("max", x)

    def smallest_integer(self, x: Value) -> Value:
        return self._over_lanes("min", x)

    def _over_lanes(self, operation: str, x: Value) -> Value:
        ptx = f"redux.sync.{operation}.s32 $0, $1, 0xFFFFFFFF;"
        return Value(llvm.inline_asm(x.ir.type, [x.ir], ptx, "=r,r", has_side_effects=True))

    def load_integers(self, ref: ir.Value) -> Words:
        """The first two integers of an array; the same for all lanes."""
        return self._load(self._pointer(ref, self.integer(0), 4), 2, None, 0)

    def store_integers(self, ref: ir.Value, integers: Sequence[Value], predicate: Value) -> None:
        """To the first places of an array."""
        pointer = self._pointer(ref, self.integer(0), 4)
        for i, integer in enumerate(integers):
            self._emit(f"@$2 st.global.b32 [$0 + {4 * i}], $1;", "l,r,b", pointer, integer.ir, predicate.ir)

    def prefetch(self, ref: ir.Value, offset: Value, nbytes: Value, predicate: Value) -> None:
        """Asks for bytes from byte `offset` of `ref` on, both multiples of 16, to be brought into the L2 cache."""
        operands = [self._pointer(ref, offset, 1), nbytes.ir, predicate.ir]
        self._emit("@$2 cp.async.bulk.prefetch.L2.global [$0], $1;", "l,r,b", *operands)
