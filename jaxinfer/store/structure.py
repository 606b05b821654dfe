"""What a weight is made of: its arrays and their names on disk, and its description in JSON."""

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from checkpoints.errors import CheckpointError
from jaxinfer.layers.weights import BlockCodes, PermutedInputs, ScaledCodes, StackedOutputs
from jaxinfer.params import ParamSpec
from jaxinfer.store.layouts import LAYOUT_VERSIONS, check_known, to_layout, unpacked
from pallas_kernels.int4_matmul import Packed, PackedInt4, PackedInt8

CODES = (PackedInt4, PackedInt8)
KINDS: Mapping[str, type] = {
    kind.__name__: kind for kind in (*CODES, PermutedInputs, StackedOutputs, ScaledCodes, BlockCodes)
}
"""What a weight may be beside an array. A store names them; it cannot name anything else."""
LATER_FIELDS = {"whole": False}
"""Fields that earlier versions did not write, and what they meant."""

DTYPES: Mapping[str, jnp.dtype] = {
    str(jnp.dtype(dtype)): jnp.dtype(dtype)
    for dtype in (
        jnp.float32, jnp.bfloat16, jnp.float16, jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.int8, jnp.uint8, jnp.int16,
        jnp.int32,
    )
}  # fmt: skip
FLOATS = ("float32", "bfloat16", "float16")
FLOAT8 = ("float8_e4m3fn", "float8_e5m2")

MAX_SIZE = 2**40


def named_arrays(weight: Any, name: str) -> Iterator[tuple[str, Any]]:
    """The arrays of a weight, abstract or not, in the order of its leaves: `qkv.codes`, `qkv.parts.0.scales`, ..."""
    if weight is None:
        return
    if isinstance(weight, tuple):
        for index, part in enumerate(weight):
            yield from named_arrays(part, f"{name}.{index}")
    elif type(weight).__name__ in KINDS:
        for field in dataclasses.fields(weight):
            if not field.metadata.get("static"):
                yield from named_arrays(getattr(weight, field.name), f"{name}.{field.name}")
    else:
        yield name, weight


def describe(weight: Any) -> Any:
    """A weight in JSON: `{"dtype": ..., "shape": ...}` for an array, `{"kind": ..., its fields}` for the rest."""
    if weight is None:
        return None
    if isinstance(weight, tuple):
        return [describe(part) for part in weight]
    if type(weight).__name__ not in KINDS:
        return {"dtype": str(weight.dtype), "shape": list(weight.shape)}
    described: dict[str, Any] = {"kind": type(weight).__name__}
    for field in dataclasses.fields(weight):
        value = getattr(weight, field.name)
        is_static = field.metadata.get("static")
        described[field.name] = (list(value) if isinstance(value, tuple) else value) if is_static else describe(value)
    if isinstance(weight, Packed):
        described["layout_version"] = LAYOUT_VERSIONS[weight.layout]
    return described


@dataclasses.dataclass(frozen=True)
class Described:
    """A weight that a store describes: abstract, and the versions of the layouts of its codes."""

    weight: Any
    versions: Mapping[str, int]

    def version_of(self, weight: Packed) -> int:
        """The version of the layout of a part of it."""
        return self.versions[weight.layout]


def parse(description: Any, spec: ParamSpec, where: str) -> Described:
    """The abstract weight of a description, checked to be one of the shape that `spec` asks for.

    Raises CheckpointError naming `where` for anything that no `describe` has written.
    """
    weight, versions = _abstract(description, where)
    _check(weight, spec, versions, where)
    return Described(weight, versions)


