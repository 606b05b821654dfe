"""Folders that are there as a whole or not at all: written beside their place, and renamed in one step."""

import contextlib
import errno
import logging
import os
import pathlib
import shutil
import tempfile
from collections.abc import Iterator

import filelock

from jaxinfer.surrogates import not_unicode

log = logging.getLogger("jaxinfer")

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""What writing alone fails with."""
UNFINISHED = ".unfinished-"
_LOCK = "lock"
"""Held by the process that writes: where it is free, the process has gone."""
_MARK = "jaxinfer-writes-here"
"""Is there while the lock is held: a folder without it is nobody's to remove, whatever its name."""


@contextlib.contextmanager
def written_whole(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """A folder to write into, which becomes `path` when the block ends.

    Where the block raises, nothing is left, and a warning says so; what a killed process leaves is removed, with a
    warning, when the same path is written again. Raises FileExistsError where there is something at `path`, and where
    another process is writing it. An OSError of a disk that is full names `path`, whichever file it was.
    """
    check_free(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        remove_interrupted(path)
        folder = pathlib.Path(tempfile.mkdtemp(prefix=path.name + UNFINISHED, dir=path.parent))
    except OSError as error:
        reason = "is a file" if path.parent.is_file() else f"cannot be written: {error.strerror}"
        raise type(error)(f"{path} cannot be made: {path.parent} {reason}; write to another path") from error
    folder.chmod(0o777 & ~_umask())  # mkdtemp makes it for this user only
    lock = filelock.FileLock(folder / _LOCK)
    lock.acquire()
    (folder / _MARK).touch()
    try:
        yield folder
        _check_absent(path)
        (folder / _MARK).unlink()
        lock.release()
        (folder / _LOCK).unlink(missing_ok=True)
        try:
            folder.rename(path)
        except OSError:  # two began at the same moment, and the other has ended first
            _check_absent(path)
            raise
    except OSError as error:
        if error.errno in FULL:
            error.filename = os.fspath(path)
        raise
    finally:
        if folder.exists():
            lock.release()
            shutil.rmtree(folder, ignore_errors=True)
            log.warning("%s: not written; what had been begun of it is removed", path)
    _synchronise(path.parent)


def check_free(path: pathlib.Path) -> None:
    """Raises FileExistsError unless a folder can be written to `path`: nothing is overwritten, nobody writes it now."""
    _check_absent(path)
    for folder in interrupted(path):
        if _is_held(folder):
            raise FileExistsError(
                f"{path} is being written by another process ({folder.name}); wait for it, or write to another path"
            )


def check_store_free(out: str | os.PathLike[str]) -> pathlib.Path:
    """The absolute path of a store to write, free as `check_free` has it. Raises ValueError for one that is not
    Unicode, also by the current folder: what writes the arrays, TensorStore, takes UTF-8 only."""
    given = pathlib.Path(out).expanduser()
    path = given.absolute()
    problem = not_unicode(str(path))
    if problem is not None:
        raise ValueError(f"no store can be written to {str(path)!r}: the path {problem}; write to another path")
    check_free(given)
    return path


def _check_absent(path: pathlib.Path) -> None:
    if os.path.lexists(path):  # a link to nothing too
        raise FileExistsError(f"{path} exists already; remove it, or write to another path")


def interrupted(path: pathlib.Path) -> list[pathlib.Path]:
    """What writes of this folder that never ended have left, or are still at."""
    if not path.name or not path.parent.is_dir():
        return []
    named = (folder for folder in path.parent.iterdir() if folder.name.startswith(path.name + UNFINISHED))
    return sorted(folder for folder in named if not folder.is_symlink() and _is_own(folder))


def _is_own(folder: pathlib.Path) -> bool:
    """Whether this module made it."""
    return all((folder / name).is_file() and not (folder / name).is_symlink() for name in (_MARK, _LOCK))


def remove_interrupted(path: pathlib.Path) -> None:
    """Removes what was left where the writing process has gone, with a warning."""
    for folder in interrupted(path):
        if not _is_held(folder):
            shutil.rmtree(folder, ignore_errors=True)
            log.warning("%s: an earlier write was interrupted; removed what it had left, %s", path, folder.name)


def _is_held(folder: pathlib.Path) -> bool:
    """Whether the process that writes it still lives."""
    lock = filelock.FileLock(folder / _LOCK)
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        return True
    lock.release()
    return False


def _synchronise(folder: pathlib.Path) -> None:
    """Waits until a folder's names are on the disk, where the system can tell."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _umask() -> int:
    """The process's mask of permissions, which can only be read by setting it."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
