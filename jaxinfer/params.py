"""From canonical checkpoint tensors to `Params`: which tensors a config asks for, how they are joined, random ones."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.config import ModelConfig
from jaxinfer.decoder import LayerParams, Params
from jaxinfer.layers.weights import StackedOutputs
from jaxinfer.packed_runs import aligned_empty
from jaxinfer.packed_weights import DeviceWeight, HostWeight, device_layout, random_packed
from jaxinfer.quantization.plan import HEAD, Plan

type ReadPacked = Callable[[Sequence[str], Sequence[int], int], HostWeight | None]
"""Joins canonical tensors of so many rows and of so many inputs without decoding them; None where it cannot."""

type ReadInto = Callable[[str, np.ndarray], None]
"""Fills an array with the canonical tensor of that name, converting to the array's dtype."""

TOP, _LAYER = "top", "layer_"

type Piece = tuple[str, dict[str, DeviceWeight]]
"""A part of `Params` on its own: `TOP` and its fields outside the layers, or a layer's `piece_name` and its fields."""


@dataclasses.dataclass(frozen=True)
class ParamSpec:
    """One leaf of `Params`: the canonical tensors whose rows it joins, its shape, and whether it is a norm weight."""

    sources: tuple[str, ...]
    rows: tuple[int, ...]
    columns: int | None
    is_norm: bool = False
    is_linear: bool = False
    """A projection of a layer, or the head: it may be packed."""

    @property
    def shape(self) -> tuple[int, ...]:
        return (sum(self.rows),) if self.columns is None else (sum(self.rows), self.columns)


def layer_specs(config: ModelConfig, index: int) -> dict[str, ParamSpec]:
    """Fields of `LayerParams` that layer `index` has."""
    hidden, ff = config.hidden_size, config.intermediate_size
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim

    def spec(parts: dict[str, int], columns: int | None, suffix: str, is_norm: bool = False) -> ParamSpec:
        names = tuple(f"layers.{index}.{part}.{suffix}" for part in parts)
        return ParamSpec(names, tuple(parts.values()), columns, is_norm, is_linear=columns is not None)

    def norm(name: str, size: int = hidden) -> ParamSpec:
        return spec({name: size}, None, "weight", is_norm=True)

    qkv = {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}
    gate_up = {"gate_proj": ff, "up_proj": ff}
    specs = {
        "qkv": spec(qkv, hidden, "weight"),
        "o": spec({"o_proj": hidden}, q_size, "weight"),
        "gate_up": spec(gate_up, hidden, "weight"),
        "down": spec({"down_proj": hidden}, ff, "weight"),
    }
    if config.qkv_bias:
        specs["qkv_bias"] = spec(qkv, None, "bias")
    if config.output_bias:
        specs["o_bias"] = spec({"o_proj": hidden}, None, "bias")
    if config.mlp_bias:
        specs["gate_up_bias"] = spec(gate_up, None, "bias")
        specs["down_bias"] = spec({"down_proj": hidden}, None, "bias")
    if config.pre_norms:
        specs |= {"attn_norm": norm("attn_norm"), "mlp_norm": norm("mlp_norm")}
    if config.post_norms:
        specs |= {"attn_post_norm": norm("attn_post_norm"), "mlp_post_norm": norm("mlp_post_norm")}
    if config.qk_norm != "none":
        full = config.qk_norm == "full"
        specs["q_norm"] = norm("q_norm", q_size if full else config.head_dim)
        specs["k_norm"] = norm("k_norm", kv_size if full else config.head_dim)
    return specs


def top_specs(config: ModelConfig, *, own_head: bool = False) -> dict[str, ParamSpec]:
    """Fields of `Params` outside the layers; with `own_head` a tied head is a weight of its own, `lm_head.weight`."""
    vocab, hidden = config.vocab_size, config.hidden_size
    specs = {
        "embed_tokens": ParamSpec(("embed_tokens.weight",), (vocab,), hidden),
        "norm": ParamSpec(("norm.weight",), (hidden,), None, is_norm=True),
    }
    if own_head or not config.tie_word_embeddings:
        specs["lm_head"] = ParamSpec(("lm_head.weight",), (vocab,), hidden, is_linear=True)
    return specs


