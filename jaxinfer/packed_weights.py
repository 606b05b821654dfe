"""Weights that stay packed in 4 bits: from GGUF blocks, and random ones for benchmarks."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from checkpoints.formats import ggml
from checkpoints.gguf import GGUFFile
from checkpoints.names import TensorSource
from checkpoints.names_gguf import unpermute_rows
from pallas_kernels.dispatch import hopper_refusal
from pallas_kernels.int4_matmul import PackedInt4, from_codes, to_mosaic

FOUR_BIT_TYPES = ("Q4_0", "Q4_1", "Q4_K")
"""ggml types whose codes fit 4 bits as they are: Q4_0 with the zero at 8, the others with a minimum."""

RANDOM_GROUP_SIZE = 128
CODES_AT_ONCE = 1 << 20


def device_layout(weight: PackedInt4) -> PackedInt4:
    """Puts a canonical weight on the default device, in the order that this device's kernel reads."""
    on_device = jax.device_put(weight)
    return on_device if hopper_refusal() is not None else to_mosaic(on_device)


def from_gguf_blocks(checkpoint: GGUFFile, sources: Sequence[TensorSource]) -> PackedInt4 | None:
    """Joins the rows of GGUF tensors into one packed weight without loss; None if their types do not allow it.

    Scales and minima are float32: those of Q4_K are products of two numbers and do not fit 16 bits. Codes are one a
    byte for a few rows at a time only.
    """
    types = {checkpoint.tensors[source.name].dtype for source in sources}
    if len(types) != 1 or types.isdisjoint(FOUR_BIT_TYPES):
        return None
    (kind,) = types
    return _joined([_packed_rows(checkpoint, source, kind) for source in sources])


def _packed_rows(checkpoint: GGUFFile, source: TensorSource, kind: str) -> PackedInt4:
    """The rows of one tensor, in the order in which the model wants them."""
    blocks = checkpoint.read_blocks(source.name)
    if source.rows is not None:
        blocks = blocks[slice(*source.rows)]
    parts = []
    rows_at_once = max(1, CODES_AT_ONCE // checkpoint.tensors[source.name].shape[-1])
    for start in range(0, len(blocks), rows_at_once):
        unpacked = ggml.unpack(blocks[start : start + rows_at_once], kind)
        codes = unpacked.codes
        if codes.dtype == np.int8:
            codes = (codes + np.int8(8)).view(np.uint8)
        parts.append(from_codes(codes, unpacked.scales, unpacked.minimums, group_size=unpacked.group_size))
    checkpoint.release(source.name)
    weight = _joined(parts)
    heads = source.unpermute_heads
    if heads is None:
        return weight
    offsets = None if weight.offsets is None else unpermute_rows(weight.offsets, heads)
    codes, scales = unpermute_rows(weight.codes, heads), unpermute_rows(weight.scales, heads)
    return dataclasses.replace(weight, codes=codes, scales=scales, offsets=offsets)


def _joined(parts: Sequence[PackedInt4]) -> PackedInt4:
    """Canonical weights of one width and kind, one below the other."""
    if len(parts) == 1:
        return parts[0]
    offsets = None if parts[0].offsets is None else np.concatenate([part.offsets for part in parts])
    return dataclasses.replace(
        parts[0],
        codes=np.concatenate([part.codes for part in parts]),
        scales=np.concatenate([part.scales for part in parts]),
        offsets=offsets,
        shape=(sum(part.shape[0] for part in parts), parts[0].shape[1]),
    )


def random_int4(key: jax.Array, shape: tuple[int, int]) -> PackedInt4:
    """Random codes in groups of 128 with random zero points, of standard deviation about 0.02; made on the device."""
    out_features, in_features = shape
    codes_key, scales_key, zeros_key = jax.random.split(key, 3)
    groups = (out_features, -(-in_features // RANDOM_GROUP_SIZE))
    codes = jax.random.bits(codes_key, (out_features, -(-in_features // 2)), jnp.uint8)
    # Codes and zero points are uniform on 0..15 and 6..9: code - zero has standard deviation 4.8.
    scales = (0.02 / 4.8) * jax.random.uniform(scales_key, groups, jnp.float32, 0.5, 1.5)
    zeros = jax.random.randint(zeros_key, groups, 6, 10, jnp.int32).astype(jnp.uint8)
    weight = PackedInt4(codes, scales.astype(jnp.bfloat16), zeros, None, shape, min(RANDOM_GROUP_SIZE, in_features))
    return weight if hopper_refusal() is not None else to_mosaic(weight)
