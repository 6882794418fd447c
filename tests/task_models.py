"""Models of transformers that are no causal language models, as modules of a user with tasks of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from tpshard.models.objectives.loss import cross_entropy_sum
from tpshard.models.objectives.tasks import Field
from transformers import T5Config, T5ForConditionalGeneration, ViTConfig, ViTForImageClassification

_SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}


class Vision(ViTForImageClassification):
    inputs = ("pixels",)

    def __init__(self) -> None:
        super().__init__(ViTConfig(image_size=16, patch_size=8, num_labels=8, **_SMALL))

    def forward(self, pixels: Tensor) -> Tensor:
        return super().forward(pixels).logits


class Translator(T5ForConditionalGeneration):
    """An encoder and a decoder, which reads the encoder's output. Its dropout is that of training alone."""

    inputs = ("source", "told")

    def __init__(self) -> None:
        super().__init__(T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4,
                                  use_cache=False, dropout_rate=0.5))  # fmt: skip

    def forward(self, source: Tensor, told: Tensor) -> Tensor:
        return super().forward(input_ids=source, decoder_input_ids=told).logits


class Images:
    """Which of eight pictures one of noise resembles: a target a row."""

    text = False

    def __init__(self, seq_len: int) -> None:
        self.fields = {"pixels": Field((3, 16, 16), ("", "", ""), torch.float32), "targets": Field((), ())}

    def inputs(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        return (batch["pixels"],)

    def loss(self, output: Tensor, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        return cross_entropy_sum(output, batch["targets"])

    def rows(self, numbers: Sequence[int], seed: int) -> dict[str, Tensor]:
        pixels = torch.randn(len(numbers), 3, 16, 16, generator=torch.Generator().manual_seed(numbers[0] % 1000))
        return {"pixels": pixels, "targets": torch.tensor([number % 8 for number in numbers])}


class Reversed:
    """The tokens of a source from its end on."""

    text = False

    def __init__(self, seq_len: int) -> None:
        self.fields = {name: Field((seq_len,), ("seq",)) for name in ("source", "told", "targets")}

    def inputs(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        return batch["source"], batch["told"]

    def loss(self, output: Tensor, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        return cross_entropy_sum(output, batch["targets"])

    def rows(self, numbers: Sequence[int], seed: int) -> dict[str, Tensor]:
        length = self.fields["source"].shape[0]
        source = torch.randint(
            1, 64, (len(numbers), length), generator=torch.Generator().manual_seed(numbers[0] % 1000)
        )
        return {"source": source, "told": source.flip(1).roll(1, 1), "targets": source.flip(1)}
