"""Makes the `Report` of a recipe: builds the programs that would run, and prices them on the recipe's device."""

from __future__ import annotations

import contextlib
import gc
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cache

from tpshard.diagnostics.diagnostic import Exit, Mistakes
from tpshard.models.model_spec import ModelSpec
from tpshard.parallelism.pricing.fusion import LARGE, compiled_as
from tpshard.plan import plan_cache, saved_plan
from tpshard.plan.report import describe
from tpshard.plan.report.planned import Planned
from tpshard.plan.report.report import PlannedJob, Report
from tpshard.plan.server import server_steps
from tpshard.plan.step.step_price import price_training
from tpshard.plan.step.units import gib
from tpshard.programs.fit.trained_parts import trained_parts
from tpshard.programs.setting import cluster
from tpshard.programs.setting.cluster import devices_of
from tpshard.programs.setting.setting import Setting
from tpshard.programs.step import saved_step, training
from tpshard.programs.step.training_step import TrainingPrograms
from tpshard.programs.step.variants import Variants
from tpshard.recipes.keys.schema import Recipe


def check_limit(programs: TrainingPrograms) -> None:
    """Raises Mistakes (exit 4) where a step holds more than `fsdp.memory_limit`."""
    recipe = programs.setting.recipe
    if recipe.fsdp.memory_limit is None or not (pricing := price_training(programs)).over_limit_bytes:
        return
    raise Mistakes.one(
        f"a step holds {gib(pricing.peak_bytes)} at its peak, more than `fsdp.memory_limit`", exit=Exit.FIT,
        where=recipe.where("fsdp.memory_limit"), why="no buckets of the recipe's policy need less",
        fix="`tpshard plan` shows edits that need less; or a higher limit, or none",
    )  # fmt: skip


def report(
    recipe: Recipe, source: str, what: str = "train", accuracy: str = "", variants: Variants | None = None
) -> Report:
    """The report of `planned`."""
    return planned(recipe, source, what, accuracy, variants).report


def planned(
    recipe: Recipe, source: str, what: str = "train", accuracy: str = "", variants: Variants | None = None
) -> Planned:
    """The plan of what a recipe would run. `what`: train, prefill or decode. `variants` keeps parts of its programs.

    Raises `Mistakes` for parts that do not fit each other (exit 4), the recipe (3) and the mesh (5).
    """
    with without_gc():
        if what != "train":
            return server_steps.planned(recipe, what, source, accuracy)
        return planned_training(build_programs(Setting.of(recipe, devices_of(recipe)), variants), source, accuracy)


@cache
def _has_frozen() -> bool:
    """Whether this process keeps objects from the collector; to count them takes 50 ms where it does."""
    return gc.get_freeze_count() > 0


@contextlib.contextmanager
def without_gc() -> Iterator[None]:
    """A context without garbage collection, which would walk over a plan's hundred thousand nodes again and again."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            if not _has_frozen():  # makes all objects old, or the next collection would walk over the new ones
                gc.freeze()
                gc.unfreeze()
            gc.enable()


def build_programs(setting: Setting, variants: Variants | None = None) -> TrainingPrograms:
    """Builds the programs of a training run, as `train` does. `variants` keeps parts of them for other settings."""
    with without_gc():
        return training.build(setting) if variants is None else variants.build(setting)


def _weights_of(spec: ModelSpec, shapes: Mapping[str, Sequence[int]]) -> int:
    """The number of a model's weights, of quantized ones too. shapes: those of its parameters as they are stored."""
    return sum(map(math.prod, (*spec.plain.shapes.values(), *spec.added.values()) if spec.packed else shapes.values()))


def _compile(programs: TrainingPrograms) -> str:
    """The recipe's `compile`; of `auto` what becomes of a stage's programs."""
    chosen = programs.setting.recipe.compile
    if chosen != "auto":
        return chosen
    every = (program for stage in programs.stages for program in stage.programs)
    return "blocks" if any(compiled_as(program, "auto") == "layers" for program in every) else "inductor"


