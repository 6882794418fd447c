"""How it is fast: Triton kernels, each with a plain-torch reference, and quantized layouts."""
