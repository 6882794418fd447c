"""A plan fits one screen, and its text and JSON have stable names and the same bytes each time."""

from __future__ import annotations

import json
import re
import socket
import subprocess
from dataclasses import replace

import pytest
from small_recipe import RECIPE
from tpshard.cli.main import run as tpshard
from tpshard.cli.preflight.model_checks import model_errors
from tpshard.parallelism.pricing.cost import Efficiency
from tpshard.parallelism.why import SourcePlace
from tpshard.plan import command, planner
from tpshard.plan.questions import diff
from tpshard.plan.report import describe, screen, screen_tables, screen_words
from tpshard.plan.report.report import Edit, Tensor
from tpshard.plan.step.units import gib, seconds
from tpshard.recipes.reading.load import loads


def test_one_screen(report):
    lines = screen.screen(report).splitlines()
    assert len(lines) <= 60
    assert max(map(len, lines)) <= 100
    shown = "\n".join(lines)
    for word in ("FITS", "SHARDING", "COLLECTIVES", "MEMORY", "TIME", "MFU", "FLOP efficiency", "BOTTLENECK"):
        assert word in shown
    assert "heads: tp" in shown


def test_lines_that_annotate_are_counted_apart_from_tensors_and_defaults(report):
    assert report.annotations.written == 0 and "11 tensors annotated by defaults (*), " in str(report.annotations)
    rules = "sharding: {rules: {batch: fsdp, mlp: tp}, annotate: {layers.*.residual: [batch, seq, embed]}}\n"
    written = planner.report(loads(RECIPE + rules), "").annotations
    assert (written.written, written.tensors, written.by_default) == (3, 8, 0)
    assert "8 tensors annotated by 3 lines (*), " in str(written)
    for once in ("gather=step", "reduce=last"):
        none = planner.report(loads(RECIPE, [f"fsdp.accumulate.{once}"]), "").annotations
        assert (none.written, none.tensors) == (0, 0) and " annotated by defaults (*), " in str(none)
    for line in ("annotate={embedded: [batch, seq, embed]}", "pin={output.weight: [tp, null]}"):
        one = planner.report(loads(RECIPE, [f"sharding.{line}"]), "").annotations
        assert (one.written, one.tensors) == (1, 1)
        assert f"1 tensor annotated by 1 line, {one.by_default} by defaults (*), " in str(one)


def test_a_suggestion_is_shown_whole_on_as_many_lines_as_it_needs(report):
    change = ", ".join(f"fsdp.accumulate.reduce{i}: last" for i in range(8))
    several = replace(report, suggestions=[Edit(change, 2**30, 1.5, True)])
    lines = screen.screen(several).splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("  try: "))
    assert max(map(len, lines)) <= 100
    shown = " ".join(line.strip() for line in lines[first:])
    assert shown.startswith(f"try: {change}: 1.00 GiB, step {seconds(1.5)}")
    assert lines[first + 1].startswith("    fsdp.")


def test_operations_computed_twice_are_named_where_the_efficiency_shows_them(report, monkeypatch):
    pricing = replace(report.pricing, local_flops=1000, useful_flops=1000 * report.devices - 10)
    losses = [{"op": "add", "where": "layers.*", "efficiency": 0.5, "wasted": 9}]
    lossy = replace(report, pricing=pricing, losses=losses)
    monkeypatch.setattr(type(report), "flop_efficiency", 0.99)
    assert "computed more than once: add" in screen.screen(lossy)
    slower = replace(lossy, pricing=replace(pricing, local_flops=2000))
    assert "computed more than once" not in screen.screen(slower), "what is lost elsewhere has another cause"
    monkeypatch.setattr(type(report), "flop_efficiency", 0.99999)
    assert "computed more than once" not in screen.screen(lossy)


def test_all_warnings_are_shown_where_they_are_asked_for(report):
    several = replace(report, warnings=[f"warning {i}" for i in range(8)])
    assert "warning 6" not in screen.screen(several) and "2 more warnings (--verbose)" in screen.screen(several)
    shown = screen.screen(several, verbose=True)
    assert all(text in shown for text in several.warnings) and "more warnings" not in shown


def test_a_narrow_screen_keeps_the_line_that_decided():
    def mark(*places: SourcePlace) -> Tensor:
        return Tensor("w", (8, 8), ("tp" if places else None, None), places, "parameter", True)

    file, batch, heads = "/far/away/llama3-8b.yaml", "batch: [dp, fsdp]", "heads: tp"
    written = mark(SourcePlace(file, 8, 18, batch), SourcePlace(file, 8, 48, heads))
    assert screen_tables.short(written) == "llama3-8b.yaml:8:18 (batch: [dp, fsdp]); llama3-8b.yaml:8:48 (heads: tp)"
    assert screen_tables.short(written, "llama3-8b.yaml", 50) == "8:18 (batch: [dp, fsdp]); 8:48 (heads: tp)"
    assert screen_tables.short(written, "llama3-8b.yaml", 20) == "8:18, 8:48"
    defaults = mark(*(SourcePlace("<default>", says=says, default=True) for says in (batch, heads)))
    assert screen_tables.short(defaults) == "batch: [dp, fsdp] (default); heads: tp (default)"
    assert screen_tables.short(defaults, "", 25) == "batch, heads (default)"
    assert screen_tables.short(mark()) == "replicated: no annotation shards it"
    assert screen_tables.short(mark(), "", 14) == "replicated"


