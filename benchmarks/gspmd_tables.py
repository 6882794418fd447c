"""The recipes of docs/concepts/gspmd-tables.md as plans: collectives, bubbles, published models, a trillion parameters.

    python benchmarks/gspmd_tables.py [--record] [--docs]        six minutes, for twelve plans of up to 2,048 devices

Nothing runs: plans are exact in counts and bytes, and their times are predictions. `--docs` writes the page's tables.
The test of the page computes the tables of the first two parts anew and reads the others from the record.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tpshard.parallelism.pipeline import schedules
from tpshard.plan import planner
from tpshard.plan.report.planned import Planned
from tpshard.programs.setting.cluster import devices_of
from tpshard.programs.setting.setting import Setting
from tpshard.recipes.reading.load import loads

from record import ROOT, Record, parser_of, with_table

PAGE = ROOT / "docs" / "concepts" / "gspmd-tables.md"
ATTEMPTS = ("attempt-1", "attempt-2", "finalized")
TENSORS = {
    "wq, wk, wv [M, ND]": "attention.wq.weight", "wo [ND, M]": "attention.wo.weight", "up [M, H]": "mlp.up.weight",
    "down [H, M]": "mlp.down.weight", "residual [B, S, M]": "residual", "heads [B, S, N, D]": "attention.attended",
    "hidden [B, S, H]": "mlp.hidden",
}  # fmt: skip
"""Tensors of a layer; weights are stored as [out, in] and shown as [in, out]."""
BUBBLES = ((4, 1, 4), (4, 1, 16), (4, 2, 8), (4, 4, 8), (8, 1, 8), (8, 2, 16), (8, 4, 16), (16, 4, 32))
"""Stages, rounds, micro-batches."""
TRILLION = [(x, y, sequences) for sequences in (512, 4096) for x, y in ((32, 64), (256, 8))]
"""Meshes and batches; every device takes its sequences at once."""


@dataclass(frozen=True)
class PublishedModel:
    """A model of the paper's authors, on TPUv3 cores (tensorflow/lingvo, tasks/lm/params/synthetic_packed_input.py).

    `rate`: the tokens a second that its file tells to expect.
    """

    name: str
    x: int
    y: int
    sequences: int
    length: int
    rate: float
    sizes: Mapping[str, int]
    gated: bool = True
    adam: bool = False

    def overrides(self) -> list[str]:
        sizes = {"seq_len": self.length, "max_seq": self.length, "kv_heads": self.sizes["heads"], **self.sizes}
        plain = [] if self.gated else ["model.preset=granite-20b", "model.attention_bias=false", "model.mlp_bias=false"]
        return [
            f"mesh.x={self.x}", f"mesh.y={self.y}", f"cluster.nodes={self.x * self.y // 8}",
            f"batch.global_sequences={self.sequences}", f"batch.per_device={self.sequences // self.x}",
            f"optimizer.name={'adamw' if self.adam else 'lion'}", *plain,
            *(f"model.{key}={size}" for key, size in sizes.items()),
        ]  # fmt: skip


_128B = {"layers": 64, "width": 8192, "heads": 128, "mlp": 65536}
_12K = {"width": 12288, "heads": 96, "mlp": 49152}
PUBLISHED = (
    PublishedModel("DenseLm128B8x8", 8, 16, 16, 1024, 3.7e3, _128B),
    PublishedModel("DenseLm128B16x16", 16, 32, 128, 1024, 18e3, _128B),
    PublishedModel("DenseLm128B32x32", 32, 64, 512, 1024, 62e3, _128B),
    PublishedModel("DenseLm175B32x32", 64, 32, 1024, 2048, 51.53e3, {"layers": 96, **_12K}, gated=False),
    PublishedModel("DenseLm12kWide41BAdam16x16", 16, 32, 256, 2048, 53.8e3, {"layers": 24, **_12K}, False, True),
    PublishedModel("DenseLm12kWide162BAdam16x16", 16, 32, 64, 2048, 12.5e3, {"layers": 96, **_12K}, False, True),
    PublishedModel(
        "DenseLm1T16x16", 16, 32, 16, 512, 1.4e3, {"layers": 128, "width": 16384, "heads": 256, "mlp": 131072}
    ),
)  # fmt: skip
PEAK = 61.5e12
"""FLOP/s of a TPUv3 core in bf16."""


@dataclass(frozen=True)
class Asked:
    """What the shardings of an attempt ask of a layer's forward pass: `bytes` of the sizes M, ND, H, B, S, X and Y."""

    count: int
    formula: str
    elements: Callable[..., int]


