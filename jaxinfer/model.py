"""Model = config + params + tokenizer, and `load`, which makes one from any checkpoint jaxinfer reads."""

import contextlib
import dataclasses
import os
import pathlib
import reprlib
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from checkpoints.names import Mismatch
from checkpoints.progress import is_watched
from checkpoints.tensors import TensorInfo
from jaxinfer import tiers
from jaxinfer.checkpoint_weights import WeightsRequest, check_memory
from jaxinfer.compilation import enable_persistent_cache
from jaxinfer.config import ModelConfig
from jaxinfer.decoder import Params
from jaxinfer.device import start_device
from jaxinfer.layers.weights import precisions
from jaxinfer.memory import shown_bytes
from jaxinfer.params import from_pieces, linear_names, num_parameters, random_params, random_pieces
from jaxinfer.prefill_copy import announce, with_copies
from jaxinfer.quantization.plan import Plan, resolve
from jaxinfer.quantization.report import QuantizationReport
from jaxinfer.source import StoreSource, open_source
from jaxinfer.tiers import TieredKV
from jaxinfer.tokenization import Tokenizer


@dataclasses.dataclass(frozen=True, repr=False)
class Model:
    """A loaded model. `tokenizer` is None for a checkpoint that has none: token ids in, token ids out.

    `kv_dtype` is what its key-value caches hold, by default `dtype`, or how they are tiered.
    """

    config: ModelConfig
    params: Params
    tokenizer: Tokenizer | None
    dtype: jnp.dtype
    name: str
    kv_dtype: jnp.dtype | TieredKV | None = None
    quantization: QuantizationReport | None = None
    """What `jaxinfer.quantize` did, where it was calibrated."""
    prefill_params: Params | None = None
    """Weights for prompts that are not those of decoding (`load(prefill_dtype=...)`)."""

    @property
    def prompt_params(self) -> Params:
        """The weights that prompts are computed with."""
        return self.params if self.prefill_params is None else self.prefill_params

    @property
    def cache_dtype(self) -> jnp.dtype:
        """dtype of the key-value caches. ValueError if they are tiered, which is for generation alone."""
        if isinstance(self.kv_dtype, TieredKV):
            raise ValueError(
                f"{self.name}: only generate and stream work with a tiered cache, and those of an engine; for all else "
                "load the model with another kv_dtype, such as 'int8'"
            )
        return self.dtype if self.kv_dtype is None else self.kv_dtype

    @property
    def num_parameters(self) -> int:
        return num_parameters(self.config)

    def __repr__(self) -> str:
        """One line: a notebook cell that ends in a model must not print its weights."""
        # What both share is counted once.
        leaves = {id(leaf): leaf.nbytes for leaf in jax.tree.leaves((self.params, self.prefill_params))}
        size, kinds = shown_bytes(sum(leaves.values())), " and ".join(precisions(self.params))
        copy = "" if self.prefill_params is None else f", prompts {self.dtype}"
        cache = "" if self.kv_dtype in (None, self.dtype) else f", cache {self.kv_dtype}"
        return (
            f"Model({self.name!r}, {self.config.model_type}, {_shown_count(self.num_parameters)} parameters "
            f"in {size}, {kinds}{copy}{cache})"
        )


@dataclasses.dataclass(frozen=True, repr=False)
class Description:
    """What a checkpoint says of itself. `tensors` are those of its files, under their own names and types.

    `mismatch` is in what they and the configuration disagree, which `load` would refuse; None where there are none.
    """

    path: pathlib.Path
    config: ModelConfig
    tokenizer: Tokenizer | None
    tensors: Mapping[str, TensorInfo]
    mismatch: Mismatch | None

    def __repr__(self) -> str:
        """One line: a configuration and all tensors fill a screen, and are a field each."""
        kinds = " and ".join(sorted({tensor.dtype for tensor in self.tensors.values()}))
        size = shown_bytes(sum(tensor.nbytes for tensor in self.tensors.values()))
        files = f"{len(self.tensors)} tensors in {size}, {kinds}" if self.tensors else "no tensors"
        tokenizer = "no tokenizer" if self.tokenizer is None else f"{self.tokenizer.num_tokens:,} tokens"
        return (
            f"Description({str(self.path)!r}, {self.config.model_type}, "
            f"{_shown_count(num_parameters(self.config))} parameters in {len(self.config.layers)} layers, context "
            f"{self.config.max_position_embeddings:,}, {tokenizer}, {files}"
            f"{', which do not fit' if self.mismatch else ''})"
        )


