"""What scoring computes, and in which order: a forest of token runs, shared prefixes once. Plain Python and NumPy.

Every pair becomes a row of input tokens (context and continuation without its last token). Rows that begin with the
same whole pages share them: such a run is computed by one row of one prefill call, and the rows below it start after
it, their page tables beginning with its pages.
"""

import array
import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from jaxinfer.config import ModelConfig

WORTH_SHARING = 0.25
"""A run is shared if it is at least this part of what its rows have left, on average. Rows that start after a run
cannot use the faster attention of rows that start from nothing, so a few common tokens are cheaper computed again."""


@dataclasses.dataclass(frozen=True)
class TokenPair:
    """A continuation to score after its context, both token ids and neither empty."""

    context: tuple[int, ...]
    continuation: tuple[int, ...]

    @property
    def num_inputs(self) -> int:
        """Tokens that the model reads: the last one is only scored."""
        return len(self.context) + len(self.continuation) - 1


@dataclasses.dataclass(frozen=True)
class Targets:
    """Tokens to score in a run: `tokens[i]` as the successor of the run's token `places[i]`, for slot `slots[i]` of the
    results, which has a slot for each continuation token, pair after pair."""

    places: np.ndarray
    tokens: np.ndarray
    slots: np.ndarray

    @classmethod
    def joined(cls, parts: "Sequence[Targets]") -> "Targets":
        """Those of all parts, counted from the same token."""
        return cls(
            np.concatenate([part.places for part in parts]),
            np.concatenate([part.tokens for part in parts]),
            np.concatenate([part.slots for part in parts]),
        )

    def between(self, start: int, stop: int) -> "Targets":
        """Those whose places lie in [start, stop), counted from `start`."""
        inside = (self.places >= start) & (self.places < stop)
        return Targets(self.places[inside] - start, self.tokens[inside], self.slots[inside])


@dataclasses.dataclass(frozen=True)
class Row:
    """Input tokens (int32), what to score in them, and how many of them are context, to be shared."""

    inputs: np.ndarray
    targets: Targets
    num_context: int


