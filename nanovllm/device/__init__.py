"""The machine: device, dtype and backend, memory, CUDA graphs, threads.

Chapters: 07_step, 11_graphs.
"""
