"""Plans for serving: a server's steps for a prompt (`prefill`), and for one token of each request (`decode`)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from tpshard.diagnostics.diagnostic import Exit, Mistakes, plural
from tpshard.parallelism.pricing.cost import Device
from tpshard.parallelism.pricing.fusion import CacheReads
from tpshard.plan.report import describe
from tpshard.plan.report.order_rows import order_rows
from tpshard.plan.report.planned import Planned
from tpshard.plan.report.report import PlannedJob
from tpshard.plan.step.pricing import StepPart, price_parts
from tpshard.plan.step.units import gib
from tpshard.programs.parts.held import bytes_of
from tpshard.programs.server.serve_setting import ServeSetting, Size
from tpshard.programs.server.served import LATEST, model_to_serve
from tpshard.programs.server.serving import BLOCK_SIZE, build_serving
from tpshard.programs.setting import cluster
from tpshard.recipes.keys.schema import Recipe


def planned(recipe: Recipe, what: str, source: str = "", accuracy: str = "", whole: bool = True) -> Planned:
    """The plan of a server's steps, with the cache that the server would allocate.

    All requests of a step have `model.seq_len` tokens, or as many as the cache holds; a prompt takes as many steps as
    the server would use. With `whole` false the programs of other sizes are left out. Raises `Mistakes` (exit 4) where
    the mesh does not fit the heads.
    """
    setting, device, per_host = server_of(recipe)
    requests, length = recipe.serve.requests, min(recipe.model.seq_len, setting.max_seq)
    sequences = 1 if what == "prefill" else min(requests, setting.most)
    sizes = setting.steps_of(what, requests, length)
    programs = build_serving(setting, [size for size in setting.sizes if whole or size in sizes])
    one_device = device.shared_by(per_host)
    blocks = programs.cache_blocks(one_device.memory_bytes - one_device.context_bytes)
    each = -(-length // BLOCK_SIZE)
    used = min(each * sequences, blocks)
    attended = used / sequences * (0.5 if what == "prefill" else 1)  # half on average while a prompt grows
    # a program holds one block of the cache per layer
    held = {"cache": blocks * programs.bytes("cache")}
    cached = CacheReads(used, attended)
    parts = [
        StepPart(
            what if len(sizes) == 1 else f"{what} of {size.rows}", programs.by_size[size], times, held, "none", cached
        )
        for size, times in sizes.items()
    ]
    behind = {"cache": (blocks + 1) * programs.bytes("cache") + programs.bytes("state"),
              "parameters": bytes_of(parts[0].program.inputs, "parameter")}  # fmt: skip
    parts += [StepPart(name, one, 1, behind, "none") for name, one in programs.choosing(sequences).items()]
    pricing = price_parts(parts, device, per_host)
    program = parts[0].program
    stored = recipe.serve.checkpoint
    spec, quantized = setting.served.spec, setting.served.quantized
    model = stored if Path(stored).exists() else str(recipe.model.stored()[str(recipe.model.named_by)])
    job = PlannedJob(
        name=recipe.name, recipe=source, what=what, model=model,
        params=spec.count or sum(map(math.prod, programs.shapes.values())), seq_len=length,
        dtype=setting.served.dtype, mesh=dict(setting.mesh.axes), nodes=-(-setting.mesh.ranks // per_host),
        devices_per_node=per_host, global_sequences=sequences, per_device=sequences, micro_batches=1,
        tokens=length if what == "prefill" else sequences, compiled="eager", device_assumed=recipe.cluster is None,
        weights=f"from {'the newest checkpoint' if stored == LATEST else stored} (serve.checkpoint)",
        quantized="" if quantized is None else f"{quantized}, layout {recipe.serve.layout}",
    )  # fmt: skip
    few = _too_few(blocks, requests, length, programs.bytes("cache"))
    steps = _steps_note(setting, sizes) if what == "prefill" and sum(sizes.values()) > 1 else ""
    notes = [text for text in (few, steps, *programs.notes) if text]
    warnings = [*notes, *describe.extra_warnings(job, device, program)]
    report = describe.report_of(job, pricing, program, list(programs.shapes), accuracy, warnings)
    orders = order_rows(programs.arrangement.between)
    return Planned(replace(report, programs=programs.listed, act_orders=orders), pricing)


def _steps_note(setting: ServeSetting, sizes: Mapping[Size, int]) -> str:
    """The warning that a prompt takes several steps."""
    rows = {size: size.rows if size.chunk or not setting.states else 1 for size in sizes}
    steps = " and ".join(f"{times:,} of {plural(rows[size], 'token')}" for size, times in sizes.items())
    return f"a prompt is computed in steps: {steps} (serve.step_tokens)"


def server_of(recipe: Recipe) -> tuple[ServeSetting, Device, int]:
    """The setting of a recipe's server, its device as a server finds it, and the number of its ranks on one host.

    Raises `Mistakes` (exit 4) for GPUs of several hosts, on which no server starts."""
    device, _, per_host = cluster.device_of(recipe)
    setting = ServeSetting.of(recipe, model_to_serve(recipe, device.kind), device.kind)
    ranks = setting.mesh.ranks
    if device.kind == "gpu" and recipe.cluster is not None and ranks > per_host:
        raise Mistakes.one(
            f"`serve.mesh` needs {ranks} GPUs, and a host has {per_host}", exit=Exit.FIT,
            where=recipe.where("serve.mesh"), why="a server runs on one host", fix=f"{per_host} devices or fewer",
        )  # fmt: skip
    return setting, device.serving, min(ranks, per_host) if recipe.cluster is not None else ranks


def _too_few(blocks: int, requests: int, length: int, each: int) -> str:
    """A warning if the cache does not hold `requests` requests of `length` tokens, else "". `each`: bytes per block."""
    held = blocks // -(-length // BLOCK_SIZE)
    if held >= requests:
        return ""
    tokens = blocks * BLOCK_SIZE
    return f"the cache, {gib(blocks * each)} or {tokens:,} tokens, holds {held} of {requests} requests of {length:,}"