def _abstract(description: Any, where: str) -> tuple[Any, dict[str, int]]:
    """The weight and the versions of the layouts in it."""
    if not isinstance(description, Mapping):
        raise _damaged(where, "a weight is not an object")
    if "kind" not in description:
        return _array(description, where), {}
    kind = KINDS.get(str(description["kind"]))
    if kind is None:
        raise CheckpointError(
            f"{where} is a {str(description['kind'])[:40]!r}, which this version of jaxinfer does not know; "
            "update jaxinfer, or write the store again"
        )
    fields = {field.name: field for field in dataclasses.fields(kind)}
    expected = {"kind", *fields, *(("layout_version",) if kind in CODES else ())}
    # Stores written before a field was there do not have it.
    if set(description) | (expected & set(LATER_FIELDS)) != expected:
        raise _damaged(where, f"{kind.__name__} has other fields than {', '.join(sorted(expected))}")
    values: dict[str, Any] = {}
    versions: dict[str, int] = {}
    for name, field in fields.items():
        value = description[name] if name in description else LATER_FIELDS[name]
        if field.metadata.get("static"):
            values[name] = tuple(value) if isinstance(value, list) else value
        elif isinstance(value, list):
            parts = [_abstract(part, where) for part in value[:64]]
            values[name] = tuple(part for part, _ in parts)
            for _, found in parts:
                versions |= found
        elif value is None:
            values[name] = None
        else:
            values[name], found = _abstract(value, where)
            versions |= found
    if kind in CODES:
        layout, version = values["layout"], description["layout_version"]
        if not isinstance(layout, str) or layout not in LAYOUT_VERSIONS or type(version) is not int:
            raise _damaged(where, f"there is no layout {str(layout)[:40]!r}")
        versions[str(layout)] = version
    return kind(**values), versions


def _array(description: Mapping[str, Any], where: str) -> jax.ShapeDtypeStruct:
    dtype, shape = description.get("dtype"), description.get("shape")
    sizes: list[Any] = shape if isinstance(shape, list) and len(shape) <= 4 else [0]
    if set(description) != {"dtype", "shape"} or not isinstance(dtype, str) or dtype not in DTYPES:
        raise _damaged(where, "an array has no dtype of a weight")
    if not all(type(size) is int and 0 < size <= MAX_SIZE for size in sizes):
        raise _damaged(where, "an array has no shape of a weight")
    return jax.ShapeDtypeStruct(tuple(sizes), DTYPES[dtype])


def _check(weight: Any, spec: ParamSpec, versions: Mapping[str, int], where: str) -> None:
    """Raises CheckpointError unless a weight's arrays fit each other and the configuration."""
    if isinstance(weight, jax.ShapeDtypeStruct):
        allowed = ("float32",) if spec.is_norm else FLOATS
        if weight.shape != spec.shape or str(weight.dtype) not in allowed:
            raise _misfit(where, f"{weight.dtype} {list(weight.shape)}", f"{allowed[-1]} {list(spec.shape)}")
        return
    if not spec.is_linear:
        raise _damaged(where, "only linear weights are packed")
    parts = weight.parts if isinstance(weight, StackedOutputs) else (weight,)
    if not isinstance(parts, tuple) or not parts:
        raise _damaged(where, "a weight has no parts")
    rows, columns = 0, spec.shape[1]
    bounds = {0}
    for part in parts:
        shape = _check_part(part, versions, where)
        if shape[1] != columns:
            raise _misfit(where, f"{shape[1]} inputs", f"{columns}")
        rows += shape[0]
        bounds.add(rows)
    starts = {sum(spec.rows[:index]) for index in range(len(spec.rows) + 1)}
    if rows != spec.shape[0] or not bounds <= starts:
        raise _misfit(where, f"{rows} outputs in {len(parts)} parts", f"{spec.shape[0]} of {len(spec.rows)} tensors")


