"""Tokenizers from GGUF metadata (the `tokenizer.*` keys), built directly as `tokenizers` objects.

Keys and defaults follow llama.cpp, whose format this is (gguf.md, llama-vocab.cpp); see `pre_tokenizers.py`
for how text is cut into words. Keys that say nothing to a causal language model (sep, mask) are not read.
"""

import logging
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, processors

from jaxinfer.tokenization.pre_tokenizers import pre_tokenization
from jaxinfer.tokenization.sentencepiece import SPACE, PieceType, SentencePieceModel
from jaxinfer.tokenization.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_END_OF_TURN = frozenset(
    {
        "<|eot_id|>",
        "<|eom_id|>",
        "<|im_end|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
        "<end_of_turn>",
        "<turn|>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<end_of_utterance>",
        "<\uff5cend\u2581of\u2581sentence\uff5c>",  # DeepSeek
        "<EOT>",
        "[EOT]",
    }
)
"""Tokens that end a turn or a text in every vocabulary that has them; a file's keys often name only one."""

_PHI3_STRIPS_AFTER = frozenset(
    {
        "</s>",
        "<|assistant|>",
        "<|system|>",
        "<|user|>",
        "<|end|>",
        *(f"<|placeholder{i}|>" for i in range(1, 7)),
    }
)
"""Phi-3's tokens that swallow the white space after them; GGUF has no field for that."""

_BYTE_PIECE = re.compile(r"<0x[0-9A-Fa-f]{2}>")


def tokenizer_from_gguf(metadata: Mapping[str, Any]) -> Tokenizer | None:
    """The tokenizer that a GGUF file carries, or None if it carries none.

    `metadata` maps GGUF keys to Python values (str, bool, int, and sequences of str, int and float). Raises
    ValueError for an unknown kind of tokenizer or pre-tokenizer, and for keys that contradict each other.
    """
    model = metadata.get("tokenizer.ggml.model")
    if model in (None, "none", "no_vocab"):
        return None
    builders = {"gpt2": _byte_level, "llama": _sentencepiece, "gemma4": _gemma4}
    if not isinstance(model, str) or model not in builders:
        raise ValueError(
            f"tokenizer.ggml.model is {model!r}; expected one of {', '.join(builders)} (decoder-only models)"
        )
    return builders[model](_Vocabulary(metadata))


