"""Annotated programs, partitioned by tpshard and by XLA: bytes that a device sends, and the share of useful FLOPs.

    python benchmarks/partitioner_vs_xla.py [NAME ...] [--json] [--record]

Every program is written once, against a few operations that both torch and jax have, and gets the same annotations of
its arguments, results and `split` values. XLA runs on eight virtual CPU devices where `jax` can be imported, Shardy
propagates for it; its collectives are read after its partitioner's and simplifier's passes, and an all-reduce of which
a device keeps its slice counts as the reduce-scatter that it becomes on accelerators. Bytes are a ring's
(`cost.wire_bytes`), of one device. `--record` keeps the table in benchmarks/records/partitioner_vs_xla.json.
"""

from __future__ import annotations

import glob
import math
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from types import ModuleType
from typing import Any

import torch
from tpshard.parallelism import Mesh, partition
from tpshard.parallelism.pricing.cost import wire_bytes

from partitioner_operations import Jax, Torch
from partitioner_programs import CASES, Case, Dims
from record import Record, parser_of


def ours(case: Case) -> tuple[dict[str, tuple[int, int]], float]:
    """(count, wire bytes) per kind of collective, and the FLOP efficiency, of tpshard's program."""
    mesh = Mesh(case.mesh)
    args = [
        torch.empty(shape, dtype=torch.int32 if i in case.indices else torch.float32, device="meta")
        for i, (shape, _) in enumerate(case.args)
    ]
    for arg in args:
        arg.requires_grad_(arg.is_floating_point())
    program = partition(
        lambda *inputs: case.fn(Torch(mesh), *inputs), args, mesh, [dims for _, dims in case.args], case.out
    )
    return totals((c.kind, c.bytes, c.size) for c in program.collectives), program.flop_efficiency


def totals(collectives: Iterable[tuple[str, int, int]]) -> dict[str, tuple[int, int]]:
    """(count, wire bytes) per kind of collective, each of which is given as kind, bytes and number of members."""
    by_kind: dict[str, tuple[int, int]] = {}
    for kind, size, members in collectives:
        count, total = by_kind.get(kind, (0, 0))
        by_kind[kind] = count + 1, total + wire_bytes(kind, size, members)
    return by_kind


_KINDS = {
    "all-gather": "all_gather", "all-reduce": "all_reduce", "reduce-scatter": "reduce_scatter",
    "all-to-all": "all_to_all", "collective-permute": "permute",
}  # fmt: skip
_BYTES = {"f32": 4, "s32": 4, "u32": 4, "pred": 1, "f16": 2, "bf16": 2, "s64": 8, "f64": 8, "u8": 1, "s8": 1, "u16": 2}


def theirs(jax: ModuleType, case: Case, folder: str) -> dict[str, tuple[int, int]]:
    """(count, wire bytes) per kind of collective of XLA's program."""
    import numpy as np

    count = math.prod(case.mesh.values())
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:count]).reshape(tuple(case.mesh.values())), tuple(case.mesh))

    def placed(dims: Dims) -> Any:
        return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*dims))

    even = all(
        n % math.prod(case.mesh[a] for a in ((d,) if isinstance(d, str) else d or ())) == 0
        for shape, dims in case.args for n, d in zip(shape, dims)
    )  # fmt: skip
    args = [
        jax.ShapeDtypeStruct(shape, np.int32 if i in case.indices else np.float32)
        for i, (shape, _) in enumerate(case.args)
    ]
    xp = Jax(jax, mesh)

    def function(*inputs: Any) -> Any:
        # jax refuses uneven arguments, XLA does not: constraints inside the function say the same
        pinned = inputs if even else [xp.split(g, *dims) for g, (_, dims) in zip(inputs, case.args)]
        results = case.fn(xp, *pinned)
        return results if even or case.out is None else xp.split(results, *case.out[0])

    outs = None if case.out is None or not even else [placed(d) for d in case.out]
    if outs is not None and len(outs) == 1 and not isinstance(jax.eval_shape(function, *args), (tuple, list)):
        outs = outs[0]
    elif outs is not None:
        outs = jax.tree.unflatten(jax.tree.structure(jax.eval_shape(function, *args)), outs)
    shutil.rmtree(folder, ignore_errors=True)
    ins = tuple(placed(dims) for _, dims in case.args) if even else None
    jax.jit(function, in_shardings=ins, out_shardings=outs).lower(*args).compile()
    (path,) = glob.glob(f"{folder}/*jit_function*before_all-reduce-promotion.txt")
    with open(path) as file:
        return totals(collectives(file.read(), count))


