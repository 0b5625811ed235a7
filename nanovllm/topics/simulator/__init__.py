"""The real scheduler under a virtual clock, with a cost model. Imports no torch.

Chapters: 14_simulator, 15_believe, 16_policies.
"""
