"""Reads at a position of a file, by several threads at once."""

import io
import os
import threading

_ONE_AT_A_TIME = threading.Lock()


def read_at(file: io.FileIO, buffer: memoryview, position: int) -> int:
    """Fills a buffer from `position` of an unbuffered file on, and returns how many bytes there were; 0 at its end.

    One call may return fewer than are there: at most 2 GiB on Linux. Systems without `preadv` (Windows) move the
    file's own position in place of it, one thread after the other.
    """
    if hasattr(os, "preadv"):
        return os.preadv(file.fileno(), [buffer], position)
    with _ONE_AT_A_TIME:
        file.seek(position)
        return file.readinto(buffer) or 0
