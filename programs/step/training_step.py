"""A training step as one value: the table of its tasks, and the programs of its stages and devices."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from tpshard.models import counts
from tpshard.models.objectives.tasks import TokenLosses
from tpshard.parallelism.mesh import Axis
from tpshard.parallelism.pipeline.schedules import Table
from tpshard.parallelism.pipeline.stages import Stage, cut
from tpshard.parallelism.program import Port, Program
from tpshard.parallelism.sharding import Layout
from tpshard.programs.parts.held import stored_ports
from tpshard.programs.parts.passes import apply
from tpshard.programs.parts.step_programs import SUM, evaluate_program, trained_by
from tpshard.programs.setting.setting import Setting
from tpshard.programs.step.device_programs import DevicePrograms, share_program
from tpshard.programs.step.staged import finish

TASKS = {"M": "micro-batch", "F": "forward", "B": "backward", "I": "gradients of inputs", "W": "gradients of weights"}
"""The name of each kind of task in plans."""


def part_of(kind: str, stage: int) -> str:
    """The name of a stage's program in plans."""
    return TASKS[kind] if kind == "M" else f"{TASKS[kind]} of stage {stage}"


@dataclass(frozen=True)
class TrainingPrograms:
    """The programs of a run. A step without stages is a table of one device, one stage and a task per micro-batch.

    Programs find their arguments among one another's results by the kinds and names of ports.
    """

    setting: Setting
    micro: Program
    """A micro-batch's forward and backward: (parameters, gradient sums, batch, a seed if the model draws random
    numbers) -> (`loss`, `count`, new gradient sums (donated), `counters` if any). With stages, what they are cut from.
    """
    table: Table
    devices: tuple[DevicePrograms, ...]
    """The programs that run once per step, by position on the pipeline's axis."""
    storage: Mapping[str, Layout]
    """The stored layout of each parameter, its summed gradient and its moments."""
    layers: tuple[int, ...] = ()
    """Layers of each stage, if there are any."""
    cuts: tuple[Stage, ...] = ()
    """The stages that `micro` was cut into."""
    scoring: bool = False
    """Whether the `loss` of an evaluation is that of each token [batch, seq] in float64, in place of the sum."""

    # ---- stages ----------------------------------------------------------------------------------------------------
    @property
    def pipeline(self) -> TrainingPrograms | None:
        """The step itself if it has stages, else None."""
        return self if self.cuts else None

    @property
    def axis(self) -> Axis | None:
        """The mesh axis of the stages. Each of their programs runs on the ranks that share an index along it."""
        return self.setting.stage_axis if self.cuts else None

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The stages of the table; without a pipeline the whole micro-batch is one."""
        return self.cuts or (Stage(0, (), self.micro, ()),)

    @cached_property
    def evaluation(self) -> tuple[Stage, ...]:
        """The stages of an evaluation, (parameters, batch) -> (`loss`, `count`), built on first use."""
        setting = self.setting
        task = TokenLosses(setting.seq_len) if self.scoring else setting.evaluated
        whole = evaluate_program(setting, self.storage, task)
        if self.axis is None:
            return (Stage(0, (), apply(self.setting, whole), ()),)
        return tuple(finish(self.setting, stage) for stage in cut(whole, self.axis, self.layers))

    @cached_property
    def share(self) -> Program | None:
        """The program that gives all devices of a pipeline the loss and count of the last stage."""
        return share_program(self.setting) if self.cuts else None

    @property
    def balanced(self) -> bool:
        """Whether layers are split among stages by their times; otherwise the recipe gives the split."""
        section = self.setting.recipe.pipeline
        return section is not None and section.split is None

    def sum_ports(self, device: int) -> list[Port]:
        """The gradient sums that a device keeps while its stages run, one for each of its trained parameters.

        Where only other devices compute a parameter's gradient, its sum stays zero until the exchange, laid out as the
        next program expects it.
        """
        own = self.devices[device]
        programs = [program for stage in self.table.stages_of(device) for program in self.stages[stage].programs]
        added = {port.key: port for program in programs for port in program.inputs if port.kind == "gradient"}
        after = {port.key: port for port in (own.reduce or own.update).inputs}
        return [added.get(key) or after[key] for key in (("gradient", name + SUM) for name in own.trained)]

    # ---- without stages --------------------------------------------------------------------------------------------
    @property
    def update(self) -> Program:
        """The update of the first device."""
        return self.devices[0].update

    @property
    def gather(self) -> Program | None:
        return self.devices[0].gather

    @property
    def reduce(self) -> Program | None:
        return self.devices[0].reduce

    @property
    def evaluate(self) -> Program:
        """The evaluation of the first stage."""
        return self.evaluation[0].forward

    # ---- parameters ------------------------------------------------------------------------------------------------
    @property
    def names(self) -> list[str]:
        """The parameters in the order of the programs' inputs."""
        return list(self.storage)

    @property
    def trained(self) -> list[str]:
        """The parameters that steps change, in the order of the programs' inputs: only they have a gradient and
        moments."""
        return trained_by(self.micro)

    @cached_property
    def stored(self) -> list[Port]:
        """The stored parameters, trained or not."""
        return stored_ports(self.setting, self.storage, self.names)

    @cached_property
    def counted(self) -> dict[str, int]:
        """The model's counters in the order of `counters`, with their number of values."""
        return counts.declared_counters(self.setting.model)

    # ---- all programs ----------------------------------------------------------------------------------------------
    @property
    def programs(self) -> dict[str, Program]:
        """All programs of a step or an evaluation, by role."""
        by_role: dict[str, Program] = {}
        kinds = ("forward", "backward", "gradients of weights") if self.cuts else ("micro-batch",)
        for stage in self.stages:
            by_role |= {f"{kind} of stage {stage.index}": program for kind, program in zip(kinds, stage.programs)}
        by_role |= {f"evaluation of stage {stage.index}": stage.forward for stage in self.evaluation}
        for i, device in enumerate(self.devices):
            by_role |= {f"{role} of device {i}": program for role, program in device.by_role.items()}
        return by_role if self.share is None else by_role | {"share": self.share}

    @property
    def transferring(self) -> dict[int, list[Program]]:
        """The programs of each device that may send or receive."""
        by_device: dict[int, list[Program]] = {}
        for i, device in enumerate(self.devices):
            stages = [of[stage] for of in (self.stages, self.evaluation) for stage in self.table.stages_of(i)]
            exchange = [] if device.exchange is None else [device.exchange]
            by_device[i] = [program for stage in stages for program in stage.programs] + exchange
        return by_device

    @cached_property
    def fingerprints(self) -> dict[str, str]:
        """Hashes by name of all that a run executes: its programs, its schedule with what each device holds, and the
        layouts of what is stored. They must be equal on all ranks, or ranks would wait forever."""
        blocks, held = [stage.blocks for stage in self.stages], [device.names for device in self.devices]
        rest = {
            "schedule": (self.axis, self.layers, self.table.rows, blocks, held),
            "layouts of what is stored": sorted(self.storage.items()),
        }
        hashes = {name: hashlib.sha256(repr(value).encode()).hexdigest() for name, value in rest.items()}
        return hashes | {f"program of {role}": program.fingerprint for role, program in self.programs.items()}
