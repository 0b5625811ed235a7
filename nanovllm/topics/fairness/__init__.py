"""Fairness: the scheduler of a server that several clients share. Imports no torch.

Chapters: 16_policies, 17_serving.
"""
