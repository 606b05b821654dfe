"""Texts that calibrated quantising looks at, split from those that it is judged by.

    Calibration.from_files(["support.jsonl", "manual.txt"])      # a user's domain; a tenth is kept for evaluation
    Calibration.bundled()                                        # for a first try: see texts/README.md

A line of a .jsonl file is a document: {"messages": [{"role": ..., "content": ...}, ...]}, {"prompt": ...,
"completion": ...}, which is two messages, or {"text": ...}. Messages are written as the model's chat template has them,
or, where it has none, one below the other. Any other file is one text.
"""

import dataclasses
import hashlib
import json
import logging
import lzma
import os
import pathlib
import re
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
from jaxtyping import Int32

from jaxinfer.tokenization import Tokenizer

log = logging.getLogger("jaxinfer")

SAMPLES, LENGTH, EVALUATION_SAMPLES = 128, 512, 16

FEW_TOKENS = 1024
"""Below, codes fitted to the text may be worse than rounded ones. With int4 codes a model of 16 layers has a KL
divergence of 0.0144 nats by rounding; on 16, 256, 512 and 1024 tokens it has 0.0258, 0.0191, 0.0112 and 0.0103 by GPTQ,
0.0169, 0.0138, 0.0145 and 0.0129 by AWQ."""

PASSAGE = 8000
"""Characters of a long text, at least, that go to one side of the split together."""

SHARED_PARAGRAPH = 32
"""Characters from which a paragraph on both sides counts as shared text; fewer are "Yes." and "THE END"."""

type Message = Mapping[str, str]
type Document = str | tuple[Message, ...]


@dataclasses.dataclass(frozen=True)
class Windows:
    """Token ids that a model is run over, each row from position 0; no evaluation rows: quality is not measured."""

    calibration: Int32[np.ndarray, "samples tokens"]
    evaluation: Int32[np.ndarray, "evaluation_samples evaluation_tokens"]
    source: str

    def __post_init__(self) -> None:
        if len(self.evaluation) and self.evaluation.shape[1] < 2:
            raise ValueError(f"{self.source}: evaluation text of one token, which nothing follows; give longer text")

    def check(self, num_tokens: int, longest: int) -> None:
        """Raises ValueError for ids that a model of `num_tokens` tokens does not have, and for rows above `longest`."""
        for name, ids in (("calibration", self.calibration), ("evaluation", self.evaluation)):
            if ids.ndim != 2 or not np.issubdtype(ids.dtype, np.integer):
                shape = f"{ids.dtype}{list(ids.shape)}"
                raise ValueError(f"{self.source}: {name} is {shape}; expected integers [rows, tokens]")
            if ids.shape[1] > longest and len(ids):
                raise ValueError(f"{self.source}: {name} has rows of {ids.shape[1]} tokens; the context is {longest}")
            wrong = ids[(ids < 0) | (ids >= num_tokens)]
            if wrong.size:
                raise ValueError(
                    f"{self.source}: {name} holds {wrong.flat[0]}; token ids of this model are 0 to {num_tokens - 1}"
                )


