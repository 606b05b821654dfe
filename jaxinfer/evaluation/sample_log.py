"""A file of answered requests, one JSON object a line, from which an interrupted run goes on."""

import hashlib
import json
import logging
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jaxinfer.model import Model

log = logging.getLogger("jaxinfer")


class SampleLog:
    """Answers by key, read from a file that new ones are appended to, each written through before the next.

    A line has `key`, what the caller says of the request, and `response`. A last line that was cut short, as by a kill
    or a full disk, is dropped. Raises ValueError for a file that is something else.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = pathlib.Path(path)
        self.responses: dict[str, Any] = {}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        content = self.path.read_bytes() if self.path.exists() else b""
        whole = content[: content.rfind(b"\n") + 1]
        for number, line in enumerate(whole.splitlines(), 1):
            try:
                record = json.loads(line)
                self.responses[record["key"]] = record["response"]
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{self.path} line {number} is no answered sample; give another file") from error
        if len(whole) < len(content):
            log.warning("%s ends in half a line, which is dropped", self.path)
            os.truncate(self.path, len(whole))
        if self.responses:
            log.info("%s has %d answered samples", self.path, len(self.responses))

    def append(self, key: str, request: Mapping[str, Any], response: Any) -> None:
        """Keeps an answer, in memory and as a line of the file."""
        self.responses[key] = response
        line = json.dumps({"key": key, **request, "response": response}, ensure_ascii=False, default=str)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")


def weights_key(model: Model) -> str:
    """A fingerprint of a model's weights: what each array is, and its first numbers. Equal names do not mean equal
    weights: a folder may have been written anew, or loaded with another plan of quantisation."""
    digest = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path((model.params, model.prefill_params)):
        first = leaf[(0,) * (leaf.ndim - 1)][:16] if leaf.ndim else leaf
        digest.update(f"{jax.tree_util.keystr(path)} {leaf.shape} {leaf.dtype}".encode() + np.asarray(first).tobytes())
    return digest.hexdigest()


def key_of(*identity: Any) -> str:
    """A fingerprint of everything that an answer depends on."""
    return hashlib.sha256(json.dumps(identity, sort_keys=True, default=str).encode()).hexdigest()
