"""
What the hardware can do: peak matrix rate by device name, memory used and free.

    torch.device -> peak_flops -> utilization

Figures are the vendors' dense ones (no sparsity), for the compute dtype that training uses.
"""

import ctypes
import re
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import torch

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4  # of glibc's mallopt


PEAK_FLOPS = {  # bf16 matrix FLOP/s by the vendors' data sheets, most specific name first
    "H100 NVL": 835e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H200": 989e12,  # GH200 too
    "B200": 2250e12,
    "B300": 2250e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "A10": 125e12,
    "RTX 5090": 209e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
}


def device_name(device: torch.device) -> str:
    """The accelerator's name as its driver gives it; `cpu` or `mps` elsewhere."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def peak_flops(name: str) -> float | None:
    """Peak matrix FLOP/s of a device by its name, None where it is not known (CPUs are not)."""
    return next((peak for part, peak in PEAK_FLOPS.items() if part in name), None)


def utilization(flops_per_second: float, device: torch.device, devices: int) -> float | None:
    """Share of the peak matrix rate that was used (MFU), or None where the peak is unknown."""
    peak = peak_flops(device_name(device))
    return flops_per_second / (peak * devices) if peak else None


def peak_memory_bytes(device: torch.device) -> int:
    """The most memory used so far: of the GPU by this process's tensors, else of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if psutil.LINUX:  # where getrusage would count what was before the exec too
        found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
        return int(found[1]) * 1024 if found else used_memory_bytes(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # of a Mac, in bytes


def used_memory_bytes(device: torch.device) -> int:
    """The memory in use now: of the GPU by this process's tensors, else of the process."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    return psutil.Process().memory_info().rss


def free_memory_bytes(device: torch.device) -> int:
    """
    Memory that can still be had: of the GPU, else of the host, within a container's limit.

    On a GPU this counts what this process has freed and its allocator keeps, on a host not.
    """
    if device.type == "cuda":
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + kept
    return min(psutil.virtual_memory().available, container_room())


def reset_peak_memory(device: torch.device) -> None:
    """Measure the peak of a GPU's memory from now on; that of a host process cannot be reset."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


@contextmanager
def limit_memory(device: torch.device, max_bytes: int) -> Iterator[None]:
    """While inside, tensors of this process take at most `max_bytes` of a GPU's memory."""
    if device.type != "cuda":
        yield
        return
    total = torch.cuda.mem_get_info(device)[1]
    torch.cuda.set_per_process_memory_fraction(min(1.0, max(0, max_bytes) / total), device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)


def container_room() -> int:
    """What a control group (version 2) still grants this process; no limit elsewhere."""
    files = (Path(f"/sys/fs/cgroup/memory.{name}") for name in ("max", "current", "stat"))
    try:
        limit, used, stat = (file.read_text() for file in files)
        room = int(limit) - int(used)
    except (OSError, ValueError):  # no such group, or its limit is "max"
        return sys.maxsize
    cached = re.search(r"^inactive_file (\d+)", stat, re.MULTILINE)  # is given back
    return max(0, room + (int(cached[1]) if cached else 0))


def keep_freed_memory() -> None:
    """
    Let this process keep what it frees, for its next allocations, where the C library is glibc.

    It hands large blocks back to the system otherwise, and every step of a training faults all its
    pages in anew: 48,000 faults a step at depth 4, a tenth of the time (measured, dev/LOG.md). For
    steps that are alike: their peak is up to 5% higher, where that of blocks of all sizes, as a
    server has, would be two thirds higher.
    """
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    if libc is not None and hasattr(libc, "gnu_get_libc_version"):
        libc.mallopt(M_MMAP_MAX, 0)  # no block of its own mapping, that would go when it is freed
        libc.mallopt(M_TRIM_THRESHOLD, -1)  # never
        libc.mallopt(M_TOP_PAD, 1 << 26)
