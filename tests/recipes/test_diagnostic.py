"""Diagnostics are rendered as text, in colour, within a width, and as JSON."""

from __future__ import annotations

import json
import re

from tpshard.diagnostics.diagnostic import Diagnostic, Exit, Source, as_json, as_text, dumps

LINE = "mesh: {fsdp: 4, tp: 3}"
WRONG = Diagnostic(
    "`mesh.tp: 3` does not divide the 32 heads of llama3-8b",
    Exit.FIT,
    Source("recipe.yaml", 4, 21, LINE),
    "32 heads, 8 KV heads",
    "tp 1, 2, 4 or 8; or sharding.on_uneven: pad",
)


def test_text_shows_place_line_caret_and_what_would_be_legal() -> None:
    assert as_text([WRONG]) == (
        "error: `mesh.tp: 3` does not divide the 32 heads of llama3-8b\n"
        "  --> recipe.yaml:4:21\n"
        "  |\n"
        "4 | mesh: {fsdp: 4, tp: 3}\n"
        "  |                     ^ 32 heads, 8 KV heads\n"
        "  fix: tp 1, 2, 4 or 8; or sharding.on_uneven: pad\n"
    )


def test_every_place_is_shown_and_line_numbers_are_aligned() -> None:
    text = as_text(
        [Diagnostic("x", where=Source("a", 9, 1, "b: 1"), also=((Source("a", 120, 3, "  c: 1", 1), "too"),))]
    )
    assert (
        text
        == "error: x\n    --> a:9:1\n    |\n  9 | b: 1\n    | ^\n    ::: a:120:3\n    |\n120 |   c: 1\n    |   ^ too\n"
    )


def test_color_adds_nothing_but_color() -> None:
    colored = as_text([WRONG], color=True)
    assert "\x1b[" in colored
    assert re.sub(r"\x1b\[[0-9;]*m", "", colored) == as_text([WRONG])


def test_the_caret_stays_under_its_character_in_a_narrow_window() -> None:
    line = "x" * 300 + "HERE" + "y" * 300
    for width in (40, 80, 0):
        shown = as_text([Diagnostic("m", where=Source("a", 1, 301, line, 4))], width=width).splitlines()
        assert max(map(len, shown)) <= (width or 210)
        at = shown[4].index("^")
        assert shown[3][at : at + 4] == "HERE" and shown[4].count("^") == 4


def test_nothing_that_a_terminal_obeys_gets_through() -> None:
    text = as_text([Diagnostic("a\x1b[2Jb", where=Source("f", 1, 7, "ok \x07\x9b x", 1), why="\r\u202e", fix="\x00")])
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", text)
    assert "a\\x1b[2Jb" in text
    lines = text.splitlines()
    assert lines[3][lines[4].index("^")] == "x"


def test_json_has_positions_and_the_exit_code() -> None:
    (actual,) = json.loads(dumps([WRONG]))["diagnostics"]
    assert (actual["file"], actual["line"], actual["col"], actual["end_col"]) == ("recipe.yaml", 4, 21, 22)
    assert actual["text"] == LINE
    assert json.loads(dumps([WRONG]))["exit"] == 4
    warning = Diagnostic("w", severity="warning")
    assert (json.loads(dumps([warning]))["ok"], json.loads(dumps([warning]))["exit"]) == (True, 0)
    assert as_json([warning])[0]["line"] is None


def test_a_value_that_nobody_wrote_has_a_name_instead_of_a_place() -> None:
    source = Source("<default mesh.tp>", 0, 0, "mesh.tp: 1")
    assert str(source) == "<default mesh.tp>"
    assert as_text([Diagnostic("m", where=source, why="why")]) == "error: m\n  --> <default mesh.tp>\n  = why\n"
