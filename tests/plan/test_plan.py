"""What `tpshard plan` says, against the programs that run: exact where it says exact, the same bytes each time."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import xml.etree.ElementTree as ET
from collections import Counter
from dataclasses import replace
from html import escape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from tpshard.cli.main import run as tpshard
from tpshard.devices.read import device
from tpshard.parallelism.fusion import kernels
from tpshard.parallelism.liveness import liveness
from tpshard.parallelism.runtime.context import Context
from tpshard.parallelism.runtime.execute import Executor
from tpshard.plan import command, compare, diff, make, page, pictures, save, search, text, trace
from tpshard.plan.pricing import Part, price_parts
from tpshard.plan.report import Edit, Report
from tpshard.programs import passes, training
from tpshard.programs.setting import Setting
from tpshard.recipes.diagnostic import Exit, Mistakes
from tpshard.recipes.load import loads

RECIPE = """
name: small
cluster: {device: cpu, devices_per_node: 4}
mesh: {fsdp: 2, tp: 2}
model: {preset: tiny, layers: 1, width: 32, heads: 4, kv_heads: 2, head_dim: 8, mlp: 64, vocab: 2048, seq_len: 16}
batch: {global_sequences: 8, per_device: 2}
compile: eager
"""


@pytest.fixture(scope="session")
def programs() -> training.TrainingPrograms:
    return make.built(Setting.of(loads(RECIPE)))


@pytest.fixture(scope="session")
def report(programs: training.TrainingPrograms) -> Report:
    return make.of_training(programs, "small.yaml")


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.yaml").write_text(RECIPE)
    return tmp_path / "small.yaml"


# ---- exact figures ----------------------------------------------------------------------------------------------


class Counting(TorchDispatchMode):
    """Counts collectives as they are dispatched: (kind, bytes of the buffer) -> times."""

    KINDS = {
        "all_gather_into_tensor": "all_gather", "all_reduce": "all_reduce", "reduce_scatter_tensor": "reduce_scatter",
        "all_to_all_single": "all_to_all",
    }  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[tuple[str, int]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        kind = self.KINDS.get(func.overloadpacket.__name__) if func.namespace == "_c10d_functional" else None
        if kind is not None:
            buffer = out if kind == "all_gather" else args[0]
            self.found[kind, buffer.numel() * buffer.itemsize] += 1
        return out


def count_on_rank(context: Context, recipe: str) -> tuple[dict[str, list[tuple[str, int, int]]], dict[str, int]]:
    """Runs both programs of a recipe on this rank; what was dispatched, and the bytes of the tensors they hold."""
    built = make.built(Setting.of(loads(recipe)))
    sent, held = {}, Counter[str]()
    for name, program in (("micro-batch", built.micro), ("update", built.update)):
        inputs = [torch.zeros(p.local, dtype=p.dtype) for p in program.inputs]
        mode = Counting()
        executor = Executor(program, context)
        with mode:
            executor(*inputs)
        sent[name] = sorted((kind, size, n) for (kind, size), n in mode.found.items())
        for port, tensor in zip(program.inputs, inputs):
            if name == "update" and port.kind in ("parameter", "gradient", "optimizer"):
                held[port.kind] += tensor.numel() * tensor.itemsize
    return sent, dict(held)


def test_collectives_and_bytes_equal_those_dispatched_on_real_ranks(pool, report):
    results = pool.run(count_on_rank, RECIPE, world=4, mesh={"dp": 1, "fsdp": 2, "tp": 2})
    planned: dict[str, Counter[tuple[str, int]]] = {}
    for part in report.pricing.parts:
        counted = planned.setdefault(part.part.name, Counter())
        for comm in part.part.program.collectives:
            # on gloo the executor sends a reduce-scatter as an all-to-all, and the plan prices it as such
            kind = "all_to_all" if comm.kind == "reduce_scatter" else comm.kind
            counted[kind, comm.bytes] += 1
    expected = {name: sorted((k, b, n) for (k, b), n in found.items()) for name, found in planned.items()}
    assert expected["micro-batch"]
    for sent, held in results:
        assert sent == expected
        static = report.static_bytes()
        assert held["parameter"] == static["parameters"]
        assert held["gradient"] == static["gradients"]
        assert held["optimizer"] == static["optimizer"]
    times = {p.part.name: p.part.times for p in report.pricing.parts}
    assert times == {"micro-batch": 2, "update": 1}
    assert sum(line.count for line in report.lines) == sum(
        times[name] * n for name, rows in expected.items() for _, _, n in rows
    )


class Living(TorchDispatchMode):
    """Peak bytes of the storages that are alive, counting each once."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self.alive: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(tensor, torch.Tensor):
                self.note(tensor)
        self.peak = max(self.peak, sum(self.alive.values()))
        return out

    def note(self, tensor: torch.Tensor) -> None:
        import weakref

        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self.alive:
            self.alive[key] = storage.nbytes()
            weakref.finalize(storage, self.alive.pop, key, None)


