"""Programs of a model's weights, compiled with the options of XLA that suit the weights."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxinfer.decoder import LINEAR
from jaxinfer.layers.weights import BlockCodes, PermutedInputs, ScaledCodes, StackedOutputs
from pallas_kernels.int4_matmul import PackedInt4, PackedInt8

CUBLAS = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}
"""cuBLAS for every product, and the algorithm that cuBLAS itself finds best.

It adds the residual where the product is written; XLA's own GEMMs leave that to kernels of their own, two a layer. And
XLA chooses by timing, on a card where other programs compile at the same time: it takes half a minute for an engine's
programs, warns that it measured badly, and may choose other sums in the next process.
"""
FEW_ROWS = 32
"""Below it XLA's own GEMMs are faster: on an H200, decode steps of 16 rows by 3 to 6 %; of 64 rows cuBLAS is by 4 %."""

CODES = (PackedInt4, PackedInt8, PermutedInputs, StackedOutputs, ScaledCodes, BlockCodes)


class Program[**P, R]:
    """A jitted function whose first arguments are a model's `Params`, and maybe its draft's.

    It is for the outermost call: JAX takes no compiler options within another program. `rows` tells from the arguments
    how many rows products have at least; without it they have many.
    """

    def __init__(
        self,
        function: Callable[P, R],
        *,
        static_argnames: Sequence[str],
        donate_argnames: str | Sequence[str] = (),
        rows: Callable[..., int] | None = None,
    ):
        functools.update_wrapper(self, function)
        self._rows = rows
        options = {"static_argnames": static_argnames, "donate_argnames": donate_argnames}
        self._usual: Any = jax.jit(function, **options)
        self._by_cublas: Any = jax.jit(function, **options, compiler_options=CUBLAS)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self._for(args)(*args, **kwargs)

    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        """As `jax.jit`'s: arguments may be `jax.ShapeDtypeStruct`s."""
        return self._for(args).lower(*args, **kwargs)

    def trace(self, *args: Any, **kwargs: Any) -> jax.stages.Traced:
        return self._for(args).trace(*args, **kwargs)

    @property
    def num_compiled(self) -> int:
        """How many programs calls have made, or found on the disk. A call that adds one has cost the host some time."""
        return self._usual._cache_size() + self._by_cublas._cache_size()

    def clear_cache(self) -> None:
        self._usual.clear_cache()
        self._by_cublas.clear_cache()

    def _for(self, args: tuple[Any, ...]) -> Any:
        few = self._rows is not None and self._rows(*args) < FEW_ROWS
        # A draft's weights come behind the target's.
        usual = few or jax.default_backend() != "gpu" or any(decoded_by_xla(weights) for weights in args[:2])
        return self._usual if usual else self._by_cublas


def program(
    *,
    static_argnames: Sequence[str],
    donate_argnames: str | Sequence[str] = (),
    rows: Callable[..., int] | None = None,
) -> Callable[[Callable], Program]:
    """`Program` as a decorator."""
    return functools.partial(Program, static_argnames=static_argnames, donate_argnames=donate_argnames, rows=rows)


def decoded_by_xla(weights: Any) -> bool:
    """Whether XLA decodes weights on their way into products: only its own GEMMs take that in."""
    layers = getattr(weights, "layers", ())  # drafts may have none
    products = [layer.__dict__[name] for layer in layers for name in LINEAR]
    return any(decoded(weight) for weight in [*products, getattr(weights, "lm_head", None)] if type(weight) in CODES)


def decoded(weight: Any) -> bool:
    """`decoded_by_xla` of one weight of the `CODES`."""
    if isinstance(weight, StackedOutputs):
        return any(decoded(part) for part in weight.parts)
    if isinstance(weight, PermutedInputs):
        return decoded(weight.weight)
    if isinstance(weight, PackedInt4 | PackedInt8):
        return weight.layout == "canonical"  # the kernels have layouts of their own
    return isinstance(weight, ScaledCodes | BlockCodes)
