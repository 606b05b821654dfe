"""Which pieces of prompts share a prefill program."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from jaxinfer.engine.layout import listed
from jaxinfer.engine.programs import Programs, Size
from jaxinfer.engine.sequence import Piece
from jaxinfer.engine.sequence import Sequence as Track
from jaxinfer.request import Request


@dataclasses.dataclass(frozen=True)
class Call:
    """Pieces that one prefill program computes."""

    pieces: tuple[Piece, ...]
    size: Size


def calls_for(pieces: Sequence[Piece], requests: Mapping[Track, Request], programs: Programs) -> Iterator[Call]:
    """Groups pieces into calls. Those that begin a sequence come first: others may read the pages they write."""
    yield from _grouped([piece for piece in pieces if piece.start == 0], requests, programs)
    yield from _grouped([piece for piece in pieces if piece.start > 0 and not piece.after_pieces], requests, programs)
    for piece in pieces:
        if piece.after_pieces:
            yield from _grouped([piece], requests, programs)


def _grouped(pieces: Sequence[Piece], requests: Mapping[Track, Request], programs: Programs) -> Iterator[Call]:
    """Pieces of one padded length share calls; a call may be up to half empty. Scored ones go alone."""
    by_length: dict[int, list[Piece]] = {}
    for piece in pieces:
        length, from_empty = programs.settings.rules.padded(piece.length), piece.start == 0
        if _is_scored(piece, requests):
            count = listed(requests[piece.sequence].params.prompt_logprobs or 0, programs.config)
            rows = programs.settings.prefill_rows[0]
            yield Call((piece,), Size("prefill_scored", rows, length, from_empty=from_empty, num_logprobs=count))
        else:
            by_length.setdefault(length, []).append(piece)
    sizes = programs.prefill_sizes()
    for length, alike in by_length.items():
        choices = [rows for rows, size in sizes if size == length]
        while alike:
            rows = next((n for n in reversed(choices) if 2 * len(alike) > n), choices[0])
            yield Call(tuple(alike[:rows]), Size("prefill", rows, length, from_empty=alike[0].start == 0))
            alike = alike[rows:]


def _is_scored(piece: Piece, requests: Mapping[Track, Request]) -> bool:
    """Whether a piece's prompt tokens must be scored: of one completion a prompt, and once."""
    request = requests[piece.sequence]
    if request.params.prompt_logprobs is None or request.sample_index > 0:
        return False
    if piece.start == 0 and len(request.prompt_tables) < len(request.prompt) - 1:
        request.prompt_tables.clear()  # of a run that was preempted half-way
    return piece.start < len(request.prompt) - 1 and piece.sequence.num_generated == 0
