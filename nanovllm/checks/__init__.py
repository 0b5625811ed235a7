"""Checks of schedulers, blocks and kernels that may be wrong.

Chapters: 03_scheduler, 10_kernels.
"""