@dataclasses.dataclass(eq=False)
class Run:
    """Tokens of one row of one prefill call: those of a sequence from position `start` on, after its parents'.

    `context_length` is the length that the sequence reaches, for RoPE kinds that depend on it. `pages` are set when the
    run is scheduled: those of all tokens up to its end.
    """

    tokens: np.ndarray
    start: int
    context_length: int
    targets: Targets
    parent: "Run | None" = None
    children: "list[Run]" = dataclasses.field(default_factory=list)
    pages: list[int] = dataclasses.field(default_factory=list)

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    def num_pages(self, page_size: int) -> int:
        """Pages of its own, also of one without successors: a kernel attends to what it has written there itself."""
        return -(-self.end // page_size) - self.start // page_size


def rows_for(pairs: Sequence[TokenPair]) -> list[Row]:
    """One row for each distinct input: answers of one token each to the same question are one row."""
    by_inputs: dict[bytes, list[tuple[TokenPair, int]]] = {}  # (pair, its first slot)
    slot = 0
    for pair in pairs:
        key = array.array("i", pair.context + pair.continuation[:-1]).tobytes()  # int32, faster than NumPy
        by_inputs.setdefault(key, []).append((pair, slot))
        slot += len(pair.continuation)
    rows = []
    for key, members in by_inputs.items():
        parts = []
        for pair, slot in members:
            offsets = np.arange(len(pair.continuation), dtype=np.int32)
            tokens = np.array(pair.continuation, np.int32)
            parts.append(Targets(len(pair.context) - 1 + offsets, tokens, slot + offsets))
        num_context = min(len(pair.context) for pair, _ in members)
        rows.append(Row(np.frombuffer(key, np.int32), Targets.joined(parts), num_context))
    return rows


def build_forest(rows: Sequence[Row], config: ModelConfig, page_size: int, longest_run: int) -> list[Run]:
    """The roots of all runs, longest sequences first. No run has more than `longest_run` tokens, a number of pages."""
    by_length_class: dict[int, list[Row]] = {}
    for row in rows:
        by_length_class.setdefault(length_class(config, len(row.inputs)), []).append(row)
    roots: list[Run] = []
    for members in by_length_class.values():
        roots += _share(members, page_size, longest_run)
    return sorted(roots, key=_reach, reverse=True)


def schedule(forest: Sequence[Run], num_pages: int, page_size: int, first_page: int = 1) -> Iterator[list[Run]]:
    """Sets the runs' pages, all in [first_page, num_pages), and yields lists of runs that may be computed together.

    A run comes after its parent, and until its last child has been yielded nobody else is given its pages: lists must
    be computed in this order. Trees are taken together as long as they fit. Of a tree that does not fit alone, the root
    is computed first, and its children with the pages that are left. Needs pages for the longest sequence.
    """
    wave: list[Run] = []
    used = first_page
    for tree in forest:
        needed = sum(run.num_pages(page_size) for run in _all_runs(tree))
        if wave and used + needed > num_pages:
            yield from _levels(wave)
            wave, used = [], first_page
        if used + needed <= num_pages:
            for run in _all_runs(tree):
                used = _give_pages(run, used, page_size)
            wave.append(tree)
        else:
            rest = _give_pages(tree, first_page, page_size)
            if rest > num_pages:
                raise ValueError(f"{num_pages} pages of {page_size} tokens do not hold a sequence of {tree.end} tokens")
            yield [tree]
            yield from schedule(tree.children, num_pages, page_size, rest)
    if wave:
        yield from _levels(wave)


def _give_pages(run: Run, first: int, page_size: int) -> int:
    """Gives a run its pages, `first` and the following ones, and returns the next free one."""
    inherited = [] if run.parent is None else run.parent.pages
    following = first + run.num_pages(page_size)
    run.pages = [*inherited, *range(first, following)]
    return following


def _levels(trees: Sequence[Run]) -> Iterator[list[Run]]:
    level = list(trees)
    while level:
        yield level
        level = [child for run in level for child in run.children]


def _all_runs(tree: Run) -> Iterator[Run]:
    """A tree's runs, parents before children."""
    for level in _levels([tree]):
        yield from level


def _reach(tree: Run) -> int:
    return max(run.end for run in _all_runs(tree))


def length_class(config: ModelConfig, length: int) -> int:
    """Sequences share keys only if these were rotated alike: equal for lengths that make no difference to RoPE."""
    seen = 0
    for rope in {layer.rope for layer in config.layers if layer.rope is not None}:
        if rope.kind in ("dynamic", "longrope") and length > rope.original_max_position_embeddings:
            seen = max(seen, length if rope.kind == "dynamic" else 1)
    return seen


def _share(rows: Sequence[Row], page_size: int, longest_run: int) -> list[Run]:
    """The roots of the runs of rows whose keys are rotated alike."""
    bytes_per_page = page_size * 4
    keys = [row.inputs[: row.num_context // page_size * page_size].tobytes() for row in rows]
    order = sorted(range(len(rows)), key=keys.__getitem__)
    roots: list[Run] = []

    def add(row: Row, start: int, stop: int, targets: Targets, parent: Run | None) -> Run | None:
        """The runs of a row's tokens from `start` to `stop`, each no longer than allowed; returns the last."""
        for piece in range(start, stop, longest_run):
            end = min(stop, piece + longest_run)
            siblings = roots if parent is None else parent.children
            here = targets.between(piece, end)
            parent = Run(row.inputs[piece:end], piece, len(row.inputs), here, parent)
            siblings.append(parent)
        return parent

    # Each entry: rows order[first:last] agree in their first `agreed` pages; runs exist up to the end of `parent`.
    waiting: list[tuple[int, int, int, Run | None]] = [(0, len(order), 0, None)]
    while waiting:
        first, last, agreed, parent = waiting.pop()
        start = 0 if parent is None else parent.end
        while first < last:
            row, key = rows[order[first]], keys[order[first]]
            offset = agreed * bytes_per_page
            page = key[offset : offset + bytes_per_page]
            following = first + 1
            while page and following < last and keys[order[following]].startswith(page, offset):
                following += 1
            if following == first + 1:
                add(row, start, len(row.inputs), row.targets, parent)  # nothing if all of it is shared
            else:
                # Sorted: what the first and the last row share, all share.
                pages = agreed + _common_pages(key, keys[order[following - 1]], offset, bytes_per_page)
                end = pages * page_size
                members = [rows[index] for index in order[first:following]]
                left = sum(len(member.inputs) - end for member in members) / len(members)
                shared = parent
                if end - start >= WORTH_SHARING * left:
                    shared = add(row, start, end, Targets.joined([member.targets for member in members]), parent)
                waiting.append((first, following, pages, shared))
            first = following
    return roots


def _common_pages(one: bytes, other: bytes, offset: int, bytes_per_page: int) -> int:
    """Whole pages that two keys have in common from byte `offset` on."""
    stop = min(len(one), len(other))
    count = 0
    while offset < stop and one[offset : offset + bytes_per_page] == other[offset : offset + bytes_per_page]:
        count += 1
        offset += bytes_per_page
    return count
