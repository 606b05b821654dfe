"""Weights that stay packed: from the codes of any checkpoint, and random ones for benchmarks."""

import collections
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from checkpoints.formats.codes import Codes, QuantizedTensor
from checkpoints.names import TensorSource
from jaxinfer.layers.weights import BlockCodes, PermutedInputs, ScaledCodes, StackedOutputs
from jaxinfer.packed_runs import (
    BlockRun,
    DenseRun,
    PackedRun,
    ScaledRun,
    float8_of,
    kind_of,
    packed_rows,
    scaled_dtype,
)
from jaxinfer.quantization.plan import Precision
from pallas_kernels.int4_matmul import Packed, PackedInt4, PackedInt8, from_int8_codes, to_kernel_layout

SMALLEST_GROUP = 16
"""Groups of fewer inputs are decoded: their scales weigh as much as their codes save."""

RANDOM_GROUP_SIZE = 128

type HostWeight = np.ndarray | PackedInt4 | PackedInt8 | PermutedInputs | StackedOutputs | ScaledCodes | BlockCodes
"""A linear weight of NumPy arrays, codes in the canonical layout, before it goes to the device."""

type DeviceWeight = jax.Array | PackedInt4 | PackedInt8 | PermutedInputs | StackedOutputs | ScaledCodes | BlockCodes

type Run = PackedRun | ScaledRun | BlockRun | DenseRun


@runtime_checkable
class QuantizedCheckpoint(Protocol):
    """What `GGUFFile` and `QuantizedFolder` share: the codes of a tensor, where it has any."""

    def code_bits(self, name: str) -> int | None: ...

    def quantized(self, name: str) -> QuantizedTensor | None: ...

    def release(self, name: str) -> None: ...


def device_layout(weight: HostWeight | DeviceWeight) -> DeviceWeight:
    """Puts a weight on the default device, packed codes in the order that this device's kernel reads."""
    if isinstance(weight, StackedOutputs):
        return StackedOutputs(tuple(device_layout(part) for part in weight.parts))
    if isinstance(weight, PermutedInputs):
        return PermutedInputs(to_kernel_layout(jax.device_put(weight.weight)), jax.device_put(weight.permutation))
    on_device = jax.device_put(weight)
    return to_kernel_layout(on_device) if isinstance(on_device, Packed) else on_device


@dataclasses.dataclass
class Decoded:
    """Quantised tensors that could not stay packed: how many, their weights, and the bits of their codes."""

    num_tensors: int = 0
    num_weights: int = 0
    num_bits: int = 0

    def add(self, num_weights: int, bits: int) -> None:
        self.num_tensors += 1
        self.num_weights += num_weights
        self.num_bits += num_weights * bits


@dataclasses.dataclass(frozen=True)
class PackedReader:
    """Reads linear weights without decoding them, where that is possible.

    `read_into` decodes a canonical tensor to `dtype`, for those that cannot stay packed. `only_for_kernel` decodes
    also what no kernel would read, `kernel_layout` being what repacks for one (None: the kernels of this device).
    `decoded` counts what was decoded, by reason.
    """

    checkpoint: QuantizedCheckpoint
    sources: Mapping[str, TensorSource]
    read_into: Callable[[str, np.ndarray], None]
    dtype: np.dtype
    only_for_kernel: bool = False
    kernel_layout: Callable[[Packed], Packed] | None = None
    decoded: dict[str, Decoded] = dataclasses.field(default_factory=lambda: collections.defaultdict(Decoded))

    def __call__(self, names: Sequence[str], rows: Sequence[int], in_features: int) -> HostWeight | None:
        """Joins canonical tensors of so many rows, one below the other; None if all of them have to be decoded.

        Neighbours of one kind are one packed weight; where the kind changes (bits, group size, code book, order of
        the inputs) another part begins.
        """
        widths = [self.checkpoint.code_bits(self.sources[name].name) for name in names]
        if not any(widths):
            return None
        runs: list[Run] = []
        for index, name in enumerate(names):
            # Room for what may follow without a break; memory that is never written to is never taken.
            room = sum(rows[index:])
            if widths[index] is not None and self._append_packed(self.sources[name], runs, room, in_features):
                continue
            run = runs[-1] if runs else None
            if not isinstance(run, DenseRun):
                run = DenseRun(room, in_features, self.dtype)
                runs.append(run)
            self.read_into(name, run.next_rows(rows[index]))
            self.checkpoint.release(self.sources[name].name)
        weights = [run.finish() for run in runs]
        return weights[0] if len(weights) == 1 else StackedOutputs(tuple(weights))

    def _append_packed(self, source: TensorSource, runs: list[Run], room: int, in_features: int) -> bool:
        """Adds a quantised tensor to the last run, or to a new one; False if it has to be decoded."""
        tensor = self.checkpoint.quantized(source.name)
        assert tensor is not None
        start, stop = source.rows or (0, tensor.shape[0])
        first = tensor.rows(start, start + 1)
        reason = self._refusal(first, in_features)
        if reason is not None:
            self.decoded[reason].add((stop - start) * in_features, first.bits)
            return False
        block_rows = _block_rows(tensor, first, source)
        kind = kind_of(first, tensor.permutation, block_rows)
        run = runs[-1] if runs else None
        if run is None or isinstance(run, DenseRun) or run.kind != kind or run.num_rows % block_rows:
            if scaled_dtype(first) is not None:
                run = ScaledRun(kind, room, in_features, first)
            elif float8_of(first) is not None:
                run = BlockRun(kind, room, in_features, first, block_rows)
            else:
                run = PackedRun(kind, room, in_features, first, tensor.permutation)
            runs.append(run)
        run.append(tensor, start, stop, source.unpermute_heads)
        self.checkpoint.release(source.name)
        return True

    def _refusal(self, codes: Codes, in_features: int) -> str | None:
        """Why rows like these are decoded; None if they stay packed."""
        if scaled_dtype(codes) is not None:
            return None  # XLA converts them inside the product, on every device
        if codes.group_size < min(SMALLEST_GROUP, in_features):
            return f"groups of {codes.group_size} inputs save nothing packed"
        if not self.only_for_kernel or float8_of(codes) is not None:
            return None  # those of blocks are XLA's as well
        try:
            layout = (self.kernel_layout or to_kernel_layout)(packed_rows(codes)).layout
        except ValueError as error:  # JAXINFER_KERNELS names a kernel that does not read this kind
            return str(error)
        return None if layout != "canonical" else "no kernel of this device reads them"


