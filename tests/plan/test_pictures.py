"""A plan's page, trace and picture are complete and need no other file."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import xml.etree.ElementTree as ET
from dataclasses import replace
from html import escape, unescape
from html.parser import HTMLParser
from itertools import pairwise

import pytest
from patience import PATIENCE
from tpshard.diagnostics.diagnostic import plural
from tpshard.plan.report import screen_words
from tpshard.plan.step import units
from tpshard.plan.views import page, page_data, pictures, trace


class Outside(HTMLParser):
    """Collects what a page would load, the ids of its sections, and the JSON inside."""

    def __init__(self) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.sections: list[str] = []
        self.data: dict[str, str] = {}
        self.inside = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        result = dict(attrs)
        outside = [v for k, v in attrs if k in ("src", "href", "data", "action") and v]
        self.loads += [v for v in outside if not v.startswith("data:")]
        if tag == "section":
            self.sections.append(str(result["id"]))
        self.inside = str(result.get("id", "code")) if tag == "script" else ""

    def handle_data(self, data: str) -> None:
        if self.inside:
            self.data[self.inside], self.inside = data, ""


def test_the_page_is_whole_and_loads_nothing(planned, report):
    actual = page.page(report, planned.drawing)
    assert actual == page.page(report, planned.drawing)
    parser = Outside()
    parser.feed(actual)
    assert parser.loads == []
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", actual)
    assert parser.sections == ["verdict", "mesh", "shardings", "timeline", "memory", "collectives", "what-if"]
    assert json.loads(parser.data["plan"]) == json.loads(json.dumps(report.to_json()))
    assert screen_words.verdict(report) in actual
    assert escape(report.tensors[0].reason, quote=True) in actual


def test_the_page_knows_the_way_from_what_was_told_to_every_tensor(planned, report):
    """Each axis of a sharding has a chain that begins at a line of the recipe, and each value leads to the next."""
    actual = page_data.data(planned.drawing)
    program = planned.program
    assert {name for tensor in actual["tensors"] for name in tensor["names"]} == {t.name for t in report.tensors}
    for tensor in actual["tensors"]:
        for form in tensor["forms"]:
            assert form["chains"] or not re.search("_[a-z]", form["sharding"].partition(" {")[0])
            for chain in form["chains"]:
                assert (
                    chain["told"]
                    and chain["steps"][0]["through"] == ""
                    and all(step["through"] and step["value"] in program.records for step in chain["steps"][1:])
                )
    up = next(t for t in actual["tensors"] if t["name"] == "layers.0.mlp.up.weight")
    tp = next(c for c in up["forms"][0]["chains"] if c["axis"] == "tp")
    assert "mlp: tp" in tp["told"][0] and tp["steps"][-1]["value"] == "layers.0.mlp.up.weight"


def test_the_page_knows_what_is_behind_every_collective_and_alive_at_the_peak(planned, report):
    actual = page_data.data(planned.drawing)
    assert [sum(row["count"] for row in rows) for rows in actual["collectives"]] == [
        sum(comm.members for comm in issued) for _, issued in planned.pricing.issues()
    ]
    rows = planned.drawing.alive
    assert sum(row["bytes"] for row in rows) == report.pricing.peak_bytes
    assert any(row["name"] == "layers.0.mlp.up.weight" and "mlp: tp" in "".join(row["told"]) for row in rows)
    for part, line in zip(planned.pricing.parts, actual["timelines"]):
        for lane, events in line["lanes"].items():
            drawn = sum(length for _, length, *_ in events) / line["finest"] * line["seconds"]
            ran = sum(e.end - e.start for e in part.timeline.events if e.lane == lane)
            assert abs(drawn - ran) <= 0.01 * line["seconds"]


NODE = shutil.which("node")
CLICKS = """
const made = {}, LEGEND = '<g class="legend">colours</g>', svg = { innerHTML: "whole" + LEGEND,
  on: {}, addEventListener(name, f) { this.on[name] = f; },
  getBoundingClientRect: () => ({ left: 0, width: 1000 }) };
const blank = () => ({ innerHTML: "", value: "", on: {}, addEventListener(name, f) { this.on[name] = f; } });
const element = (id) => made[id] ??= blank();
const row = (text) => ({ cells: [{ textContent: text }], on: {}, addEventListener(name, f) { this.on[name] = f; } });
element("why-data").textContent = DATA;
const found = JSON.parse(DATA), line = found.timelines[0];
const tensors = found.tensors.map((t) => row(t.names.at(-1))), collectives = found.collectives.map(() => row(""));
open({ getElementById: element, addEventListener() {}, querySelectorAll: (what) =>
  what.startsWith("#shardings") ? tensors : what.startsWith("#collectives") ? collectives : [svg] });
