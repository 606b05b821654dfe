"""Model = config + params + tokenizer, and `load`, which makes one from any checkpoint jaxinfer reads."""

import contextlib
import dataclasses
import os
import pathlib
import sys
from collections.abc import Iterator, Mapping

import jax
import jax.numpy as jnp

from checkpoints.errors import CheckpointError
from checkpoints.gguf import GGUFFile, whole_models
from checkpoints.names import Mismatch
from checkpoints.pull import pull
from checkpoints.safetensors import SafetensorsFolder, read_json
from checkpoints.tensors import TensorInfo
from jaxinfer import kv_cache
from jaxinfer.checkpoint_weights import (
    WeightsRequest,
    check_memory,
    compare_folder,
    compare_gguf,
    read_gguf,
    read_safetensors,
)
from jaxinfer.compilation import enable_persistent_cache
from jaxinfer.config import ModelConfig
from jaxinfer.config_gguf import from_gguf
from jaxinfer.config_hf import from_hugging_face
from jaxinfer.decoder import Params
from jaxinfer.device import start_device
from jaxinfer.params import from_pieces, linear_names, num_parameters, random_params
from jaxinfer.quantization.plan import Plan, resolve
from jaxinfer.tokenization import Tokenizer, tokenizer_from_folder, tokenizer_from_gguf


@dataclasses.dataclass(frozen=True, repr=False)
class Model:
    """A loaded model. `tokenizer` is None for a checkpoint that has none: token ids in, token ids out.

    `kv_dtype` is what its key-value caches hold, by default `dtype`.
    """

    config: ModelConfig
    params: Params
    tokenizer: Tokenizer | None
    dtype: jnp.dtype
    name: str
    kv_dtype: jnp.dtype | None = None

    @property
    def cache_dtype(self) -> jnp.dtype:
        """dtype of the key-value caches."""
        return self.dtype if self.kv_dtype is None else self.kv_dtype

    @property
    def num_parameters(self) -> int:
        return num_parameters(self.config)

    def __repr__(self) -> str:
        """One line: a notebook cell that ends in a model must not print its weights."""
        millions = self.num_parameters / 1e6
        megabytes = sum(leaf.nbytes for leaf in jax.tree.leaves(self.params)) / 1e6
        cache = "" if self.cache_dtype == self.dtype else f", cache {self.cache_dtype}"
        return (
            f"Model({self.name!r}, {self.config.model_type}, {millions:,.1f} million parameters "
            f"in {megabytes:,.1f} MB, {self.dtype}{cache})"
        )


@dataclasses.dataclass(frozen=True)
class Description:
    """What a checkpoint says of itself. `tensors` are those of its files, under their own names and types.

    `mismatch` is in what they and the configuration disagree, which `load` would refuse; None where there are none.
    """

    path: pathlib.Path
    config: ModelConfig
    tokenizer: Tokenizer | None
    tensors: Mapping[str, TensorInfo]
    mismatch: Mismatch | None


def default_dtype() -> jnp.dtype:
    """bfloat16 on a GPU, float32 on a CPU."""
    return jnp.dtype(jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16)


def load(
    path_or_name: str | os.PathLike[str],
    *,
    dtype: jnp.dtype | type | str | None = None,
    quantize: Plan | str | os.PathLike[str] | None = None,
    packed: bool | None = None,
    kv_dtype: jnp.dtype | type | str | None = None,
    random_weights: int | None = None,
    progress: bool | None = None,
) -> Model:
    """Loads a model from a Hugging Face folder, a .gguf file, or a name or repo id that `jaxinfer.pull` knows.

    `dtype` is that of the weights (default: bfloat16 on a GPU, float32 on a CPU). `random_weights=seed` reads only the
    configuration and makes random weights of that shape on the device, for benchmarks; what `quantize` packs, with
    random codes: of 8 bits, or of 4 with zero points in groups of 128. `progress` shows bars; by default on a terminal
    and in a notebook.

    `quantize` packs the projections of the layers, and the head where a rule names it, while they are read: a preset
    ("int4", "int4-int8-head", "int8", "fp8", "seed-mixed", ...), the path of a TOML file, or a `Plan`
    (`jaxinfer.quantization.plan`).

    Quantised checkpoints are read as they are: GGUF files, and folders in the formats AWQ, GPTQ, compressed-tensors,
    FP8, MXFP4, NVFP4, bitsandbytes and HQQ. `packed` says whether codes stay packed on the device (True) or are decoded
    to `dtype` when loading (False). By default they stay packed on a GPU in bfloat16, where a kernel reads them so;
    elsewhere each product would decode them again. Codes of 8 bits can stay packed if there is one scale an output and
    no zero; the others are decoded in any case, and packed=True says which.

    `kv_dtype` is that of the key-value caches: by default `dtype`; "int8" or "float8_e4m3fn" take about half of
    bfloat16's room and time to read, "int4" about a quarter (`jaxinfer.kv_cache`).

    Raises CheckpointError or ValueError, naming the file and the remedy, before anything large is allocated.
    """
    if kv_dtype is not None:
        kv_cache.format_for(kv_dtype)
        kv_dtype = jnp.dtype(kv_dtype)
    if quantize is not None and packed is not None:
        raise ValueError("packed keeps the codes of the checkpoint, quantize makes new ones: pass one of them")
    plan = None if quantize is None else resolve(quantize)
    if random_weights is not None and not (isinstance(random_weights, int) and 0 <= random_weights < 2**32):
        raise ValueError(f"random_weights={random_weights!r}: a seed is an integer from 0 to 2**32 - 1")
    enable_persistent_cache()
    start_device()
    weights_dtype = weights_dtype_for(dtype)
    progress = is_watched() if progress is None else progress
    path = _resolve(path_or_name, progress)
    name = os.fspath(path_or_name)
    request = WeightsRequest(name, weights_dtype, packed, plan, progress)
    if path.is_dir():
        config, tokenizer = _read_folder(path)
        if random_weights is None:
            params = from_pieces(read_safetensors(path, config, request))
            return Model(config, params, tokenizer, weights_dtype, name, kv_dtype)
    else:
        with contextlib.closing(GGUFFile(path)) as checkpoint:
            config, tokenizer = _read_gguf(checkpoint)
            if random_weights is None:
                params = from_pieces(read_gguf(checkpoint, config, request))
                return Model(config, params, tokenizer, weights_dtype, name, kv_dtype)
    if plan is not None:
        plan.check(linear_names(config))
    check_memory(config, weights_dtype, name, plan=plan)
    params = random_params(config, weights_dtype, random_weights, plan=plan)
    return Model(config, params, tokenizer, weights_dtype, name, kv_dtype)


