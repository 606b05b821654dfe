"""SentencePiece BPE as a `tokenizers` object, from scored pieces (GGUF "llama") or a tokenizer.model file.

SentencePiece joins, again and again, the neighbours whose joint piece has the highest score. `tokenizers`
applies a list of merges in order of rank. Both agree when every way to cut a piece in two pieces is a merge,
ranked by the score of the whole. (Merges that give the same piece cannot share a rank; no vocabulary seen so
far makes that matter.)
"""

import dataclasses
import enum
import re
import struct
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

SPACE = "▁"
_ADDED_SCORE = -1000.0
"""Score that converters give to tokens added after training; those of the model itself have better ones."""


_MAX_ADDED = 1_000_000


class PieceType(enum.IntEnum):
    """Types of sentencepiece_model.proto, which GGUF's `tokenizer.ggml.token_type` shares."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclasses.dataclass(frozen=True)
class SentencePieceModel:
    """A SentencePiece BPE vocabulary: piece i has id i.

    `charsmap` is SentencePiece's compiled normalisation (NFKC and the like), empty for none. `merges`
    replaces the scores where a file has merges and no scores. `strip_after` are control tokens that swallow
    the white space after them (Phi-3).
    """

    pieces: Sequence[str]
    scores: Sequence[float]
    types: Sequence[int]
    unknown_id: int | None = 0
    add_space_prefix: bool = True
    remove_extra_whitespaces: bool = False
    charsmap: bytes = b""
    merges: Sequence[tuple[str, str]] | None = None
    strip_after: frozenset[str] = frozenset()

    def extended(self, added: Mapping[str, int], special: Collection[str]) -> "SentencePieceModel":
        """The vocabulary with tokens that were added later, by id; those in `special` are control tokens.

        Ids that nobody names are filled with unused tokens. Raises ValueError if an id is another piece's.
        """
        pieces, scores, types = list(self.pieces), list(self.scores), list(self.types)
        known = {piece: position for position, piece in enumerate(pieces)}
        for token, position in sorted(added.items(), key=lambda item: item[1]):
            if not 0 <= position < len(self.pieces) + _MAX_ADDED or known.get(token, position) != position:
                raise ValueError(
                    f"added token {token!r} cannot have the id {position} beside {len(self.pieces)} pieces"
                )
            while len(pieces) <= position:
                pieces.append(f"[UNUSED_{len(pieces)}]")
                scores.append(_ADDED_SCORE)
                types.append(PieceType.UNUSED)
            if position < len(self.pieces) and pieces[position] != token:
                raise ValueError(f"added token {token!r} has id {position}, which is the piece {pieces[position]!r}")
            pieces[position] = token
            if types[position] == PieceType.UNUSED or token in special:
                types[position] = PieceType.CONTROL if token in special else PieceType.USER_DEFINED
        return dataclasses.replace(self, pieces=pieces, scores=scores, types=types)

    def build(self) -> tuple[Tokenizer, Callable[[str], str] | None]:
        """The `tokenizers` object, and what has to be done to a text before it (None: nothing)."""
        byte_fallback = PieceType.BYTE in self.types
        unknown = None if self.unknown_id is None else self.pieces[self.unknown_id]
        backend = Tokenizer(
            models.BPE(
                vocab={piece: token for token, piece in enumerate(self.pieces)},
                merges=list(self.merges) if self.merges is not None else self._merges_by_score(),
                unk_token=unknown,
                fuse_unk=True,
                byte_fallback=byte_fallback,
            )
        )
        whole = self._needs_no_preparation()
        spaces = normalizers.Replace(" ", SPACE)
        prefixed = whole and self.add_space_prefix
        # Applied to what is between tokens that are matched in the text as it is.
        backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces]) if prefixed else spaces
        steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        if self.add_space_prefix:
            steps.append(decoders.Strip(" ", 1, 0))
        backend.decoder = decoders.Sequence(steps)

        def added(types: tuple[PieceType, ...], *, normalized: bool) -> list[AddedToken]:
            strips = self.strip_after if whole else frozenset()
            return [AddedToken(text, normalized=normalized, rstrip=text in strips) for text in self._of_type(*types)]

        backend.add_special_tokens(added((PieceType.CONTROL, PieceType.UNKNOWN), normalized=False))
        # Matched after spaces became U+2581, as in SentencePiece: a piece may consist of spaces. With a prefix all of
        # them were added later, and a space follows them as it does control tokens.
        backend.add_tokens(added((PieceType.USER_DEFINED,), normalized=not prefixed))
        return backend, None if whole else self._preparation()

    def _needs_no_preparation(self) -> bool:
        """Whether `tokenizers` can express the treatment of spaces, as the tokenizer.json files of Llama do."""
        scored = zip(self.scores, self.types, strict=True)
        own = any(kind == PieceType.USER_DEFINED and score > _ADDED_SCORE for score, kind in scored)
        return not (self.remove_extra_whitespaces or self.charsmap or (self.add_space_prefix and own))

    def _of_type(self, *types: PieceType) -> list[str]:
        return [piece for piece, kind in zip(self.pieces, self.types, strict=True) if kind in types]

    def _merges_by_score(self) -> list[tuple[str, str]]:
        """Every cut of every normal piece in two normal pieces, best score first."""
        normal = {
            piece: token
            for token, (piece, kind) in enumerate(zip(self.pieces, self.types, strict=True))
            if kind == PieceType.NORMAL
        }
        ranked = sorted(normal.items(), key=lambda item: (-self.scores[item[1]], item[1]))
        return [
            (piece[:cut], piece[cut:])
            for piece, _ in ranked
            for cut in range(1, len(piece))
            if piece[:cut] in normal and piece[cut:] in normal
        ]

    def _preparation(self) -> Callable[[str], str] | None:
        """SentencePiece's treatment of spaces, which `tokenizers` cannot express around user-defined pieces.

        A space goes before the text and after each special token, as in the tokenizer.json files of Llama,
        Mistral and Phi-3 and in llama.cpp; but none after a user-defined piece of the SentencePiece model,
        which is ordinary text.
        """
        if not (self.add_space_prefix or self.remove_extra_whitespaces or self.charsmap or self.strip_after):
            return None
        added = [
            piece
            for piece, score, kind in zip(self.pieces, self.scores, self.types, strict=True)
            if kind == PieceType.USER_DEFINED and score <= _ADDED_SCORE
        ]
        special = sorted(self._of_type(PieceType.CONTROL, PieceType.UNKNOWN) + added, key=len, reverse=True)
        boundaries = re.compile(f"({'|'.join(map(re.escape, special))})") if special else None
        normalize = _charsmap_normalizer(self.charsmap).normalize_str if self.charsmap else None

        def prepare(text: str) -> str:
            parts = boundaries.split(text) if boundaries else [text]
            for position in range(0, len(parts), 2):
                part = parts[position]
                if normalize is not None:
                    part = normalize(part)
                if position and parts[position - 1] in self.strip_after:
                    part = part.lstrip()
                if self.remove_extra_whitespaces:
                    part = re.sub(" +", " ", part).lstrip(" ").rstrip(f" {SPACE}")
                if self.add_space_prefix and part:
                    part = " " + part
                parts[position] = part
            return "".join(parts)

        return prepare


def _charsmap_normalizer(charsmap: bytes) -> normalizers.Normalizer:
    """SentencePiece's compiled normalisation: the size of a double-array trie, the trie, the replacements.

    `tokenizers` walks the trie unchecked and panics when it leads outside. Raises ValueError for such a one.
    """
    size = int.from_bytes(charsmap[:4], "little")
    if size == 0 or size % 1024 or 4 + size > len(charsmap):
        raise ValueError(f"the tokenizer's precompiled_charsmap has {len(charsmap)} bytes and a trie of {size} bytes")
    units = np.frombuffer(charsmap, "<u4", size // 4, offset=4)
    texts = np.frombuffer(charsmap, np.uint8, offset=4 + size)
    inner = units >> 31 == 0  # the others are values, except that the walk always starts at the first
    inner[0] = True
    children = np.arange(units.size, dtype=np.uint32) ^ ((units >> 10) << ((units & 0x200) >> 6))
    sound = _is_utf8(texts.tobytes()) and children[inner].max(initial=0) < units.size
    if sound:
        starts = units[children[inner & (units & 0x100 != 0)]] & 0x7FFFFFFF
        sound = starts.max(initial=0) < texts.size and not np.any(texts[starts] & 0xC0 == 0x80)
    if not sound:
        raise ValueError("the tokenizer's precompiled_charsmap is damaged: its trie leads outside or into a character")
    return normalizers.Precompiled(charsmap)


def _is_utf8(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True


def read_model(path: Path) -> SentencePieceModel:
    """Reads a tokenizer.model file (sentencepiece_model.proto). Raises ValueError if it is no BPE model."""
    unigram, bpe = 1, 2
    try:
        fields = list(_fields(path.read_bytes()))
        pieces = [_piece(value) for number, value in fields if number == 1 and isinstance(value, bytes)]
        trainer = dict(_fields(_last_message(fields, 2)))
        normalizer = dict(_fields(_last_message(fields, 3)))
    except (IndexError, UnicodeDecodeError, struct.error, _MalformedError) as error:
        raise ValueError(f"{path} is not a SentencePiece model ({error}); convert it to tokenizer.json") from error
    if not pieces:
        raise ValueError(f"{path} is not a SentencePiece model: it has no pieces")
    if trainer.get(3, unigram) != bpe:
        raise ValueError(
            f"{path} is not a BPE model; convert it: pip install 'jaxinfer[sentencepiece]', then in Python "
            "transformers.AutoTokenizer.from_pretrained(folder).save_pretrained(folder), which writes tokenizer.json"
        )
    charsmap = normalizer.get(2, b"")
    return SentencePieceModel(
        pieces=[piece for piece, _, _ in pieces],
        scores=[score for _, score, _ in pieces],
        types=[kind for _, _, kind in pieces],
        unknown_id=next((i for i, (_, _, kind) in enumerate(pieces) if kind == PieceType.UNKNOWN), None),
        add_space_prefix=bool(normalizer.get(3, 1)),
        remove_extra_whitespaces=bool(normalizer.get(4, 1)),
        charsmap=charsmap if isinstance(charsmap, bytes) else b"",
    )


class _MalformedError(Exception):
    """The bytes are not protobuf."""


def _last_message(fields: list[tuple[int, int | float | bytes]], number: int) -> bytes:
    messages = [value for key, value in fields if key == number and isinstance(value, bytes)]
    return messages[-1] if messages else b""


def _piece(message: bytes) -> tuple[str, float, int]:
    fields = dict(_fields(message))
    text, score, kind = fields.get(1, b""), fields.get(2, 0.0), fields.get(3, PieceType.NORMAL)
    if not isinstance(text, bytes) or not isinstance(score, float) or not isinstance(kind, int):
        raise _MalformedError("a piece has a field of the wrong type")
    return text.decode(), score, kind


def _fields(message: bytes) -> Iterator[tuple[int, int | float | bytes]]:
    """Fields of one protobuf message: (number, value) with value an int, a float32 or bytes."""
    position = 0
    while position < len(message):
        key, position = _varint(message, position)
        number, wire_type = key >> 3, key & 7
        if wire_type == 0:
            value, position = _varint(message, position)
        elif wire_type == 1:
            (value,) = struct.unpack_from("<d", message, position)
            position += 8
        elif wire_type == 2:
            length, position = _varint(message, position)
            if position + length > len(message):
                raise _MalformedError("a field is longer than the file")
            value = message[position : position + length]
            position += length
        elif wire_type == 5:
            (value,) = struct.unpack_from("<f", message, position)
            position += 4
        else:
            raise _MalformedError(f"wire type {wire_type} at byte {position}")
        yield number, value


def _varint(message: bytes, position: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 64, 7):
        byte = message[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
    raise _MalformedError(f"an integer of more than 64 bits at byte {position}")
