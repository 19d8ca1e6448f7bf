"""
What the hardware could do at best: peak matrix rate and memory bandwidth by device name.

    torch.device -> Peak(flops, bytes per second) -> utilisation

Figures are the vendors' dense ones (no sparsity), for the compute dtype that training uses.
"""

import ctypes
import re
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import psutil
import torch

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4  # of glibc's mallopt


class Peak(NamedTuple):
    """Best case of one device: bf16 matrix FLOP/s, and bytes/s from its memory."""

    flops: float
    bytes_per_second: float


# Vendors' data sheets, most specific name first.
PEAKS = (
    ("H200", Peak(989e12, 4.8e12)),
    ("H100 NVL", Peak(835e12, 3.9e12)),
    ("H100 PCIe", Peak(756e12, 2.0e12)),
    ("H100", Peak(989e12, 3.35e12)),
    ("GH200", Peak(989e12, 4.0e12)),
    ("B200", Peak(2250e12, 8.0e12)),
    ("B300", Peak(2250e12, 8.0e12)),
    ("A100-SXM4-80GB", Peak(312e12, 2.04e12)),
    ("A100", Peak(312e12, 1.56e12)),
    ("L40S", Peak(362e12, 0.86e12)),
    ("L4", Peak(121e12, 0.3e12)),
    ("A10", Peak(125e12, 0.6e12)),
    ("RTX 5090", Peak(209e12, 1.79e12)),
    ("RTX 4090", Peak(165e12, 1.01e12)),
    ("RTX 3090", Peak(71e12, 0.94e12)),
)


def device_name(device: torch.device) -> str:
    """The accelerator's name as its driver gives it; `cpu` or `mps` elsewhere."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def known_peak(device: torch.device) -> Peak | None:
    """The data sheet's figures, or None for a device that is not in the table (CPUs are not)."""
    return peak_of(device_name(device))


def peak_of(name: str) -> Peak | None:
    """The same for a device by its name, as the driver gives it."""
    return next((peak for part, peak in PEAKS if part in name), None)


def utilization(flops_per_second: float, device: torch.device, devices: int) -> float | None:
    """Share of the peak matrix rate that was used (MFU), or None where the peak is unknown."""
    peak = known_peak(device)
    return flops_per_second / (peak.flops * devices) if peak else None


def peak_memory_bytes(device: torch.device) -> int:
    """The most memory used so far: of the GPU by this process's tensors, else of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resident_peak()


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
    group = Path("/sys/fs/cgroup")
    try:
        limit, used, stat = (
            (group / f"memory.{name}").read_text() for name in ("max", "current", "stat")
        )
    except OSError:
        return sys.maxsize
    if limit.strip() == "max":
        return sys.maxsize
    cached = re.search(r"^inactive_file (\d+)", stat, re.MULTILINE)  # is given back
    return max(0, int(limit) - int(used) + (int(cached[1]) if cached else 0))


def resident_peak() -> int:
    """Peak resident set of this process in bytes."""
    if psutil.LINUX:  # where getrusage would count what was before the exec too
        found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
        return int(found[1]) * 1024 if found else psutil.Process().memory_info().rss
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if psutil.MACOS else peak * 1024


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
