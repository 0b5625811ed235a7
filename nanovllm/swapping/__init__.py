"""Swapping: preempted requests' blocks in host memory.

Chapters: 03_scheduler.
"""
