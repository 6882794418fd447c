"""Kernels: Triton and torch operations, each with a plain-torch reference, and the layouts of quantized weights."""