def test_no_row_of_the_shardings_is_cut(report):
    rows = [line for line in screen.screen(report).splitlines() if re.match(r" [* ]\S+ +[\dx]+ +\[", line)]
    assert rows and not any(row.endswith("...") for row in rows)


def test_buckets_are_shown_with_what_hides_them(report):
    gathers = [bucket for bucket in report.buckets if bucket.kind == "all_gather"]
    assert [screen_words.span(bucket.values) for bucket in gathers] == [
        "tok_embed.weight",
        "layers.*",
        "norm to output",
    ] + ["layers.*"]
    assert all(bucket.behind_s >= bucket.time_s for bucket in gathers[1:]), "these are hidden"
    assert gathers[0].exposed_s > 0 and sum(bucket.exposed_s for bucket in gathers[1:]) == 0
    of_all = sum(line.exposed_s for line in report.lines if line.of in ("parameter", "gradient"))
    assert of_all == pytest.approx(report.job.micro_batches * sum(bucket.exposed_s for bucket in report.buckets))
    rows = [line for line in screen.screen(report, verbose=True).splitlines() if "norm to output (2)" in line]
    assert [row.split()[:2] for row in rows] == [["all_gather", "forward"], ["reduce_scatter", "backward"]]
    assert "BUCKETS" not in screen.screen(report)


def test_the_names_of_the_screen_are_what_patterns_match(report):
    rows = [line for line in screen.shardings(report) if re.match(r" [* ]\S+ ", line)]
    names = [(row[2:].split()[0], len(re.search(r"\d+(x\d+)*(?= +\[)", row)[0].split("x"))) for row in rows]
    assert ("output.weight", 2) in names and ("layers.*.residual", 3) in names
    for name, rank in names:
        assert not wrong_with(name, rank)
    (mistake,) = wrong_with("output", 3)
    assert mistake.fix == "did you mean `output.weight`?"


def wrong_with(name, rank):
    """The error of a pattern for a tensor with a number of dims."""
    recipe = loads(RECIPE, [f"sharding.annotate={{{name}: [{', '.join(['null'] * rank)}]}}"])
    return [result for result in model_errors(recipe) if result.severity == "error"]


def test_json_has_the_names_that_others_rely_on(report):
    data = json.loads(json.dumps(report.to_json()))
    names = {"schema", "params", "mesh", "memory", "time", "tokens_per_s_per_device", "flop_efficiency", "collectives"}
    assert names | {"shardings", "buckets", "annotations", "warnings"} <= data.keys()
    assert {"peak_bytes", "reserved_bytes", "by_category"} <= data["memory"].keys()
    assert {"step_s", "compute_s", "comm_s", "exposed_comm_s"} <= data["time"].keys()
    assert {"kind", "axes", "count", "bytes", "wire_bytes", "time_s", "reason"} <= data["collectives"][0].keys()
    assert {"name", "shape", "sharding", "reason"} <= data["shardings"][0].keys()
    assert {"written", "given", "by_default", "inferred"} == data["annotations"].keys()
    assert data["mesh"] == {"fsdp": 2, "tp": 2} or data["mesh"] == {"dp": 1, "fsdp": 2, "tp": 2}
    assert sum(data["memory"]["by_category"].values()) == data["memory"]["peak_bytes"]
    wq = next(s for s in data["shardings"] if s["name"] == "layers.0.attention.wq.weight")
    assert wq["sharding"] == ["tp", None] and wq["annotated"]
    for figure in ("memory.parameters", "collectives.bytes", "params"):
        assert data["provenance"][figure] == "exact"


def test_calibrated_is_what_rests_on_nothing_that_was_not_fitted(report):
    def labels(**changes):
        device = replace(report.pricing.device, **changes)
        return replace(report, pricing=replace(report.pricing, device=device))

    every = dict.fromkeys(("matmul", "attention", "streaming", "inside"), "measured")
    fitted = labels(fitted=every)
    figures = ("time", "collectives.time_s")
    assert [fitted.provenance[figure] for figure in figures] == ["calibrated"] * 2
    without_link = labels(fitted={k: v for k, v in every.items() if k != "inside"})
    assert [without_link.provenance[figure] for figure in figures] == ["roofline", "roofline"]
    assert without_link.to_json()["unfitted"]["time"] == ["inside"]
    assert "[roofline: inside not fitted]" in screen.screen(without_link)
    served = replace(labels(fitted=every, kind="gpu"), job=replace(report.job, what="decode"))
    assert served.provenance["time"] == "roofline", "a GPU's constants come from training steps"


def test_a_device_of_which_the_data_sheet_alone_is_known_has_a_range(report):
    def on(**changes):
        return replace(report, pricing=replace(report.pricing, device=replace(report.pricing.device, **changes)))

    sheet = on(fitted={}, kind="gpu", efficiency=Efficiency())
    least, most = sheet.to_json()["time"]["step_range_s"]
    assert least < sheet.pricing.step_s < most and f"{seconds(least)} to {seconds(most)}" in screen.screen(sheet)
    assert on(fitted={"matmul": "measured"}, kind="gpu").step_range_s is None


