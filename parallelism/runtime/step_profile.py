"""Records when each operation of real steps ran on this rank, by the program's own names."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from tpshard.parallelism.node_info import Collective
from tpshard.parallelism.pricing.flow import info_of


@dataclass(frozen=True)
class OperationEvent:
    """An interval on this rank's compute lane, on the lane of a collective's axes, or of waiting for one."""

    lane: str
    """compute, wait, or the axes of a collective."""
    name: str
    start: float
    """Seconds of a clock that all events share."""
    end: float
    module: str = ""
    phase: str = ""
    part: str = ""
    flops: int = 0
    comm: Collective | None = None


class StepProfile:
    """The events of the profiled steps; executors add to it while it is theirs."""

    def __init__(self) -> None:
        self.events: list[OperationEvent] = []
        self.part = ""
        self._issued: dict[fx.Node, float] = {}
        self._pending: list[tuple[fx.Node, Any, Any]] = []

    def run(self, module: fx.GraphModule | None, call: Any, part: str, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Runs a program's function `call`: by its graph `module`, operation by operation; or, where a compiler has
        made one function of all, as one event."""
        self.part = part
        began = time.perf_counter()
        if module is not None:
            results: list[Tensor] = _Timed(module, self).run(*inputs)
            self._settle()
            return results
        results = call(*inputs)
        _synchronize(inputs)
        self.events.append(OperationEvent("compute", f"compiled {part}", began, time.perf_counter(), part=part))
        return results

    def waited(self, node: fx.Node, began: float, ended: float, axes: str) -> None:
        """Adds the wait for a collective, and the collective itself from its issue to the end of the wait."""
        data = info_of(node)
        name = data.origin or node.name
        about = {"module": data.module, "phase": data.phase, "part": self.part, "comm": data.comm}
        self.events.append(OperationEvent("wait", name, began, ended, **about))  # type: ignore[arg-type]
        issued = self._issued.pop(node, began)
        self.events.append(OperationEvent(axes, name, issued, ended, **about))  # type: ignore[arg-type]

    def ran(self, node: fx.Node, source: fx.Node, began: float, ended: float) -> None:
        """Adds an operation of the compute lane. source: the program's node, by which a wait knows its collective."""
        data = info_of(node)
        if data.comm is not None:
            self._issued[source] = began
            return
        self.events.append(
            OperationEvent(
                "compute", data.origin or node.name, began, ended, data.module, data.phase, self.part, data.flops
            )
        )

    def later(self, node: fx.Node, began: Any, ended: Any) -> None:
        """Adds an operation that the device runs between two CUDA events."""
        self._pending.append((node, began, ended))

    def _settle(self) -> None:
        """Converts CUDA events to intervals, on the clock of the host at the end of the last one."""
        if not self._pending:
            return
        last = self._pending[-1][2]
        last.synchronize()
        now = time.perf_counter()
        for node, began, ended in self._pending:
            self.ran(node, node, now - began.elapsed_time(last) / 1e3, now - ended.elapsed_time(last) / 1e3)
        self._pending.clear()


class _Timed(fx.Interpreter):
    """Runs a graph operation by operation, and times each."""

    def __init__(self, module: fx.GraphModule, profile: StepProfile):
        super().__init__(module)
        self.profile = profile
        self.cuda = torch.cuda.is_available() and torch.cuda.is_initialized()

    def run_node(self, node: fx.Node) -> Any:
        if node.op in ("placeholder", "get_attr", "output"):
            return super().run_node(node)
        if self.cuda and info_of(node).comm is None:
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            began.record()
            result = super().run_node(node)
            ended.record()
            self.profile.later(node, began, ended)
            return result
        began_s = time.perf_counter()
        result = super().run_node(node)
        waits = getattr(node.target, "__name__", "") == "bound"  # it has added its own events
        if not waits:
            self.profile.ran(node, node.meta.get("program_node", node), began_s, time.perf_counter())
        return result


def _synchronize(tensors: Sequence[Tensor]) -> None:
    if any(tensor.is_cuda for tensor in tensors):
        torch.cuda.synchronize()
