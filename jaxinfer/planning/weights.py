"""The parameters that `load` would make, as shapes and types: from a configuration and the headers of files.

The functions that load are run on outlines: tensors whose data is never read. So what a plan says of a weight's codes,
groups and padding is what the loader itself would do.
"""

import collections
import contextlib
import dataclasses
import functools
import pathlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from checkpoints.errors import CheckpointError
from checkpoints.formats.codes import QuantizedTensor
from checkpoints.gguf import GGUFFile
from checkpoints.quantized import QuantizedFolder, open_folder
from jaxinfer.checkpoint_weights import match_tensors, wants_codes
from jaxinfer.config import ModelConfig
from jaxinfer.decoder import Params
from jaxinfer.layers.weights import BlockCodes, PermutedInputs, ScaledCodes, StackedOutputs
from jaxinfer.packed_weights import PackedReader
from jaxinfer.params import (
    ParamSpec,
    ReadPacked,
    build,
    build_pieces,
    from_pieces,
    has_own_head,
    linear_names,
    random_params,
)
from jaxinfer.planning.target import Target
from jaxinfer.prefill_copy import with_copies
from jaxinfer.quantization.plan import CALIBRATED, Plan, Precision
from jaxinfer.quantization.quantizer import quantize_weight
from jaxinfer.store.manifest import is_store
from jaxinfer.store.reader import Store
from jaxinfer.store.structure import canonical_like
from pallas_kernels.int4_matmul import Packed


@dataclasses.dataclass(frozen=True)
class Storage:
    """How weights are kept, as `load` was asked: see there. `plan` and `packed` exclude each other."""

    dtype: jnp.dtype
    plan: Plan | None = None
    packed: bool | None = None


def abstract_params(path: pathlib.Path, config: ModelConfig, storage: Storage, target: Target) -> Params:
    """`Params` of `jax.ShapeDtypeStruct`s, as `load` makes them of the checkpoint at `path` for that device.

    A folder with a config.json alone is taken for one of plain tensors. Of a quantised folder's tensors only vectors
    are read, of a GGUF file's one row each, of a store none. Raises CheckpointError for what `load` would refuse.
    """
    plan = storage.plan
    if plan is not None:
        plan.check(linear_names(config))
        return build(config, lambda spec: _by_plan(spec, storage, target), has_own_head(plan))
    if is_store(path):
        return _as_kept(Store(path), storage, target)
    with _packed_reader(path, config, storage, target) as read_packed:
        return build(config, lambda spec: _as_stored(spec, storage, target, read_packed), False)


def abstract_random_params(config: ModelConfig, storage: Storage, target: Target) -> Params:
    """Those that `load(random_weights=...)` makes on that device."""
    params = jax.eval_shape(lambda: random_params(config, storage.dtype, 0, plan=storage.plan))
    if target.is_here:
        return params
    return jax.tree.map(
        lambda weight: _on_device(weight, target), params, is_leaf=lambda node: isinstance(node, Packed)
    )


def prompt_params(params: Params, config: ModelConfig, dtype: jnp.dtype) -> Params:
    """Those with which `load(prefill_dtype=...)` computes prompts: a second copy of what is packed, decoded."""
    return with_copies(params, config, build_pieces(config, lambda spec: _plain(spec, Storage(dtype)), False))


def bytes_by_precision(params: Params) -> dict[str, int]:
    """Bytes of parameters, abstract or not, by what they are: "int4, groups of 64", "int8", "bfloat16", "norms", ..."""
    found: collections.Counter[str] = collections.Counter()
    for leaf in jax.tree.leaves(params, is_leaf=_is_codes):
        if isinstance(leaf, Packed):
            found[f"int{leaf.bits}, groups of {leaf.group_size}"] += num_bytes(leaf)
        elif isinstance(leaf, ScaledCodes):
            found[str(leaf.codes.dtype)] += num_bytes(leaf)
        elif isinstance(leaf, BlockCodes):
            found[f"{leaf.codes.dtype}, blocks of {leaf.block[0]} x {leaf.block[1]}"] += num_bytes(leaf)
        else:
            found[str(leaf.dtype) if len(leaf.shape) > 1 else "norms and biases"] += num_bytes(leaf)
    return dict(found.most_common())


def _is_codes(node: object) -> bool:
    return isinstance(node, (Packed, ScaledCodes, BlockCodes))


