"""What a linear weight may be, beside an array or packed codes: products of these that formats force on the loader."""

import collections
import dataclasses
import typing
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Float

from pallas_kernels.int4_matmul import Packed, PackedInt4, PackedInt8

# The pytrees are exempt from run-time type checks: JAX rebuilds pytrees around placeholders, as in `lower`.


@typing.no_type_check
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PermutedInputs:
    """A packed weight whose columns are in another order than x: column j multiplies x[permutation[j]].

    GPTQ's act-order leaves the inputs of a group scattered; packed weights have them side by side. `permutation` is
    int32 [in_features].
    """

    weight: Packed
    permutation: jax.Array | np.ndarray

    @property
    def shape(self) -> tuple[int, int]:
        return self.weight.shape


@typing.no_type_check
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StackedOutputs:
    """Weights of different kinds, one below the other: their products with the same x, side by side.

    Such as q and k in 4 bits and v in 16, as GGUF's mixed types have them.
    """

    parts: tuple[Any, ...]

    @property
    def shape(self) -> tuple[int, int]:
        return (sum(part.shape[0] for part in self.parts), self.parts[0].shape[1])


@typing.no_type_check
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ScaledCodes:
    """A weight of 8 bits: `codes`, int8 or a float8 [out, in], times `scales`, float32 [out].

    One scale an output, so it is applied to the product. XLA converts the codes, which bfloat16 holds exactly, on
    their way into the product; no kernel of ours is needed.
    """

    codes: jax.Array | np.ndarray
    scales: jax.Array | np.ndarray

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]


@typing.no_type_check
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BlockCodes:
    """A weight of 8-bit floats with a scale for each block: DeepSeek's and Qwen's fp8, of 128 x 128.

    `codes` are float8_e4m3fn or float8_e5m2 [out, in], `scales` float32 [ceil(out / rows), ceil(in / columns)], and
    `block` is (rows, columns): output n and input k are of block n // rows, k // columns. Kernels and XLA read
    them in this order: `pallas_kernels.byte_matmul`.
    """

    codes: jax.Array | np.ndarray
    scales: jax.Array | np.ndarray
    block: tuple[int, int] = dataclasses.field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]


type Weight = Float[Array, "_ _"] | PackedInt4 | PackedInt8 | PermutedInputs | StackedOutputs | ScaledCodes | BlockCodes
"""A linear weight [out, in]: an array as checkpoints store it, or codes that the kernel reads as they are."""


def precisions(params: Any) -> list[str]:
    """What weights of a pytree, abstract or not, are stored as: "int4", "float32"; most bytes first, no vectors."""
    found: collections.Counter[str] = collections.Counter()
    for weight in jax.tree.leaves(params, is_leaf=lambda node: isinstance(node, Packed | ScaledCodes | BlockCodes)):
        if isinstance(weight, Packed):
            name = f"int{weight.bits}"
        else:
            name = str(weight.codes.dtype if isinstance(weight, ScaledCodes | BlockCodes) else weight.dtype)
        if len(weight.shape) > 1:
            found[name] += sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(weight))
    return [name for name, _ in found.most_common()]
