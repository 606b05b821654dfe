"""Checksums of a store's arrays and files, cheap enough to be looked at whenever one is read.

A block of 4 MiB is taken for words of 8 bytes in rows of 509, and BLAKE2b is computed of the columns' sums modulo
2**64 and of the bytes that fill no row. A word that changed changes its column's sum, so that a flipped bit is always
found; with a row length that is prime, pages that changed places end in other columns. NumPy adds at the speed of
memory, without Python's lock; zlib.crc32 takes ten times as long, and what is as fast needs a package of its own.
"""

import hashlib

import numpy as np

BLOCK_BYTES = 2**22
_ROW = 509
_DIGEST_BYTES = 8


def block_digests(data: np.ndarray) -> bytes:
    """8 bytes for each block of data, uint8 [bytes] that begin with a block."""
    found = []
    for start in range(0, len(data), BLOCK_BYTES):
        block = data[start : start + BLOCK_BYTES]
        whole = len(block) // (8 * _ROW) * (8 * _ROW)
        sums = np.add.reduce(block[:whole].view("<u8").reshape(-1, _ROW), axis=0)
        digest = hashlib.blake2b(sums.astype("<u8").tobytes(), digest_size=_DIGEST_BYTES)
        digest.update(block[whole:])
        found.append(digest.digest())
    return b"".join(found)


def of_blocks(digests: bytes) -> str:
    """The checksum of data whose blocks, in order, have these digests: 16 hexadecimal digits."""
    return hashlib.blake2b(digests, digest_size=_DIGEST_BYTES).hexdigest()


def checksum(data: np.ndarray | bytes) -> str:
    """The checksum of an array's bytes in row-major order, or of a file's."""
    raw = np.frombuffer(data, np.uint8) if isinstance(data, bytes) else np.ascontiguousarray(data).reshape(-1)
    return of_blocks(block_digests(raw.view(np.uint8)))