def num_bytes(tree: Any) -> int:
    """Bytes of all arrays of a pytree, abstract or not."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _by_plan(spec: ParamSpec, storage: Storage, target: Target) -> Any:
    """What `QuantizingReader` makes of a parameter."""
    plan = storage.plan
    assert plan is not None
    if spec.columns is None or not spec.is_linear:
        return _plain(spec, storage)
    parts = []
    for precision, run in plan.runs([name.removesuffix(".weight") for name in spec.sources]):
        shape = (sum(spec.rows[run]), spec.columns)
        if precision is None:
            parts.append(jax.ShapeDtypeStruct(shape, storage.dtype))
        else:
            parts.append(_on_device(codes_of(shape, precision), target))
    return parts[0] if len(parts) == 1 else StackedOutputs(tuple(parts))


@functools.lru_cache(maxsize=256)
def codes_of(shape: tuple[int, int], precision: Precision) -> Any:
    """What `quantize_weight` makes of a weight of that shape [out, in], as an outline."""
    weight, moments = jax.ShapeDtypeStruct(shape, jnp.float32), None
    if precision.method in CALIBRATED:
        moments = jax.ShapeDtypeStruct((shape[1], shape[1]), jnp.float32)
    return jax.eval_shape(lambda weight, moments: quantize_weight(weight, precision, moments), weight, moments)


def _as_stored(spec: ParamSpec, storage: Storage, target: Target, read_packed: ReadPacked | None) -> Any:
    """What `assemble` makes of a parameter."""
    if read_packed is not None and spec.is_linear and spec.columns is not None:
        packed = read_packed(spec.sources, spec.rows, spec.columns)
        if packed is not None:
            outline = jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype), packed)
            return _on_device(outline, target)
    return _plain(spec, storage)


def _as_kept(store: Store, storage: Storage, target: Target) -> Params:
    """What `Store.pieces` makes, or for packed=False the decoding of all that is packed."""
    if storage.packed is False:
        return build(store.config, lambda spec: _plain(spec, storage), False)

    def make(spec: ParamSpec, weight: Any) -> Any:
        if isinstance(weight, StackedOutputs):
            return StackedOutputs(tuple(make(spec, part) for part in weight.parts))
        if isinstance(weight, PermutedInputs):
            return PermutedInputs(make(spec, weight.weight), weight.permutation)
        if isinstance(weight, Packed):
            return _on_device(canonical_like(weight), target)
        if isinstance(weight, jax.ShapeDtypeStruct) and not spec.is_norm:
            return jax.ShapeDtypeStruct(weight.shape, storage.dtype)
        return weight

    pieces = store.manifest.weights
    return from_pieces(
        (piece, {field: make(spec, pieces[piece][field].weight) for field, spec in specs.items()})
        for piece, specs in store.specs()
    )


def _plain(spec: ParamSpec, storage: Storage) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(spec.shape, jnp.dtype(jnp.float32) if spec.is_norm else storage.dtype)


def _on_device(weight: Any, target: Target) -> Any:
    """`packed_weights.device_layout` of an outline."""
    if isinstance(weight, StackedOutputs):
        return StackedOutputs(tuple(_on_device(part, target) for part in weight.parts))
    if isinstance(weight, PermutedInputs):
        return PermutedInputs(_on_device(weight.weight, target), weight.permutation)
    return _laid_out(weight, target) if isinstance(weight, Packed) else weight


@functools.lru_cache(maxsize=256)
def _laid_out(weight: Any, target: Target) -> Any:
    """Codes in the order that the device's kernel reads; a model has few different ones."""
    return jax.eval_shape(target.kernel_layout, weight)


class _Unread(QuantizedTensor):
    """A tensor that is asked of what kind its codes are, and then handed over in no pieces."""

    def chunks(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        return iter(())


@dataclasses.dataclass(frozen=True)
class _Outline:
    """A checkpoint whose tensors are not read, for `PackedReader`."""

    checkpoint: QuantizedFolder | GGUFFile

    def code_bits(self, name: str) -> int | None:
        return self.checkpoint.code_bits(name)

    def quantized(self, name: str) -> QuantizedTensor | None:
        tensor = self.checkpoint.quantized(name)
        return None if tensor is None else _Unread(tensor.shape, tensor.rows, tensor.permutation, tensor.block_rows)

    def release(self, name: str) -> None:
        self.checkpoint.release(name)


@contextlib.contextmanager
def _packed_reader(
    path: pathlib.Path, config: ModelConfig, storage: Storage, target: Target
) -> Iterator[ReadPacked | None]:
    """The reader that `load` would have; None for plain tensors, and where quantised ones are decoded."""
    if path.is_dir() and not any(path.glob("*.safetensors")):
        yield None
        return
    with contextlib.closing(open_folder(path) if path.is_dir() else GGUFFile(path)) as checkpoint:
        match = match_tensors(config, checkpoint)
        if match.mismatch:
            raise CheckpointError(f"{path}: {match.mismatch}")
        wanted = wants_codes(storage.packed, storage.dtype, target.backend)
        if not wanted or not isinstance(checkpoint, QuantizedFolder | GGUFFile):
            yield None
            return
        outline = checkpoint.without_data() if isinstance(checkpoint, QuantizedFolder) else checkpoint
        # Rows that nobody wrote need not be put into the model's order of heads.
        sources = {name: dataclasses.replace(source, unpermute_heads=None) for name, source in match.sources.items()}
        yield PackedReader(
            _Outline(outline),
            sources,
            lambda name, out: None,
            np.dtype(storage.dtype),
            only_for_kernel=storage.packed is None,
            kernel_layout=target.kernel_layout,
        )


def largest(params: Params) -> tuple[int, int]:
    """Shape of the largest linear weight of the layers that is packed in groups; (0, 0) if there is none."""
    shapes = [
        leaf.shape
        for leaf in jax.tree.leaves(params.layers, is_leaf=lambda node: isinstance(node, Packed))
        if isinstance(leaf, Packed)
    ]
    return max(shapes, key=lambda shape: shape[0] * shape[1], default=(0, 0))


def loading_bytes(params: Params, storage: Storage, random: bool) -> int:
    """Bytes that loading takes on the device beside the weights: room to make the largest of them.

    Plain tensors go there as they are. Codes are put into the kernel's order, with three bytes a weight for a moment;
    quantising has the weight in float32, and codes and errors of its groups; random numbers are drawn in 32 bits.
    """
    if random:
        return 4 * max(leaf.size for leaf in jax.tree.leaves(params))
    shapes = [leaf.shape for leaf in jax.tree.leaves(params, is_leaf=_is_codes) if _is_codes(leaf)]
    weights = max((shape[0] * shape[1] for shape in shapes), default=0)
    return weights * (3 if storage.plan is None else 8)
