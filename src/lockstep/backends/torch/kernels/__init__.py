"""Kernels of our own for NVIDIA GPUs: in Triton (`*_triton.py`), or CUDA source that is compiled by NVRTC.

Beside each are the functions that put it in the place of PyTorch's.
"""
