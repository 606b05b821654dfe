"""`jaxinfer.memory_plan`: what a model, its cache and its programs will take on a device, and what would fit."""

import dataclasses
import os
import typing
from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp

from jaxinfer import kv_cache, tiers
from jaxinfer.batch import PAGE_SIZE, Limits, bucket, pages_for, pool_pages
from jaxinfer.config import ModelConfig
from jaxinfer.decoder import LINEAR, Params
from jaxinfer.model import dtype_with_copy, inspect
from jaxinfer.planning.result import MemoryPlan, fits_in
from jaxinfer.planning.target import Target, target_for
from jaxinfer.planning.temporaries import Temporaries, Work, compiled, estimate
from jaxinfer.planning.weights import (
    Storage,
    abstract_params,
    abstract_random_params,
    bytes_by_precision,
    loading_bytes,
    num_bytes,
    prompt_params,
)
from jaxinfer.prefill_copy import copied_bytes
from jaxinfer.program import CODES, FEW_ROWS, decoded, decoded_by_xla
from jaxinfer.quantization.plan import Plan, resolve
from jaxinfer.speculative.ngram import MAX_DRAFTED
from jaxinfer.tier_pages import TierRules
from jaxinfer.tiered_batch import pools_for, tiered_limits
from jaxinfer.tiers import KVCache, TieredKV

MOST_ROWS = 1 << 16


