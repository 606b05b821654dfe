"""What the programs need beside weights and cache while they run: by a formula, or asked of XLA's compiler.

The formula counts what is alive at the widest points of a layer, in numbers a token. It was fitted to
`memory_analysis()` of programs compiled for an H200.
"""

import dataclasses
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer import kv_cache, steps
from jaxinfer.batch import MIN_PREFILL, PAGE_SIZE, Limits, bucket, pages_for, plan_prefill
from jaxinfer.config import ModelConfig
from jaxinfer.decoder import LayerParams, Params
from jaxinfer.layers.attention import KEYS_AT_ONCE
from jaxinfer.layers.weights import BlockCodes, PermutedInputs, ScaledCodes
from jaxinfer.loop import DecodeState, decode_chunk
from jaxinfer.planning.weights import largest
from jaxinfer.program import decoded_by_xla
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.sampling_state import build_sampling_state
from pallas_kernels.int4_matmul import Packed
from pallas_kernels.int4_matmul.mlp import gated_shapes_refusal
from pallas_kernels.int4_matmul.wide_tuning import DEQUANTIZED_ROWS

SORTED_LOGITS = 5
"""Copies of a step's logits that drawing tokens with top-k or top-p takes (sorting keeps keys, ids and both sorted)."""

SAMPLED = SamplingParams(temperature=0.8, top_p=0.9)


