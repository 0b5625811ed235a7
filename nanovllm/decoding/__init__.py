"""Decoding beyond one plain sequence: samples, beams, penalties, prompt log-probabilities.

Chapters: 13_samples.
"""