def _check_part(part: Any, versions: Mapping[str, int], where: str) -> tuple[int, int]:
    """The shape of one kind of codes, or of an array, whose arrays fit each other."""
    match part:
        case jax.ShapeDtypeStruct(shape=(out, inputs)) if str(part.dtype) in FLOATS:
            return out, inputs
        case ScaledCodes(codes=jax.ShapeDtypeStruct(shape=(out, inputs)), scales=jax.ShapeDtypeStruct()):
            is_code = str(part.codes.dtype) in ("int8", *FLOAT8)
            if is_code and part.scales.shape == (out,) and part.scales.dtype == jnp.float32:
                return out, inputs
        case BlockCodes(codes=jax.ShapeDtypeStruct(shape=(out, inputs)), scales=jax.ShapeDtypeStruct(), block=(m, n)):
            is_block = type(m) is int and type(n) is int and min(m, n) > 0 and str(part.codes.dtype) in FLOAT8
            if is_block and part.scales.dtype == jnp.float32 and part.scales.shape == (-(-out // m), -(-inputs // n)):
                return out, inputs
        case PermutedInputs(weight=PackedInt4() | PackedInt8(), permutation=jax.ShapeDtypeStruct()):
            shape = _check_part(part.weight, versions, where)
            if part.permutation.shape == (shape[1],) and part.permutation.dtype == jnp.int32:
                return shape
        case PackedInt4() | PackedInt8() if all(_is_array(array) for array in (part.codes, part.scales)):
            _check_packed(part, versions[part.layout], where)
            return part.shape
    raise _damaged(where, f"the arrays of {type(part).__name__} do not fit each other")


def _is_array(array: Any) -> bool:
    return isinstance(array, jax.ShapeDtypeStruct)


def _check_packed(weight: Packed, version: int, where: str) -> None:
    shape, group = weight.shape, weight.group_size
    sound = isinstance(shape, tuple) and len(shape) == 2 and all(type(n) is int and 0 < n <= MAX_SIZE for n in shape)
    if not sound or type(group) is not int or not 0 < group <= shape[1]:
        raise _damaged(where, "codes have no shape or no group size")
    offsets, book = weight.offsets, weight.book
    if type(weight.whole) is not bool:
        raise _damaged(where, "a code book is neither whole nor not")
    if not all(array is None or _is_array(array) for array in (weight.codes, weight.scales, offsets, book)):
        raise _damaged(where, "codes, scales, offsets or book are no arrays")
    if str(weight.scales.dtype) not in FLOATS or (offsets is not None and book is not None):
        raise _damaged(where, "codes have no scales, or offsets and a book")
    if offsets is not None and str(offsets.dtype) not in (*FLOATS, "uint8"):
        raise _damaged(where, f"offsets are {offsets.dtype}")
    if book is not None and (book.shape != (16,) or str(book.dtype) not in FLOATS):
        raise _damaged(where, f"a code book is {book.dtype} {list(book.shape)}")
    check_known(weight.layout, version, where)
    canonical = canonical_like(weight)
    if version == LAYOUT_VERSIONS[weight.layout]:
        if _expected(canonical, weight.layout) != weight:
            raise _damaged(where, f"the arrays of layout {weight.layout} do not fit {list(shape)}")
    elif jax.eval_shape(lambda w: unpacked(w, version), weight) != canonical:
        raise _damaged(where, f"the arrays of layout {weight.layout} do not fit {list(shape)}")


def canonical_like(weight: Packed) -> Packed:
    """The abstract canonical weight of the same shape and kind; of a code book too the shape alone, to be hashed."""
    weight = jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype), weight)
    out, inputs = weight.shape
    groups = (out, weight.num_groups)
    return dataclasses.replace(
        weight,
        codes=jax.ShapeDtypeStruct((out, -(-inputs * weight.bits // 8)), jnp.dtype(jnp.uint8)),
        scales=jax.ShapeDtypeStruct(groups, weight.scales.dtype),
        offsets=None if weight.offsets is None else jax.ShapeDtypeStruct(groups, weight.offsets.dtype),
        layout="canonical",
    )


@functools.lru_cache(maxsize=256)
def _expected(canonical: Packed, layout: str) -> Packed:
    """What a canonical weight becomes in a layout; a model has few different ones."""
    return jax.eval_shape(lambda weight: to_layout(weight, layout), canonical)


def _damaged(where: str, what: str) -> CheckpointError:
    return CheckpointError(f"{where}: {what}; the store is damaged: write it again")


def _misfit(where: str, found: str, expected: str) -> CheckpointError:
    return CheckpointError(
        f"{where} has {found}, the configuration asks for {expected}; the store is damaged: write it again"
    )
