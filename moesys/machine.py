"""What a measurement was made on and with: the machine, its speed, its memory, the versions."""

from __future__ import annotations

import os
import platform
import resource
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil
import torch

MEASURED_PACKAGES = ("moesys", "torch", "transformers", "numpy")


def describe_machine() -> dict[str, Any]:
    """Processor, usable cores, PyTorch's threads and vector instructions, memory in bytes, system, load."""
    return {
        "processor": _processor_name(),
        "cores": len(psutil.Process().cpu_affinity())
        if hasattr(psutil.Process, "cpu_affinity")
        else os.cpu_count() or 1,
        "threads": torch.get_num_threads(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "memory_bytes": psutil.virtual_memory().total,
        "system": platform.platform(),
        "load_average": os.getloadavg()[0],
    }


def describe_versions() -> dict[str, str]:
    """Version of Python and of every measured package that is installed."""
    found = {"python": platform.python_version()}
    for package in MEASURED_PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def commit() -> str | None:
    """Commit of the checkout this code runs from, "-dirty" after it where files differ; None without one."""
    here = Path(__file__).resolve()

    def git(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["git", "-C", str(here.parent), *arguments], capture_output=True, text=True)

    try:
        # Installed code can lie inside somebody else's repository, which does not track it.
        if git("ls-files", "--error-unmatch", here.name).returncode != 0:
            return None
        head = git("rev-parse", "HEAD").stdout.strip()
        return head + (
            "-dirty" if git("status", "--porcelain", "--untracked-files=no").stdout.strip() else ""
        )
    except FileNotFoundError:
        return None


def matmul_rate(size: int = 2048, repeats: int = 3) -> float:
    """FLOP/s of float32 products of [size, size] matrices, the fastest of `repeats` after one to warm up."""
    left, right, out = torch.randn(size, size), torch.randn(size, size), torch.empty(size, size)
    torch.mm(left, right, out=out)
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        torch.mm(left, right, out=out)
        seconds.append(time.perf_counter() - start)
    return 2 * size**3 / min(seconds)


def reset_peak_memory() -> None:
    """Let the mark of `peak_memory` start again at what is resident now, where the system can (Linux)."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return


def peak_memory() -> int:
    """Most bytes that were resident in this process at one time since its start or the last reset."""
    try:
        # Not getrusage on Linux: its mark survives exec, so a child would report its parent's size.
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _processor_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
