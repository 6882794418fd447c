"""A model's layers one at a time, as GPTQ quantizes them."""