const seen = tensors.map((t) => (t.on.click(), made["tensor-graph"].innerHTML));
const behind = collectives.map((c) => (c.on.click(), made["collective-why"].innerHTML));
for (let i = 0; i < 5; i++) svg.on.wheel({ preventDefault() {}, deltaY: -1, clientX: 565 });
const zoomed_ = svg.innerHTML;
const key = (name) => (svg.on.keydown({ preventDefault() {}, key: name }), svg.innerHTML);
const moved = [key("ArrowLeft"), key("-"), key("0")];
svg.on.dblclick({});
console.log(JSON.stringify({ seen, behind, zoomed: zoomed_, moved, reset: svg.innerHTML }));
"""


@pytest.mark.skipif(NODE is None, reason="no JavaScript engine here")
def test_clicks_show_chains_and_tensors_and_the_wheel_zooms(planned, report, tmp_path):
    """Runs the page's own script in a minimal document."""
    parser = Outside()
    parser.feed(page.page(report, planned.drawing))
    script = tmp_path / "clicks.js"
    script.write_text(f"{parser.data['code']}\nconst DATA = {json.dumps(parser.data['why-data'])};\n{CLICKS}")
    shown = json.loads(
        subprocess.run([NODE, script], capture_output=True, text=True, check=True, timeout=PATIENCE).stdout
    )
    actual = page_data.data(planned.drawing)
    for tensor, html in zip(actual["tensors"], shown["seen"]):
        assert all(
            escape(source)[:20] in html for form in tensor["forms"] for c in form["chains"] for source in c["told"]
        )
        assert html.count("<svg") == len(tensor["forms"])
        assert all(ET.fromstring(drawn) is not None for drawn in re.findall(r"<svg.*?</svg>", html))
    assert all(html.count("<tr>") == 1 + len(rows) for html, rows in zip(shown["behind"], actual["collectives"]))
    legend = '<g class="legend">colours</g>'
    assert "<rect" in shown["zoomed"] and shown["zoomed"].endswith(legend) and shown["reset"] == f"whole{legend}"
    lanes = [re.findall(r'<text x="8"[^>]*>([^<]+)', drawn) for drawn in (shown["zoomed"], shown["moved"][0])]
    assert lanes[0] == lanes[1] == [{"wait": "waiting"}.get(n, n) for n in planned.drawing.parts[0].lanes]
    assert len({shown["zoomed"], *shown["moved"]}) == 4 and shown["moved"][-1] == shown["reset"]


BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def open_page(html, folder):
    """(DOM, lines on the console, addresses that the page asked for) of a page in headless Chromium."""
    (folder / "plan.html").write_text(html)
    done = subprocess.run(
        [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--enable-logging=stderr",
         "--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={folder}/profile",
         f"--log-net-log={folder}/net.json", "--dump-dom", f"file://{folder}/plan.html"],
        capture_output=True, text=True, timeout=PATIENCE,
    )  # fmt: skip
    # The browser asks for things of its own (its updates, the time); those have no origin, a page's have one.
    log = [event.get("params", {}) for event in json.loads((folder / "net.json").read_text())["events"]]
    requests = {e["url"] for e in log if "url" in e and e.get("initiator", "not an origin") != "not an origin"}
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line], requests


@pytest.mark.skipif(BROWSER is None, reason="no Chromium here")
def test_the_page_opens_in_chromium_without_errors_or_requests(planned, report, tmp_path):
    dom, console, requests = open_page(page.page(report, planned.drawing), tmp_path)
    assert (console, requests) == ([], set())
    assert 'id="what-if"' in dom
    broken = '<img src="http://example.invalid/a.png"><script>nothing.there</script>'  # this test can fail
    _, console, requests = open_page(broken, tmp_path)
    assert "nothing is not defined" in "".join(console)
    assert requests == {"http://example.invalid/a.png"}


DRIVER = """<script>addEventListener("load", () => {
  const found = (what) => document.querySelector(what), key = { bubbles: true, cancelable: true };
  const words = (svg) => [...svg.querySelectorAll("text")].map((t) => t.textContent);
  const choice = found("#tensor-choice"), line = found("svg.timeline"), box = line.getBoundingClientRect();
  const seen = { whole: words(line), names: [...document.querySelectorAll("svg")].map((s) => s.ariaLabel) };
  choice.value = choice.options[2].value;
  choice.dispatchEvent(new Event("change"));
  seen.choice = [choice.options[2].text, found("#tensor-graph").innerText];
  const row = [...document.querySelectorAll("#shardings tbody tr")].at(-1);
  row.focus();
  row.dispatchEvent(new KeyboardEvent("keydown", { key: "Enter", ...key }));
  seen.row = [document.activeElement === row, row.cells[0].textContent, found("#tensor-graph").innerText];
  const wheel = { deltaY: -1, clientX: box.left + box.width / 2, ...key };
  for (let i = 0; i < 6; i++) line.dispatchEvent(new WheelEvent("wheel", wheel));
  seen.zoomed = words(line);
  line.focus();
  document.activeElement.dispatchEvent(new KeyboardEvent("keydown", { key: "0", ...key }));
  seen.again = words(line);
  document.body.innerHTML = "<pre></pre>";
  found("pre").textContent = "SEEN" + JSON.stringify(seen) + "SEEN";
})</script>"""