def _shown_count(number: int) -> str:
    """Such as "1.24 billion", "135 million", or a small number in full."""
    for word, scale in (("billion", 10**9), ("million", 10**6)):
        if number >= scale:
            return f"{number / scale:,.4g} {word}"
    return f"{number:,}"


def check_loaded(model: object) -> None:
    """Raises ValueError for what is no loaded model: a name or a path, most likely."""
    if not isinstance(model, Model):
        what = f"jaxinfer.load({model!r})" if isinstance(model, str | os.PathLike) else "what jaxinfer.load returns"
        raise ValueError(f"model={reprlib.repr(model)} is no loaded model; give {what}")


def default_dtype() -> jnp.dtype:
    """bfloat16 on a GPU, float32 on a CPU."""
    return jnp.dtype(jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16)


def load(
    path_or_name: str | os.PathLike[str],
    *,
    dtype: jnp.dtype | type | str | None = None,
    quantize: Plan | str | os.PathLike[str] | None = None,
    packed: bool | None = None,
    kv_dtype: jnp.dtype | type | str | TieredKV | None = None,
    prefill_dtype: jnp.dtype | type | str | None = None,
    random_weights: int | None = None,
    progress: bool | None = None,
) -> Model:
    """Loads a model from a Hugging Face folder, a .gguf file, a store, or a name or repo id that `jaxinfer.pull` knows.

    `dtype` is that of the weights (default: bfloat16 on a GPU, float32 on a CPU). `random_weights=seed` reads only the
    configuration and makes random weights of that shape on the device, for benchmarks; what `quantize` packs, with
    random codes: of 8 bits, or of 4 with zero points in groups of 128. `progress` shows bars, by default on a terminal
    and in a notebook; in a log it writes a line now and then.

    `quantize` packs the projections of the layers, and the head where a rule names it, while they are read: a preset
    ("int4", "int4-int8-head", "int8", "fp8", "seed-mixed", ...), the path of a TOML file, or a `Plan`
    (`jaxinfer.quantization.plan`).

    Quantised checkpoints are read as they are: GGUF files, and folders in the formats AWQ, GPTQ, compressed-tensors,
    FP8, MXFP4, NVFP4, bitsandbytes and HQQ. `packed` says whether codes stay packed on the device (True) or are decoded
    to `dtype` when loading (False). By default they stay packed on a GPU in bfloat16, where a kernel reads them so;
    elsewhere each product would decode them again. FP8 codes with more scales than one an output are decoded in any
    case; packed=True says which were.

    What a store (`jaxinfer.quantize(..., out=...)`, `jaxinfer convert`) has packed stays so on any device, unless
    packed=False or `quantize` decodes it; what was laid out for another kernel is repacked, with a warning.

    `kv_dtype` is that of the key-value caches: by default `dtype`; "int8" or "float8_e4m3fn" take about half of
    bfloat16's room and time to read, "int4" about a quarter (`jaxinfer.kv_cache`). "tiered", or a `TieredKV`, keeps the
    newest tokens in `dtype`, older ones in int8, the oldest in int4 (`jaxinfer.tiers`).

    `prefill_dtype` keeps a second copy of what is packed, decoded to that dtype, which is `dtype` too: `generate` and
    `stream` compute prompts with it, as the original model would, and decoding reads the codes. What the copy takes is
    said in a warning before it is made. Scores and `logits` are those of the codes. An engine that computes generated
    tokens again, after a preemption, does so with the codes; in its prefix cache it keeps prompts alone.

    Raises CheckpointError or ValueError, naming the file and the remedy, before anything large is allocated.
    """
    if not isinstance(path_or_name, str | os.PathLike):
        raise ValueError(f"path_or_name={reprlib.repr(path_or_name)}; expected the path or the name of a model")
    if kv_dtype is not None:
        kv_dtype = tiers.resolve(kv_dtype)
    if quantize is not None and packed is not None:
        raise ValueError("packed keeps the codes of the checkpoint, quantize makes new ones: pass one of them")
    plan = None if quantize is None else resolve(quantize)
    if random_weights is not None and not (isinstance(random_weights, int) and 0 <= random_weights < 2**32):
        raise ValueError(f"random_weights={random_weights!r}: a seed is an integer from 0 to 2**32 - 1")
    enable_persistent_cache()
    start_device()
    weights_dtype = dtype_with_copy(dtype, prefill_dtype)
    progress = is_watched() if progress is None else progress
    name = os.fspath(path_or_name)
    with open_source(path_or_name, progress=progress) as source:
        config, tokenizer = source.config, source.tokenizer
        if random_weights is None:
            request = WeightsRequest(name, weights_dtype, packed, plan, progress)
            params = from_pieces(source.pieces(request))
            copies = None
            if prefill_dtype is not None and announce(params, config, weights_dtype, name):
                copies = with_copies(
                    params, config, source.pieces(dataclasses.replace(request, packed=False, plan=None))
                )
            report = source.report if isinstance(source, StoreSource) and plan is None else None
            return Model(config, params, tokenizer, weights_dtype, name, kv_dtype, report, copies)
    if plan is not None:
        plan.check(linear_names(config))
    check_memory(config, weights_dtype, name, plan=plan)
    params, copies = random_params(config, weights_dtype, random_weights, plan=plan), None
    if prefill_dtype is not None and announce(params, config, weights_dtype, name):
        copies = with_copies(params, config, random_pieces(config, weights_dtype, random_weights))
    return Model(config, params, tokenizer, weights_dtype, name, kv_dtype, prefill_params=copies)


