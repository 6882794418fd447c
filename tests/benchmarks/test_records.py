"""Records contain what their benchmarks measured, and README and docs cite them correctly."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import statistics
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


def _module() -> ModuleType:
    spec = importlib.util.spec_from_file_location("record", ROOT / "benchmarks" / "record.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["record"] = module
    spec.loader.exec_module(module)
    return module


record = _module()


def test_a_record_says_where_when_and_how(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(record, "RECORDS", tmp_path / "records")
    monkeypatch.setattr(sys, "argv", [str(ROOT / "benchmarks" / "serving_speed.py"), "--new", "8", "/far/away.csv"])
    actual = record.Record("serving", "nosuchpeer")
    actual.rows.append({"engine": "tpshard", "s": 1.5})
    times = [3.0, 1.0, 2.0, 9.0, 4.0]
    assert actual.figure("first.token", times, "s").median == statistics.median(times)
    actual.close(write=True)
    printed = capsys.readouterr().out
    assert "python benchmarks/serving_speed.py --new 8 away.csv\n" in printed and "first.token" in printed
    held = json.loads((tmp_path / "records" / "serving.json").read_text())
    assert held == record.load("serving")
    assert held["command"] == "python benchmarks/serving_speed.py --new 8 away.csv" and held["rows"] == actual.rows
    assert held["machine"]["cores"] >= 1 and held["versions"]["torch"] != held["versions"]["nosuchpeer"] == "none"
    figure = held["figures"]["first.token"]
    assert figure["low"] < figure["median"] < figure["high"] and (figure["count"], figure["unit"]) == (5, "s")


def test_json_is_all_that_is_printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmarks/kernels.py"])
    actual = record.Record("kernels", quiet=True)
    actual.say("a table")
    actual.figure("one", 2, "times")
    actual.close(as_json=True)
    assert json.loads(capsys.readouterr().out)["figures"]["one"]["median"] == 2.0


def test_a_number_that_differs_from_its_record_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "RECORDS", tmp_path)
    figures = {"a.b": {"median": 2.0683}, "many": {"median": 12345.6}}
    (tmp_path / "x.json").write_text(json.dumps({"figures": figures}))
    right = "takes 2.07<!--x:a.b--> times as long, 2.1<!--x:a.b-->, and 12,346<!--x:many--> tokens"
    assert list(record.differences(right)) == []
    wrong = right.replace("2.07", "2.06").replace("12,346", "12346")
    assert list(record.differences(wrong)) == [("2.06<!--x:a.b-->", "2.07<!--x:a.b-->")]
    with pytest.raises(KeyError):
        list(record.differences("2<!--x:lost-->"))
    with pytest.raises(FileNotFoundError):
        list(record.differences("2<!--nowhere:a-->"))


def test_a_transcript_shows_what_a_command_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "RECORDS", tmp_path)
    printed = "starting\nstep 1/120  loss 8.1785  2.7k tokens/s\n  loss          8.1785 -> 4.5689\n"
    (tmp_path / "x.json").write_text(json.dumps({"figures": {}, "texts": {"train": printed}}))
    page = "<!--x:text train-->\n```\n$ tpshard train\n...\nstep 1/120  loss 8.1785  2.7k tokens/s\n{}\n```\n"
    assert list(record.differences(page.format("  loss          8.1785 -> 4.5689"))) == []
    old = "  loss          8.1785 -> 4.6000"
    assert list(record.differences(page.format(old))) == [(old, "  loss          8.1785 -> 4.5689")]
    assert list(record.differences(page.format("done"))) == [("done", "")]
    starred = " *a.weight x4 [B]"
    assert list(record.differences(page.format(starred))) == [(starred, "")], "no pattern of the words' own"


@pytest.mark.parametrize("page", record.pages(), ids=lambda page: page.name)
def test_what_pages_say_is_what_records_hold(page: Path) -> None:
    assert list(record.differences(page.read_text(encoding="utf-8"))) == []


def test_the_readme_shows_the_picture_of_the_recorded_plan() -> None:
    """`recipe_gallery.py --record --docs` draws it; GitHub shows it from the README."""
    picture, recorded = ROOT / "docs" / "llama3-8b.svg", record.load("recipe_gallery")["texts"]["picture"]
    assert hashlib.sha256(picture.read_bytes()).hexdigest() == recorded and picture.stat().st_size < 160_000
    assert "](docs/llama3-8b.svg)" in (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("path", sorted(record.RECORDS.glob("*.json")), ids=lambda path: path.stem)
def test_a_kept_record_is_whole_and_its_script_is_there(path: Path) -> None:
    held = json.loads(path.read_text())
    assert held["schema"] == record.SCHEMA and held["benchmark"] == path.stem
    script = held["command"].split()[1]
    assert script.startswith("benchmarks/") and (ROOT / script).is_file()
    assert held["date"] and held["machine"]["processor"] and held["versions"]["tpshard"]
    assert held["rows"] or held["figures"]
