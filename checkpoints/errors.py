"""The one exception that reading a checkpoint raises for a file that is broken, incomplete or not supported."""

import os
import stat
from pathlib import Path


class CheckpointError(ValueError):
    """A checkpoint cannot be read. The message names the file, the thing in it, and what to do."""


def exists(path: Path) -> bool:
    """Whether there is something at a path. A link to nothing is a CheckpointError, not a file that is absent.

    A Hugging Face snapshot is a folder of links into `blobs/`: copied without those, every file of it, the optional
    ones as well, would count as absent.
    """
    if path.exists():
        return True
    if path.is_symlink():
        raise CheckpointError(
            f"{path} is a link to {os.readlink(path)}, which is not there; "
            "copy the snapshot with its files (cp -L), or pull it again"
        )
    return False


def check_regular(path: Path) -> None:
    """Raises CheckpointError for a pipe, a device, a socket or a folder: opening or reading one may never end.

    Also for a link to nothing. OSError where there is nothing at all, or nothing that may be looked at.
    """
    exists(path)
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise CheckpointError(f"{path} is not a regular file; give a file on a disk, or download it again")
