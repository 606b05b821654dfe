"""Tokenizers from Hugging Face model folders: tokenizer.json, or tokenizer.model alone.

Only data is read: no class named in the folder is looked up, no code in it is run.
"""

import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, processors

from checkpoints.errors import CheckpointError, check_regular, exists
from checkpoints.safetensors import read_json
from jaxinfer.tokenization.sentencepiece import read_model
from jaxinfer.tokenization.tokenizer import Tokenizer, added_by_post_processor, backend_errors

logger = logging.getLogger(__name__)

_OTHER_FORMATS = ("tekken.json", "vocab.json", "merges.txt", "vocab.txt", "tiktoken.model", "spiece.model")
_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
_HAS_SUBWORD_PREFIX = re.compile(rb'"continuing_subword_prefix"\s*:\s*"[^"]')


def tokenizer_from_folder(path: str | Path) -> Tokenizer | None:
    """The tokenizer of a model folder, or None if it has none.

    Raises ValueError for a broken file and for a tokenizer in a format that is not read here.
    """
    folder = Path(path)
    config = read_json(folder, "tokenizer_config.json", optional=True)
    if _has(folder, "tokenizer.json"):
        has_json, prepare = True, None
        backend = _from_json(folder / "tokenizer.json")
        _add_missing_tokens(backend, folder, config)
    elif _has(folder, "tokenizer.model"):
        has_json = False
        backend, prepare = _from_sentencepiece(folder, config)
    else:
        found = [name for name in _OTHER_FORMATS if (folder / name).is_file()]
        if found:
            raise ValueError(
                f"{folder} has a tokenizer only as {', '.join(found)}; write a tokenizer.json with "
                "transformers.AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
            )
        return None
    special = _special_tokens(folder, config)
    ids = {name: backend.token_to_id(token) for name, token in special.items()}
    _apply_bos_rule(backend, config, special.get("bos_token"), has_json=has_json)
    return Tokenizer(
        backend,
        bos_token_id=ids.get("bos_token"),
        eos_token_ids=_stop_set(folder, ids.get("eos_token")),
        chat_templates=_chat_templates(folder, config),
        special_tokens=special,
        prepare_text=prepare,
    )


def _has(folder: Path, name: str) -> bool:
    """Whether a folder has a file. A pipe or a device of that name is an error: reading it may never end."""
    if not exists(folder / name):
        return False
    check_regular(folder / name)
    return True


def _from_json(path: Path) -> tokenizers.Tokenizer:
    _check_merges(path)
    with backend_errors(f"{path} is not a tokenizer; download it again"):
        return tokenizers.Tokenizer.from_file(str(path))


