"""The programs of a server: their setting, caches, kernels and the layout of quantized weights."""
