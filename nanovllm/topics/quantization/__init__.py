"""Quantization: weights in few bits.

Chapters: 21_small_numbers.
"""
