"""Quantization: weights in few bits."""