@pytest.mark.skipif(BROWSER is None, reason="no Chromium here")
def test_the_page_is_used_with_wheel_and_keys_in_chromium(planned, report, tmp_path):
    dom, console, _ = open_page(page.page(report, planned.drawing) + DRIVER, tmp_path)
    assert console == []
    seen = json.loads(unescape(dom.split("SEEN")[1]))
    pattern, shown = seen["choice"]
    assert pattern in shown
    focused, name, shown = seen["row"]
    assert focused and name in shown
    tick = r"(\d+(?:\.\d*[1-9])?|\d+\.0+) (s|ms|us)"
    ticks, rest = ([[w for w in seen[key] if bool(re.fullmatch(tick, w)) == is_tick] for key in ("whole", "zoomed")]
                   for is_tick in (True, False))  # fmt: skip
    assert rest[0] == rest[1] and "compute" in rest[0] and "forward" in rest[0], "the legend and the lanes stay"
    assert ticks[0] != ticks[1] and 3 <= len(ticks[1]) <= 8
    apart = {round(float(b.split()[0]) - float(a.split()[0]), 9) for a, b in pairwise(ticks[1])}
    assert len(apart) == 1 and f"{apart.pop():e}"[0] in "125"
    assert seen["again"] == seen["whole"]
    assert all(seen["names"])


def test_trace_has_a_lane_per_resource_and_the_memory(planned, report):
    events = json.loads(trace.trace(report, planned.drawing))["traceEvents"]
    lanes = {e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    assert {"compute", "collectives over fsdp", "collectives over tp"} <= lanes
    assert max(sum(e["args"].values()) for e in events if e["ph"] == "C") == report.pricing.peak_bytes
    assert all(e["dur"] >= 0 for e in events if e["ph"] == "X")


def test_what_ends_after_its_program_stays_inside_the_axes(planned):
    part = max(planned.drawing.parts, key=lambda part: len(part.lanes))
    late = replace(part, each_s=part.each_s / 2)
    drawn = ET.fromstring(f"<svg>{pictures.timeline(late)}</svg>")
    ends = [float(bar.attrib["x"]) + float(bar.attrib["width"]) for bar in drawn.iter("rect")]
    assert max(ends) <= 990.3 and page_data.timeline(late)["seconds"] == late.drawn_s == part.each_s


def test_svg_is_xml(planned, report):
    assert ET.fromstring(pictures.svg(report, planned.drawing)).tag.endswith("svg")


def test_a_picture_has_one_unit_and_says_what_its_colours_mean(planned, report):
    """A peak far below the device's memory fills half of the picture; the limit is the headline's."""
    drawn = ET.fromstring(pictures.svg(report, planned.drawing))
    words = [str(element.text) for element in drawn.iter() if element.tag.endswith("text")]
    limit = report.pricing.device.memory_bytes
    size, unit = units.bytes_axis(report.pricing.peak_bytes)
    assert f"device {limit / size:.2f} {unit}" in " ".join(words)
    assert len({w.split()[1] for w in words if re.fullmatch(r"[\d.]+ ([KMGT]i)?B", w)}) == 1
    assert len({w.split()[1] for w in words if re.fullmatch(r"[\d.e+-]+ (s|ms|us)", w)}) == 1
    assert {"forward", "backward", "parameters", "gradients"} <= set(words)


def test_one_of_a_thing_is_singular():
    assert [plural(n, "host") for n in (1, 2)] == ["1 host", "2 hosts"]
    assert [plural(n, "micro-batch") for n in (1, 8)] == ["1 micro-batch", "8 micro-batches"]
    assert [plural(2, word) for word in ("epoch", "path")] == ["2 epochs", "2 paths"]


def test_ticks_are_round_numbers_and_few():
    assert pictures.round_ticks(79.1) == [0, 20, 40, 60]
    assert pictures.round_ticks(0.0113) == [0, 0.002, 0.004, 0.006, 0.008, 0.01]
    for top in (1, 2.2, 3.7, 9.99, 0.12, 1234.5):
        ticks = pictures.round_ticks(top)
        assert 3 <= len(ticks) <= 7 and ticks[-1] <= top * (1 + 1e-9)
    assert pictures.round_ticks(0) == [0]