class _Vocabulary:
    """The `tokenizer.ggml.*` keys, checked, with the named special tokens resolved."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self._metadata = metadata
        self.architecture = metadata.get("general.architecture")
        _check_types(metadata)
        tokens = self.get("tokens")
        if tokens is None or len(tokens) == 0:
            raise ValueError("tokenizer.ggml.tokens is missing or empty; convert the model again")
        # An empty string cannot be a token; llama.cpp gives it a name, too.
        self.tokens = [token or f"[EMPTY_{position}]" for position, token in enumerate(tokens)]
        if len(set(self.tokens)) < len(self.tokens):
            repeated = next(token for token, count in Counter(self.tokens).items() if count > 1)
            raise ValueError(f"tokenizer.ggml.tokens has {repeated!r} twice; a token needs one id")
        types = self._as_long_as_tokens("token_type")
        self.types = [int(kind) for kind in (self._guessed_types() if types is None else types)]

    def get(self, key: str, default: Any = None) -> Any:
        return self._metadata.get(f"tokenizer.ggml.{key}", default)

    def scores(self) -> list[float] | None:
        scores = self._as_long_as_tokens("scores")
        return None if scores is None else [float(score) for score in scores]

    def merges(self) -> list[tuple[str, str]] | None:
        """Merges as pairs; the first character is never the separator, as a token may itself be a space."""
        merges = self.get("merges")
        if merges is None:
            return None
        known = set(self.tokens)
        pairs = []
        for merge in merges:
            separator = merge.find(" ", 1)
            pair = merge[:separator], merge[separator + 1 :]
            if separator < 0 or not known.issuperset((*pair, "".join(pair))):
                raise ValueError(f"tokenizer.ggml.merges has {merge!r}; expected two tokens that give a third")
            pairs.append(pair)
        return pairs

    def named(self, name: str, default: int | None = None) -> int | None:
        """Id under `tokenizer.ggml.{name}_token_id`; one outside the vocabulary counts as absent."""
        token = self.get(f"{name}_token_id", default)
        return int(token) if token is not None and 0 <= int(token) < len(self.tokens) else None

    def of_type(self, *types: PieceType) -> list[str]:
        return [token for token, kind in zip(self.tokens, self.types, strict=True) if kind in types]

    def num_tokens(self) -> int:
        """Number of tokens without the unused ones that pad the end of the vocabulary."""
        count = len(self.tokens)
        while count > 1 and self.types[count - 1] == PieceType.UNUSED:
            count -= 1
        return count

    def wrap(
        self,
        backend: tokenizers.Tokenizer,
        *,
        bos: int | None,
        eos: int | None,
        add_bos: bool,
        prepare_text: Any = None,
    ) -> Tokenizer:
        add_bos = bool(self.get("add_bos_token", add_bos))
        if add_bos and bos is None:
            raise ValueError("tokenizer.ggml.add_bos_token is true, but there is no valid bos_token_id; set one")
        if add_bos:
            backend.post_processor = processors.TemplateProcessing(single=["BOS", "$A"], special_tokens=[("BOS", bos)])
        if self.get("add_eos_token", False):
            logger.info("tokenizer.ggml.add_eos_token is set and ignored: a prompt is there to be continued")
        special = {
            "bos_token": bos,
            "eos_token": eos,
            "unk_token": self.named("unknown"),
            "pad_token": self.named("padding"),
        }
        return Tokenizer(
            backend,
            bos_token_id=bos,
            eos_token_ids=self._stop_set(eos),
            chat_templates=_chat_templates(self._metadata),
            special_tokens={name: self.tokens[token] for name, token in special.items() if token is not None},
            prepare_text=prepare_text,
            num_tokens=self.num_tokens(),
        )

    def _stop_set(self, eos: int | None) -> list[int]:
        stop = [eos, self.named("eot"), self.named("eom")]
        markers = {
            token: position
            for position, (token, kind) in enumerate(zip(self.tokens, self.types, strict=True))
            if token in _END_OF_TURN and kind in (PieceType.CONTROL, PieceType.USER_DEFINED)
        }
        # In the harmony format <|end|> closes one message of several; <|return|> and <|call|> end the turn.
        if "<|return|>" in markers and "<|call|>" in markers:
            markers.pop("<|end|>", None)
        return [token for token in (*stop, *markers.values()) if token is not None]

    def _as_long_as_tokens(self, key: str) -> Sequence[Any] | None:
        values = self.get(key)
        if values is not None and len(values) != len(self.tokens):
            raise ValueError(f"tokenizer.ggml.{key} has {len(values)} entries for {len(self.tokens)} tokens")
        return values

    def _guessed_types(self) -> list[int]:
        """Types for a file without them: named special tokens, byte pieces, and normal tokens."""
        types = [PieceType.BYTE if _BYTE_PIECE.fullmatch(token) else PieceType.NORMAL for token in self.tokens]
        for name in ("bos", "eos", "eot", "eom", "padding"):
            if (token := self.named(name)) is not None:
                types[token] = PieceType.CONTROL
        if (unknown := self.named("unknown")) is not None:
            types[unknown] = PieceType.UNKNOWN
        return [int(kind) for kind in types]


def _check_types(metadata: Mapping[str, Any]) -> None:
    """Raises ValueError for a key whose value, or an entry of whose array, is of another type than it is used as."""
    arrays = {"tokens": str, "merges": str, "token_type": int, "scores": int | float, "precompiled_charsmap": int}
    for key, kind in arrays.items():
        value = metadata.get(f"tokenizer.ggml.{key}")
        if value is None:
            continue
        is_array = isinstance(value, Sequence) and not isinstance(value, str | bytes)
        if not is_array or not all(isinstance(entry, kind) for entry in value):
            entries = "strings" if kind is str else "numbers"
            raise ValueError(f"tokenizer.ggml.{key} is not an array of {entries}; convert the model again")
    names = ("bos", "eos", "eot", "eom", "unknown", "padding")
    scalars = {"pre": str} | {f"{name}_token_id": int for name in names}
    for key, kind in scalars.items():
        value = metadata.get(f"tokenizer.ggml.{key}")
        if value is not None and not isinstance(value, kind):
            raise ValueError(f"tokenizer.ggml.{key} is {value!r}, not of type {kind.__name__}; convert the model again")


def _byte_level(vocabulary: _Vocabulary) -> Tokenizer:
    """GPT-2's kind: bytes spelled as characters, words cut by a regular expression, ranked merges."""
    rule = pre_tokenization(vocabulary.get("pre"))
    backend = tokenizers.Tokenizer(_ranked_bpe(vocabulary, ignore_merges=rule.ignore_merges))
    if (normalizer := rule.normalizer()) is not None:
        backend.normalizer = normalizer
    backend.pre_tokenizer = rule.pre_tokenizer()
    backend.decoder = decoders.ByteLevel()
    _add_tokens(backend, vocabulary)
    return vocabulary.wrap(backend, bos=vocabulary.named("bos"), eos=vocabulary.named("eos"), add_bos=rule.adds_bos)


