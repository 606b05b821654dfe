"""Which pieces of prompts share a prefill program."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from jaxinfer.engine.layout import listed
from jaxinfer.engine.programs import Programs, Size
from jaxinfer.engine.sequence import Piece
from jaxinfer.engine.sequence import Sequence as Track
from jaxinfer.engine.settings import Room
from jaxinfer.request import Request


@dataclasses.dataclass(frozen=True)
class Call:
    """Pieces that one prefill program computes."""

    pieces: tuple[Piece, ...]
    size: Size


def calls_for(pieces: Sequence[Piece], requests: Mapping[Track, Request], programs: Programs) -> Iterator[Call]:
    """Groups pieces into calls. Those that begin a sequence come first: others may read the pages they write."""
    if programs.settings.packed:
        yield from _packed(pieces, requests, programs)
        return
    together: dict[bool, list[Piece]] = {False: [], True: []}
    for piece in pieces:
        if piece.start > 0 and not piece.after_pieces:
            together[_of_output(piece, programs)].append(piece)
    yield from _grouped([piece for piece in pieces if piece.start == 0], requests, programs)
    for alike in together.values():
        yield from _grouped(alike, requests, programs)
    for piece in pieces:
        if piece.after_pieces:
            yield from _grouped([piece], requests, programs)


def _grouped(pieces: Sequence[Piece], requests: Mapping[Track, Request], programs: Programs) -> Iterator[Call]:
    """The longest pieces first. A call is as large as pieces of one padded length make it more than half full; shorter
    ones have its other rows, which would be computed anyway. Scored pieces go alone."""
    rules, rest = programs.settings.rules, list[Piece]()
    for piece in sorted(pieces, key=lambda piece: -piece.length):
        if _is_scored(piece, requests):
            yield _scored(piece, requests, programs)
        else:
            rest.append(piece)
    sizes = programs.prefill_sizes()
    while rest:
        length = rules.padded(rest[0].length)
        num_alike = sum(rules.padded(piece.length) == length for piece in rest)
        choices = [rows for rows, size in sizes if size == length]
        rows = next((n for n in reversed(choices) if 2 * num_alike > n), choices[0])
        of_output = _of_output(rest[0], programs)
        size = Size("prefill", rows, length, from_empty=rest[0].start == 0, of_output=of_output)
        yield Call(tuple(rest[:rows]), size)
        del rest[:rows]


def _packed(pieces: Sequence[Piece], requests: Mapping[Track, Request], programs: Programs) -> Iterator[Call]:
    """Pieces in order, each cut into as many rows as it needs. Every call has all its rows, or no room for the tokens
    of the next one, but those that end a round, come before a scored piece, which goes alone, or before a piece for
    other weights.

    A row may continue one of its own call: a layer writes all keys and values before it reads any.
    """
    rooms = programs.settings.packed
    most = rooms[-1]
    waiting, num_waiting = list[Piece](), 0

    def calls() -> Iterator[Call]:
        nonlocal num_waiting
        num_waiting = 0
        while waiting:
            room, count = _room(waiting, rooms)
            of_output = _of_output(waiting[0], programs)
            size = Size("prefill", room.rows, room.tile, num_ordered=room.tokens, of_output=of_output)
            yield Call(tuple(waiting[:count]), size)
            del waiting[:count]

    for piece in pieces:
        scored = _is_scored(piece, requests)
        if waiting and (scored or _of_output(piece, programs) != _of_output(waiting[0], programs)):
            yield from calls()
        if scored:
            yield _scored(piece, requests, programs)
            continue
        for row in _rows(piece, most.tile):
            if len(waiting) == most.rows or num_waiting + row.length > most.tokens:
                yield from calls()
            waiting.append(row)
            num_waiting += row.length
    yield from calls()


def _room(rows: Sequence[Piece], rooms: Sequence[Room]) -> tuple[Room, int]:
    """Where the first rows go, and how many: all into the smallest room for them, or as many as a smaller one takes
    where the others then need so much less that a quarter of the tokens is saved, padding for the most part."""
    for index, room in enumerate(rooms):
        if _leading(rows, room) < len(rows):
            continue
        for smaller in reversed(rooms[:index]):
            count = _leading(rows, smaller)
            others = next(one for one in rooms if _leading(rows[count:], one) == len(rows) - count)
            if 4 * (smaller.tokens + others.tokens) <= 3 * room.tokens:
                return smaller, count
        return room, len(rows)
    raise ValueError(f"{len(rows)} rows are more than the largest room has, {rooms[-1]}")


def _leading(rows: Sequence[Piece], room: Room) -> int:
    """How many of the first rows there is room for."""
    num_tokens = 0
    for count, row in enumerate(rows[: room.rows]):
        num_tokens += row.length
        if num_tokens > room.tokens:
            return count
    return min(len(rows), room.rows)


def _rows(piece: Piece, tile: int) -> Iterator[Piece]:
    end = piece.start + piece.length
    for start in range(piece.start, end, tile):
        yield Piece(piece.sequence, start, min(tile, end - start), piece.last and start + tile >= end)


def _of_output(piece: Piece, programs: Programs) -> bool:
    """Whether a piece is computed with the weights of decoding, where prompts have others."""
    return programs.settings.rules.two_weights and piece.start >= piece.sequence.num_prompt


def _scored(piece: Piece, requests: Mapping[Track, Request], programs: Programs) -> Call:
    """The call of a piece whose tokens are scored."""
    count = listed(requests[piece.sequence].params.prompt_logprobs or 0, programs.config)
    rows, length = next((rows, length) for rows, length in programs.scored_sizes() if length >= piece.length)
    return Call((piece,), Size("prefill_scored", rows, length, from_empty=piece.start == 0, num_logprobs=count))


def _is_scored(piece: Piece, requests: Mapping[Track, Request]) -> bool:
    """Whether a piece's prompt tokens must be scored: of one completion a prompt, and once."""
    request = requests[piece.sequence]
    if request.params.prompt_logprobs is None or request.sample_index > 0:
        return False
    if piece.sequence.num_generated or piece.start >= len(request.prompt) - 1:
        return False
    if piece.start == 0:
        request.prompt_tables.clear()  # of a run that was preempted or interrupted before its first token
    return True
