"""Swapping: preempted requests' blocks in host memory.

Chapters: 04_preemption.
"""
