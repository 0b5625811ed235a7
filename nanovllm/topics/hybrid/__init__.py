"""Hybrid models: most layers have a state of a fixed size instead of a KV cache.

Chapters: 23_hybrid.
"""
