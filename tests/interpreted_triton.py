"""Triton kernels without a GPU: run on NumPy arrays by Triton's own interpreter, or compiled for a card.

A kernel is interpreted or compiled according to the environment when triton is imported, so one process cannot do both:
the interpreter has its own.
"""

import concurrent.futures
import contextlib
import dataclasses
import functools
import importlib
import importlib.util
import multiprocessing
import os
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import triton_backend
from tests import simulated_ptx

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("jax_triton") is None, reason="needs the optional extra: pip install jaxinfer[triton]"
)


BLOCK_BYTES = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10}
"""Shared memory that a block can have, by compute capability."""


def compile_for(capability: int, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Makes jax-triton compile for a card that is not there, which needs the CUDA plugin of JAX but no GPU.

    The list that it gives grows by the shared memory of every kernel that is compiled.
    """
    if not any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13)):
        pytest.skip("needs the CUDA build of JAX: pip install jaxinfer[cuda13]")
    import jax_triton

    library = jax_triton.triton_lib.triton_kernel_call_lib
    kernel, shared_bytes = library.TritonKernel, []

    def record(name: str, num_warps: int, num_ctas: int, shared: int, *rest: Any) -> Any:
        shared_bytes.append(shared)
        return kernel(name, num_warps, num_ctas, shared, *rest)

    monkeypatch.setattr(library, "TritonKernel", record)
    call = functools.partial(jax_triton.triton_call, compute_capability=capability)
    monkeypatch.setattr(jax_triton, "triton_call", call)
    monkeypatch.setattr(triton_backend, "multiprocessors", lambda: 108)
    monkeypatch.setattr(triton_backend, "capability", lambda: f"{capability // 10}.{capability % 10}")
    jax.clear_caches()
    return shared_bytes


@contextlib.contextmanager
def interpreter() -> Iterator[Any]:
    """Gives a function that does what `triton_backend.call` does, outside of jit."""
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, context, initializer=_start) as worker:

        def call(
            kernel: Any,
            *inputs: jax.Array,
            out_type: list[Any],
            grid: tuple[int, ...],
            num_warps: int,
            num_stages: int,
            **constants: Any,
        ) -> list[jax.Array]:
            del num_warps, num_stages
            function = kernel.fn
            arrays = [_of_numpy(np.asarray(x)) for x in inputs]
            shapes = [(out.shape, np.dtype(out.dtype)) for out in out_type]
            job = worker.submit(_run, function.__module__, function.__name__, arrays, shapes, grid, constants)
            return [jnp.asarray(out) for out in job.result()]

        yield call


def _of_numpy(array: np.ndarray) -> np.ndarray:
    """NumPy has no float8: its bytes, which is how the kernels read it too."""
    return array.view(np.int8) if array.dtype.itemsize == 1 else array


def _start() -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    from triton.runtime import interpreter

    patch_tensor = interpreter._patch_lang_tensor

    def patch_lang_tensor(tensor: Any, scope: Any) -> None:
        """As the interpreter has it, but for NumPy from 2.5 on, where int() takes no array of one element."""
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    def create_dot(self: Any, a: Any, b: Any, d: Any, *_: Any) -> Any:
        """With operands as the numbers they are: the interpreter keeps bfloat16 as its bits, and multiplies those."""
        return interpreter.TensorHandle(_numbers(a.data) @ _numbers(b.data) + d.data, d.dtype.scalar)

    def create_inline_asm(self: Any, assembly: str, constraints: str, values: list, types: list, pure: bool, pack: int):
        """Each instance of the assembly has `pack` neighbouring elements of every argument, in 32-bit registers."""
        del self, pure
        shape, registers = values[0].data.shape, []
        for value in values:
            data = np.ascontiguousarray(value.data).reshape(-1, pack)
            registers += list((data if data.dtype.itemsize == 8 else data.view(np.uint32)).T)
        results = simulated_ptx.run(assembly, [np.ascontiguousarray(x) for x in registers], constraints.count("="))
        handles = []
        for register, kind in zip(results, types, strict=True):
            scalar = kind.scalar
            dtype = {"bf16": np.uint16, "fp16": np.float16, "fp32": np.float32, "int32": np.int32}[str(scalar)]
            handles.append(interpreter.TensorHandle(register.view(dtype).reshape(shape), scalar))
        return Results(handles)

    interpreter._patch_lang_tensor = patch_lang_tensor
    interpreter.InterpreterBuilder.create_dot = create_dot
    interpreter.InterpreterBuilder.create_inline_asm = create_inline_asm


@dataclasses.dataclass(frozen=True)
class Results:
    """What an operation with several results gives."""

    handles: list[Any]

    def get_result(self, index: int) -> Any:
        return self.handles[index]


def _numbers(data: np.ndarray) -> np.ndarray:
    return (data.astype(np.uint32) << 16).view(np.float32) if data.dtype == np.uint16 else data.astype(np.float32)


def _run(
    module: str,
    name: str,
    inputs: list[np.ndarray],
    shapes: list[tuple[tuple[int, ...], np.dtype]],
    grid: tuple[int, ...],
    constants: dict[str, Any],
) -> list[np.ndarray]:
    """Outputs start out as NaN, so that what a kernel leaves out, or reads before it writes, shows."""
    kernel = getattr(importlib.import_module(module), name)
    outputs = [np.full(shape, np.nan, dtype) for shape, dtype in shapes]
    known = {key: value for key, value in constants.items() if key in kernel.arg_names}
    kernel[grid](*[Tensor(x) for x in (*inputs, *outputs)], **known)
    return outputs


class Tensor:
    """As much of a torch tensor as the interpreter uses. It copies arguments to the host and back: here, nowhere."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = np.ascontiguousarray(array)
        assert array.size == 0 or np.shares_memory(array, self.array), "the kernel would write to a copy"
        self.dtype = array.dtype

    def data_ptr(self) -> int:
        return self.array.ctypes.data

    def untyped_storage(self) -> "Tensor":
        return self

    def cpu(self) -> "Tensor":
        return self

    def new_empty(self, size: int, device: str) -> "Tensor":
        del size, device
        return self

    def set_(self, *_: Any) -> None: ...

    def copy_(self, _: "Tensor") -> None: ...

    def storage_offset(self) -> int:
        return 0

    def size(self) -> tuple[int, ...]:
        return self.array.shape

    def stride(self) -> tuple[int, ...]:
        return self.array.strides
