"""Tensor parallelism: ranks that share each layer.

Chapters: 15_parallel.
"""