@dataclasses.dataclass(frozen=True)
class Work:
    """The calls that a batch makes: `rows` prompts of `context` tokens, in calls as `generate` cuts them.

    `chunk` tokens of `prefill_rows` rows are one prefill call; where `continues`, prompts need more than one.
    """

    rows: int
    context: int
    prefill_rows: int
    chunk: int
    continues: bool
    decode_steps: int

    @classmethod
    def of(cls, rows: int, context: int, limits: Limits) -> "Work":
        most = min(rows, max(1, limits.prefill_tokens // MIN_PREFILL))  # no call has more rows
        group = plan_prefill([context] * most, limits)[0]
        return cls(
            bucket(rows), context, bucket(len(group.rows)), group.chunk, context > group.chunk, limits.decode_chunk
        )


@dataclasses.dataclass(frozen=True)
class Temporaries:
    """Bytes beside weights and cache: of the prefill and of the decode programs, and of the logits between them."""

    prefill: int
    decode: int
    logits: int

    @property
    def most(self) -> int:
        """At the worst moment. Logits of the prompts stay until the batch is done."""
        return self.logits + max(self.prefill, self.decode)


def estimate(config: ModelConfig, params: Params, dtype: jnp.dtype, work: Work, backend: str) -> Temporaries:
    """By the formula; `params` are the prompts'."""
    tokens, item = work.prefill_rows * work.chunk, dtype.itemsize
    hidden, ff = config.hidden_size, config.intermediate_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    if backend == "cpu":
        widths = [hidden + 3 * ff, 2 * hidden]
    else:
        by_cublas = not decoded_by_xla(params)
        widths = [width for layer in _kinds(params) for width in _layer_widths(config, layer, tokens, dtype, by_cublas)]
        if work.continues:
            widths.append(2 * hidden + 4 * q)
    most = tokens * item * max(widths)
    if backend == "cpu" or config.attention_softcap is not None or config.head_dim > 256:
        # Attention written out: scores in float32, and the weights made of them.
        keys = max(work.chunk, min(KEYS_AT_ONCE, work.context) if work.continues else 0)
        scores = tokens * config.num_heads * keys * (12 if backend == "cpu" else 4 + item)
        most = max(most, scores + tokens * item * 2 * hidden)
    out, inputs = largest(params)
    if out and backend == "cpu":
        most += out * inputs * item  # the weight that is decoded
    logits = 4 * config.vocab_size
    decode = SORTED_LOGITS * work.rows * logits
    if backend == "cpu":  # gathers a layer's cache
        decode += 2 * work.rows * pages_for(work.context) * PAGE_SIZE * kv * item
    between = work.rows + (work.prefill_rows if work.prefill_rows < work.rows or work.continues else 0)
    return Temporaries(most, decode, between * logits)


def _layer_widths(config: ModelConfig, layer: LayerParams, tokens: int, dtype: jnp.dtype, by_cublas: bool) -> list[int]:
    """What is alive at the widest points of a layer on a GPU, in numbers a token: in attention and in the MLP.

    `by_cublas`: the program leaves products to cuBLAS, which adds the residual where it writes one of plain weights.
    """
    hidden, ff = config.hidden_size, config.intermediate_size
    qkv = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    sums = 4 // dtype.itemsize  # of 8-bit codes with a scale an output: products are float32 before it
    rope = 2 * config.head_dim
    widths = [rope + 3 * hidden + (2 * sums if isinstance(layer.qkv, ScaledCodes) else 2) * qkv]
    if _is_gated_block(config, layer, tokens):
        # The weights of qkv and o, decoded for cuBLAS; too much where the card's kernel takes so many rows of them
        # (`wide_tuning.natural_taken`). What heads have norms for waits until the layer's end.
        decoded = qkv * hidden + config.num_heads * config.head_dim * hidden if tokens >= DEQUANTIZED_ROWS else 0
        normed = config.qk_norm != "none"
        waiting = qkv if normed else hidden if decoded else 0
        if normed:
            widths[0] += config.num_heads * config.head_dim + decoded // tokens
        return [*widths, rope + 2 * hidden + ff + waiting + decoded // tokens]
    if isinstance(layer.gate_up, ScaledCodes):
        return [*widths, rope + 3 * hidden + (1 + 2 * sums) * ff]
    widths.append(
        rope + (1 if by_cublas and isinstance(layer.down, jax.ShapeDtypeStruct | jax.Array) else 3) * hidden + 3 * ff
    )
    if isinstance(layer.gate_up, Packed | PermutedInputs | BlockCodes) and tokens >= DEQUANTIZED_ROWS:
        widths.append(rope + 3 * hidden + 2 * ff + 2 * ff * hidden // tokens)  # with the weight, decoded for cuBLAS
    return widths


def _is_gated_block(config: ModelConfig, layer: LayerParams, tokens: int) -> bool:
    """Whether kernels do gate, up and down as one, as `layers.mlp.packed_mlp` asks them on the device itself."""
    gate_up, down = layer.gate_up, layer.down
    if not isinstance(gate_up, Packed) or not isinstance(down, Packed) or config.activation != "silu":
        return False
    if layer.gate_up_bias is not None or layer.down_bias is not None:
        return False
    return gate_up.layout == down.layout == "mosaic" and gated_shapes_refusal(tokens, gate_up, down) is None


def compiled(
    config: ModelConfig,
    params: Params,
    work: Work,
    cache_dtype: jnp.dtype,
    *,
    prompts: Params | None = None,
    num_layers: int | None = None,
) -> Temporaries:
    """As XLA's compiler says, for this process's device, of programs with a few layers and no weights.

    Layers are unrolled and take turns in the same room (`decoder.MANY_TOKENS` sees to that), so the first layers of
    each kind say it all (`num_layers`: so many instead). A few seconds a program. `prompts` are the params of prefill,
    where they are others.
    """
    kept = representative_layers(config, params) if num_layers is None else list(range(num_layers))
    thin = dataclasses.replace(config, layers=tuple(config.layers[index] for index in kept))
    weights, prompt_weights = (
        dataclasses.replace(own, layers=[own.layers[index] for index in kept])
        for own in (params, params if prompts is None else prompts)
    )
    width = pages_for(work.context)
    pages = 1 + work.rows * width
    cache = jax.eval_shape(lambda: kv_cache.create(thin, pages, PAGE_SIZE, cache_dtype))
    prefill = 0
    for first in (True, False) if work.continues else (True,):
        analysis = _prefill(thin, prompt_weights, cache, work, first)
        prefill = max(prefill, analysis)
    decode = _decode(thin, weights, cache, work, width)
    logits = 4 * config.vocab_size
    between = work.rows + (work.prefill_rows if work.prefill_rows < work.rows or work.continues else 0)
    return Temporaries(prefill, decode, between * logits)


def representative_layers(config: ModelConfig, params: Params) -> list[int]:
    """Indices of the first two layers of each kind: same positions, window, and shapes and types of weights."""
    seen: dict[Any, int] = {}
    kept = []
    for index, layer in enumerate(config.layers):
        kind = (layer, _weights_kind(params.layers[index]))
        seen[kind] = seen.get(kind, 0) + 1
        if seen[kind] <= 2:
            kept.append(index)
    return kept


def _kinds(params: Params) -> Iterable[LayerParams]:
    """One layer of each kind of weights."""
    return {_weights_kind(layer): layer for layer in params.layers}.values()


def _weights_kind(layer: LayerParams) -> Hashable:
    leaves, structure = jax.tree.flatten(layer)
    return structure, tuple((leaf.shape, leaf.dtype) for leaf in leaves)


def _outline(shape: Sequence[int], dtype: Any = jnp.int32) -> Any:
    """An array that a program is compiled for; of any type for a checker, since `lower` takes it for the array."""
    return jax.ShapeDtypeStruct(tuple(shape), dtype)


def _int32(*shape: int) -> Any:
    return _outline(shape)


def _prefill(config: ModelConfig, params: Params, cache: Any, work: Work, first: bool) -> int:
    rows, width = work.prefill_rows, pages_for(work.chunk if first else work.context)
    lowered = steps.outermost_prefill.lower(
        params,
        cache,
        _int32(rows, work.chunk),
        _int32(rows),
        _int32(rows),
        _int32(rows, width),
        config=config,
        context_lengths=_int32(rows),
        from_empty=first,
    )
    return _temporary(lowered)


def _decode(config: ModelConfig, params: Params, cache: Any, work: Work, width: int) -> int:
    sampling, variant = build_sampling_state(
        [SAMPLED] * work.rows,
        [[0]] * work.rows,
        vocab_size=config.vocab_size,
        num_tokens=config.num_tokens,
        eos_token_ids=config.eos_token_ids,
        batch_size=work.rows,
        seeds=[0] * work.rows,
        sample_indices=[0] * work.rows,
    )
    rows = _int32(work.rows)
    flags = _outline((work.rows,), jnp.bool_)
    state = DecodeState(
        tokens=rows,
        positions=rows,
        num_generated=rows,
        max_tokens=rows,
        stop_ids=_int32(work.rows, 1),
        context_lengths=rows,
        done=flags,
        sampling=jax.tree.map(lambda leaf: _outline(leaf.shape, leaf.dtype), sampling),
    )
    lowered = decode_chunk.lower(
        params,
        cache,
        state,
        flags,
        _int32(work.rows, width),
        config=config,
        variant=variant,
        num_steps=work.decode_steps,
    )
    return _temporary(lowered)


def _temporary(lowered: Any) -> int:
    """Bytes that a program allocates for itself."""
    analysis = lowered.compile().memory_analysis()
    if analysis is None:
        raise ValueError("XLA does not say on this device what a program takes; leave compile out")
    return analysis.temp_size_in_bytes