_WEIGHTS = Asked(6, "6 weights: (4 M ND + 2 M H) / Y", lambda M, ND, H, Y, **_: (4 * M * ND + 2 * M * H) // Y)
_RESULTS = Asked(2, "2 results: 2 B S M / X", lambda B, S, M, X, **_: 2 * B * S * M // X)
PAPER: dict[tuple[str, str, str], Asked] = {
    ("attempt-1", "all_reduce", "x"): Asked(
        4, "q, k, v and hidden: B S (3 ND + H) / Y", lambda B, S, ND, H, Y, **_: B * S * (3 * ND + H) // Y
    ),
    ("attempt-1", "all_reduce", "y"): _RESULTS,
    ("attempt-2", "all_gather", "x"): _WEIGHTS,
    ("attempt-2", "all_reduce", "y"): _RESULTS,
    ("finalized", "all_gather", "x"): _WEIGHTS,
    ("finalized", "all_gather", "y"): Asked(2, "2 inputs: 2 B S M / X", _RESULTS.elements),
    ("finalized", "reduce_scatter", "y"): _RESULTS,
}  # fmt: skip


def recipes() -> dict[str, str]:
    """The page's recipes and its device by name."""
    blocks = re.findall(r"(?ms)^```yaml\n((?:schema: 1\n)?name: ([\w-]+)\n.*?)^```$", PAGE.read_text(encoding="utf-8"))
    return {name: text for text, name in blocks}


def plan(text: str, overrides: Iterable[str] = ()) -> Planned:
    return planner.planned(loads(text, list(overrides)), "")


# ---- three attempts -------------------------------------------------------------------------------------------------
def collectives(name: str, planned: Planned) -> list[dict[str, Any]]:
    """The collectives of the one layer, by kind, axis and what they move; bytes of a device in the forward pass."""
    rows: dict[tuple[str, str, str], dict[str, Any]] = {}
    norms = {p.name for p in planned.program.inputs if "norm" in p.name}
    for part in planned.pricing.parts:
        for info, comm, cost, _ in part.collectives():
            if not (info.place.layer or comm.value[0].startswith("layers.")):
                continue
            small = comm.value[0] in norms or ("norm" in comm.value[0] and comm.kind == "all_reduce")
            role = "norms" if small else {"parameter": "weights", "gradient": "gradients"}.get(comm.of, "activations")
            row = rows.setdefault((comm.kind, comm.axes[0], role), {
                "attempt": name, "kind": comm.kind, "axis": comm.axes[0], "moves": role,
                "forward": 0, "backward": 0, "bytes": 0, "sent": 0,
            })  # fmt: skip
            row["forward" if info.phase == "forward" else "backward"] += 1
            row["bytes"] += comm.bytes * (info.phase == "forward")
            row["sent"] += cost.wire_bytes
    for row in rows.values():
        asked = PAPER.get((name, row["kind"], row["axis"])) if row["moves"] != "norms" else None
        row["asked"] = None if asked is None else {
            "count": asked.count, "formula": asked.formula, "bytes": 2 * asked.elements(**sizes(planned)),
        }  # fmt: skip
    return sorted(rows.values(), key=lambda row: (row["moves"] == "norms", -row["forward"], row["kind"]))


def sizes(planned: Planned) -> dict[str, int]:
    """M, ND, H, B, S, X and Y of a recipe of this page."""
    shapes = {row["name"]: row["shape"] for row in planned.report.to_json()["shardings"]}
    (heads, width), (hidden, _) = shapes["layers.0.attention.wq.weight"], shapes["layers.0.mlp.up.weight"]
    job, mesh = planned.report.job, planned.report.job.mesh
    return {
        "M": width, "ND": heads, "H": hidden, "B": job.global_sequences,
        "S": job.seq_len, "X": mesh["x"], "Y": mesh["y"],
    }  # fmt: skip


def sharding(planned: Planned, tensor: str) -> str:
    """A layer's tensor by the axes of its dims, as in the paper's table."""
    rows = {row["name"]: row for row in planned.report.to_json()["shardings"]}
    row = rows[f"layers.0.{tensor}"]
    dims = row["stored"] or row["sharding"]
    dims = [*dims, *[None] * (len(row["shape"]) - len(dims))]
    if row["kind"] == "parameter":
        dims.reverse()
    return "[" + ", ".join("_" if dim is None else dim if isinstance(dim, str) else "+".join(dim) for dim in dims) + "]"


def attempts() -> tuple[str, str, list[dict[str, Any]]]:
    """The tables of shardings and of collectives, and the rows of the latter."""
    texts = recipes()
    plans = {name: plan(texts[name]) for name in ATTEMPTS}
    shardings = table(
        ("", *ATTEMPTS), [(f"`{label}`", *(f"`{sharding(plans[name], tensor)}`" for name in ATTEMPTS))
                          for label, tensor in TENSORS.items()],
    )  # fmt: skip
    rows = [row for name in ATTEMPTS for row in collectives(name, plans[name])]
    cells = []
    for name in ATTEMPTS:
        mine = [row for row in rows if row["attempt"] == name]
        for i, row in enumerate(mine):
            asked = "" if row["asked"] is None else f"{row['asked']['formula']} = {size_of(row['asked']['bytes'])}"
            cells.append((
                "" if i else name, f"{row['kind'].replace('_', '-')} over {row['axis']}", row["moves"],
                row["forward"], row["backward"], size_of(row["bytes"]) if row["forward"] else "", asked,
            ))  # fmt: skip
        cells.append(("", "a device sends in all", "", "", "", size_of(sum(row["sent"] for row in mine)), ""))
    heads = ("", "collective", "moves", "forward", "backward", "bytes forward", "asked for, forward")
    return shardings, table(heads, cells), rows


# ---- pipelines ------------------------------------------------------------------------------------------------------
def bubbles() -> tuple[str, list[dict[str, Any]]]:
    text, rows = recipes()["circular"], []
    for stages, rounds, micros in BUBBLES:
        schedule = "circular" if rounds > 1 else "gpipe"
        overrides = [f"mesh.pp={stages}", f"model.layers={stages * rounds}", f"pipeline.micro_batches={micros}",
                     f"pipeline.schedule={schedule}", f"batch.global_sequences={2 * micros}",
                     f"cluster.nodes={stages // 4}"]  # fmt: skip
        recipe = loads(text, [*overrides, f"pipeline.rounds={rounds if rounds > 1 else 'null'}"])
        stacking = Setting.of(recipe, devices_of(recipe)).stacking
        assert stacking is not None and (stacking.stages, stacking.rounds) == (stages, rounds)
        tasks = schedules.make(schedule, stages, micros, rounds)
        rows.append({
            "stages": stages, "rounds": rounds, "micro_batches": micros, "planned": round(stacking.bubble, 6),
            "staged": round(tasks.bubble(tasks.timetable(lambda task: 1.0)), 6),
            "formula": round((stages - 1) / (micros * rounds + stages - 1), 6),
        })  # fmt: skip
    cells = [(row["stages"], row["rounds"], row["micro_batches"], f"{row['stages'] - 1} / "
              f"{row['micro_batches'] * row['rounds'] + row['stages'] - 1} = {row['formula']:.3f}",
              f"{row['planned']:.3f}", f"{row['staged']:.3f}") for row in rows]  # fmt: skip
    heads = ("stages", "rounds", "micro-batches", "formula", "planned, vectorized", "staged")
    return table(heads, cells), rows


# ---- published models -----------------------------------------------------------------------------------------------
def published() -> list[dict[str, Any]]:
    texts, rows = recipes(), []
    with tempfile.TemporaryDirectory() as folder:
        device = Path(folder) / "tpu-v3.yaml"
        device.write_text(texts["tpu-v3"], encoding="utf-8")
        for model in PUBLISHED:
            report = plan(texts["dense"], [f"cluster.device={device}", *model.overrides()]).report.to_json()
            tokens = model.sequences * model.length
            rows.append({
                "published": model.name, "mesh": f"{model.x} x {model.y}", "sequences": model.sequences,
                "length": model.length, "params": report["params"], "tokens_s": model.rate, "adam": model.adam,
                "utilization": 6 * report["params"] * model.rate / (model.x * model.y * PEAK),
                "planned_tokens_s": tokens / report["time"]["step_s"], "planned_mfu": report["mfu"],
                "needed_bytes": report["memory"]["needed_bytes"], "exposed_s": report["time"]["exposed_comm_s"],
                "step_s": report["time"]["step_s"], "sent_bytes": sum(r["wire_bytes"] for r in report["collectives"]),
            })  # fmt: skip
    return rows


def published_table(rows: Sequence[Mapping[str, Any]]) -> str:
    cells = [(
        f"`{row['published']}`", row["mesh"], f"{row['sequences']} x {row['length']:,}",
        f"{row['params'] / 1e9:,.1f} B", f"{row['tokens_s']:,.0f}", f"{row['planned_tokens_s']:,.0f}",
        f"{row['planned_tokens_s'] / row['tokens_s']:.2f}",
        f"{100 * row['utilization']:.0f}%, {100 * row['utilization'] * 4 / 3:.0f}%",
        f"{100 * row['planned_mfu']:.0f}%, {100 * row['planned_mfu'] * 4 / 3:.0f}%",
        f"{row['needed_bytes'] / 2**30:.1f} GiB" + ("" if row["adam"] else " \\*"),
    ) for row in rows]  # fmt: skip
    heads = (
        "configuration", "mesh x, y", "sequences", "parameters", "tokens/s, authors", "planned", "planned/authors'",
        "utilization, authors", "planned", "memory of a core",
    )  # fmt: skip
    return table(heads, cells)


# ---- a trillion -----------------------------------------------------------------------------------------------------
def trillion() -> list[dict[str, Any]]:
    text, rows = recipes()["trillion"], []
    for x, y, sequences in TRILLION:
        sizes = [
            f"mesh.x={x}",
            f"mesh.y={y}",
            f"batch.global_sequences={sequences}",
            f"batch.per_device={sequences // x}",
        ]
        report = plan(text, sizes).report.to_json()
        rows.append({
            "mesh": f"{x} x {y}", "sequences": sequences, "params": report["params"], "fits": report["fits"],
            "needed_bytes": report["memory"]["needed_bytes"], "step_s": report["time"]["step_s"],
            "exposed_s": report["time"]["exposed_comm_s"], "mfu": report["mfu"],
            "sent_bytes": sum(row["wire_bytes"] for row in report["collectives"]),
        })  # fmt: skip
    return rows


def trillion_table(rows: Sequence[Mapping[str, Any]]) -> str:
    cells = [(
        row["mesh"], row["sequences"], f"{row['params'] / 1e12:.3f} T", f"{row['needed_bytes'] / 2**30:.1f} GiB",
        f"{row['sent_bytes'] / 2**30:,.0f} GiB", f"{row['step_s']:.3g} s", f"{row['exposed_s']:.3g} s",
        f"{100 * row['mfu']:.0f}%",
    ) for row in rows]  # fmt: skip
    heads = ("mesh x, y", "sequences", "parameters", "memory of a device", "a device sends", "a step", "waiting", "MFU")
    return table(heads, cells)


def size_of(size: int) -> str:
    return f"{size / 2**20:,.0f} MiB" if size >= 2**20 else f"{size / 2**10:,.0f} KiB"


def table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--docs", action="store_true", help="write the tables into docs/concepts/gspmd-tables.md")
    options = parser.parse_args()
    record = Record("gspmd_tables", quiet=options.json)
    shardings, layers, _ = attempts()
    pipelines, _ = bubbles()
    models, large = published(), trillion()
    record.rows = [*models, *large]
    tables = {
        "shardings": shardings, "attempts": layers, "bubbles": pipelines, "published": published_table(models),
        "trillion": trillion_table(large),
    }  # fmt: skip
    text = PAGE.read_text(encoding="utf-8")
    for name, content in tables.items():
        record.say(f"\n{content}\n")
        text = with_table(text, record.name, content, name)
    if options.docs:
        PAGE.write_text(text, encoding="utf-8")
    record.close(write=options.record, as_json=options.json)


if __name__ == "__main__":
    main()