def _all_specs(config: ModelConfig, own_head: bool = False) -> Iterator[ParamSpec]:
    yield from top_specs(config, own_head=own_head).values()
    for index in range(config.num_layers):
        yield from layer_specs(config, index).values()


def canonical_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every canonical tensor a checkpoint of this config must hold, with its shape."""
    shapes = {}
    for spec in _all_specs(config):
        for name, rows in zip(spec.sources, spec.rows, strict=True):
            shapes[name] = (rows,) if spec.columns is None else (rows, spec.columns)
    return shapes


def linear_names(config: ModelConfig) -> list[str]:
    """The layers' projections and the head, tied or not, without ".weight": what may be packed."""
    layers = (spec for index in range(config.num_layers) for spec in layer_specs(config, index).values())
    names = [name.removesuffix(".weight") for spec in layers if spec.is_linear for name in spec.sources]
    return [*names, HEAD]


def num_parameters(config: ModelConfig) -> int:
    """Number of weights, a tied head counted once."""
    return sum(math.prod(spec.shape) for spec in _all_specs(config))


def least_bytes(config: ModelConfig, dtype: jnp.dtype | type, *, packed: bool = False, plan: Plan | None = None) -> int:
    """Bytes that the weights take at least, scales aside: by a plan, or where they may be `packed` with 4 bits."""

    def bits(spec: ParamSpec, name: str) -> int:
        precision = None if plan is None or not spec.is_linear else plan.precision(name.removesuffix(".weight"))
        if precision is not None:
            return max(4, precision.bits)
        return 32 if spec.is_norm else 4 if packed and spec.is_linear else 8 * jnp.dtype(dtype).itemsize

    total = 0
    for spec in _all_specs(config, own_head=has_own_head(plan)):
        for name, rows in zip(spec.sources, spec.rows, strict=True):
            total += bits(spec, name) * rows * (1 if spec.columns is None else spec.columns)
    return total // 8


def largest_piece(config: ModelConfig) -> int:
    """Number of weights of the largest piece of `Params`."""
    return max(sum(math.prod(spec.shape) for spec in specs.values()) for _, specs in piece_specs(config))


def has_own_head(plan: Plan | None) -> bool:
    """Whether the head is quantised, and so a weight of its own also where it is tied."""
    return plan is not None and plan.precision(HEAD) is not None


def piece_name(index: int) -> str:
    """What the piece of a layer is called: such that names sort as layers do."""
    return f"{_LAYER}{index:05d}"


def piece_owner(params: Params, name: str) -> Params | LayerParams:
    """What holds the fields of a piece."""
    return params if name == TOP else params.layers[int(name.removeprefix(_LAYER))]


def piece_specs(config: ModelConfig, *, own_head: bool = False) -> Iterator[tuple[str, dict[str, ParamSpec]]]:
    """The fields of each piece of `Params`: `TOP`, then the layers in order."""
    yield TOP, top_specs(config, own_head=own_head)
    for index in range(config.num_layers):
        yield piece_name(index), layer_specs(config, index)


def from_pieces(pieces: Iterable[Piece]) -> Params:
    """`Params` of all their pieces: layers in order, `TOP` before or after them."""
    layers, top = [], {}
    # Which kind of weight a field may hold is what `piece_specs` says, not the type of a piece.
    for name, fields in cast(Iterable[tuple[str, dict[str, Any]]], pieces):
        if name == TOP:
            top = fields
        else:
            layers.append(LayerParams(**fields))
    return Params(layers=layers, **top)


def build_pieces(config: ModelConfig, make: Callable[[ParamSpec], Any], own_head: bool) -> Iterator[Piece]:
    """What `make` gives for each leaf that the configuration asks for, a piece at a time."""
    for name, specs in piece_specs(config, own_head=own_head):
        yield name, {field: make(spec) for field, spec in specs.items()}


def build(config: ModelConfig, make: Callable[[ParamSpec], Any], own_head: bool) -> Params:
    """`Params` with what `make` gives for each leaf that the configuration asks for."""
    return from_pieces(build_pieces(config, make, own_head))