def test_predicted_peak_is_that_of_the_storages_alive_while_running():
    def step(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return ((x @ w).exp() @ v).transpose(0, 1).reshape(-1, 8).sum(0)

    from tpshard.parallelism import Mesh, partition

    args = [torch.randn(64, 32), torch.randn(32, 256), torch.randn(256, 16)]
    program = partition(step, args, Mesh({"x": 1}))
    predicted = liveness(program, kernels(program, compiled="none"))
    mode = Living()
    module = torch.fx.GraphModule({}, program.graph)
    with mode:
        for tensor in args:
            mode.note(tensor)
        module(*args)
    assert predicted.peak_bytes == pytest.approx(mode.peak, rel=0.02)


def test_recomputation_trades_memory_for_time():
    found = {}
    for remat in ("none", "selective", "full"):
        setting = Setting.of(loads(RECIPE, [f"remat={remat}", "model.seq_len=64", "mesh.tp=1", "mesh.fsdp=4"]))
        micro = passes.apply(setting, training.micro_program(setting))
        pricing = price_parts([Part("micro-batch", micro, compiled="none")], device("cpu"), 4, processes=4)
        found[remat] = (pricing.peak_bytes, pricing.compute_s)
    assert found["full"][0] < found["selective"][0] < found["none"][0]
    assert found["full"][1] > found["selective"][1] > found["none"][1]


# ---- the screen and the JSON ------------------------------------------------------------------------------------


def test_one_screen(report):
    lines = text.screen(report).splitlines()
    assert len(lines) <= 60
    assert max(map(len, lines)) <= 100
    shown = "\n".join(lines)
    for word in ("FITS", "SHARDING", "COLLECTIVES", "MEMORY", "TIME", "MFU", "FLOP efficiency", "BOTTLENECK"):
        assert word in shown
    assert "heads: tp" in shown


def test_a_narrow_screen_keeps_the_line_that_decided():
    where = "/far/away/llama3-8b.yaml:8:18 (batch: [dp, fsdp]); /far/away/llama3-8b.yaml:8:48 (heads: tp)"
    assert text.short(where) == "llama3-8b.yaml:8:18 (batch: [dp, fsdp]); llama3-8b.yaml:8:48 (heads: tp)"
    assert text.short(where, "llama3-8b.yaml", 50) == "8:18 (batch: [dp, fsdp]); 8:48 (heads: tp)"
    assert text.short(where, "llama3-8b.yaml", 20) == "8:18, 8:48"
    defaults = "<default sharding.rules.batch> (batch: [dp, fsdp]); <default sharding.rules.heads> (heads: tp)"
    assert text.short(defaults) == "batch: [dp, fsdp] (default); heads: tp (default)"
    assert text.short(defaults, "", 25) == "batch, heads (default)"
    assert text.short("whole: no annotation cuts it", "", 10) == "whole"


def test_no_row_of_the_shardings_is_cut(report):
    rows = [line for line in text.screen(report).splitlines() if re.match(r" [* ]\S+ +[\dx]+ +\[", line)]
    assert rows and not any(row.endswith("...") for row in rows)


def test_json_has_the_names_that_others_rely_on(report):
    data = json.loads(json.dumps(report.to_json()))
    names = {"schema", "params", "mesh", "memory", "time", "tokens_per_s_per_device", "flop_efficiency", "collectives"}
    assert names | {"shardings", "buckets", "annotations", "warnings"} <= data.keys()
    assert {"peak_bytes", "reserved_bytes", "by_category"} <= data["memory"].keys()
    assert {"step_s", "compute_s", "comm_s", "exposed_comm_s"} <= data["time"].keys()
    assert {"kind", "axes", "count", "bytes", "wire_bytes", "time_s", "reason"} <= data["collectives"][0].keys()
    assert {"name", "shape", "sharding", "reason"} <= data["shardings"][0].keys()
    assert {"given", "inferred"} == data["annotations"].keys()
    assert data["mesh"] == {"fsdp": 2, "tp": 2} or data["mesh"] == {"dp": 1, "fsdp": 2, "tp": 2}
    assert sum(data["memory"]["by_category"].values()) == data["memory"]["peak_bytes"]
    wq = next(s for s in data["shardings"] if s["name"] == "layers.0.attention.wq.weight")
    assert wq["sharding"] == ["tp", None] and wq["annotated"]
    for figure in ("memory.parameters", "collectives.bytes", "params"):
        assert data["provenance"][figure] == "exact"


def test_step_time_is_what_its_lanes_say(report):
    t = report.pricing
    assert t.step_s == pytest.approx(t.compute_s + t.slowed_s + t.exposed_s)
    assert 0 < t.exposed_s <= t.comm_s


def test_plan_twice_gives_the_same_bytes_and_touches_nothing(small, monkeypatch, capsys):
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a dry run opens no socket and starts no process")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(subprocess.Popen, "__init__", refuse)
    said = []
    for _ in range(2):
        assert tpshard(["plan", "small.yaml", "--dry-run", "--json"]) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1]
    json.loads(said[0])
    assert [p.name for p in small.parent.iterdir()] == ["small.yaml"]


