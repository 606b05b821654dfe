"""The one exception that reading a checkpoint raises for a file that is broken, incomplete or not supported."""

import os
import stat
from pathlib import Path


class CheckpointError(ValueError):
    """A checkpoint cannot be read. The message names the file, the thing in it, and what to do."""


def check_regular(path: Path) -> None:
    """Raises CheckpointError for a pipe, a device, a socket or a folder: opening or reading one may never end.

    OSError where there is nothing at all, or nothing that may be looked at.
    """
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise CheckpointError(f"{path} is not a regular file; give a file on a disk, or download it again")
