"""The exact bytes of every token, which incremental detokenisation needs and `tokenizers` does not offer.

`tokenizers` decodes whole sequences to text. The bytes of one token follow from the decoder's description:
byte-level BPE spells bytes with 256 printable characters, SentencePiece writes spaces as U+2581 and unknown
bytes as <0x0A>.
"""

import json
import re
from typing import Any

import tokenizers

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's spelling of bytes: printable Latin-1 as itself, the rest as U+0100 upwards in order."""
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(256 + position): byte for position, byte in enumerate(others)})
    return alphabet


BYTE_LEVEL_ALPHABET = _byte_level_alphabet()


class TokenBytes:
    """Bytes of the tokens of one `tokenizers` object, by its decoder.

    `strips_leading_space` says that the decoder takes one space off the start of a text, because the encoder
    put one there (SentencePiece's dummy prefix). Raises ValueError for a decoder of another kind (WordPiece,
    CTC, ...).
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        self._added = backend.get_added_tokens_decoder()
        self._cache: dict[int, bytes] = {}
        self._replacements: list[tuple[str, str]] = []
        self._byte_level = False
        self._byte_fallback = False
        self.strips_leading_space = False
        if backend.decoder is not None:
            self._read(json.loads(backend.decoder.__getstate__()))

    def __call__(self, token_id: int) -> bytes:
        """Bytes of one token; of an id inside the vocabulary that no token has, none."""
        cached = self._cache.get(token_id)
        if cached is None:
            cached = self._cache[token_id] = self._bytes(token_id)
        return cached

    def joined(self, token_ids: list[int]) -> bytes | None:
        """Bytes of several tokens if all have been asked for before, else None. It calls nothing for each of them: a
        server's host spends most of its time here."""
        cached = self._cache
        try:
            return b"".join([cached[token] for token in token_ids])
        except KeyError:
            return None

    def _read(self, decoder: dict[str, Any]) -> None:
        kind = decoder["type"]
        if kind == "Sequence":
            for part in decoder["decoders"]:
                self._read(part)
        elif kind == "ByteLevel":
            self._byte_level = True
        elif kind == "ByteFallback":
            self._byte_fallback = True
        elif kind == "Replace" and "String" in decoder["pattern"]:
            self._replacements.append((decoder["pattern"]["String"], decoder["content"]))
        elif kind == "Metaspace":
            self._replacements.append((decoder["replacement"], " "))
            self.strips_leading_space = decoder.get("prepend_scheme", "always") != "never"
        elif kind == "Strip" and decoder["content"] == " " and decoder["start"] <= 1 and decoder["stop"] == 0:
            self.strips_leading_space = decoder["start"] == 1
        elif kind != "Fuse":
            raise ValueError(
                f"the tokenizer's decoder is {kind}, whose tokens have no bytes of their own; "
                "expected a byte-level or SentencePiece tokenizer"
            )

    def _bytes(self, token_id: int) -> bytes:
        added = self._added.get(token_id)
        token = added.content if added is not None else self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if self._byte_fallback and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        if self._byte_level and added is None:
            values = [BYTE_LEVEL_ALPHABET.get(character) for character in token]
            known = [value for value in values if value is not None]
            if len(known) == len(values):
                return bytes(known)
        if added is None or not added.special:
            for old, new in self._replacements:
                token = token.replace(old, new)
        return token.encode("utf-8", "surrogatepass")
