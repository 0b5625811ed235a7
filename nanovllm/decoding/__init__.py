"""Decoding beyond one plain sequence: samples, beams, penalties, log-probabilities of the prompt."""