def memory_plan(
    path_or_name: str | os.PathLike[str],
    *,
    context: int | None = None,
    batch: int = 1,
    gpu_memory: int | str | None = None,
    dtype: jnp.dtype | type | str | None = None,
    quantize: Plan | str | os.PathLike[str] | None = None,
    packed: bool | None = None,
    kv_dtype: jnp.dtype | type | str | TieredKV | None = None,
    prefill_dtype: jnp.dtype | type | str | None = None,
    draft: str | os.PathLike[str] | None = None,
    num_drafted: int = 4,
    random_weights: bool = False,
    compile: bool = False,
    progress: bool | None = None,
) -> MemoryPlan:
    """How much memory `load` and `generate` will take, without loading: from the configuration and the files' headers.

    `batch` sequences of `context` tokens each (the model's context by default), prompt and output together. The
    device is this process's, or with `gpu_memory` ("24GiB") a GPU that need not be here; of a GPU, arrays get the
    share that JAX takes. `dtype`, `quantize`, `packed`, `kv_dtype` and `prefill_dtype` are those of `load`;
    `random_weights` plans for the random codes that it makes for benchmarks. `draft` is a smaller model that drafts
    `num_drafted` tokens a step.

    Weights and cache are counted by the functions that allocate them, and exact; what `generate` rounds up is
    (`MemoryPlan.rounded`). Activations and other temporaries come from a formula (within a tenth or so, but for the
    decode step of a tiered cache, which takes more); `compile` asks XLA instead, which takes some seconds and is for
    this process's device.

    Raises ValueError or CheckpointError as `load` does, and for sizes that make no sense.
    """
    target = target_for(gpu_memory)
    if quantize is not None and packed is not None:
        raise ValueError("packed keeps the codes of the checkpoint, quantize makes new ones: pass one of them")
    if compile and not target.is_here:
        raise ValueError("compile asks the compiler for this process's device, which is not a GPU; leave it out")
    if dtype is None and prefill_dtype is None:
        dtype = target.default_dtype
    weights_dtype = dtype_with_copy(dtype, prefill_dtype)
    cache_dtype = weights_dtype if kv_dtype is None else tiers.resolve(kv_dtype)
    if isinstance(cache_dtype, TieredKV) and (compile or draft is not None):
        raise ValueError(f"kv_dtype={str(cache_dtype)!r}: tiers are planned without draft, and by the formula")
    found = inspect(path_or_name, progress=progress)
    config = found.config
    context = config.max_position_embeddings if context is None else context
    _check_sizes(config, context, batch)
    storage = Storage(weights_dtype, None if quantize is None else resolve(quantize), packed)
    if random_weights:
        params = abstract_random_params(config, storage, target)
    else:
        params = abstract_params(found.path, config, storage, target)
    weights, prompts = bytes_by_precision(params), params
    if prefill_dtype is not None:
        prompts = prompt_params(params, config, weights_dtype)
        weights[f"{weights_dtype}, a copy for prompts"] = copied_bytes(params, config, weights_dtype)
    models = [Loaded(config, params, weights_dtype, cache_dtype)]
    if draft is not None:
        if not _is_whole(num_drafted) or not 1 <= num_drafted <= MAX_DRAFTED:
            raise ValueError(f"num_drafted is {num_drafted!r}; a draft proposes 1 to {MAX_DRAFTED} tokens")
        other = inspect(draft, progress=progress)
        if other.config.num_tokens != config.num_tokens:
            raise ValueError(
                f"{os.fspath(draft)} has {other.config.num_tokens} tokens and {os.fspath(path_or_name)} "
                f"{config.num_tokens}; a draft needs the same ones"
            )
        outline = abstract_params(other.path, other.config, Storage(weights_dtype), target)
        models.append(Loaded(other.config, outline, weights_dtype, weights_dtype))
    spare = 0 if draft is None else num_drafted
    loading = max(loading_bytes(model.params, storage, random_weights) for model in models)

    draft_weights = {} if draft is None else bytes_by_precision(models[1].params)
    all_weights = sum(weights.values()) + sum(draft_weights.values())

    limits = Limits.default(target.backend)
    if isinstance(cache_dtype, TieredKV):
        limits = tiered_limits(limits)

    def temporaries(rows: int, tokens: int) -> Temporaries:
        return estimate(config, prompts, weights_dtype, Work.of(rows, tokens, limits), target.backend)

    def fits(rows: int, tokens: int) -> bool:
        cache = _cache_bytes(models, rows, tokens, spare, limits)
        return fits_in(target.capacity, all_weights, cache, all_weights + cache + temporaries(rows, tokens).most)

    work = Work.of(batch, context, limits)
    chosen = temporaries(batch, context)
    if compile and not isinstance(cache_dtype, TieredKV):
        chosen = compiled(config, params, work, cache_dtype, prompts=prompts)
    cache_bytes = _cache_bytes(models, batch, context, spare, limits)
    if isinstance(cache_dtype, TieredKV):
        per_token = -(-cache_bytes // (bucket(batch) * pages_for(context) * PAGE_SIZE))
    else:
        per_token = sum(
            kv_cache.bytes_per_token(model.config, model.cache_dtype)
            for model in models
            if not isinstance(model.cache_dtype, TieredKV)
        )
    return MemoryPlan(
        model=os.fspath(path_or_name),
        device=target.name,
        capacity=target.capacity,
        batch=batch,
        context=context,
        weights=weights,
        draft_weights=draft_weights,
        kv_dtype=str(cache_dtype),
        kv_bytes_per_token=per_token,
        kv_cache=cache_bytes,
        prefill=chosen.prefill,
        decode=chosen.decode,
        logits=chosen.logits,
        compiling=_compiling_bytes(config, params, prompts, weights_dtype, work, target),
        loading=loading,
        temporaries_from="compiler" if compile else "formula",
        largest_batch=_last(lambda rows: fits(rows, context), _doubled(1, MOST_ROWS)),
        longest_context=_last(lambda tokens: fits(batch, tokens), _contexts(config)),
    )


@dataclasses.dataclass(frozen=True)
class Loaded:
    """A model as it would be in memory."""

    config: ModelConfig
    params: Params
    dtype: jnp.dtype
    cache_dtype: jnp.dtype | TieredKV


def _is_whole(value: object) -> typing.TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_sizes(config: ModelConfig, context: object, batch: object) -> None:
    if not _is_whole(context) or not 1 <= context <= config.max_position_embeddings:
        raise ValueError(f"context={context!r}; expected 1 to {config.max_position_embeddings}, the model's own")
    if not _is_whole(batch) or not 1 <= batch <= MOST_ROWS:
        raise ValueError(f"batch={batch!r}; expected 1 to {MOST_ROWS}")


def _cache_bytes(models: Iterable[Loaded], rows: int, tokens: int, spare_tokens: int, limits: Limits) -> int:
    """Bytes of the pools that `generate` makes."""

    def allocate(model: Loaded) -> KVCache:
        if isinstance(model.cache_dtype, TieredKV):
            rules = TierRules.of(model.config, model.cache_dtype, PAGE_SIZE)
            return tiers.create(model.config, pools_for(rules, rows, tokens, limits), PAGE_SIZE, model.dtype)
        return kv_cache.create(model.config, pool_pages(rows, tokens, spare_tokens), PAGE_SIZE, model.cache_dtype)

    return sum(num_bytes(jax.eval_shape(lambda model=model: allocate(model))) for model in models)


def _compiling_bytes(
    config: ModelConfig, params: Params, prompts: Params, dtype: jnp.dtype, work: Work, target: Target
) -> int:
    """Operands and two results of the largest product for which XLA compares kernels on a GPU.

    It does in prefills of weights that it decodes itself, and in decode steps of few rows of all that are arrays;
    everything else is cuBLAS' or a kernel of ours (`jaxinfer.program`), and one row is a sum.
    """
    if target.backend == "cpu":
        return 0
    products = []
    if decoded_by_xla(prompts):
        products.append((work.prefill_rows * work.chunk, 2 * config.intermediate_size, config.hidden_size))
    if 1 < work.rows < FEW_ROWS:
        head = params.embed_tokens if params.lm_head is None else params.lm_head
        weights = [head, *(layer.__dict__[name] for layer in params.layers for name in LINEAR)]
        products += [(work.rows, *weight.shape) for weight in weights if type(weight) not in CODES or decoded(weight)]
    return max(((rows * (ins + 2 * out) + ins * out) * dtype.itemsize for rows, out, ins in products), default=0)


def _doubled(first: int, last: int) -> Iterable[int]:
    size = first
    while size <= last:
        yield size
        size *= 2


def _contexts(config: ModelConfig) -> Iterable[int]:
    """The longest context of each width of page table, ascending; the model's own ends them."""
    longest = config.max_position_embeddings
    for pages in _doubled(pages_for(1), pages_for(longest)):
        yield min(pages * PAGE_SIZE, longest)


def _last(fits: Callable[[int], bool], sizes: Iterable[int]) -> int | None:
    """The last of ascending sizes before one that does not fit."""
    last = None
    for size in sizes:
        if not fits(size):
            break
        last = size
    return last
