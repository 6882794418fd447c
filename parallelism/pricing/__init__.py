"""What a program costs: kernels, time and memory, from plain numbers."""
