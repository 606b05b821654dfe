"""Sizes of a model's layers and of the launch: who has which rows, and what lies where."""

import dataclasses

HEAD_DIM = 128
ROWS = 8
"""Rows of a slot of the ring: a warp's mma takes so many outputs."""
PAD = 64
"""Bytes between rows of a slot, so that the lanes of eight rows meet in no bank."""
LEAST_SLOTS = 6
KINDS = ("qkv", "o", "gate_up", "down", "attn_norm", "mlp_norm", "q_norm", "k_norm", "keys", "values")
SHARED_BYTES = 232448
MULTIPROCESSORS = 132


@dataclasses.dataclass(frozen=True)
class Matrix:
    """A weight [parts * outputs, inputs] whose parts a block has the same rows of, and its inputs' phase."""

    kind: str
    parts: int
    outputs: int
    inputs: int


@dataclasses.dataclass(frozen=True)
class Plan:
    """What the kernel is made for. `tokens` new tokens of one row, the first at a place known at run time."""

    layers: int
    hidden: int
    q_heads: int
    kv_heads: int
    ff: int
    tokens: int
    page_size: int
    pages_per_row: int
    scale: float
    norm_eps: float
    qk_norm: bool
    blocks: int = 128
    warps: int = 16
    window: int = 4
    """Slots that may be on their way at a time: what is asked for first delays what is asked for later."""

    @property
    def queries(self) -> int:
        return self.q_heads * HEAD_DIM

    @property
    def qkv(self) -> int:
        return (self.q_heads + 2 * self.kv_heads) * HEAD_DIM

    @property
    def matrices(self) -> tuple[Matrix, Matrix, Matrix, Matrix]:
        return (
            Matrix("qkv", 1, self.qkv, self.hidden),
            Matrix("o", 1, self.hidden, self.queries),
            Matrix("gate_up", 2, self.ff, self.hidden),
            Matrix("down", 1, self.hidden, self.ff),
        )

    @property
    def kinds(self) -> tuple[str, ...]:
        return KINDS if self.qk_norm else tuple(kind for kind in KINDS if kind not in ("q_norm", "k_norm"))

    # Attention: a block has a slice of the context of a KV head.
    @property
    def slices(self) -> int:
        return self.blocks // self.kv_heads

    @property
    def group(self) -> int:
        return self.q_heads // self.kv_heads

    @property
    def query_rows(self) -> int:
        """Query rows of a KV head: by token, then by head."""
        return self.group * self.tokens

    @property
    def merged_words(self) -> int:
        """Words of a KV head's result that a block puts together from all slices."""
        return self.query_rows * HEAD_DIM // 2 // self.slices

    # Products
    @property
    def piece(self) -> int:
        """Inputs of which every warp of a block has 64."""
        return 64 * self.warps

    @property
    def row_bytes(self) -> int:
        return 2 * self.piece + PAD

    @property
    def slot_bytes(self) -> int:
        return ROWS * self.row_bytes

    def rows(self, matrix: Matrix) -> int:
        """A block's rows of each part."""
        return matrix.outputs // self.blocks

    @property
    def most_rows(self) -> int:
        return max(matrix.parts * self.rows(matrix) for matrix in self.matrices)

    # Shared memory, from the end: what is small lies before the ring.
    @property
    def sums_bytes(self) -> int:
        """Of one of two sets: every warp's sums of every token."""
        return self.tokens * self.warps * self.most_rows * 4

    @property
    def squares_bytes(self) -> int:
        return self.tokens * self.warps * 4

    @property
    def squares_start(self) -> int:
        return 2 * self.sums_bytes

    @property
    def residual_start(self) -> int:
        return self.squares_start + 2 * self.squares_bytes

    @property
    def heads_start(self) -> int:
        """The warps' results of attention, float32 [warps, query_rows, HEAD_DIM]; their maxima and sums follow."""
        return self.residual_start + self.tokens * 32 * 4

    @property
    def stats_start(self) -> int:
        return self.heads_start + self.warps * self.query_rows * HEAD_DIM * 4

    @property
    def angles_start(self) -> int:
        """cos, then sin, float32 [tokens, HEAD_DIM / 2]."""
        return self.stats_start + self.warps * self.query_rows * 8

    @property
    def angles_bytes(self) -> int:
        return self.tokens * HEAD_DIM // 2 * 4

    @property
    def table_start(self) -> int:
        return self.angles_start + 2 * self.angles_bytes

    @property
    def pointers_start(self) -> int:
        return -(-(self.table_start + self.pages_per_row * 4) // 8) * 8

    @property
    def barriers_start(self) -> int:
        return self.pointers_start + self.layers * len(self.kinds) * 8

    @property
    def slots(self) -> int:
        fixed = self.barriers_start + 128
        return min(16, (SHARED_BYTES - fixed) // (self.slot_bytes + 16))

    @property
    def ring_start(self) -> int:
        return -(-(self.barriers_start + 16 * self.slots) // 128) * 128

    @property
    def shared_bytes(self) -> int:
        return self.ring_start + self.slots * self.slot_bytes

    # Tagged words, by phase
    @property
    def words(self) -> dict[str, int]:
        """Where each exchange's words start; "end" is their number."""
        sizes = {
            "hidden": self.tokens * self.hidden // 2,
            "qkv": self.tokens * self.qkv // 2,
            "heads": self.blocks * self.query_rows * HEAD_DIM // 2,
            "lse": self.blocks * self.query_rows,
            "attended": self.tokens * self.queries // 2,
            "middle": self.tokens * self.hidden // 2,
            "activated": self.tokens * self.ff // 2,
        }
        starts, total = {}, 0
        for name, size in sizes.items():
            starts[name], total = total, total + size
        return starts | {"end": total}

    def refusal(self) -> str | None:
        """Why the kernel does not take these sizes; None if it does."""
        for matrix in self.matrices:
            if matrix.outputs % (ROWS * self.blocks):
                return f"{matrix.kind} has {matrix.outputs} outputs, no multiple of {ROWS * self.blocks}"
            if self.rows(matrix) > 32:
                return f"{matrix.kind} has {matrix.outputs} outputs, more than {32 * self.blocks}"
            if matrix.inputs % self.piece:
                return f"{matrix.kind} has {matrix.inputs} inputs, no multiple of {self.piece}"
            count = matrix.parts * self.rows(matrix) // ROWS * (matrix.inputs // self.piece)
            if count > LEAST_SLOTS:
                return f"a multiprocessor's part of {matrix.kind} does not fit into its registers"
        if self.blocks % self.kv_heads or self.slices not in (16, 32):
            return f"{self.kv_heads} KV heads do not divide the context into 16 or 32 slices"
        if self.query_rows not in (2, 4):
            return f"a KV head has {self.query_rows} query rows; it takes 2 or 4"
        if self.slots < LEAST_SLOTS:
            return f"{self.layers} layers and {self.pages_per_row} pages leave no room in shared memory"
        return None
