"""Defining an operation `tpshard::name`: what computes it, the shapes of its results, and its gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

LIBRARY = torch.library.Library("tpshard", "FRAGMENT")


def operation(
    schema: str, compute: Callable[..., Any] | None = None, shapes: Callable[..., Any] | None = None, *,
    cuda: Callable[..., Any] | None = None, gradient: Callable[..., Any] | None = None,
    keep: Callable[..., None] | None = None,
) -> Any:  # fmt: skip
    """Defines an operation by its schema, `name(arguments) -> results`, and returns it.

    compute: computes it on a CPU, and on CUDA unless `cuda` does; None for one that only stands in graphs. shapes:
    returns empty results, for tracing. gradient: maps a context and the results' gradients to those of the inputs.
    keep: fills that context from (context, inputs, output), by default with all inputs as its saved tensors.
    """
    name = schema.partition("(")[0]
    LIBRARY.define(schema)
    if compute is not None:
        LIBRARY.impl(name, compute, "CPU")
        LIBRARY.impl(name, cuda or compute, "CUDA")
    if shapes is not None:
        torch.library.register_fake(f"tpshard::{name}", shapes, lib=LIBRARY)
    if gradient is not None:
        torch.library.register_autograd(f"tpshard::{name}", gradient, setup_context=keep or _keep_inputs, lib=LIBRARY)
    return getattr(torch.ops.tpshard, name).default


def _keep_inputs(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs)
