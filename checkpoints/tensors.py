"""What every checkpoint reader offers: a table of tensors and a way to read one of them."""

import dataclasses
from collections.abc import Mapping
from typing import Protocol

import numpy as np


@dataclasses.dataclass(frozen=True)
class TensorInfo:
    """A tensor in a file. `shape` is row-major, outermost first; `dtype` is the file format's own name (BF16, Q4_1)."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int


class Checkpoint(Protocol):
    """A checkpoint opened for reading. Tensors are read one at a time, so host memory holds what the caller keeps."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]: ...

    def read(self, name: str, rows: slice | None = None) -> np.ndarray:
        """Returns a fresh array of the tensor, or of a contiguous range of its first axis.

        Floating-point tensors keep their dtype (bfloat16 through `ml_dtypes`); block-quantised ones become float32.
        """
        ...

    def close(self) -> None: ...
