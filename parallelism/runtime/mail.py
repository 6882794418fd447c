"""Sends and receives between pipeline stages by torch.distributed; receives are posted before they are needed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx
from tpshard.parallelism.mesh import Axis
from tpshard.parallelism.program import Program, group_name, info
from tpshard.parallelism.runtime.context import Context
from tpshard.parallelism.runtime.outbox import Outbox
from tpshard.parallelism.transfer import recv, send


def transfers(program: Program) -> list[fx.Node]:
    """The nodes of a program that send or receive."""
    return program.cached("transfers", lambda: [node for node in program.graph.nodes if node.target in (send, recv)])


class Mail:
    """This rank's sends to and receives from other ranks along one mesh axis.

    A value is identified by its name and a number on which both ends agree (the micro-batch). Every pair of ranks has a
    group of its own for each way in which it sends: NCCL runs the transfers of a group in the order of their issue, so
    that in a larger group a send could wait for a receive that needs it (see `pipeline.queue_order`). Every rank must
    create it with the same programs.
    """

    def __init__(self, context: Context, axis: Axis, programs: Mapping[int, Iterable[Program]]):
        """programs: those of each position along the axis."""
        self.context, self.axis = context, axis
        mesh = context.mesh
        self.stride, self.place = mesh.stride[axis.name], mesh.index(axis, context.rank)
        by_place = {
            place: [node for one in of_place for node in transfers(one)] for place, of_place in programs.items()
        }
        names = sorted({_value_name(node) for nodes in by_place.values() for node in nodes})
        self.numbers = {name: i for i, name in enumerate(names)}
        """The tag of each value. A library without tags matches by order, which a schedule's check guarantees."""
        sends = {(place, _offset(node)) for place, nodes in by_place.items() for node in nodes if node.target is send}
        self.groups: dict[tuple[int, int], Any] = {}
        """This rank's groups by the position of the sender and the offset of the receiver."""
        for place, offset in sorted(sends):
            pairs = [[line[place], line[(place + offset) % axis.size]] for line in mesh.groups((axis,))]
            group = context.groups.divide(pairs, f"{group_name((axis,))} {place}{offset:+}")
            if group is not None:
                self.groups[place, offset] = group
        self.number = 0
        """The number (micro-batch) of the values that the running program sends."""
        self.sent_bytes = 0
        """Bytes sent so far."""
        self._coming: dict[tuple[str, int], tuple[Tensor, Any]] = {}
        self._arriving: dict[int, Any] = {}
        self._outbox = Outbox(waits=context.device.type == "cpu")

    def _peer(self, offset: int) -> int:
        other = (self.place + offset) % self.axis.size
        return self.context.rank + (other - self.place) * self.stride

    def _tag(self, name: str, number: int) -> int:
        return number * len(self.numbers) + self.numbers[name]

    # ---- receiving ---------------------------------------------------------------------------------------------------
    def expect(self, program: Program, number: int) -> None:
        """Posts the receives of a program, unless they are posted already."""
        ports = {port.name: port for port in program.inputs}
        for node in transfers(program):
            name = _value_name(node)
            if node.target is not recv or (name, number) in self._coming:
                continue
            port, offset = ports[name], _offset(node)
            room = torch.empty(port.local, dtype=port.dtype, device=self.context.device)
            group = self.groups[(self.place + offset) % self.axis.size, -offset]
            work = dist.irecv(room, self._peer(offset), group, self._tag(name, number))
            self._coming[name, number] = (room, work)

    def take(self, name: str, number: int) -> Tensor:
        """The buffer of an expected value, as an input of the program, which then waits for it."""
        room, work = self._coming.pop((name, number))
        self._arriving[room.data_ptr()] = work
        return room

    def wait(self, room: Tensor) -> Tensor:
        """Waits until a value has arrived, and returns it."""
        self._arriving.pop(room.data_ptr()).wait()
        return room

    # ---- sending -----------------------------------------------------------------------------------------------------
    def start(self, value: Tensor, node: fx.Node) -> Tensor:
        """Starts the send of a program's node."""
        offset, packed = _offset(node), value.contiguous()
        self.sent_bytes += packed.numel() * packed.itemsize
        work = dist.isend(
            packed, self._peer(offset), self.groups[self.place, offset], self._tag(_value_name(node), self.number)
        )
        self._outbox.keep(work, packed)
        return value

    def finish(self) -> None:
        """Waits until all sends are complete."""
        self._outbox.empty()


def _offset(node: fx.Node) -> int:
    offset = node.args[1]
    assert isinstance(offset, int)
    return offset


def _value_name(node: fx.Node) -> str:
    comm = info(node).comm
    assert comm is not None
    return comm.value[0]


Places = Sequence[tuple[int, fx.Node]]


def positions(program: Program) -> tuple[Places, Places]:
    """The inputs that are received and the outputs that are sent, each as its index and its node."""
    feeds = [node for node in program.graph.nodes if node.op == "placeholder"]
    (end,) = (node for node in program.graph.nodes if node.op == "output")
    results = [o for o in end.args[0] if isinstance(o, fx.Node)]  # type: ignore[union-attr]
    received = [(feeds.index(node.all_input_nodes[0]), node) for node in transfers(program) if node.target is recv]
    return received, [(i, node) for i, node in enumerate(results) if node.target is send]
