"""The NumPy twin of `pallas_kernels.int4_matmul.code_words.CodeWords`."""

import ml_dtypes
import numpy as np

BF16 = ml_dtypes.bfloat16


class SimulatedCodeWords:
    """Words are int32 arrays, one element a lane."""

    def masked(self, word: np.ndarray, mask: int, *, shift: int = 0, ones: int = 0) -> np.ndarray:
        bits = np.ascontiguousarray(word, np.int32).view(np.uint32) >> np.uint32(shift)
        return (bits & np.uint32(mask) | np.uint32(ones)).view(np.int32)

    def rounded(self, number: np.ndarray) -> np.ndarray:
        return np.rint(number).astype(np.int32)

    def pick_bytes(self, a: np.ndarray, b: np.ndarray, selector: np.ndarray | int) -> np.ndarray:
        """As the PTX manual has it, the mode that spreads a sign included."""
        both = np.concatenate([self._octets(a), self._octets(b)], 1)
        selectors = np.full(32, selector, np.int32) if isinstance(selector, int) else selector
        picked = np.empty((32, 4), np.uint8)
        for i in range(4):
            nibble = selectors >> (4 * i) & 15
            byte = both[np.arange(32), nibble & 7]
            picked[:, i] = np.where(nibble & 8, np.where(byte & 128, 255, 0), byte)
        return picked.view(np.int32)[:, 0]

    def multiply_pairs(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return self._pairs_word(self._numbers(a) * self._numbers(b))

    def subtract_pairs(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return self._pairs_word(self._numbers(a) - self._numbers(b))

    def pair(self, low: np.ndarray, high: np.ndarray) -> np.ndarray:
        return self._pairs_word(np.stack([low, high], -1))

    def reciprocal(self, x: np.ndarray) -> np.ndarray:
        return np.float32(1) / x

    def first_numbers(self, ref: np.ndarray, count: int) -> tuple[np.ndarray, ...]:
        assert ref.dtype == np.float32
        return tuple(np.full(32, number, np.float32) for number in ref[:count])

    @staticmethod
    def _numbers(word: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(word, np.int32).view(BF16).reshape(32, 2).astype(np.float64)

    @staticmethod
    def _pairs_word(numbers: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(numbers.astype(np.float32).astype(BF16)).view(np.int32).reshape(32)

    @staticmethod
    def _octets(word: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(word, np.int32).view(np.uint8).reshape(32, 4)
