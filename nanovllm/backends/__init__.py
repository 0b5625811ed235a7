"""Backends: the functions of layers/ops.py in PyTorch, numba and Triton, and what records steps.

Chapters: 06_attention, 10_kernels, 11_graphs.
"""