def inspect(path_or_name: str | os.PathLike[str], *, progress: bool | None = None) -> Description:
    """Reads all of a checkpoint that `load` would, except the weights. Same names, same errors.

    A folder with a config.json and no weights will do; it has no tensors.
    """
    with open_source(path_or_name, progress=is_watched() if progress is None else progress) as source:
        tensors, mismatch = source.contents()
        return Description(source.path, source.config, source.tokenizer, tensors, mismatch)


def dtype_with_copy(dtype: jnp.dtype | type | str | None, prefill_dtype: jnp.dtype | type | str | None) -> jnp.dtype:
    """The dtype of weights where a copy for prompts may be asked for: both are the same, and one may be left out.

    Raises ValueError for two, as activations and cache are the same for prompts and decoding.
    """
    copied = None if prefill_dtype is None else weights_dtype_for(prefill_dtype, "prefill_dtype")
    found = copied if copied is not None and dtype is None else weights_dtype_for(dtype)
    if copied not in (None, found):
        raise ValueError(f"prefill_dtype={prefill_dtype!r} and dtype={dtype!r}: they have to agree; leave dtype out")
    return found


def weights_dtype_for(dtype: jnp.dtype | type | str | None, name: str = "dtype") -> jnp.dtype:
    """The dtype that `load` gives weights when asked for `dtype`. Raises ValueError for one they cannot have; `name` is
    what it calls the argument."""
    if dtype is None:
        return default_dtype()
    with contextlib.suppress(TypeError, ValueError):  # NumPy has both for text that is no type
        resolved = jnp.dtype(dtype)
        if resolved in (jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16)):
            return resolved
    raise ValueError(f"{name}={dtype!r}: weights can be float32, bfloat16 or float16")
