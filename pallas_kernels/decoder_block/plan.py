"""How the attention block's kernel is cut up: sizes and shared memory, known at compile time."""

import dataclasses

from pallas_kernels.int4_matmul.packing import STRIP
from pallas_kernels.int4_matmul.packing_int8 import Packed
from pallas_kernels.int4_matmul.plan import PART, Fusion, Schedule
from pallas_kernels.int4_matmul.plan import Plan as ProductPlan
from pallas_kernels.paged_attention.new_token import DecodePlan
from pallas_kernels.paged_attention.plan import KEYS

BLOCKS, WARPS = 8, 8
"""Of a cluster, the largest that every card places, and of a block."""


@dataclasses.dataclass(frozen=True)
class BlockPlan:
    """A cluster of `BLOCKS` blocks has one KV head and its query heads.

    Each block computes `qkv.schedule.strips` strips of 16 of the cluster's outputs of q, k and v, attends every eighth
    tile of keys, and multiplies the cluster's heads with an eighth of the outputs of o. `slices` are added to x first.
    """

    decode: DecodePlan
    qkv: ProductPlan
    o: ProductPlan
    slices: int

    @classmethod
    def of(cls, decode: DecodePlan, qkv: Packed, o: Packed, slices: int, norm_eps: float) -> "BlockPlan":
        """Of weights of the mosaic layout; `decode.attention` has `BLOCKS` splits of `WARPS` warps."""
        attention = decode.attention
        strips = (attention.group + 2) * attention.head_dim // STRIP // BLOCKS
        parts = qkv.shape[1] // (WARPS * PART)
        schedule = Schedule(WARPS, parts, strips, strips, attention.kv_heads * BLOCKS, once=True)
        of_qkv = ProductPlan.of(attention.tokens, qkv, schedule, Fusion(norm_eps))
        strips = -(-o.shape[0] // (STRIP * BLOCKS * WARPS))
        # A warp has all inputs of its strips, those of the cluster's heads.
        schedule = Schedule(1, attention.group * attention.head_dim // PART, strips, strips, once=True)
        return cls(decode, of_qkv, ProductPlan.of(attention.tokens, o, schedule), slices)

    @property
    def threads(self) -> int:
        return 32 * WARPS

    @property
    def head_strips(self) -> int:
        """Strips of results that a head's elements are."""
        return self.decode.attention.head_dim // STRIP

    def elements_each(self, fewest: int) -> int:
        """Of the attended heads, that a thread adds up: a power of two up to 4, so that all threads have some."""
        elements = self.decode.attention.rows * self.decode.attention.head_dim
        return next(each for each in (1, 2, 4) if each >= fewest and (each * self.threads >= elements or each == 4))

    # Shared memory of the attention: what `DecodePlan` has, inputs of the products, what the cluster's blocks send.
    @property
    def x_start(self) -> int:
        """[warp][token] a warp's inputs of qkv."""
        return -(-self.decode.smem_bytes // 16) * 16

    @property
    def x_bytes(self) -> int:
        """Of a token in one warp."""
        return 2 * self.qkv.warp_columns

    @property
    def heads_start(self) -> int:
        """[token] the cluster's attended heads, the inputs of o."""
        return self.x_start + WARPS * self.decode.attention.tokens * self.x_bytes

    @property
    def heads_bytes(self) -> int:
        """Of a token."""
        return 2 * self.decode.attention.group * self.decode.attention.head_dim

    @property
    def new_start(self) -> int:
        """The new tokens' heads, as `NewTokens` numbers them: queries, keys, values."""
        return self.heads_start + self.decode.attention.tokens * self.heads_bytes

    @property
    def new_bytes(self) -> int:
        """Of all of them."""
        attention = self.decode.attention
        return 2 * attention.tokens * (attention.group + 2) * attention.head_dim

    @property
    def statistics_start(self) -> int:
        """[block][query row] maximum and sum."""
        return self.new_start + self.new_bytes

    @property
    def sums_start(self) -> int:
        """[block][query row][element] weighted values."""
        return self.statistics_start + BLOCKS * 8 * self.decode.attention.rows

    @property
    def sums_bytes(self) -> int:
        """Of one block."""
        return 4 * self.decode.attention.rows * self.decode.attention.head_dim

    @property
    def new_barrier(self) -> int:
        return self.sums_start + BLOCKS * self.sums_bytes

    @property
    def sums_barrier(self) -> int:
        return self.new_barrier + 8

    @property
    def attention_bytes(self) -> int:
        return self.sums_barrier + 8

    # Shared memory of the products: what qkv's plan has, rings for o's weights, tables, pages.
    @property
    def o_start(self) -> int:
        return -(-self.qkv.shared_bytes // 16) * 16

    @property
    def tables_start(self) -> int:
        return self.o_start + WARPS * self.o.ring_bytes

    @property
    def tables(self) -> list[tuple[str, int]]:
        """Names, as the attention's arguments have them, and bytes."""
        of_norm = 0 if self.decode.norm_eps is None else 4 * self.decode.attention.head_dim
        of_angles = 2 * self.decode.attention.tokens * self.decode.rotary_dim
        sizes = {"q_norm": of_norm, "k_norm": of_norm, "cos": of_angles, "sin": of_angles}
        return [(name, nbytes) for name, nbytes in sizes.items() if nbytes]

    @property
    def listed_start(self) -> int:
        """[warp] the position, then the page ids of its tiles of keys, in order."""
        return self.tables_start + sum(nbytes for _, nbytes in self.tables)

    @property
    def listed_tiles(self) -> int:
        """Most tiles of a warp."""
        attention = self.decode.attention
        return -(-attention.pages_per_row * attention.page_size // (KEYS * BLOCKS * WARPS))

    @property
    def listed_bytes(self) -> int:
        """Of a warp."""
        return 4 * (1 + self.listed_tiles)

    @property
    def product_bytes(self) -> int:
        return self.listed_start + WARPS * self.listed_bytes
