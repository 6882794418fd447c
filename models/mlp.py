"""What a layer computes row by row.   x: [batch, seq, embed] -> [batch, seq, embed]"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch.nn.functional as F
from torch import Tensor, nn
from tpshard.models.dims import name
from tpshard.models.layers import Parts


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)) (Shazeer 2020)"""

    def __init__(self, parts: Parts) -> None:
        super().__init__()
        self.gate, self.up, self.down = map(parts, ("gate", "up", "down"))

    def forward(self, x: Tensor) -> Tensor:
        hidden = name(F.silu(self.gate(x)) * self.up(x), "hidden", "batch", "seq", "mlp")
        return self.down(hidden)  # type: ignore[no-any-return]


class GELU(nn.Module):
    """down(gelu(up(x))), with tanh's approximation"""

    def __init__(self, parts: Parts) -> None:
        super().__init__()
        self.up, self.down = map(parts, ("up", "down"))

    def forward(self, x: Tensor) -> Tensor:
        hidden = name(F.gelu(self.up(x), approximate="tanh"), "hidden", "batch", "seq", "mlp")
        return self.down(hidden)  # type: ignore[no-any-return]


MLPS: Mapping[str, Callable[[Parts], nn.Module]] = {"swiglu": SwiGLU, "gelu": GELU}
"""By the name that `models.catalog` gives them."""
