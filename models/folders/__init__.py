"""Hugging Face's format: config, headers, weights, tokenizer and quantized tensors of a folder."""
