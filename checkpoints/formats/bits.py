"""Fields of a few bits out of the words that formats pack them in."""

import numpy as np


def fields(words: np.ndarray, bits: int) -> np.ndarray:
    """Takes a little-endian stream of fields apart: integers [..., n] -> uint8 [..., n * word bits // bits].

    The words of the last axis are one stream, lowest bits first; where `bits` does not divide a word (3, 5, 6, 7),
    fields straddle words. `bits` is 1 to 8.
    """
    stream = np.ascontiguousarray(words).view(np.uint8)
    if bits == 8:
        return stream
    if 8 % bits == 0:
        count = 8 // bits
        out = np.empty((*stream.shape[:-1], stream.shape[-1] * count), np.uint8)
        for i in range(count):  # with the fields as a last axis it takes three times as long
            np.bitwise_and(stream >> np.uint8(bits * i), np.uint8(2**bits - 1), out=out[..., i::count])
        return out
    single = np.unpackbits(stream, axis=-1, bitorder="little")
    count = single.shape[-1] // bits
    single = single[..., : count * bits].reshape(*stream.shape[:-1], count, bits)
    weights = np.left_shift(np.uint8(1), np.arange(bits, dtype=np.uint8))
    return (single * weights).sum(axis=-1, dtype=np.uint8)


def padded_fields(words: np.ndarray, bits: int) -> np.ndarray:
    """The same where every 32-bit word holds 32 // bits whole fields, its highest bits left empty."""
    shifts = np.arange(32 // bits, dtype=np.uint32) * np.uint32(bits)
    parts = (np.ascontiguousarray(words).view(np.uint32)[..., None] >> shifts) & np.uint32(2**bits - 1)
    return parts.astype(np.uint8).reshape(*words.shape[:-1], -1)
