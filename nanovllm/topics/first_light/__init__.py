"""First light: the first minutes of the engine on a GPU.

Chapters: 11_graphs.
"""
