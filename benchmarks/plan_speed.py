"""How long a plan takes: 8B on 64 devices, 70B on 256, 405B on 16,384; the command, the second time; and a search.

The aims, on two cores: 5, 12 and 30 s, under 2 s the second time, from the cache of plans, and 60 s for a search that
prices 50 variants of 8B. The search runs in as many processes as there are cores, but at most two.

Without names it runs all of them; `--search` searches for better variants of the named ones, by default of 8B, instead:

    python benchmarks/plan_speed.py [NAME ...] [--search] [--record] [--json]
"""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from pathlib import Path

from tpshard.plan import outputs, planner
from tpshard.plan.report import report_file
from tpshard.plan.search import search, suggest
from tpshard.programs.setting.setting import Setting
from tpshard.programs.step.variants import Variants
from tpshard.recipes.reading.load import load

from record import Record, parser_of
from running import COMMAND

CASES = {
    "8b": ("llama3-8b", 64, "{fsdp: 64, tp: 1}", 64),
    "70b": ("llama3-70b", 256, "{fsdp: 32, tp: 8}", 64),
    "405b": ("llama3-405b", 16384, "{dp: 128, fsdp: 16, tp: 8}", 2048),
}


def pace() -> float:
    """Seconds of a plain Python loop, for comparing machines, or one machine at different times."""
    start, entries = time.perf_counter(), {}
    for i in range(3_000_000):
        entries[i % 1000] = (i, str(i & 255))
    return time.perf_counter() - start


def measure(record: Record, name: str, devices: int, path: str) -> None:
    """A plan in this process, what it takes to try what its figures speak for, and the command the second time."""
    os.environ["TPSHARD_CACHE"] = str(Path(path).with_name("cache"))
    start, cpu = time.perf_counter(), time.process_time()
    recipe = load(path)
    with planner.without_gc():  # as `planner.report`, which does both
        programs = planner.build_programs(Setting.of(recipe), variants := Variants())
        built = time.perf_counter()
        planned = planner.planned_training(programs, path)
    report = planned.report
    options = outputs.PlanOptions(source=path, dry_run=True)
    outputs.text("screen", report, lambda: planned.drawing)
    end, used = time.perf_counter(), time.process_time() - cpu
    report.suggestions = suggest.promising(report, recipe, variants=variants)
    suggested = time.perf_counter() - end
    entry = outputs.entry(recipe, options)
    assert entry is not None
    entry.write({"report": report_file.dumps(report)})
    begun = time.perf_counter()
    printed = subprocess.run([*COMMAND, "plan", path, "--dry-run"], capture_output=True, text=True).stdout
    second = time.perf_counter() - begun
    whole = outputs.text("screen", report, lambda: planned.drawing)
    assert printed == whole, "the second plan did not come from the cache"
    record.rows.append({"case": name, "devices": devices, "nodes": len(programs.micro.nodes), "build_s": built - start,
                        "price_s": end - built, "cpu_s": used, "suggestions_s": suggested, "second_s": second,
                        "suggested": [edit.change for edit in report.suggestions]})  # fmt: skip
    units = {"total": end - start, "cpu": used, "suggestions": suggested, "second": second}
    for what, value in units.items():
        record.figure(f"{name}.{what}", value, "s")
    record.say(
        f"{name:<5} {devices:>7} {len(programs.micro.nodes):>7} {built - start:>8.1f} {end - built:>8.1f} "
        f"{end - start:>8.1f} ({used:.1f}) {suggested:>12.1f} {second:>9.2f} "
        f"{report.pricing.needed_bytes / 2**30:>10.1f} {report.pricing.step_s:>9.2f}"
    )


def cpu_seconds() -> float:
    """Seconds of CPU of this process and its ended children."""
    return sum(os.times()[:4])


def measure_search(record: Record, name: str, path: str) -> None:
    """A search in this process: what it prices, what it rules out unbuilt, and what it leaves untried."""
    recipe, notes = load(path), list[str]()
    start, cpu = time.perf_counter(), cpu_seconds()
    processes = min(2, os.cpu_count() or 1)
    result = search.search(recipe, notes.append, processes)
    total_s, used = time.perf_counter() - start, cpu_seconds() - cpu
    unbuilt = sum(note.endswith(("not built", "alone exceed the memory")) for note in notes)
    priced = len(notes) - unbuilt - len(result.untried)
    best = result.best
    row = {"case": f"{name} search", "priced": priced, "unbuilt": unbuilt, "untried": len(result.untried),
           "processes": processes, "cpu_s": used, "total_s": total_s, "best": best.changes if best is not None else [],
           "best_step_s": best.price.step_s if best is not None else None}  # fmt: skip
    record.rows.append(row)
    record.figure(f"{name}.search", total_s, "s")
    record.figure(f"{name}.search.cpu", used, "s of CPU")
    record.figure(f"{name}.search.50", total_s * 50 / max(1, priced), "s for 50 variants")
    record.say(f"{name} search: {priced} priced, {unbuilt} not built, {len(result.untried)} not tried; {total_s:.1f} s "
               f"in {processes} processes ({used:.1f} s of CPU), {total_s * 50 / max(1, priced):.1f} s for 50; best "
               f"{row['best']}")  # fmt: skip


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(CASES)}; default: all")
    parser.add_argument("--search", action="store_true", help="search instead of planning; default: 8b")
    options = parser.parse_args()
    record = Record("search_speed" if options.search else "plan_speed", quiet=options.json)
    record.figure("pace", pace(), "s for a plain Python loop of 3 million")
    if not options.search:
        record.say(
            "case  devices   nodes  build s  price s  total s (cpu s)  suggestions  second s  needs GiB    step s"
        )
    for name in options.names or (["8b"] if options.search else CASES):
        preset, devices, mesh, sequences = CASES[name]
        text = f"""
name: {name}
cluster: {{device: h100-sxm-80g, nodes: {devices // 8}, devices_per_node: 8}}
mesh: {mesh}
model: {{preset: {preset}}}
batch: {{global_sequences: {sequences}, per_device: 1}}
remat: full
"""
        with tempfile.TemporaryDirectory(prefix="tpshard-plan-speed-") as folder:
            path = Path(folder) / f"{name}.yaml"
            path.write_text(text)
            if options.search:
                measure_search(record, name, str(path))
            else:
                measure(record, name, devices, str(path))
    record.close(write=options.record, as_json=options.json)


if __name__ == "__main__":
    main()