def inspect(path_or_name: str | os.PathLike[str], *, progress: bool | None = None) -> Description:
    """Reads all of a checkpoint that `load` would, except the weights. Same names, same errors.

    A folder with a config.json and no weights will do; it has no tensors.
    """
    path = _resolve(path_or_name, is_watched() if progress is None else progress)
    if not path.is_dir():
        with contextlib.closing(GGUFFile(path)) as checkpoint:
            config, tokenizer = _read_gguf(checkpoint)
            mismatch = compare_gguf(checkpoint, config)
            return Description(path, config, tokenizer, dict(checkpoint.tensors), mismatch)
    config, tokenizer = _read_folder(path)
    if not any(path.glob("*.safetensors")):
        return Description(path, config, tokenizer, {}, None)
    with contextlib.closing(SafetensorsFolder(path)) as weights:
        return Description(path, config, tokenizer, weights.tensors, compare_folder(path, config))


def weights_dtype_for(dtype: jnp.dtype | type | str | None) -> jnp.dtype:
    """The dtype that `load` gives weights when asked for `dtype`. Raises ValueError for one they cannot have."""
    if dtype is None:
        return default_dtype()
    with contextlib.suppress(TypeError):
        resolved = jnp.dtype(dtype)
        if resolved in (jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16)):
            return resolved
    raise ValueError(f"dtype={dtype!r}: weights can be float32, bfloat16 or float16")


def is_watched() -> bool:
    """Whether somebody sees a progress bar: in a log file it would be a line of carriage returns."""
    return sys.stderr.isatty() or "ipykernel" in sys.modules


def _resolve(path_or_name: str | os.PathLike[str], progress: bool) -> pathlib.Path:
    """The folder or .gguf file that was meant; names that are no path are pulled."""
    path = pathlib.Path(path_or_name)
    with contextlib.suppress(RuntimeError):  # ~name of nobody here
        path = path.expanduser()
    if not path.exists():
        text = os.fspath(path_or_name)
        is_file_name = path.suffix in (".gguf", ".safetensors", ".json") and ":" not in text
        looks_like_path = path.is_absolute() or text.startswith((".", "~")) or is_file_name or text.count("/") > 1
        if looks_like_path:
            raise FileNotFoundError(f"{text}: no such file or folder; a model to fetch is written name or owner/name")
        path = pull(text, progress=progress)
    if path.is_dir() and not (path / "config.json").exists():
        ggufs = whole_models(path.glob("*.gguf"))
        if len(ggufs) != 1:
            listed = ", ".join(file.name for file in ggufs) or "no .gguf file either"
            raise FileNotFoundError(
                f"{path}: no config.json in this folder ({listed}); "
                "give a Hugging Face model folder or the path of one .gguf file (of a split model, any part)"
            )
        path = ggufs[0]
    if path.is_file() and path.suffix != ".gguf":
        raise ValueError(f"{path}: not a .gguf file; give a .gguf file or the folder that holds config.json")
    return path


def _read_folder(path: pathlib.Path) -> tuple[ModelConfig, Tokenizer | None]:
    tokenizer = tokenizer_from_folder(path)
    files = read_json(path, "config.json"), read_json(path, "generation_config.json", optional=True)
    with _naming(path):
        config = from_hugging_face(
            *files,
            num_tokens=None if tokenizer is None else tokenizer.num_tokens,
            extra_eos=() if tokenizer is None else map(int, tokenizer.eos_token_ids),
        )
    return config, tokenizer


@contextlib.contextmanager
def _naming(path: pathlib.Path) -> Iterator[None]:
    """Adds the folder or the file to errors of those who were given its contents only."""
    try:
        yield
    except CheckpointError:  # names its file itself
        raise
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _read_gguf(checkpoint: GGUFFile) -> tuple[ModelConfig, Tokenizer | None]:
    with _naming(checkpoint.paths[0]):
        config = from_gguf(checkpoint.metadata, checkpoint.tensors, checkpoint.read)
        tokenizer = tokenizer_from_gguf(checkpoint.metadata)
    if tokenizer is not None:
        eos = tuple(sorted({*config.eos_token_ids, *map(int, tokenizer.eos_token_ids)}))
        num_tokens = min(config.vocab_size, tokenizer.num_tokens)
        config = dataclasses.replace(config, eos_token_ids=eos, num_tokens=num_tokens)
    return config, tokenizer
