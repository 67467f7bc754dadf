"""Doctests import every module; what needs a framework that is not installed is left out."""

from importlib.util import find_spec

from lockstep.backends import BACKENDS, is_installed

collect_ignore = ["tests/text_programs"]
collect_ignore += [f"src/lockstep/backends/{name}.py" for name in BACKENDS if not is_installed(name)]
if find_spec("triton") is None:  # PyTorch for GPUs brings it
    needing = "attention_dropout attention_kernels batch_norm_kernels column_sum_kernels layer_norm_kernels row_kernels"
    collect_ignore += [f"src/lockstep/backends/torch_{name}.py" for name in needing.split()]