def test_too_little_memory_names_edits_that_fit(small, capsys):
    (small.parent / "tight.yaml").write_text(
        """
schema: 1
name: tight
kind: cpu
backend: gloo
memory: 1 GiB
memory_bandwidth: 20 GB/s
rates: {fp32: 100 GFLOP/s}
host:
  devices: 64
  cores: 4
  inside: {bandwidth: 2 GB/s, latency: 60 us, shared: true}
  across: {bandwidth: 1 GB/s, latency: 100 us, shared: true}
"""
    )
    code = tpshard(
        ["plan", "small.yaml", "--dry-run", "--json", "cluster.device=tight.yaml", "model.vocab=65536",
         "model.seq_len=512", "batch.per_device=4"]
    )  # fmt: skip
    out = json.loads(capsys.readouterr().out)
    assert code == Exit.FIT
    assert not out["fits"] and out["spare_bytes"] < 0
    assert out["edits"] and any(edit["fits"] for edit in out["edits"])
    assert max(out["memory"]["by_category"], key=out["memory"]["by_category"].get) == "logits_and_loss"


def test_a_server_that_does_not_fit_is_told_edits_that_fit_when_made(report, monkeypatch):
    def needed(*changes):
        return make.report(loads(RECIPE, ["serve.mesh.tp=1", *changes]), "", "decode").pricing.needed_bytes

    full = needed()
    found = make.report(loads(RECIPE, ["serve.mesh.tp=1"]), "", "decode")
    limit = full - 1
    assert needed("serve.requests=8") < limit
    whole = make.device_of

    def tight(recipe):
        device, nodes, per_host = whole(recipe)
        processes = recipe.serve.mesh["tp"]  # a CPU's share the host's memory
        return replace(device, memory_bytes=limit * processes), nodes, per_host

    monkeypatch.setattr(make, "device_of", tight)
    edits = search.edits(found, loads(RECIPE, ["serve.mesh.tp=1"]))
    assert len(edits) == 3 and all(edit.fits for edit in edits)
    for edit in edits:
        assert needed(*(change.replace(": ", "=") for change in edit.change.split(", "))) == edit.needed_bytes