def _block_rows(tensor: QuantizedTensor, first: Codes, source: TensorSource) -> int:
    """How many rows have the same scales in the weight that is made of a tensor.

    1 where they are written out for each row: there is one scale a row anyway, or the model's rows are not in the
    tensor's order, or begin within a block.
    """
    begins_within = source.rows is not None and source.rows[0] % tensor.block_rows
    if scaled_dtype(first) is not None or source.unpermute_heads is not None or begins_within:
        return 1
    return tensor.block_rows


def random_packed(key: jax.Array, shape: tuple[int, int], precision: Precision) -> Packed | ScaledCodes:
    """Random codes of 8 bits, or of 4 as `random_int4` makes them whatever the precision's group size; on the device.

    Raises ValueError for codes of fewer bits, and of other methods that have 4.
    """
    if precision.bits == 4 and precision.method == "rtn" and not precision.symmetric:
        return random_int4(key, shape)
    if precision.bits == 8 and precision.group_size is not None:
        return random_int8(key, shape, precision.group_size, symmetric=bool(precision.symmetric))
    if precision.bits == 8:
        return random_scaled(key, shape, jnp.float8_e4m3fn if precision.method == "fp8" else jnp.int8)
    kind = f"{'symmetric ' if precision.symmetric else ''}{precision.bits}-bit {precision.method}"
    raise ValueError(f"quantize asks for {kind} codes: random ones have 4 bits with zero points by rtn, or 8 bits")


def random_scaled(key: jax.Array, shape: tuple[int, int], dtype: jnp.dtype | type) -> ScaledCodes:
    """Random codes of 8 bits with a scale an output, of standard deviation about 0.02; made on the device."""
    codes_key, scales_key = jax.random.split(key)
    codes = jax.lax.bitcast_convert_type(jax.random.bits(codes_key, shape, jnp.uint8), jnp.int8)
    # Uniform on -127..127: of standard deviation 73.6. As float8 they are rounded to 4 bits; random bytes would be NaN.
    codes = jnp.maximum(codes, jnp.int8(-127)).astype(dtype)
    scales = (0.02 / 73.6) * jax.random.uniform(scales_key, shape[:1], jnp.float32, 0.5, 1.5)
    return ScaledCodes(codes, scales)


def random_int8(key: jax.Array, shape: tuple[int, int], group_size: int, *, symmetric: bool) -> PackedInt8:
    """Random codes in groups, with random zero points unless `symmetric`, of standard deviation about 0.02."""
    codes_key, scales_key, zeros_key = jax.random.split(key, 3)
    groups = (shape[0], -(-shape[1] // group_size))
    codes = jax.random.bits(codes_key, shape, jnp.uint8)  # of standard deviation 73.9
    scales = (0.02 / 73.9) * jax.random.uniform(scales_key, groups, jnp.float32, 0.5, 1.5)
    zeros = None if symmetric else jax.random.randint(zeros_key, groups, 112, 145, jnp.int32).astype(jnp.uint8)
    return to_kernel_layout(from_int8_codes(codes, scales.astype(jnp.bfloat16), zeros, group_size=group_size))


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
    return to_kernel_layout(weight)
