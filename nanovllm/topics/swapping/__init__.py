"""Swapping: blocks of preempted requests, and of evicted prefixes, in host memory.

Chapters: 04_preemption.
"""