def collectives(text: str, devices: int) -> Iterator[tuple[str, int, int]]:
    """Kind, bytes and number of members of each collective of an HLO module."""
    lines = text.splitlines()
    for line in lines:
        match = re.match(r"\s*(?:ROOT )?(%\S+) = (.*?) (all-gather|all-reduce|reduce-scatter|all-to-all|"
                         r"collective-permute)\((.*?)\)", line)  # fmt: skip
        if match is None:
            continue
        name, type_text, kind = _KINDS[match[3]], match[2], match[3]
        size = sum(
            math.prod(int(n) for n in dims.split(",") if n) * _BYTES[dtype]
            for dtype, dims in re.findall(r"(\w+)\[([\d,]*)\]", type_text)
        )
        members = _members(line, devices)
        if kind == "reduce-scatter":
            size *= members
        readers = [r for r in lines if f"{match[1]}," in r.split(" = ")[-1] or f"{match[1]})" in r.split(" = ")[-1]]
        if kind == "all-reduce" and len(readers) == 1 and " dynamic-slice(" in readers[0]:
            name = "reduce_scatter"
        yield name, size, members


def _members(line: str, devices: int) -> int:
    iota = re.search(r"replica_groups=\[(\d+),(\d+)\]", line)
    if iota:
        return int(iota[2])
    plain = re.search(r"replica_groups=\{\{([\d,]*)\}", line)
    return len(plain[1].split(",")) if plain else devices


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="programs (default: all)")
    options = parser.parse_args()
    if unknown := set(options.names) - set(CASES):
        parser.error(f"no program {', '.join(sorted(unknown))}: {', '.join(CASES)}")
    record = Record("partitioner_vs_xla", "jax", quiet=options.json)
    folder = tempfile.mkdtemp(prefix="tpshard-xla-")
    os.environ["XLA_FLAGS"] = (
        f"--xla_force_host_platform_device_count=8 --xla_dump_to={folder} --xla_dump_hlo_pass_re=all-reduce-promotion"
    )
    try:
        import jax
    except ImportError:
        jax = None  # type: ignore[assignment]
    rows = record.rows
    record.say("MB that a device sends (2^20 bytes)")
    record.say(f"{'program':<40} {'tpshard':>8} {'XLA':>8} {'ratio':>6} {'FLOPs':>6}  collectives (tpshard | XLA)")
    for name in options.names or CASES:
        row: dict[str, Any] = {"program": name}
        try:
            row["collectives"], row["flop_efficiency"] = ours(CASES[name])
            row["bytes"] = sum(size for _, size in row["collectives"].values())
        except Exception as error:  # a program that one of the two refuses is a row as well
            row["error"] = f"{type(error).__name__}: {error}"
        if jax is not None:
            try:
                row["xla_collectives"] = theirs(jax, CASES[name], folder)
                row["xla_bytes"] = sum(size for _, size in row["xla_collectives"].values())
            except Exception as error:
                row["xla_error"] = f"{type(error).__name__}: {error}"
        rows.append(row)
        record.say(_show(row))
    if jax is not None:
        above = [r["program"] for r in rows if r.get("bytes", math.inf) > r.get("xla_bytes", math.inf)]
        record.say(f"\nabove XLA: {len(above)} of {len(rows)}: {'; '.join(above)}")
        record.figure("programs", len(rows), "programs")
        record.figure("above-xla", len(above), "programs")
    record.close(as_json=options.json, write=options.record)


def _show(row: dict[str, Any]) -> str:
    def kinds(totals: dict[str, tuple[int, int]]) -> str:
        return " ".join(f"{n} {kind}" for kind, (n, _) in sorted(totals.items())) or "none"

    if "error" in row:
        return f"{row['program']:<40} {row['error'].splitlines()[0][:100]}"
    mine, other = row["bytes"], row.get("xla_bytes")
    ratio = "" if other is None else "1.00" if mine == other else f"{mine / other:.2f}" if other else "inf"
    peer = row.get("xla_error", "")[:60] or kinds(row.get("xla_collectives", {}))
    other_mib = "" if other is None else f"{other / 2**20:.3f}"
    return (
        f"{row['program']:<40} {mine / 2**20:>8.3f} {other_mib:>8} {ratio:>6} {row['flop_efficiency']:>6.2f}"
        f"  {kinds(row['collectives'])} | {peer}"
    )


if __name__ == "__main__":
    main()
