"""A second copy of what is packed, decoded, for prompts: `load(..., quantize="int4", prefill_dtype="bfloat16")`.

A decode step costs what reading the weights costs, and packed ones are read in a quarter of the time. A prompt of many
tokens costs what its products cost, which gain nothing by codes: with the copy they are those of the original weights,
as exact and as fast. What is not packed is shared by both.
"""

import logging
import math
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.checkpoint_weights import check_bytes
from jaxinfer.config import ModelConfig
from jaxinfer.decoder import Params
from jaxinfer.memory import shown_bytes
from jaxinfer.params import Piece, from_pieces, piece_owner, piece_specs

log = logging.getLogger("jaxinfer")


def copied_bytes(params: Params, config: ModelConfig, dtype: jnp.dtype) -> int:
    """What a copy takes: `dtype` for every weight of `params` (arrays or shapes) that is packed.

    A head that is packed and was tied to the embedding needs none: prompts use the embedding.
    """
    return dtype.itemsize * sum(
        math.prod(spec.shape)
        for name, specs in piece_specs(config)
        for field, spec in specs.items()
        if not _is_plain(getattr(piece_owner(params, name), field))
    )


def announce(params: Params, config: ModelConfig, dtype: jnp.dtype, name: str) -> bool:
    """Says what the copy will take before it is taken, or that there is nothing to copy: False.

    Raises ValueError for a copy that there is no room for.
    """
    needed = copied_bytes(params, config, dtype)
    if not needed:
        log.warning("%s: no weight is packed: prefill_dtype=%s is the dtype of all, and no copy is kept", name, dtype)
        return False
    size = shown_bytes(needed)
    log.warning("%s: prefill_dtype=%s keeps a second copy of the packed weights, %s", name, dtype, size)
    check_bytes(needed, name, f"a second copy for prefill_dtype={dtype} takes", "leave prefill_dtype out")
    return True


def with_copies(params: Params, config: ModelConfig, decoded: Iterable[Piece]) -> Params:
    """The params of prompts: those of `decoded` where `params` are packed. It holds one piece more at a time."""

    def pieces() -> Iterator[Piece]:
        expected = dict(piece_specs(config))
        for name, fields in decoded:
            owner = piece_owner(params, name)
            yield name, {field: _first_plain(getattr(owner, field), fields[field]) for field in expected[name]}
            del fields

    return from_pieces(pieces())


def _first_plain(own: Any, decoded: Any) -> Any:
    return own if _is_plain(own) else decoded


def _is_plain(weight: Any) -> bool:
    return isinstance(weight, jax.Array | jax.ShapeDtypeStruct)
