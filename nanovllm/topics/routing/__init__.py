"""Routing: which of several replicas serves a request. Imports no torch.

Chapters: 19_replicas.
"""
