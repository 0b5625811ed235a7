"""Decoding beyond one plain sequence: samples, beams, penalties, prompt log-probabilities, drafts.

Chapters: 13_samples, 22_speculative.
"""
