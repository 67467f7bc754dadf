"""The CPU, the peak memory of the process, and pinning of threads, for every backend."""

import os
import platform
import re
import resource
import subprocess
from pathlib import Path

from lockstep.core.device import Device, Hardware


def cpu() -> Hardware:
    """The CPU: its name, its memory and the cores that this process may use."""
    num_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    usable = getattr(os, "sched_getaffinity", lambda _: range(os.cpu_count() or 1))  # Linux only
    return Hardware(Device("cpu:0"), _name(), num_bytes, len(usable(0)))


def memory_of_gpus() -> list[int]:
    """The memory of each GPU in bytes; nothing of this process touches a GPU, which would rule out forking."""
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout
        return [int(line) * 2**20 for line in said.split()]
    except (OSError, ValueError, subprocess.SubprocessError):
        return []


def peak_of_process(reset: bool = False) -> int:
    """Peak memory of this process in bytes; since the last `reset` where the system can reset it."""
    try:
        if reset:
            Path("/proc/self/clear_refs").write_text("5")
        found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    except OSError:
        found = None
    kilobytes = int(found[1]) if found else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return 1024 * kilobytes


def cpu_vendor() -> str:
    """Who made the processor, as it says itself: GenuineIntel, AuthenticAMD; nothing where that is not known."""
    return _of_cpu("vendor_id")


def _name() -> str:
    return _of_cpu("model name") or platform.processor() or platform.machine()


def _of_cpu(entry: str) -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            return next(line.partition(":")[2].strip() for line in lines if line.startswith(entry))
    except (OSError, StopIteration):
        return ""


def pin_to_core(number: int, num_threads: int) -> None:
    """Pins the calling thread to one core, if `num_threads` threads like it use all cores of this process.

    With cores to spare it is not pinned: another program may be using that core.
    """
    if not hasattr(os, "sched_setaffinity"):
        return
    cores = sorted(os.sched_getaffinity(0))
    if num_threads == len(cores):
        os.sched_setaffinity(0, {cores[number]})