def assemble(
    config: ModelConfig,
    dtype: jnp.dtype | type,
    read_into: ReadInto,
    on_progress: Callable[[int], object] | None = None,
    read_packed: ReadPacked | None = None,
    *,
    own_head: bool = False,
) -> Iterator[Piece]:
    """Reads every tensor of `config` and puts it on the default device, joining q, k, v and gate, up: `from_pieces`
    makes `Params` of them, and who takes a piece at a time needs no room for the model.

    One array at a time is built on the host, in its final dtype, and handed over before the next is read: host memory
    never holds more than one array beyond what the device holds, and nothing beyond the model itself on a CPU, which
    takes the array over. `on_progress` is told the bytes of each finished array. `read_packed` is asked for linear
    weights first, and answers None for those that cannot stay packed. `own_head` reads `lm_head.weight` also where the
    head is tied.
    """

    def make(spec: ParamSpec) -> DeviceWeight:
        packed = None
        if read_packed is not None and spec.is_linear and spec.columns is not None:
            packed = read_packed(spec.sources, spec.rows, spec.columns)
        if packed is not None:
            weight = device_layout(packed)
            jax.block_until_ready(weight)
            if on_progress is not None:
                on_progress(math.prod(spec.shape) * np.dtype(dtype).itemsize)
            return weight
        host = aligned_empty(spec.shape, np.dtype(np.float32 if spec.is_norm else dtype))
        start = 0
        for name, rows in zip(spec.sources, spec.rows, strict=True):
            read_into(name, host[start : start + rows])
            start += rows
        if spec.is_norm and config.norm_offset:
            host += np.float32(config.norm_offset)
        array = jax.device_put(host)
        array.block_until_ready()
        if on_progress is not None:
            on_progress(host.nbytes)
        return array

    return build_pieces(config, make, own_head)


def random_params(config: ModelConfig, dtype: jnp.dtype | type, seed: int, *, plan: Plan | None = None) -> Params:
    """`random_pieces` as `Params`."""
    return from_pieces(random_pieces(config, dtype, seed, plan=plan))


def random_pieces(
    config: ModelConfig, dtype: jnp.dtype | type, seed: int, *, plan: Plan | None = None
) -> Iterator[Piece]:
    """Weights of the right shapes made on the device: uniform with standard deviation 0.02, norms 1.

    For benchmarks: no file is read and nothing passes through the host. What `plan` names is packed, with random codes
    (`random_packed`, which raises ValueError for precisions that it cannot make up); the rest has `dtype`.
    """
    key = jax.random.key(seed)
    programs: dict[tuple[int, ...], Callable] = {}

    def uniform(shape: tuple[int, ...]) -> Callable:
        if shape not in programs:
            # Drawn as 16-bit integers: 4 bytes of scratch a weight instead of the 12 that a float32 draw takes.
            def draw(key: jax.Array) -> jax.Array:
                bits = jax.random.bits(key, shape, jnp.uint16).astype(jnp.float32)
                return ((bits - 32767.5) * (0.02 * 3**0.5 / 32768)).astype(dtype)

            programs[shape] = jax.jit(draw)
        return programs[shape]

    counter = iter(range(1 << 30))

    pack = jax.jit(random_packed, static_argnames=("shape", "precision"))

    def make(spec: ParamSpec) -> DeviceWeight:
        if spec.is_norm:
            return jnp.ones(spec.shape, jnp.float32)
        own_key = jax.random.fold_in(key, next(counter))
        if plan is None or not spec.is_linear or spec.columns is None:
            return uniform(spec.shape)(own_key)
        runs = plan.runs([name.removesuffix(".weight") for name in spec.sources])
        parts = []
        for precision, run in runs:
            part_key = own_key if len(runs) == 1 else jax.random.fold_in(own_key, run.start)
            shape = (sum(spec.rows[run]), spec.columns)
            parts.append(uniform(shape)(part_key) if precision is None else pack(part_key, shape, precision))
        return parts[0] if len(parts) == 1 else StackedOutputs(tuple(parts))

    return build_pieces(config, make, has_own_head(plan))
