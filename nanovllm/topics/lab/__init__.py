"""The scheduler lab: `nanovllm lab` serves it. `tutorials.lab.build` builds it.

Chapters: 14_simulator, 16_policies.
"""
