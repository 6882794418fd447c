"""What becomes of act-orders in a model that no server takes: its graph is that of a forward pass of its task."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor
from tpshard.models.assemble import evaluating
from tpshard.models.model_spec import ModelSpec
from tpshard.models.objectives.tasks import Task
from tpshard.parallelism.tracing.capture import Trail, capture
from tpshard.programs.server.act_order import arrange
from tpshard.programs.server.served import Quantization


def orders_in_task(spec: ModelSpec, folder: Path, task: Task) -> Mapping[str, str]:
    """What becomes of the order of each act-ordered weight of a folder (`Arrangement.between`), found on the graph of a
    forward pass with rows of a task; nothing for a dense folder. ValueError where it cannot be captured."""
    quantized = Quantization.of_folder(folder, spec)
    if quantized is None:
        return {}
    module, trail = spec.build(), Trail()
    parameters = {name: parameter.detach() for name, parameter in module.named_parameters()}
    fields = {name: torch.empty(2, *one.shape, dtype=one.dtype, device="meta") for name, one in task.fields.items()}

    def forward(inputs: tuple[Tensor, ...], parameters: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(module, parameters, inputs, tie_weights=True)  # type: ignore[no-any-return]

    inputs = task.inputs(fields)
    names = [*(f"input {i}" for i in range(len(inputs))), *parameters]
    with torch.no_grad(), evaluating(module), trail.watch(module):
        graph = capture(forward, [inputs, parameters], names, trail)
    return arrange(graph, quantized.orders, "tp_aware", {}, list(parameters)).between | quantized.in_sequence
