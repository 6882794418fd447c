"""The files that a plan draws: a page that needs nothing else, a trace, a picture."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import xml.etree.ElementTree as ET
from html import escape
from html.parser import HTMLParser

import pytest
from patience import PATIENCE
from tpshard.plan import page, pictures, screen, trace, units


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
    assert screen.verdict(report) in made
    assert escape(report.tensors[0].reason, quote=True) in made


BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def opened(html, folder):
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


def test_a_picture_has_one_unit_and_says_what_its_colours_mean(report):
    """Memory ends at what the device has, also where the plan needs little of it."""
    drawn = ET.fromstring(pictures.svg(report))
    words = [str(element.text) for element in drawn.iter() if element.tag.endswith("text")]
    limit = report.pricing.device.memory_bytes - report.pricing.device.context_bytes
    size, unit = units.bytes_axis(limit)
    assert f"{limit / size:.2f} {unit}" in words and f"device {limit / size:.2f} {unit}," in " ".join(words)
    assert len({w.split()[1] for w in words if re.fullmatch(r"[\d.]+ ([KMGT]i)?B", w)}) == 1
    assert len({w.split()[1] for w in words if re.fullmatch(r"[\d.e+-]+ (s|ms|us)", w)}) == 1
    assert {"forward", "backward", "parameters", "gradients"} <= set(words)


def test_one_of_a_thing_is_singular():
    assert [units.plural(n, "host") for n in (1, 2)] == ["1 host", "2 hosts"]
    assert [units.plural(n, "micro-batch") for n in (1, 8)] == ["1 micro-batch", "8 micro-batches"]
