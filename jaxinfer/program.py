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

CODES = (PackedInt4, PackedInt8, PermutedInputs, StackedOutputs, ScaledCodes, BlockCodes)


class Program[**P, R]:
    """A jitted function whose first argument is a model's `Params` (or anything that holds weights).

    It is for the outermost call: JAX takes no compiler options within another program.
    """

    def __init__(
        self, function: Callable[P, R], *, static_argnames: Sequence[str], donate_argnames: str | Sequence[str] = ()
    ):
        functools.update_wrapper(self, function)
        options = {"static_argnames": static_argnames, "donate_argnames": donate_argnames}
        self._usual: Any = jax.jit(function, **options)
        self._by_cublas: Any = jax.jit(function, **options, compiler_options=CUBLAS)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self._for(args[0])(*args, **kwargs)

    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        """As `jax.jit`'s: arguments may be `jax.ShapeDtypeStruct`s."""
        return self._for(args[0]).lower(*args, **kwargs)

    def trace(self, *args: Any, **kwargs: Any) -> jax.stages.Traced:
        return self._for(args[0]).trace(*args, **kwargs)

    def clear_cache(self) -> None:
        self._usual.clear_cache()
        self._by_cublas.clear_cache()

    def _for(self, weights: Any) -> Any:
        return self._by_cublas if jax.default_backend() == "gpu" and not decoded_by_xla(weights) else self._usual


def program(
    *, static_argnames: Sequence[str], donate_argnames: str | Sequence[str] = ()
) -> Callable[[Callable], Program]:
    """`Program` as a decorator."""
    return functools.partial(Program, static_argnames=static_argnames, donate_argnames=donate_argnames)


def decoded_by_xla(weights: Any) -> bool:
    """Whether XLA decodes weights on their way into products: only its own GEMMs take that in."""
    layers = getattr(weights, "layers", ())  # drafts may have none
    products = [layer.__dict__[name] for layer in layers for name in LINEAR]
    return any(_decoded(weight) for weight in [*products, getattr(weights, "lm_head", None)] if type(weight) in CODES)


def _decoded(weight: Any) -> bool:
    if isinstance(weight, StackedOutputs):
        return any(_decoded(part) for part in weight.parts)
    if isinstance(weight, PermutedInputs):
        return _decoded(weight.weight)
    if isinstance(weight, PackedInt4 | PackedInt8):
        return weight.layout == "canonical"  # the kernels have layouts of their own
    return isinstance(weight, ScaledCodes | BlockCodes)
