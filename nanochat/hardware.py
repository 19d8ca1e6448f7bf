"""
Hardware limits: peak FLOP/s by device name, memory used and free.

    device name -> peak_flops
    torch.device -> memory in bytes

Peaks are the vendors' dense figures (no sparsity) in bfloat16.
"""

import ctypes
import re
import resource
import shutil
import sys
import sysconfig
import time
from pathlib import Path

import psutil
import torch

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4  # parameters of glibc's mallopt


PEAK_FLOPS = {  # pattern of names -> bf16 FLOP/s of the vendor's data sheet, most specific first
    "H100 NVL": 835e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H200": 989e12,  # GH200 too
    "B200": 2250e12,
    "B300": 2250e12,
    "A100[DX]?": 312e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "A10": 125e12,
    "RTX 5090": 209e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
}


def device_name(device: torch.device) -> str:
    """Name of the GPU as reported by its driver; otherwise `cpu` or `mps`."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def is_hopper(device: torch.device) -> bool:
    """Whether this is a GPU of the generation of H100 and H200."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def peak_flops(name: str) -> float | None:
    """Peak FLOP/s of a device by name; None if unknown, as for CPUs."""
    known = PEAK_FLOPS.items()
    return next((peak for part, peak in known if re.search(rf"{part}(?![\dA-Z])", name)), None)


def peak_memory_bytes(device: torch.device) -> int:
    """Peak memory in bytes: of this process's tensors on a GPU or MPS, else of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if device.type == "mps":
        return torch.mps.driver_allocated_memory()  # freed memory stays allocated
    if psutil.LINUX:  # getrusage would include memory used before the exec
        found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
        return int(found[1]) * 1024 if found else used_memory_bytes(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # on macOS, in bytes


def used_memory_bytes(device: torch.device) -> int:
    """Memory in use in bytes: of this process's tensors on a GPU or MPS, else of the process."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    if device.type == "mps":
        return torch.mps.current_allocated_memory()
    return psutil.Process().memory_info().rss


def free_memory_bytes(device: torch.device) -> int:
    """
    Available memory in bytes: of the GPU, else of the host within a container's limit.

    On a GPU, this includes memory that PyTorch's allocator has cached.
    """
    if device.type == "cuda":
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + kept
    free = min(psutil.virtual_memory().available, container_memory()[1])
    if device.type == "mps":  # shares the host's memory
        room = torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory()
        return max(0, min(free, room))
    return free


def total_memory_bytes(device: torch.device) -> int:
    """Memory in bytes of a GPU, else of the host or a container's limit."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    return min(psutil.virtual_memory().total, container_memory()[0])


def container_memory() -> tuple[int, int]:
    """The cgroup v2 memory limit and bytes left under it; sys.maxsize if there is none."""
    files = (Path(f"/sys/fs/cgroup/memory.{name}") for name in ("max", "current", "stat"))
    try:
        limit, used, stat = (file.read_text() for file in files)
        room = int(limit) - int(used)
    except (OSError, ValueError):  # no such group, or its limit is "max"
        return sys.maxsize, sys.maxsize
    cached = re.search(r"^inactive_file (\d+)", stat, re.MULTILINE)  # reclaimable
    return int(limit), max(0, room + (int(cached[1]) if cached else 0))


def keep_freed_memory() -> None:
    """
    Keep freed memory in this process for later allocations (glibc only).

    By default, glibc returns large blocks to the system, and every training step faults all its
    pages in again: 48,000 faults per step at depth 4, a tenth of the time (measured, dev/LOG.md).
    Use it for repeated, equal steps, where peak memory grows by up to 5%. In a server, which
    allocates blocks of all sizes, it grows by two thirds.
    """
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    if libc is not None and hasattr(libc, "gnu_get_libc_version"):
        libc.mallopt(M_MMAP_MAX, 0)  # no mmapped blocks: they would be unmapped when freed
        libc.mallopt(M_TRIM_THRESHOLD, -1)  # never trim
        libc.mallopt(M_TOP_PAD, 1 << 26)


# ---- Compiler and speed --------------------------------------------------------------------------

GPU_EFFICIENCY = 0.4  # fraction of peak FLOP/s in estimates of training time
# The same, as a fraction of measured matmul FLOP/s (CPU, d4 compiled, 2026-11)
MATMUL_EFFICIENCY = {torch.bfloat16: 0.5, torch.float16: 0.5, torch.float32: 0.75}
RATE_SECONDS = 0.5  # duration of the matmul benchmark, long enough for a CPU to raise its clock


def has_compiler() -> bool:
    """Whether a C++ compiler and Python's headers, which torch.compile needs, are installed."""
    headers = Path(sysconfig.get_path("include"), "Python.h")
    return any(map(shutil.which, ("g++", "c++", "clang++"))) and headers.exists()


def training_rate(device: torch.device, dtype: torch.dtype, width: int) -> float:
    """
    Rough FLOP/s of training on one device: a fraction of the peak of a known GPU, else of the
    fastest of repeated matmuls of the model's width.
    """
    if peak := peak_flops(device_name(device)):
        return peak * GPU_EFFICIENCY
    a = torch.randn(4096, width, device=device).to(dtype)
    b = torch.randn(width, 4 * width, device=device).to(dtype)
    fastest, started = float("inf"), time.perf_counter()
    while (begun := time.perf_counter()) - started < RATE_SECONDS:
        float(torch.mm(a, b)[0, 0])  # waits for the device
        fastest = min(fastest, time.perf_counter() - begun)
    return 2 * 4096 * width * 4 * width / fastest * MATMUL_EFFICIENCY[dtype]
