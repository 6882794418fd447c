"""Low-rank adapters (LoRA) of linear layers: what a recipe says of them, their modules, and PEFT's folders."""
