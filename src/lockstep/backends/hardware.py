"""What the CPU is, for every backend alike."""

import os
import platform

from lockstep.device import Device, Hardware


def cpu() -> Hardware:
    """The CPU of this machine: its name, its memory and the cores that this process may use."""
    num_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    usable = getattr(os, "sched_getaffinity", lambda _: range(os.cpu_count() or 1))  # Linux only
    return Hardware(Device("cpu:0"), _name(), num_bytes, len(usable(0)))


def _name() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
