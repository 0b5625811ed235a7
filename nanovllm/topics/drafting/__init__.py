"""Drafting: a small model proposes draft tokens.

Chapters: 22_speculative.
"""
