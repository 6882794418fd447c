"""Compiling one rank's graph by torch's compiler in the scheduled order (`compile: inductor`)."""

from __future__ import annotations

import atexit
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._pytree import tree_leaves
from tpshard.kernels.add_parts import add_parts, add_parts_formula
from tpshard.kernels.fake_mode import fake_mode
from tpshard.kernels.optimizer_steps import FORMULAS
from tpshard.parallelism.draws import RANDOM, random
from tpshard.parallelism.runtime.heap import give_back

Boxed = Callable[[list[Tensor]], list[Tensor]]
"""A function that takes a list of tensors, empties it, and returns a list."""

KEEP_ORDER: dict[str, Any] = {
    "reorder_for_peak_memory": False,
    "reorder_for_compute_comm_overlap": False,
    "allow_buffer_reuse": False,
}
"""Inductor settings that keep the scheduled order: it must not move a gather to its use, nor reuse its buffers."""


CACHE = "TORCHINDUCTOR_CACHE_DIR"
"""The environment variable with the folder of inductor's compiled code."""


@cache
def own_cache() -> Path:
    """A folder for compiled code that only this user can write: in the user's cache folder, or else a new one.

    By default torch takes a folder of a predictable name in the shared temporary folder, whoever made it, and loads
    what lies there.
    """
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = Path(base, "tpshard", "inductor")
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
        if status.st_uid == os.getuid() and not status.st_mode & 0o022 and os.access(folder, os.W_OK | os.X_OK):
            return folder
    except OSError:
        pass
    private = tempfile.mkdtemp(prefix="tpshard-inductor-")
    atexit.register(shutil.rmtree, private, ignore_errors=True)
    return Path(private)


def compile_graph(module: fx.GraphModule, inputs: Sequence[Tensor]) -> Boxed:
    """Compiles a localized graph, or a part of one, for tensors like `inputs`.

    The graph is traced again into the decompositions that inductor expects; results keep the graph's memory layouts.
    Raises RuntimeError with inductor's message if it cannot compile (for example without a C++ compiler).
    """
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.decomposition import select_decomp_table
    from torch.compiler import config as compiler_config

    compiler: Any = compiler_config
    if CACHE not in os.environ:
        os.environ[CACHE] = str(own_cache())
    mode = fake_mode()
    mode.shape_env = ShapeEnv()  # without one torch neither looks for a compiled graph in its cache nor keeps one
    with mode:
        fakes = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device) for t in inputs]

    def flat(*tensors: Tensor) -> list[Tensor]:
        return list(module(*tensors))

    table = select_decomp_table() | FORMULAS | {RANDOM: random, add_parts: add_parts_formula}
    with torch.no_grad():
        traced = make_fx(flat, decomposition_table=table, tracing_mode="fake", _allow_non_fake_inputs=True)(*fakes)
    output = next(node for node in reversed(traced.graph.nodes) if node.op == "output")
    output.args = (tuple(output.args[0]),)
    output.meta["user_visible_output_idxs"] = range(len(output.args[0]))
    output.meta["original_output_strides"] = [node.meta["val"].stride() for node in output.args[0]]
    traced.recompile()
    tag = compiler.patch("cache_key_tag", f"{_layouts(traced.graph)} {_machine()}")
    with tag, config.patch(KEEP_ORDER), torch._guards.tracing(torch._guards.TracingContext(mode)):
        run = compile_fx_inner(traced, fakes)

    give_back()  # what compiling took: often more than a step takes

    def call(tensors: list[Tensor]) -> list[Tensor]:
        return list(run(tensors))

    return call


INSTRUCTIONS = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS")
"""Environment variables by which libraries take other instructions of a processor than they would."""


def _machine() -> str:
    """What else decides compiled code: the processor's instructions, of which a folder in a home that several hosts
    share has several, and the threads for which it is written."""
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    capability = torch.backends.cpu.get_cpu_capability()
    allowed = [os.environ.get(name) for name in INSTRUCTIONS]
    return repr((capability, str(pick_vec_isa()), allowed, torch.get_num_threads()))


def _layouts(graph: fx.Graph) -> str:
    """A hash of the layouts of all values of a graph.

    They decide the code that inductor writes, and those of operations of tpshard's own may change with its versions;
    the key by which torch finds compiled code has the graph and its inputs alone.
    """
    values = [value for node in graph.nodes for value in tree_leaves(node.meta.get("val"))]
    told = [(*v.shape, *v.stride(), str(v.dtype)) for v in values if isinstance(v, Tensor)]
    return hashlib.sha256(repr(told).encode()).hexdigest()
