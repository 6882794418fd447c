"""The page on GSPMD's tables says what plans of its recipes say today, and these what the paper's formulas say."""

from __future__ import annotations

import pytest
from tpshard.models.families.presets import preset
from tpshard.recipes.reading.load import loads

import gspmd_tables
import record

TEXT = gspmd_tables.PAGE.read_text(encoding="utf-8")


def held(table: str, mark: str) -> bool:
    """Whether the page's table of a mark is this one."""
    return gspmd_tables.with_table(TEXT, "gspmd_tables", table, mark) == TEXT and f"<!--{mark}: " in TEXT


def test_a_layers_collectives_are_the_papers() -> None:
    shardings, collectives, rows = gspmd_tables.attempts()
    assert held(shardings, "shardings") and held(collectives, "attempts")
    asked = [row for row in rows if row["asked"]]
    assert [(r["forward"], r["bytes"]) for r in asked] == [(r["asked"]["count"], r["asked"]["bytes"]) for r in asked]
    assert len(asked) == len(gspmd_tables.PAPER)
    others = [row for row in rows if row["forward"] and not row["asked"]]
    assert {row["moves"] for row in others} == {"norms"}


def test_a_circular_pipelines_bubble_is_the_formulas() -> None:
    table, rows = gspmd_tables.bubbles()
    assert held(table, "bubbles") and len(rows) == len(gspmd_tables.BUBBLES)
    for row in rows:
        assert row["planned"] == row["formula"] == pytest.approx(row["staged"])


def test_a_trillion_is_as_recorded() -> None:
    rows = [row for row in record.load("gspmd_tables")["rows"] if "published" not in row]
    assert held(gspmd_tables.trillion_table(rows), "trillion")
    model = loads(gspmd_tables.recipes()["trillion"]).model
    assert model.preset is not None
    assert {row["params"] for row in rows} == {preset(model.preset, model.overrides()).count}


def test_published_models_are_as_recorded() -> None:
    rows = [row for row in record.load("gspmd_tables")["rows"] if "published" in row]
    assert held(gspmd_tables.published_table(rows), "published")
    assert [row["published"] for row in rows] == [model.name for model in gspmd_tables.PUBLISHED]
    # the authors' total has 32 relative positions of each head and layer besides
    assert rows[0]["params"] == 137_702_416_384 - 32 * 128 * 64