def test_an_edit_that_fits_is_not_offered_again_with_more_beside_it(report, monkeypatch):
    tried = []

    def quick(recipe, what):
        tried.append((recipe.batch.per_device, recipe.remat))
        return search.Quick(1, 1.0, 0.0, recipe.batch.per_device == 1 or recipe.remat == "full")

    monkeypatch.setattr(search, "quick", quick)
    edits = search.edits(report, loads(RECIPE, ["remat=none"]), wanted=2)
    assert [edit.change for edit in edits] == ["remat: full", "batch.per_device: 1"]


@pytest.mark.parametrize(
    ("overrides", "code", "words"),
    [
        (["mesh.tp=4"], 5, "does not fit 4 devices"),  # row 8: the product is not the devices
        (["mesh.tp=3", "cluster.devices_per_node=6"], 4, "3"),  # row 9: heads that tp does not divide
        (["sharding.rules.heads=tpp"], 3, "tpp"),  # row 10: an axis that is not there
        (["sharding.pin.layers.9.mlp.up.weight=[tp, null]"], 3, ""),  # row 10: a pattern that matches nothing
        (["batch.global_sequences=7"], 4, "7"),  # row 12
    ],
)
def test_what_does_not_go_together_is_refused_before_anything_is_built(small, capsys, overrides, code, words):
    assert tpshard(["plan", "small.yaml", "--dry-run", *overrides]) == code
    said = capsys.readouterr()
    assert said.out == ""
    assert words in said.err


# ---- files ------------------------------------------------------------------------------------------------------


class Outside(HTMLParser):
    """Collects what a page would load, the ids of its sections, and the JSON inside."""

    def __init__(self) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.sections: list[str] = []
        self.data = ""
        self.inside = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        outside = [v for k, v in attrs if k in ("src", "href", "data", "action") and v]
        self.loads += [v for v in outside if not v.startswith("data:")]
        if tag == "section":
            self.sections.append(str(found["id"]))
        self.inside = tag == "script"

    def handle_data(self, data: str) -> None:
        if self.inside:
            self.data, self.inside = data, False


def test_the_page_is_whole_and_loads_nothing(report):
    made = page.page(report)
    assert made == page.page(report)
    parser = Outside()
    parser.feed(made)
    assert parser.loads == []
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", made)
    assert parser.sections == list(page.SECTIONS)
    assert json.loads(parser.data.replace("<\\/", "</")) == json.loads(json.dumps(report.to_json()))
    assert text.verdict(report) in made
    assert escape(report.tensors[0].reason, quote=True) in made


BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def opened(html, folder):
    """(DOM, lines on the console, addresses that the page asked for) of a page in headless Chromium."""
    (folder / "plan.html").write_text(html)
    done = subprocess.run(
        [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--enable-logging=stderr",
         "--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={folder}/profile",
         f"--log-net-log={folder}/net.json", "--dump-dom", f"file://{folder}/plan.html"],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    # The browser asks for things of its own (its updates, the time); those have no origin, a page's have one.
    log = [event.get("params", {}) for event in json.loads((folder / "net.json").read_text())["events"]]
    asked = {e["url"] for e in log if "url" in e and e.get("initiator", "not an origin") != "not an origin"}
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line], asked


@pytest.mark.skipif(BROWSER is None, reason="no Chromium here")
def test_the_page_opens_in_chromium_without_errors_or_requests(report, tmp_path):
    dom, console, asked = opened(page.page(report), tmp_path)
    assert (console, asked) == ([], set())
    assert 'id="what-if"' in dom
    broken = '<img src="http://example.invalid/a.png"><script>nothing.there</script>'  # this test can fail
    _, console, asked = opened(broken, tmp_path)
    assert "nothing is not defined" in "".join(console)
    assert asked == {"http://example.invalid/a.png"}


