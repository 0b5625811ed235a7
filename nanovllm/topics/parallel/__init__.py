"""Tensor parallelism: ranks that share each layer.

Chapters: 18_parallel.
"""
