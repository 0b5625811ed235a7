"""The machine: device, dtype and backend, memory, CUDA graphs, threads.

Chapters: 06_model_runner.
"""
