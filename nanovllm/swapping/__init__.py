"""Swapping: the blocks of preempted requests wait in host memory."""