def planned_training(programs: TrainingPrograms, source: str = "", accuracy: str = "") -> Planned:
    """The plan of a training recipe, from its built programs."""
    setting, recipe = programs.setting, programs.setting.recipe
    device, nodes, per_host = cluster.device_of(recipe)
    pricing = price_training(programs)
    batch = setting.batch
    parameters = {port.name: port for port in programs.micro.inputs if port.kind == "parameter"}
    saved = sum(math.prod(port.shape) for name, port in parameters.items() if name not in setting.spec.left_out)
    params = _weights_of(setting.spec, {name: port.shape for name, port in parameters.items()})
    trained = {name: p.numel() for name, p in setting.model.named_parameters() if name in setting.trained}
    job = PlannedJob(
        name=recipe.name,
        recipe=source,
        what="train",
        model=setting.spec.source.name,
        params=params,
        seq_len=setting.seq_len,
        dtype=str(recipe.model.dtype),
        mesh=dict(setting.mesh.axes),
        nodes=nodes,
        devices_per_node=per_host,
        global_sequences=batch.global_sequences,
        per_device=batch.per_device,
        micro_batches=batch.micro_batches,
        tokens=batch.global_sequences * setting.seq_len,
        compiled=_compile(programs),
        remat=_remat(recipe),
        offload=_offload(recipe),
        weights=_weights(setting),
        experts="" if setting.dropless is None else setting.dropless.words,
        device_assumed=recipe.cluster is None,
        stacking=setting.stacking,
        steps=0 if recipe.data.epochs else recipe.train.steps,
        save_every=recipe.checkpoint.every_steps,
        checkpoint_bytes=saved * setting.master_dtype.itemsize + setting.moment_bytes(trained),
    )
    warnings = describe.extra_warnings(job, device, programs.update)
    if (job.compiled, recipe.compile) == ("blocks", "auto"):
        warnings.append(
            f"`compile: auto` compiles the layers alone: as a whole, a program of more than {LARGE:,} operations takes "
            "minutes (compile: inductor)"
        )
    report = describe.report_of(job, pricing, programs.micro, list(parameters), accuracy, warnings)
    report.trained = trained_parts(recipe, setting.spec)
    return Planned(report, pricing, programs)


def read_programs(saved: saved_plan.SavedPlan, setting: Setting) -> TrainingPrograms:
    """The programs of a saved plan, for a setting that `save.check` has passed.

    Those of a plan that this account saved are the file's (`plan_cache.is_own`). The file of anybody else may say
    anything that a program can: so the recipe's are built, which are run if the file's are the same.

    Raises `Mistakes` (exit 3) where the file's cannot be read, or their fingerprints are not those in the plan or those
    of the recipe's.
    """
    own = plan_cache.is_own(saved.text)
    with without_gc():
        try:
            read = saved_step.unpack(saved.step or "", setting)
            named, described = read.fingerprints, dict(saved.fingerprints)
        except saved_plan.UNREADABLE as error:
            why = str(error) or type(error).__name__
            message = f"the programs in {saved.path} cannot be read"
            raise Mistakes.one(message, why=why, fix="plan again") from error
    programs = read if own else build_programs(setting)
    for whose, fingerprints in (("its plan describes", described), ("its recipe gives", programs.fingerprints)):
        if named != fingerprints:
            raise Mistakes.one(
                f"the programs in {saved.path} differ from those that {whose}", why="the fingerprints differ",
                fix="plan again",
            )  # fmt: skip
    return programs


def _weights(setting: Setting) -> str:
    """Where a run's first weights come from."""
    begun, source = setting.recipe.train.init_from, setting.spec.source
    if begun is not None:
        return f"from {begun} (train.init_from)"
    if setting.spec.packed and source.folder is None:
        return "of the folder that `tpshard quantize` will write (adapters.packed)"
    if source.folder is None or (source.key == "transformers" and setting.spec.weights is None):
        return f"drawn at random, seed {setting.recipe.seed}"
    return f"from {source.folder} (model.{source.key})"


def _offload(recipe: Recipe) -> str:
    """The recipe's `offload` as text; "" where nothing is offloaded."""
    where = recipe.offload
    return f"activations of the first {where.first}" if not isinstance(where, str) else where.replace("none", "")


def _remat(recipe: Recipe) -> str:
    """The recipe's `remat` as text."""
    remat = recipe.remat
    if isinstance(remat, str):
        return remat
    if isinstance(remat, tuple):
        return "+".join(remat)
    parts = [f"every {remat.every}"] * (remat.every > 1) + [f"first {remat.first}"] * (remat.first is not None)
    return " of ".join([*parts, *remat.modules]) or "full"