def test_trace_has_a_lane_per_resource_and_the_memory(report):
    events = json.loads(trace.trace(report))["traceEvents"]
    lanes = {e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    assert {"compute", "collectives over fsdp", "collectives over tp"} <= lanes
    assert max(sum(e["args"].values()) for e in events if e["ph"] == "C") == report.pricing.peak_bytes
    assert all(e["dur"] >= 0 for e in events if e["ph"] == "X")


def test_svg_is_xml(report):
    assert ET.fromstring(pictures.svg(report)).tag.endswith("svg")


# ---- explain, diff, search, save ---------------------------------------------------------------------------------


def test_explain_ends_at_the_annotation(programs):
    said = make.explain(programs.micro, "layers.0.attention.wq.weight")
    assert "heads: tp" in said
    assert "all_gather over fsdp" in said
    with pytest.raises(KeyError, match=r"layers\.0\.attention"):
        make.explain(programs.micro, "attention.wq")


@pytest.mark.parametrize("name", ["layers.0.attention.wk", "layers.*.attention.wk", "layers.*.attention.wk.weight"])
def test_explain_takes_the_names_of_the_screen(programs, name):
    assert make.explain(programs.micro, name).startswith("layers.0.attention.wk.weight")


def test_explain_of_a_misspelt_name_says_which_are_near(programs):
    with pytest.raises(KeyError, match=r"similar: layers\.0\.attention\.wk\.weight"):
        make.explain(programs.micro, "layers.0.atention.wk.weight")


def test_diff_says_what_changes_and_what_it_costs(report):
    other = make.of_training(make.built(Setting.of(loads(RECIPE, ["mesh.tp=1", "mesh.fsdp=4"]))))
    found = diff.diff(report, other)
    assert any(row["name"] == "layers.0.mlp.up.weight" for row in found["shardings"])
    assert any(row["axes"] == "tp" and row["count"][1] == 0 for row in found["collectives"])
    assert found["figures"]["step_s"]["change"] == pytest.approx(other.pricing.step_s / report.pricing.step_s - 1)
    assert "COLLECTIVES" in diff.text(found)
    same = diff.diff(report, report)
    assert same["shardings"] == [] and same["collectives"] == []


def test_search_ranks_what_fits():
    recipe = loads(RECIPE, ["cluster.devices_per_node=2", "mesh.fsdp=2", "mesh.tp=1",
                            "batch.global_sequences=2", "batch.per_device=1"])  # fmt: skip
    found = search.search(recipe)
    assert {(c.mesh["fsdp"], c.mesh["tp"]) for c in found.candidates} == {(2, 1), (1, 2)}
    steps = [c.found.step_s for c in found.candidates]
    assert steps == sorted(steps)
    assert found.candidates[0].pareto
    winner = loads(search.text(found, recipe).partition("# the fastest, as a recipe\n")[2])
    assert winner.mesh == {**winner.mesh, **found.candidates[0].mesh}


def test_a_saved_plan_is_refused_for_another_program(report, tmp_path):
    recipe = loads(RECIPE)
    file = tmp_path / "plan.json"
    save.write(file, save.dumps(report, recipe.to_yaml()))
    save.check(save.read(str(file)), report, recipe.to_yaml())
    changed = loads(RECIPE, ["batch.global_sequences=16"])
    more = make.report(changed, "")
    assert save.fingerprints(more) == save.fingerprints(report)  # the same programs, run more often
    with pytest.raises(Mistakes, match="global_sequences: 16") as caught:
        save.check(save.read(str(file)), more, changed.to_yaml())
    assert caught.value.exit == Exit.FIT
    edited = json.loads(file.read_text())
    edited["plan"]["memory"]["peak_bytes"] -= 1
    file.write_text(json.dumps(edited))
    with pytest.raises(Mistakes, match="not as planned: memory"):
        save.check(save.read(str(file)), report, recipe.to_yaml())
    file.write_text("{}")
    with pytest.raises(Mistakes, match="not a saved plan"):
        save.read(str(file))


@pytest.mark.parametrize(
    "options",
    [
        ["--html", "same", "--svg", "same"],
        ["--explain", "norm.weight", "--html", "page.html"],
        ["--search", "--for", "decode"],
        ["--html", "."],
    ],
)
def test_options_that_do_not_go_together_are_refused_before_planning(small, capsys, options):
    assert tpshard(["plan", "small.yaml", "--dry-run", *options]) == Exit.USAGE
    assert "exists" not in capsys.readouterr().err
    assert [p.name for p in small.parent.iterdir()] == ["small.yaml"]


@pytest.mark.parametrize(
    "options",
    [
        ["--dry-run", "--html", "file/page.html"],
        ["--dry-run", "--trace", "file/deeper/trace.json"],
        ["--dry-run", "--svg", "locked/new/drawn.svg"],
        ["run.dir=file"],
        ["run.dir=taken"],
    ],
)
def test_files_that_cannot_be_written_are_found_before_planning(small, capsys, monkeypatch, options):
    base = small.parent
    (base / "file").write_text("")
    (base / "locked").mkdir()
    (base / "taken" / "plan.html").mkdir(parents=True)
    access = save.os.access  # root may write everywhere
    monkeypatch.setattr(save.os, "access", lambda path, mode: "locked" not in str(path) and access(path, mode))
    monkeypatch.setattr(make, "report", lambda *_: pytest.fail("it was planned"))
    assert tpshard(["plan", "small.yaml", *options]) == Exit.MACHINE
    assert "cannot be written" in capsys.readouterr().err
    assert sorted(p.name for p in base.iterdir()) == ["file", "locked", "small.yaml", "taken"]


def test_an_explanation_is_json_where_json_is_asked_for(report, monkeypatch):
    monkeypatch.setattr(make, "report", lambda *_: report)
    said = command.run(loads(RECIPE), command.Asked(explain="norm.weight")).text
    found = json.loads(command.run(loads(RECIPE), command.Asked(explain="norm.weight", as_json=True)).text)
    assert found == {"name": "norm.weight", "lines": said.splitlines()} and found["lines"]


def test_without_dry_run_the_plan_is_saved_in_the_runs_folder(small, report, monkeypatch):
    monkeypatch.setattr(make, "report", lambda *_: report)
    monkeypatch.setattr(search, "suggestions", lambda *_: [])
    done = command.run(loads(RECIPE), command.Asked(source="small.yaml"))
    assert done.exit == Exit.DONE
    folder = small.parent / "runs" / "small"
    assert sorted(p.name for p in folder.iterdir()) == ["plan.html", "plan.json", "plan.trace.json"]


def test_machines_are_told_the_suggestions_that_people_are(small, report, monkeypatch):
    faster = Edit("remat: none", 2**20, report.pricing.step_s / 2, True)
    monkeypatch.setattr(make, "report", lambda *_: report)
    monkeypatch.setattr(search, "suggestions", lambda *_: [faster])
    shown = command.run(loads(RECIPE), command.Asked(dry_run=True)).text
    found = json.loads(command.run(loads(RECIPE), command.Asked(dry_run=True, as_json=True)).text)
    assert "try: remat: none" in shown
    assert [edit["change"] for edit in found["suggestions"]] == ["remat: none"]


def test_plans_for_serving_hold_a_cache(report):
    recipe = loads(RECIPE, ["serve.mesh.tp=2", "serve.requests=4"])
    prefill, decode = make.report(recipe, "", "prefill"), make.report(recipe, "", "decode")
    # keys and values, half of the 2 heads of 8, fp32, 4 sequences of 16 and block 0
    assert decode.static_bytes()["cache"] >= 2 * 1 * 8 * 4 * (4 * 16)
    assert prefill.job.tokens == 16 and decode.job.tokens == 4
    assert {line.kind for line in decode.lines} == {"all_reduce", "all_gather"}


def test_a_run_is_compared_with_its_plan(report, tmp_path):
    assert compare.record(tmp_path) == ""
    save.write(tmp_path / "plan.json", save.dumps(report, loads(RECIPE).to_yaml()))
    step_s = report.pricing.step_s
    rows = [{"step": i, "loss": 1.0, "step_s": step_s * (9 if i < 2 else 2), "run": 1} for i in range(8)]
    rows.append({"step": 8, "eval_loss": 1.0, "run": 1})
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)) + '\n{"step": 9, "lo')
    found = compare.compare(tmp_path)
    assert found is not None and found["step_s"]["error"] == pytest.approx(-0.5)
    assert "(-50%)" in compare.record(tmp_path)
    assert json.loads((tmp_path / "plan_measured.json").read_text())["step_s"]["measured"] == pytest.approx(2 * step_s)
