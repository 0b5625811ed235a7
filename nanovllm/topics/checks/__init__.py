"""Checks for user-written schedulers and block managers, for kernels, and for the files of a model.

Chapters: 03_scheduler, 05_model, 10_kernels.
"""
