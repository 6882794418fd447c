"""Plans for serving: the step of a server for a prompt (`prefill`) and for one token of each request (`decode`)."""

from __future__ import annotations

from dataclasses import replace

from tpshard.models import build
from tpshard.parallelism.cost import Device
from tpshard.parallelism.flow import known, op_name
from tpshard.parallelism.mesh import Mesh
from tpshard.parallelism.program import INFO, Program, info
from tpshard.parallelism.rules.table import entry_of
from tpshard.plan.pricing import Part, price_parts
from tpshard.plan.report import Job, Report
from tpshard.plan.text import gib
from tpshard.programs import serving
from tpshard.programs.padding import note, padded
from tpshard.programs.served import Served, served
from tpshard.programs.setting import DTYPES
from tpshard.recipes.diagnostic import Exit, Mistakes
from tpshard.recipes.schema import Recipe


def report(recipe: Recipe, what: str, source: str = "", accuracy: str = "", blocks: int | None = None) -> Report:
    """The plan of a server's step, its cache as large as the server would make it, or of so many `blocks`.

    All requests of a step are at `model.seq_len`, or as long as the cache holds them. Raises `Mistakes` (exit 4) where
    tp does not fit the heads.
    """
    from tpshard.plan import make

    device, _, per_host = make.device_of(recipe)
    told = _served(recipe, device)
    sizes = {axis: max(1, size) for axis, size in recipe.serve.mesh.items()}
    mesh = Mesh(sizes)
    requests, length = recipe.serve.requests, recipe.model.seq_len
    rows = length if what == "prefill" else requests
    each = -(-length // serving.BLOCK_SIZE)
    sequences = 1 if what == "prefill" else requests
    tp, quantized = sizes.get("tp", 1), told.quantized
    config = padded(told.config, tp, 1 if quantized is None else quantized.shared)
    blocks = cache_blocks(recipe) if blocks is None else blocks
    used = min(each * sequences, blocks)
    try:
        made = serving.step(
            build(config, dtype=DTYPES[told.dtype]), config, mesh, rows=rows, wanted=sequences, blocks=used,
            block_size=serving.BLOCK_SIZE, orders=told.orders, layout=recipe.serve.layout,
        )  # fmt: skip
    except ValueError as error:
        raise Mistakes.one(str(error), exit=Exit.FIT, where=recipe.where("serve.mesh")) from error
    program = with_kinds(made.program if quantized is None else quantized.held(made, device.kind))
    # the rule counts every row against the whole pool; a row reads its own sequence, half of it while prompts grow
    _scale_attention(program, sequences * (2 if what == "prefill" else 1))
    _own_columns(program, told.config.mlp, config.mlp)
    per_host = _processes(recipe, mesh.ranks, per_host)
    held = (blocks - used) * serving.block_bytes(told.config, tp, told.dtype)
    pricing = price_parts(
        [Part(what, program, 1, {"cache": held} if held else {}, "none")], device, per_host, processes=per_host
    )
    parameters = [port.name for port in program.inputs if port.kind == "parameter"]
    job = Job(
        name=recipe.name, recipe=source, what=what, model=recipe.model.preset or recipe.model.hf or "model",
        params=told.config.count, seq_len=length, dtype=told.dtype, mesh=sizes, nodes=-(-mesh.ranks // per_host),
        devices_per_node=per_host, global_sequences=sequences, per_device=sequences, micro_batches=1, tokens=rows,
        compiled=False, device_assumed=recipe.cluster is None,
        quantized="" if quantized is None else f"{quantized}, layout {recipe.serve.layout}",
    )  # fmt: skip
    few = _too_few(blocks, requests, length, serving.block_bytes(told.config, tp, told.dtype))
    notes = [text for text in (few, told.note, note(told.config, config, tp)) if text]
    warnings = [*notes, *make.extra_warnings(job, device, program)]
    return make.assemble(job, pricing, program, parameters, accuracy, warnings)


def with_kinds(program: Program) -> Program:
    """The same program, its inputs told apart: parameters, cache, and what every step brings."""

    def kind(name: str) -> str:
        if name in serving.ROWS:
            return "batch"
        return "cache" if ".cache." in name else "order" if name.endswith(".order") else "parameter"

    return replace(program, inputs=tuple(replace(port, kind=kind(port.name)) for port in program.inputs))


def _scale_attention(program: Program, divisor: int) -> None:
    for node in program.graph.nodes:
        if op_name(node) == "paged_attention":
            here = info(node)
            node.meta[INFO] = replace(here, flops=here.flops // divisor, global_flops=here.global_flops // divisor)


def _own_columns(program: Program, mlp: int, wider: int) -> None:
    """Of an MLP that was padded for tp only the model's own columns are of use: devices compute the others as well."""
    for node in program.graph.nodes:
        here = known(node)
        _, inside, part = here.module.partition(".mlp")
        # what `down` does besides its product is as wide as the residual stream
        if mlp == wider or not here.global_flops or not inside or part[:1] not in ("", "."):
            continue
        if not (part == ".down" and entry_of(node.target).inlined):
            node.meta[INFO] = replace(here, global_flops=here.global_flops * mlp // wider)


def cache_blocks(recipe: Recipe) -> int:
    """Blocks of the cache that the server would make on each of the recipe's devices while nothing else is on them."""
    from tpshard.plan import make

    device, _, per_host = make.device_of(recipe)
    told, serve = _served(recipe, device), recipe.serve
    tp = max(1, serve.mesh.get("tp", 1))
    mine = device.shared_by(_processes(recipe, tp, per_host))
    free = mine.memory_bytes - mine.context_bytes
    bits = None if told.quantized is None else told.quantized.settings.bits
    return serving.cache_blocks(told.config, tp, told.dtype, serve.requests, serve.cache_mb, free, device.kind, bits)


def _served(recipe: Recipe, device: Device) -> Served:
    told = served(recipe, device.kind)
    if told is None:
        raise Mistakes.one(
            "a module of your own cannot be served", exit=Exit.FIT, where=recipe.where("model.module"),
            why="the server needs a cache of keys and values",
        )  # fmt: skip
    return told


def _processes(recipe: Recipe, ranks: int, per_host: int) -> int:
    """Ranks of a server on one host."""
    return min(ranks, per_host) if recipe.cluster is not None else ranks


def _too_few(blocks: int, requests: int, length: int, each: int) -> str:
    """Says that a cache does not hold all `requests` of `length` tokens; empty where it does. `each`: bytes a block."""
    held = blocks // -(-length // serving.BLOCK_SIZE)
    if held >= requests:
        return ""
    tokens = blocks * serving.BLOCK_SIZE
    return f"the cache, {gib(blocks * each)} or {tokens:,} tokens, holds {held} of {requests} requests of {length:,}"
