"""Compiled programs kept on disk, so that the second process that runs a model compiles nothing."""

import contextlib
import errno
import logging
import os
import pathlib
import shutil

import jax

from checkpoints.errors import CheckpointError
from checkpoints.pull import cache_folder
from jaxinfer.surrogates import not_unicode

log = logging.getLogger("jaxinfer")

SWITCH = "JAXINFER_COMPILATION_CACHE"
MAX_BYTES = 4 * 2**30
"""Room for several hundred programs of a large model. What is beyond it, the least recently used, is dropped when a
process turns the cache on: JAX's own bound (jax_compilation_cache_max_size) takes a lock and lists the folder for each
program, so that threads that compile side by side time out, with a warning for each program."""
LEAST_FREE_BYTES = 64 * 2**20
"""Of the disk, to begin with: JAX warns twice of each program that it cannot write."""


def enable_persistent_cache() -> pathlib.Path | None:
    """Turns on JAX's persistent compilation cache for this process and returns its folder; None if it stays off.

    `load` calls it. The folder is `xla` in jaxinfer's cache folder, brought down to `MAX_BYTES` here. What the user has
    configured stays: a folder of their own (JAX_COMPILATION_CACHE_DIR or jax_compilation_cache_dir), a bound
    (JAX_COMPILATION_CACHE_MAX_SIZE), a threshold, or no cache at all (JAX_ENABLE_COMPILATION_CACHE=false, or
    JAXINFER_COMPILATION_CACHE=off here). Raises ValueError for another value of JAXINFER_COMPILATION_CACHE than on or
    off.

    Programs already compiled in this process are not written, so it is best called before JAX is used.
    """
    switch = os.environ.get(SWITCH, "on").lower()
    if switch not in ("on", "off"):
        raise ValueError(f"{SWITCH}={switch!r}: expected on or off")
    if switch == "off" or not jax.config.jax_enable_compilation_cache:
        return None
    configured = jax.config.jax_compilation_cache_dir
    if configured is None:
        try:
            folder = cache_folder() / "xla"
        except CheckpointError as error:  # no home folder: a model on disk needs none
            log.warning("compiled programs are not kept: %s", error)
            return None
        reason = not_unicode(str(folder))
        if reason is not None:  # which XLA's options have to be
            log.warning("compiled programs are not kept: the path %r %s", str(folder), reason)
            return None
        try:
            # Others who can write here could have this process run their code, as JAX's documentation warns.
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if jax.config.jax_compilation_cache_max_size == -1:  # else JAX keeps to the user's bound
                _drop_oldest(folder, MAX_BYTES)
            if not os.access(folder, os.W_OK):
                reason = os.strerror(errno.EACCES)
            elif shutil.disk_usage(folder).free < LEAST_FREE_BYTES:
                reason = os.strerror(errno.ENOSPC)
        except OSError as error:
            reason = error.strerror
        if reason is not None:  # JAX would warn twice a program
            log.warning("compiled programs are not kept: %s: %s; JAXINFER_CACHE chooses another folder", folder, reason)
            return None
        jax.config.update("jax_compilation_cache_dir", str(folder))
        configured = str(folder)
    # By default JAX keeps no program that compiled in under a second: a process runs dozens of such small ones.
    option = "jax_persistent_cache_min_compile_time_secs"
    if option.upper() not in os.environ and getattr(jax.config, option) == 1.0:  # nobody has chosen another
        jax.config.update(option, 0.0)
    return pathlib.Path(configured)


def _drop_oldest(folder: pathlib.Path, most_bytes: int) -> None:
    """Removes the files in a folder that were used least recently, until the others have at most so many bytes.

    Another process may do the same, or read what goes: then it compiles.
    """
    found = []
    for file in os.scandir(folder):
        with contextlib.suppress(FileNotFoundError):
            if file.is_file(follow_symlinks=False):
                status = file.stat(follow_symlinks=False)
                found.append((max(status.st_atime, status.st_mtime), status.st_size, file.path))
    total = sum(size for _, size, _ in found)
    for _, size, path in sorted(found):
        if total <= most_bytes:
            return
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        total -= size