def _check_merges(path: Path) -> None:
    """Raises CheckpointError where a BPE merge's second part lacks the prefix that the file says it has.

    `tokenizers` cuts the prefix's length off that part without looking, and may end the process over what is left.
    Hardly any BPE file has a prefix, so that as a rule nothing is parsed here.
    """
    try:
        has_prefix = _HAS_SUBWORD_PREFIX.search(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    match read_json(path.parent, path.name) if has_prefix else None:
        case {"model": {"continuing_subword_prefix": str(prefix), "merges": list(merges)}}:
            for merge in merges:
                parts = merge.split(" ") if isinstance(merge, str) else merge
                match parts:
                    case [_, str(second)] if not second.startswith(prefix):
                        raise CheckpointError(
                            f"{path}: the second part of the merge {merge!r} lacks the continuing_subword_prefix "
                            f"{prefix!r}; download it again"
                        )


def _from_sentencepiece(folder: Path, config: Mapping[str, Any]) -> tuple[tokenizers.Tokenizer, Any]:
    """tokenizer.model, with the tokens that fine-tuning added beside it."""
    model = read_model(folder / "tokenizer.model")
    described = _added_tokens(folder, config)
    added = {token.content: position for position, token in described.items()}
    for token, position in read_json(folder, "added_tokens.json", optional=True).items():
        if type(position) is not int:
            raise ValueError(
                f"{folder / 'added_tokens.json'} gives {token!r} the id {position!r}; expected an integer: "
                "download it again"
            )
        added[token] = position
    special = {token.content for token in described.values() if token.special}
    special |= set(_special_tokens(folder, config).values())
    return model.extended(added, special).build()


def _added_tokens(folder: Path, config: Mapping[str, Any]) -> dict[int, AddedToken]:
    """`added_tokens_decoder` of tokenizer_config.json, by id in ascending order."""
    fields = ("single_word", "lstrip", "rstrip", "normalized", "special")
    decoder = config.get("added_tokens_decoder") or {}
    where = f"{folder / 'tokenizer_config.json'}: added_tokens_decoder"
    if not isinstance(decoder, Mapping):
        raise ValueError(f"{where} is a {type(decoder).__name__}, not an object; download the file again")
    tokens = {}
    for key, token in decoder.items():
        if not key.isdecimal() or not isinstance(token, Mapping) or not isinstance(token.get("content"), str):
            raise ValueError(
                f"{where} has {key!r}: {token!r}; expected an id and an object with a content: download the file again"
            )
        flags = {name: bool(token[name]) for name in fields if name in token}
        tokens[int(key)] = AddedToken(token["content"], **flags)
    return dict(sorted(tokens.items()))


def _add_missing_tokens(backend: tokenizers.Tokenizer, folder: Path, config: Mapping[str, Any]) -> None:
    """Brings in what tokenizer_config.json says of added tokens; as in transformers, it wins (but not on ids)."""
    known = {token: repr(added) for token, added in backend.get_added_tokens_decoder().items()}
    for position, token in _added_tokens(folder, config).items():
        if known.get(position) == repr(token):
            continue
        (backend.add_special_tokens if token.special else backend.add_tokens)([token])
        if backend.token_to_id(token.content) != position:
            logger.warning(
                "tokenizer_config.json gives %r the id %d, tokenizer.json gives it %s; the latter holds",
                token.content,
                position,
                backend.token_to_id(token.content),
            )


def _special_tokens(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Named special tokens (bos_token, ...) as text; each may be written as a string or as an object."""
    legacy = read_json(folder, "special_tokens_map.json", optional=True)
    special = {}
    for name in _SPECIAL_NAMES:
        value = config[name] if name in config else legacy.get(name)
        if isinstance(value, Mapping):
            value = value.get("content")
        if isinstance(value, str):
            special[name] = value
    return special


def _apply_bos_rule(
    backend: tokenizers.Tokenizer, config: Mapping[str, Any], bos_token: str | None, *, has_json: bool
) -> None:
    """Makes the post-processor open texts with BOS, or not, if tokenizer_config.json says so.

    Without `add_bos_token` there the post-processor of tokenizer.json is the rule; tokenizer.model has none,
    and models that come with it alone want BOS. What opens a text otherwise ([gMASK]<sop>) stays.
    """
    add_bos = config.get("add_bos_token", None if has_json else True)
    bos = None if bos_token is None else backend.token_to_id(bos_token)
    if add_bos is None or bos is None:
        return
    opening, _ = added_by_post_processor(backend)
    if add_bos and not opening:
        backend.post_processor = processors.TemplateProcessing(single=["BOS", "$A"], special_tokens=[("BOS", bos)])
    elif not add_bos and opening == [bos]:
        backend.post_processor = processors.TemplateProcessing(single=["$A"], special_tokens=[])


def _stop_set(folder: Path, eos: int | None) -> list[int]:
    """The tokenizer's EOS and those of generation_config.json and config.json, each an int or a list."""
    stop: list[Any] = [eos]
    config = read_json(folder, "config.json", optional=True)
    text_config = config.get("text_config")
    for source in (
        read_json(folder, "generation_config.json", optional=True),
        config,
        text_config if isinstance(text_config, Mapping) else {},
    ):
        ids = source.get("eos_token_id")
        stop += ids if isinstance(ids, list) else [ids]
    return [token for token in stop if isinstance(token, int) and token >= 0]


def _chat_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Templates by name. Files of their own win over tokenizer_config.json, that over chat_template.json."""
    templates: dict[str, str] = {}
    for source in (read_json(folder, "chat_template.json", optional=True), config):
        found = source.get("chat_template")
        if isinstance(found, str):
            templates["default"] = found
        elif isinstance(found, list):
            for entry in found:
                match entry:
                    case {"name": str(name), "template": str(template)}:
                        templates[name] = template
                    case _:
                        raise ValueError(
                            f"a chat template in {folder} is {entry!r}; expected a name and a template: "
                            "download its files again"
                        )
    for path in sorted(folder.glob("additional_chat_templates/*.jinja")):
        if exists(path) and path.is_file():
            templates[path.stem] = _read_template(path)
    if _has(folder, "chat_template.jinja"):
        templates["default"] = _read_template(folder / "chat_template.jinja")
    return templates


def _read_template(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 ({error.reason} at byte {error.start}); download it again") from error
