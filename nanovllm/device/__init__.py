"""The machine: its device and backend, its memory, CUDA graphs on a GPU, threads on a CPU."""