def test_plan_twice_gives_the_same_bytes_and_touches_nothing(small, monkeypatch, capsys):
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a dry run opens no socket and starts no process")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(subprocess.Popen, "__init__", refuse)
    output = []
    for _ in range(2):
        assert tpshard(["plan", "small.yaml", "--dry-run", "--json"]) == 0
        output.append(capsys.readouterr().out)
    assert output[0] == output[1]
    json.loads(output[0])
    assert [p.name for p in small.parent.iterdir()] == ["small.yaml"]


def test_explain_ends_at_the_annotation(programs):
    explanation = describe.explain(programs.micro, "layers.0.attention.wq.weight")
    assert "heads: tp" in explanation
    assert "all_gather over fsdp" in explanation
    with pytest.raises(KeyError, match=r"layers\.0\.attention"):
        describe.explain(programs.micro, "attention.wq")


@pytest.mark.parametrize("name", ["layers.0.attention.wk", "layers.*.attention.wk", "layers.*.attention.wk.weight"])
def test_explain_takes_the_names_of_the_screen(programs, name):
    assert describe.explain(programs.micro, name).startswith("layers.0.attention.wk.weight")


def test_explain_of_a_misspelt_name_says_which_are_near(programs):
    with pytest.raises(KeyError, match=r"similar: layers\.0\.attention\.wk\.weight"):
        describe.explain(programs.micro, "layers.0.atention.wk.weight")


def test_diff_says_what_changes_and_what_it_costs(report):
    other = planner.report(loads(RECIPE, ["mesh.tp=1", "mesh.fsdp=4"]), "")
    actual = diff.diff(report, other)
    assert any(row["name"] == "layers.0.mlp.up.weight" for row in actual["shardings"])
    assert any(row["axes"] == "tp" and row["count"][1] == 0 for row in actual["collectives"])
    assert actual["figures"]["step_s"]["change"] == pytest.approx(other.pricing.step_s / report.pricing.step_s - 1)
    assert "COLLECTIVES" in diff.text(actual) and "devices:" not in diff.text(actual)
    assert "on 4 and on 8 devices" in diff.text(actual | {"devices": [4, 8]})
    equal = [{"name": f"layers.{i}.up", "before": "[M]", "after": "[M_tp]"} for i in range(3)]
    assert "  layers.*.up x3: [M] -> [M_tp]\n" in diff.text(actual | {"shardings": equal})
    many = [{"name": f"{chr(97 + i)}.weight", "before": "[M]", "after": "[M_tp]"} for i in range(26)]
    assert "... 2 more (--json)" in diff.text(actual | {"shardings": many})
    same = diff.diff(report, report)
    assert same["shardings"] == [] and same["collectives"] == []


def test_an_explanation_is_json_where_json_is_asked_for(planned, monkeypatch):
    monkeypatch.setattr(planner, "planned", lambda *_: planned)
    done = command.run(loads(RECIPE), command.PlanOptions(explain="norm.weight")).text
    parsed = json.loads(command.run(loads(RECIPE), command.PlanOptions(explain="norm.weight", as_json=True)).text)
    assert parsed == {"name": "norm.weight", "lines": done.splitlines()} and parsed["lines"]


def test_a_narrow_terminal_gets_80_columns_with_all_figures(report):
    lines = screen.screen(report, width=80).splitlines()
    assert len(lines) <= 60 and max(map(len, lines)) <= 80
    shown, wide = "\n".join(lines), screen.screen(report)
    for title in ("COLLECTIVES of a device in a step", "dims: B batch, S seq", "weights drawn at random, seed "):
        assert title in shown and title in wide
    assert " bytes " in wide and " sent " in shown and "exposed  link" in shown
    verbose = screen.screen(report, verbose=True, width=80).splitlines()
    buckets = verbose[verbose.index(next(line for line in verbose if line.startswith("BUCKETS"))) + 1 :]
    assert buckets[0].split() == ["count", "time", "behind", "exposed"]
    assert len(buckets[1]) == len(buckets[0]) < 80 and buckets[1].startswith("  all_gather")


def test_a_reason_without_room_is_left_out_and_not_cut_to_a_letter(report):
    rows = screen.shardings(report, 80)
    longest = max(len(row) for row in rows)
    width = longest - len("replicated") + 2
    assert any(row.endswith("replicated") for row in rows)
    assert max(map(len, screen.shardings(report, width))) <= width


def test_memory_says_why_its_three_figures_differ(report):
    shown = screen.screen(report)
    assert "allocated: tensors; reserved: all that the allocator holds" in shown
    device = replace(report.pricing.device, context_bytes=2**30)
    gpu = replace(report, pricing=replace(report.pricing, device=device))
    assert "needed: 1.00 GiB of driver and libraries more" in " ".join(screen.screen(gpu).split())
    assert gib(3 * 2**40) == "3.00 TiB"
