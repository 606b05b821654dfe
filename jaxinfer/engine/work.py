"""Dispatched programs, and what their ends bring to each sequence."""

import dataclasses
import typing
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax

from jaxinfer.engine.sequence import Chunk, Piece
from jaxinfer.engine.sequence import Sequence as Track
from jaxinfer.loop import DecodedChunk
from jaxinfer.request import Request
from jaxinfer.sampling_logprobs import Logprob, TokenLogprobs, logprob_tables
from jaxinfer.speculative.loop import StepCounts

type Tables = Sequence[dict[int, Logprob]]


@dataclasses.dataclass
class Work:
    """One dispatched program whose end is to be seen. `outputs` are on the device until it is read."""

    kind: Literal["prefill", "draft", "first", "decode"]
    """"draft": a draft's own prefill, and its catching up after plain steps."""
    outputs: Any
    """Prefill: its logits, to see that it has ended, or the scores of a prompt. Draft: something to see that it has
    ended. Otherwise a `DecodedChunk`."""
    rows: Sequence[Track | None]
    """The sequence of each row, None for the padding behind them."""
    num_tokens: int
    """Tokens computed in real rows, at most."""
    dispatched: float
    piece: Piece | None = None
    """The piece whose prompt tokens `outputs` scores."""
    chunk: Chunk | None = None
    """What a decode chunk does."""
    counts: StepCounts | None = None
    """Of a decode chunk with a draft: what became of the proposals; on the device until the work is read."""
    num_compiled: int = 0
    """Programs that were compiled before its round. If there are more when it is read, the host was busy meanwhile."""

    @property
    def num_rows(self) -> int:
        """Rows that hold a sequence."""
        return sum(sequence is not None for sequence in self.rows)


class Result(typing.NamedTuple):
    """What a program gave one sequence."""

    sequence: Track
    tokens: list[int]
    tables: Tables = ()
    failed: bool = False
    prompt_tables: Tables = ()


def wait(work: Work, requests: Mapping[Track, Request]) -> list[Result]:
    """Waits for a program, and hands out what it gave each sequence. Of tokens `work.outputs` is on the host then."""
    if work.kind in ("prefill", "draft"):
        if work.piece is not None:
            return [_scored_prompt(work.piece, jax.device_get(work.outputs), requests)]
        jax.block_until_ready(work.outputs)
        return []
    chunk: DecodedChunk = jax.device_get(work.outputs)
    work.outputs = chunk
    # As lists at once: a few numbers of an array one by one cost more than all of them together.
    columns, counts, failed = chunk.tokens.T.tolist(), chunk.counts.tolist(), chunk.failed.tolist()
    num_steps = len(chunk.tokens)
    results = []
    for row, sequence in enumerate(work.rows):
        if sequence is None:
            break  # padding, up to the end
        count = counts[row]
        tokens = columns[row] if count == num_steps else columns[row][:count]
        tables: Tables = ()
        if chunk.logprobs is not None and sequence in requests:
            wanted = requests[sequence].params.logprobs
            if wanted is not None:
                tables = logprob_tables(tokens, _row(chunk.logprobs, row, axis=1), wanted)
        results.append(Result(sequence, tokens, tables, failed[row]))
    return results


def _scored_prompt(piece: Piece, scores: TokenLogprobs, requests: Mapping[Track, Request]) -> Result:
    """The tables of a piece's prompt tokens, each for the token that follows."""
    sequence, start = piece.sequence, piece.start
    count = requests[sequence].params.prompt_logprobs if sequence in requests else None
    targets = sequence.tokens[start + 1 : start + 1 + piece.length][: sequence.num_prompt - 1 - start]
    tables = [] if count is None else logprob_tables(targets, _row(scores, 0, axis=0), count)
    return Result(sequence, [], prompt_tables=tables)


def _row(scores: TokenLogprobs, row: int, axis: int) -> TokenLogprobs:
    return jax.tree.map(lambda leaf: leaf.take(row, axis=axis), scores)
