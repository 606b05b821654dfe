"""GGUF metadata keys of one architecture, checked as they are read."""

from collections.abc import Mapping
from typing import Any

import numpy as np


class GGUFKeys:
    """Reads `{arch}.{key}`, and raises ValueError, naming the key, for a value that is not as asked."""

    def __init__(self, metadata: Mapping[str, Any], arch: str):
        self.metadata = metadata
        self.arch = arch

    def get(self, key: str, default: Any = None) -> Any:
        return self.metadata.get(f"{self.arch}.{key}", default)

    def integer(self, key: str, default: int | None = None, minimum: int = 1) -> int:
        value = self._single(key, default)
        if type(value) is not int or not minimum <= value < 2**31:
            raise ValueError(f"{self.arch}.{key} is {value!r} in the GGUF metadata; expected an integer >= {minimum}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number >= 0; a float32 as its shortest decimal (1e-05, not 9.99999975e-06)."""
        value = self._single(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e38:
            raise ValueError(f"{self.arch}.{key} is {value!r} in the GGUF metadata; expected a number >= 0")
        single = np.float32(value)
        return float(str(single)) if float(single) == value else float(value)

    def _single(self, key: str, default: Any) -> Any:
        """A value, or the one value that an array repeats for every layer."""
        value = self.get(key, default)
        if value is None:
            raise ValueError(f"{self.arch}.{key} is missing from the GGUF metadata; convert the model again")
        if isinstance(value, list):
            if len(set(map(str, value))) != 1:
                raise ValueError(f"{self.arch}.{key} differs from layer to layer, which is not supported")
            return value[0]
        return value
