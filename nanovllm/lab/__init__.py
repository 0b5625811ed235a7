"""The scheduler lab: `nanovllm lab` serves it. It is built by `tutorials.lab.build`."""