@typing.no_type_check  # it checks more, and its errors are the ones users must see
@dataclasses.dataclass(frozen=True, repr=False)
class Calibration:
    """Documents to calibrate with, and others, which share no paragraph with them, to judge the result by.

    Of each, as many windows of `length` tokens are taken as are asked for and there are, evenly from all of the text.
    """

    documents: tuple[Document, ...]
    evaluation: tuple[Document, ...]
    source: str
    samples: int = SAMPLES
    length: int = LENGTH
    evaluation_samples: int = EVALUATION_SAMPLES

    def __post_init__(self) -> None:
        for name in ("documents", "evaluation"):
            texts = getattr(self, name)
            if not isinstance(texts, tuple) or not all(isinstance(text, str | tuple) for text in texts):
                raise ValueError(
                    f"{name} is {type(texts).__name__}; expected a tuple of texts and conversations "
                    "(Calibration.from_files reads files)"
                )
        for name, least in (("samples", 1), ("length", 2), ("evaluation_samples", 0)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise ValueError(f"{name}={value!r}; expected a whole number from {least}")

    def __repr__(self) -> str:
        return (
            f"Calibration({self.source!r}, {len(self.documents)} documents, {len(self.evaluation)} for evaluation, "
            f"{self.samples} windows of {self.length} tokens)"
        )

    @classmethod
    def bundled(
        cls, *, samples: int = SAMPLES, length: int = LENGTH, evaluation_samples: int = EVALUATION_SAMPLES
    ) -> "Calibration":
        """A novel to calibrate with; minutes of a workshop and verse, 113 thousand tokens, to judge by."""
        return cls(
            (_bundled_text("alice"),),
            (_bundled_text("electronic_texts"), _bundled_text("paradise_lost")),
            "Alice's Adventures in Wonderland (bundled)",
            samples,
            length,
            evaluation_samples,
        )

    @classmethod
    def from_files(
        cls,
        paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
        *,
        evaluation: str | os.PathLike[str] | Iterable[str | os.PathLike[str]] | None = None,
        evaluation_share: float = 0.1,
        samples: int = SAMPLES,
        length: int = LENGTH,
        evaluation_samples: int = EVALUATION_SAMPLES,
    ) -> "Calibration":
        """Reads text and .jsonl files. Without `evaluation` files that share of the documents is kept for evaluation.

        A document's content decides its side, so equal ones are on the same side; long texts are split into passages
        first. What is left to calibrate with has no paragraph that evaluation has. Raises ValueError naming the file,
        and the line, that is wrong, FileNotFoundError for a file that is not there, and IsADirectoryError for a folder.
        """
        names = _listed(paths)
        documents = [document for path in names for document in _read(path)]
        if evaluation is not None:
            kept = [document for path in _listed(evaluation) for document in _read(path)]
        else:
            if not (isinstance(evaluation_share, int | float) and 0.0 <= evaluation_share < 1.0):
                raise ValueError(f"evaluation_share is {evaluation_share!r}; expected a share from 0 to less than 1")
            documents, kept = _split(
                [piece for document in documents for piece in _passages(document)], evaluation_share
            )
        documents = list(_without_shared(documents, kept))
        source = ", ".join(path.name for path in names)
        if not documents:
            raise ValueError(f"{source}: no text is left to calibrate with; give more, or other evaluation files")
        return cls(tuple(documents), tuple(kept), source, samples, length, evaluation_samples)

    def windows(self, tokenizer: Tokenizer, longest: int) -> Windows:
        """The token ids, in windows of at most `longest` tokens."""
        length = min(self.length, longest)
        calibration = _cut(tokenizer, self.documents, length, self.samples)
        evaluation = _cut(tokenizer, self.evaluation, length, self.evaluation_samples)
        if not len(evaluation) and self.evaluation_samples:
            log.warning(
                "%s: no text is kept apart to judge by (it is a single passage, or none was asked for): perplexity and "
                "KL are not measured; give more, or text to judge by (--evaluation, from_files(..., evaluation=))",
                self.source,
            )
        return Windows(calibration, evaluation, self.source)


def _cut(
    tokenizer: Tokenizer, documents: Sequence[Document], length: int, most: int
) -> Int32[np.ndarray, "samples tokens"]:
    """Windows of the documents' tokens, one document after the other; each begins as the tokenizer opens a text."""
    stream = [token for document in documents for token in _encode(tokenizer, document)]
    opening = list(tokenizer.opening_ids)
    length = min(length, len(opening) + len(stream))
    windows, position = [], 0
    while len(stream) - position >= length - len(opening) and most and stream:
        prefix = [] if stream[position : position + len(opening)] == opening else opening
        end = position + length - len(prefix)
        if end > len(stream):
            break
        windows.append(prefix + stream[position:end])
        position = end
    if len(windows) > most:
        windows = [windows[index * len(windows) // most] for index in range(most)]
    return np.array(windows, np.int32).reshape(len(windows), length)


def _encode(tokenizer: Tokenizer, document: Document) -> list[int]:
    if isinstance(document, str):
        return tokenizer.encode(document, add_special_tokens=False)
    if tokenizer.chat_template is None:
        text = "\n\n".join(message["content"] for message in document)
        return tokenizer.encode(text, add_special_tokens=False)
    return tokenizer.apply_chat_template(document, add_generation_prompt=False)


def _listed(paths: object) -> list[pathlib.Path]:
    given = [paths] if isinstance(paths, str | os.PathLike) or not isinstance(paths, Iterable) else list(paths)
    listed = []
    for path in given:
        if not isinstance(path, str | os.PathLike) or path == "":
            raise ValueError(f"a calibration file is {path!r}; expected the path of a text or .jsonl file")
        listed.append(pathlib.Path(path).expanduser())
    if not listed:
        raise ValueError("no calibration files are given; give text or .jsonl files")
    return listed


def _read(path: pathlib.Path) -> Iterator[Document]:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: byte {error.start}") from error
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{path}: no such file; expected a text or .jsonl file to calibrate with") from error
    except IsADirectoryError as error:
        raise IsADirectoryError(f"{path} is a folder; name the text and .jsonl files in it one by one") from error
    if path.suffix != ".jsonl":
        yield text
        return
    # By line feeds alone: JSON may hold the other characters that end a line for `splitlines` as they are.
    for number, line in enumerate(text.removeprefix("\ufeff").split("\n"), 1):
        if line.strip():
            yield _record(line, f"{path}: line {number}")


def _record(line: str, where: str) -> Document:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is not JSON: {error}") from error
    match record:
        case {"text": str(text)}:
            return text
        case {"prompt": str(prompt), "completion": str(completion)}:
            return {"role": "user", "content": prompt}, {"role": "assistant", "content": completion}
        case {"messages": [_, *_] as messages}:
            for message in messages:
                match message:
                    case {"role": str(), "content": str()}:
                        pass
                    case _:
                        raise ValueError(f'{where} has the message {message!r}; expected a "role" and a "content" text')
            return tuple(messages)
    raise ValueError(f'{where} has no "messages", no "text", and no "prompt" with "completion"')


def _split(pieces: Sequence[Document], share: float) -> tuple[list[Document], list[Document]]:
    """Calibration and evaluation, which is about that share; of pieces that differ, each side has at least one."""
    places = sorted(set(map(_place, pieces)))
    border = sum(place < share for place in places)
    if share and len(places) > 1:
        border = min(max(border, 1), len(places) - 1)
    elif len(places) == 1:
        border = 0
    kept = set(places[:border])
    return [p for p in pieces if _place(p) not in kept], [p for p in pieces if _place(p) in kept]


def _passages(document: Document) -> Iterator[Document]:
    """A text in pieces of whole paragraphs, ten or more of them if it has so many; a conversation is one piece."""
    if not isinstance(document, str):
        yield document
        return
    least = min(PASSAGE, len(document) // 10)
    piece: list[str] = []
    for paragraph in _paragraphs(document):
        piece.append(paragraph)
        if sum(map(len, piece)) >= least:
            yield "\n\n".join(piece)
            piece = []
    if piece:
        yield "\n\n".join(piece)


def _paragraphs(text: str) -> list[str]:
    return [paragraph for paragraph in re.split(r"\n[^\S\n]*\n\s*", text) if paragraph.strip()]


def _normalised(text: str) -> str:
    return " ".join(text.split()).casefold()


def _place(document: Document) -> float:
    """A number from 0 to 1 by a document's words alone."""
    texts = [document] if isinstance(document, str) else [message["content"] for message in document]
    digest = hashlib.sha256("\n".join(map(_normalised, texts)).encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8]) / 2**64


def _shareable(document: Document) -> Iterator[str]:
    """Paragraphs that must not be on both sides; system prompts may, as they are in every conversation."""
    texts = [document] if isinstance(document, str) else [m["content"] for m in document if m["role"] != "system"]
    for text in texts:
        for paragraph in map(_normalised, _paragraphs(text)):
            if len(paragraph) >= SHARED_PARAGRAPH:
                yield paragraph


def _without_shared(documents: Sequence[Document], others: Sequence[Document]) -> Iterator[Document]:
    """The documents without what the others have as well: a text's paragraphs, or a whole conversation."""
    taken = {paragraph for document in others for paragraph in _shareable(document)}
    for document in documents:
        if not taken.intersection(_shareable(document)):
            yield document
        elif isinstance(document, str):
            left = [paragraph for paragraph in _paragraphs(document) if _normalised(paragraph) not in taken]
            if left:
                yield "\n\n".join(left)


def _bundled_text(name: str) -> str:
    path = pathlib.Path(__file__).with_name("texts") / f"{name}.txt.xz"
    return lzma.decompress(path.read_bytes()).decode("utf-8")
