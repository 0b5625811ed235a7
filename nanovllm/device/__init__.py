"""The machine: device, dtype and backend, memory, CUDA graphs, threads; the first minutes on a GPU.

Chapters: 07_step, 11_graphs.
"""