def _gemma4(vocabulary: _Vocabulary) -> Tokenizer:
    """Gemma 4: SentencePiece's spelling with ranked merges over the whole text."""
    backend = tokenizers.Tokenizer(_ranked_bpe(vocabulary, byte_fallback=True))
    backend.normalizer = normalizers.Replace(" ", SPACE)
    backend.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    _add_tokens(backend, vocabulary)
    bos = vocabulary.named("bos")
    return vocabulary.wrap(backend, bos=bos, eos=vocabulary.named("eos"), add_bos=bos is not None)


def _sentencepiece(vocabulary: _Vocabulary) -> Tokenizer:
    """SentencePiece BPE: Llama 1 and 2, Mistral before Tekken, Phi-3, Gemma 1 to 3."""
    scores, merges = vocabulary.scores(), None
    normal = {score for score, kind in zip(scores or [], vocabulary.types, strict=False) if kind == PieceType.NORMAL}
    if len(normal) <= 1:
        # Converted from a tokenizer.json, which has no scores: it has merges, and ids in the order of merging.
        merges = vocabulary.merges()
        logger.warning(
            "tokenizer.ggml.scores is %s; ranking merges by %s",
            "missing" if scores is None else "constant",
            "token id" if merges is None else "tokenizer.ggml.merges",
        )
        scores = [-float(token) for token in range(len(vocabulary.tokens))]
    assert scores is not None
    backend, prepare = SentencePieceModel(
        pieces=vocabulary.tokens,
        scores=scores,
        types=vocabulary.types,
        unknown_id=vocabulary.named("unknown", 0),
        add_space_prefix=bool(vocabulary.get("add_space_prefix", True)),
        remove_extra_whitespaces=bool(vocabulary.get("remove_extra_whitespaces", False)),
        charsmap=bytes(int(byte) & 0xFF for byte in vocabulary.get("precompiled_charsmap") or ()),
        merges=merges,
        strip_after=_PHI3_STRIPS_AFTER if vocabulary.architecture == "phi3" else frozenset(),
    ).build()
    return vocabulary.wrap(
        backend,
        bos=vocabulary.named("bos", 1),
        eos=vocabulary.named("eos", 2),
        add_bos=True,
        prepare_text=prepare,
    )


def _ranked_bpe(vocabulary: _Vocabulary, *, ignore_merges: bool = False, byte_fallback: bool = False) -> models.BPE:
    merges = vocabulary.merges()
    if merges is None:
        raise ValueError("tokenizer.ggml.merges is missing; convert the model again")
    return models.BPE(
        vocab={token: position for position, token in enumerate(vocabulary.tokens)},
        merges=merges,
        ignore_merges=ignore_merges,
        byte_fallback=byte_fallback,
        fuse_unk=byte_fallback,
    )


def _add_tokens(backend: tokenizers.Tokenizer, vocabulary: _Vocabulary) -> None:
    """Marks the tokens that are found in a text before anything else: control and user-defined."""
    backend.add_special_tokens(
        [AddedToken(token, normalized=False) for token in vocabulary.of_type(PieceType.CONTROL, PieceType.UNKNOWN)]
    )
    backend.add_tokens([AddedToken(token, normalized=False) for token in vocabulary.of_type(PieceType.USER_DEFINED)])


def _chat_templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    """`tokenizer.chat_template` is the default one, `tokenizer.chat_template.NAME` the others."""
    key = "tokenizer.chat_template"
    templates = {
        name.removeprefix(f"{key}."): template
        for name, template in metadata.items()
        if name.startswith(f"{key}.") and isinstance(template, str)
    }
    if isinstance(metadata.get(key), str):
        templates["default"] = metadata[key]
    return templates
