"""Checks of schedulers and blocks that may be wrong.

Chapters: 03_scheduler.
"""
