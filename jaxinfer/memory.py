"""How much memory is left, on the device and on the host; and bytes in words."""

import ctypes
import os
import pathlib
import sys
from collections.abc import Iterator

import jax


def shown_bytes(num_bytes: int) -> str:
    """Decimal units, three digits."""
    for unit, scale in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.3g} {unit}" if num_bytes < 1000 * scale else f"{num_bytes / scale:,.0f} {unit}"
    return f"{num_bytes} bytes"


def shown_binary(num_bytes: int) -> str:
    """Binary units, in which memory comes, two decimals: "1.50 GiB", "12.00 KiB", "640 B"."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:,.2f} {unit}"
    return f"{num_bytes} B"


def free_device_bytes() -> int | None:
    """Bytes that arrays can still take on the first device; None where nothing tells: on a CPU, and on a device that is
    not of CUDA and whose allocator has no limit.

    JAX's usual allocator for GPUs knows. Those that take memory from the driver as they go (XLA_PYTHON_CLIENT_ALLOCATOR
    of cuda_async or platform) have no limit of their own: then it is what the driver has, and what they hold unused.
    """
    device = jax.local_devices()[0]
    stats = device.memory_stats() or {}
    if stats.get("bytes_limit"):
        return stats["bytes_limit"] - stats["bytes_in_use"]
    if device.platform == "cpu":
        return None
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    held = max(0, stats.get("pool_bytes", 0) - stats.get("bytes_in_use", 0))
    return _free_in_driver(driver, device.local_hardware_id or 0) + held


def _free_in_driver(driver: ctypes.CDLL, index: int) -> int:
    """Free bytes of a CUDA device (CUDA driver API, cuMemGetInfo)."""
    device, context = ctypes.c_int(), ctypes.c_void_p()
    free, total = ctypes.c_size_t(), ctypes.c_size_t()

    def call(function: str, *arguments: object) -> None:
        if code := getattr(driver, function)(*arguments):
            raise RuntimeError(f"{function} of the CUDA driver failed with error {code}: free memory is not known")

    call("cuDeviceGet", ctypes.byref(device), index)
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    try:
        call("cuCtxPushCurrent_v2", context)
        try:
            call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        finally:
            call("cuCtxPopCurrent_v2", ctypes.byref(context))
    finally:
        call("cuDevicePrimaryCtxRelease_v2", device)
    return free.value


def free_host_bytes(root: pathlib.Path = pathlib.Path("/")) -> int:
    """Memory that the operating system can still give; where it does not tell, all of it.

    In a container it is what the container's control groups allow, if that is less: the kernel ends a process that
    takes more, whatever the machine has. `root` is where `/proc` and `/sys` are.
    """
    meminfo = root / "proc/meminfo"
    if meminfo.exists():  # MemAvailable counts cached files, which give way; sysconf's free pages do not
        fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        return min(int(fields["MemAvailable"].split()[0]) * 1024, *_free_in_control_groups(root), sys.maxsize)
    if hasattr(os, "sysconf"):  # macOS
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return sys.maxsize


def _free_in_control_groups(root: pathlib.Path) -> Iterator[int]:
    """Bytes left in each memory control group around this process: its own, and those that contain it.

    https://docs.kernel.org/admin-guide/cgroup-v2.html and cgroup-v1/memory.html. A container often sees its own group
    as the root of the mount while `/proc/self/cgroup` has the host's path: so the root is asked as well.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:  # not Linux, or a kernel without control groups
        return
    for line in lines:  # hierarchy:controllers:path, without controllers in version 2
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            mount, limit, usage, cached = "sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            mount, limit, usage = "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            cached = "total_inactive_file"
        else:
            continue
        group = pathlib.PurePosixPath(path.removeprefix("/"))
        for level in (group, *group.parents):
            folder = root / mount / level
            allowed, used = _number(folder / limit), _number(folder / usage)
            if allowed is not None and used is not None:
                # Cached files count as used and give way, as they do in MemAvailable.
                yield max(0, allowed - max(0, used - _statistic(folder / "memory.stat", cached)))


def _number(path: pathlib.Path) -> int | None:
    """The number in a file; None for `max` and where there is no such file."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None


def _statistic(path: pathlib.Path, name: str) -> int:
    """A line of `memory.stat`, 0 where it is not there."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    return next((int(value) for key, value in map(str.split, lines) if key == name), 0)
