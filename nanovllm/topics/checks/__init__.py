"""Checks for user-written schedulers and block managers, and for kernels.

Chapters: 03_scheduler, 10_kernels.
"""
