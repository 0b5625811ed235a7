"""Decoding beyond one plain sequence: samples, beams, penalties, prompt log-probabilities, guesses.

Chapters: 13_samples, 22_guesses.
"""
