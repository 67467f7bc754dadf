"""What decides which kernels PyTorch uses, and so how it rounds; and kernels that every x86-64 processor has."""

import os
from functools import cache

import torch

from lockstep.backends.hardware import cpu
from lockstep.backends.torch.kernels.hopper import can_replace
from lockstep.backends.torch.kernels.nvrtc import can_compile_kernels
from lockstep.backends.torch.matrix_products import multiplies_with_onednn
from lockstep.core.device import Device
from lockstep.core.errors import BackendError

# The widest vectors that the x86-64 processors of the last ten years have in common. The libraries read these when they
# compute for the first time.
PORTABLE = {"ATEN_CPU_CAPABILITY": "avx2", "DNNL_MAX_CPU_ISA": "AVX2", "MKL_CBWR": "AVX2"}
VARIABLES = " ".join(f"{name}={value}" for name, value in PORTABLE.items())
READ_BY = {  # other variables that change the kernels of a library
    "oneDNN": ("DNNL_MAX_CPU_ISA", "ONEDNN_MAX_CPU_ISA", "DNNL_CPU_ISA_HINTS", "DNNL_DEFAULT_FPMATH_MODE"),
    "MKL": ("MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS", "MKL_DEBUG_CPU_TYPE"),
}


def pin_kernels() -> None:
    """Kernels from now on are those that every x86-64 processor has; refused where others were chosen already."""
    before = {name: os.environ.get(name) for name in PORTABLE}
    os.environ |= PORTABLE
    chosen = torch.backends.cpu.get_cpu_capability()  # chooses them, if nothing was computed yet
    if chosen == "AVX2":
        return
    for name, value in before.items():
        os.environ.pop(name)
        if value is not None:
            os.environ[name] = value
    if chosen == "AVX512":
        raise BackendError(
            f"PyTorch has computed something before --portable could choose its kernels: it uses AVX-512. Start your "
            f"program with {VARIABLES} in its environment."
        )
    raise BackendError(
        f"--portable needs AVX2, which x86-64 processors have, and PyTorch uses {chosen} on this one. Leave it out."
    )


@cache
def kernel_choice(device: Device) -> dict[str, str]:
    """What decides the kernels for a device, by name."""
    if device.kind == "cuda":
        found = torch.cuda.get_device_properties(device.number)
        return {
            "GPU": f"{found.name} (compute capability {found.major}.{found.minor})",
            "cuDNN": str(torch.backends.cudnn.version()),
            "source of Triton kernels": "Lockstep" if can_replace() else "none",
            "source of CUDA kernels": "Lockstep and PyTorch" if can_compile_kernels() else "PyTorch",
        }
    settings = {
        library: " ".join(f"{name}={os.environ[name]}" for name in names if os.environ.get(name)) or "as it chooses"
        for library, names in READ_BY.items()
    }
    return {
        "processor": cpu().name,
        "CPU capability": torch.backends.cpu.get_cpu_capability(),
        "library for large matrix products": "oneDNN" if multiplies_with_onednn() else "PyTorch's",
        **settings,
    }
