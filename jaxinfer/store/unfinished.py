"""Folders in which stores are written before they are there: their names, and what is left of interrupted writes."""

import logging
import pathlib
import shutil

import filelock

log = logging.getLogger("jaxinfer")

UNFINISHED = ".unfinished-"
LOCK = "lock"
"""Held by the process that writes: where it is free, the process has gone."""


def interrupted(path: pathlib.Path) -> list[pathlib.Path]:
    """What writes of this store that never ended have left, or are still at."""
    if not path.name or not path.parent.is_dir():
        return []
    return sorted(
        folder for folder in path.parent.iterdir() if folder.name.startswith(path.name + UNFINISHED) and folder.is_dir()
    )


def remove_interrupted(path: pathlib.Path) -> None:
    """Removes what was left where the writing process has gone, with a warning."""
    for folder in interrupted(path):
        lock = filelock.FileLock(folder / LOCK)
        try:
            lock.acquire(timeout=0)
        except filelock.Timeout:  # somebody is writing
            continue
        lock.release()
        shutil.rmtree(folder, ignore_errors=True)
        log.warning("%s: an earlier write was interrupted; removed what it had left, %s", path, folder.name)
