"""The machine: device, dtype and backend, memory, threads, two steps in flight.

Chapters: 07_step, 11_graphs, 12_performance.
"""
