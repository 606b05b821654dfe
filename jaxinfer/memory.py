"""How much memory is left, on the device and on the host."""

import os
import pathlib
import sys

import jax


def free_device_bytes() -> int | None:
    """Bytes that the first device's allocator has left; None where it does not tell, as on a CPU."""
    stats = jax.local_devices()[0].memory_stats()
    if stats is None or "bytes_limit" not in stats:
        return None
    return stats["bytes_limit"] - stats["bytes_in_use"]


def free_host_bytes() -> int:
    """Memory that the operating system can still give; where it does not tell, all of it."""
    meminfo = pathlib.Path("/proc/meminfo")
    if meminfo.exists():  # MemAvailable counts cached files, which give way; sysconf's free pages do not
        fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        return int(fields["MemAvailable"].split()[0]) * 1024
    if hasattr(os, "sysconf"):  # macOS
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return sys.maxsize
