"""The site builds, links lead somewhere, examples run, and the reference is up to date."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from commands import tpshard
from forked import python
from patience import PATIENCE

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
BLOCK = re.compile(r"(?ms)^```(\w+)\n(.*?)^```$")


def blocks(language: str) -> Iterator[tuple[str, str]]:
    """(page, code) of every fenced block of a language. `test_contributing.py` does the exercises as a whole."""
    for page in (page for page in PAGES if page.parent.name != "contributing"):
        result = [code for kind, code in BLOCK.findall(page.read_text(encoding="utf-8")) if kind == language]
        yield from ((f"{page.stem}-{i}", code) for i, code in enumerate(result))


def titles(page: Path) -> set[str]:
    """The anchors of a page's headings."""
    text = re.sub(BLOCK, "", page.read_text(encoding="utf-8"))
    heads = re.findall(r"(?m)^#+ (.+)$", text)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


WRITTEN = ("faults.md", "gallery.md", "gspmd-tables.md", "kernels.md", "plan_accuracy.md", "serving_accuracy.md")
"""Pages with tables that a benchmark writes from its record."""
MEASURED = re.compile(
    r"(?<!\w)\d[\d.,]* ?([nuµm]?s|min|h|%|(k |M )?tokens/s|[KMGT]i?B(/s)?|[MGT]bit/s|TFLOP/s)(?![\w/])"
)
"""A number with the sign of a unit. Limits and settings are in words: "30 seconds", "two percent"."""


def typed_measurements(text: str) -> list[str]:
    """The numbers with a unit in prose and in transcripts that no record is the source of; not those of tables that a
    script writes from one."""
    text = re.sub(r"(?s)<!--table: .*?<!--/-->", "", text)
    text = re.sub(r"(?s)<!--[\w-]+:text [\w.-]+-->\n+```\n.*?```", "", text)
    text = re.sub(r"`[^`\n]+`", "", re.sub(BLOCK, "", text))
    return [measured[0] for measured in MEASURED.finditer(text)]


def test_no_page_has_a_typed_measurement() -> None:
    pages = [page for page in PAGES if page.name not in WRITTEN and "reference" not in page.parts]
    assert {page.name: typed for page in pages if (typed := typed_measurements(page.read_text("utf-8")))} == {}
    assert typed_measurements("8.7<!--plan_speed:8b.cpu--> s and `4 us`") == []
    text = "it took 8.7 s, 5% more, and 2.5 GiB\n```\nstep 700 ms\n```"
    assert typed_measurements(text) == ["8.7 s", "5%", "2.5 GiB", "700 ms"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(BLOCK, "", page.read_text(encoding="utf-8"))
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.is_file(), f"{page.name} links to {target}"
        assert not anchor or anchor in titles(linked), f"{page.name} links to {target}"


def test_the_site_builds(tmp_path: Path) -> None:
    """Strictly: a link or a page of the menu that leads nowhere is an error."""
    pytest.importorskip("zensical")
    shutil.copytree(DOCS, tmp_path / "docs")
    shutil.copy(ROOT / "zensical.toml", tmp_path)
    build = [sys.executable, "-m", "zensical", "build", "--strict"]
    done = subprocess.run(build, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "site" / "guides" / "make-it-fit" / "index.html").is_file()


def test_every_page_is_in_the_menu() -> None:
    menu = re.findall(r'= "([\w/-]+\.md)"', (ROOT / "zensical.toml").read_text(encoding="utf-8"))
    assert sorted(menu) == sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))


def test_the_reference_is_what_the_code_says() -> None:
    pages = script("write_reference").pages()
    stored = {str(path.relative_to(DOCS / "reference")) for path in (DOCS / "reference").rglob("*.md")}
    assert stored == set(pages), "a page that the script does not write, or has not written"
    for name, text in pages.items():
        written = (DOCS / "reference" / name).read_text(encoding="utf-8")
        assert written == text, f"run `python docs/write/write_reference.py`: {name} differs"


def test_a_law_between_keys_is_shown_by_a_recipe() -> None:
    """Every diagnostic says how to fix it, and each of the samples shows a diagnostic."""
    listing = script("diagnostic_samples")
    entries, shown = listing.entries(), listing.samples()
    assert [entry.message for entry in entries if not entry.has_fix] == []
    laws = [entry for entry in entries if entry.file.startswith("recipes/keys/") and "laws" in entry.file]
    assert laws and [entry.message for entry in laws if entry not in shown] == []
    for sample, blocks in listing.all_printed():
        assert blocks and all(listing.entry_of(*block) is not None for block in blocks), sample


@pytest.mark.parametrize("number", range(5))
def test_json_outputs_have_the_keys_that_the_reference_tells(number: int, tmp_path: Path) -> None:
    reference = script("json_outputs")
    output = [output for output in reference.OUTPUTS if output.command][number]
    done = tpshard(tmp_path, *output.command)
    printed = json.loads(done.stdout)
    assert reference.unknown(printed, output) == [], done.stderr
    assert reference.missing(printed, output) == []


def script(name: str) -> Any:
    """A script of docs/write/ as a module, and those that it imports."""
    folder = DOCS / "write"
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, folder / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


PARTS = re.compile("path/to|mymodel")
"""What an example says that needs files of the reader's."""
WHOLE = [(name, code) for name, code in blocks("python") if "import " in code and not PARTS.search(code)]
"""Python examples that stand by themselves; others show a part of a file."""


@pytest.mark.parametrize(("name", "code"), WHOLE, ids=[name for name, _ in WHOLE])
def test_python_examples_run(name: str, code: str, tmp_path: Path) -> None:
    done = python(code, folder=tmp_path)
    assert done.returncode == 0, f"{name}:\n{done.stderr}"


SHELL = list(blocks("sh"))


@pytest.mark.parametrize(("name", "code"), SHELL, ids=[name for name, _ in SHELL])
def test_shell_examples_run(name: str, code: str, tmp_path: Path) -> None:
    """Line by line, in one folder."""
    for line in code.splitlines():
        program, *arguments = shlex.split(line)
        assert program == "tpshard"
        done = tpshard(tmp_path, *arguments)
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
