"""Quantization: weights in few bits.

Chapters: 21_quantization.
"""
