"""Programs and plans are those of the record, and no stage on the way to them changes what another one made."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import architectures
import pytest
from tpshard.programs.setting.setting import Setting
from tpshard.programs.step.variants import Variants
from tpshard.recipes.reading.load import loads
from unchanged import nothing_changes

import fingerprints
import record

RECORD = record.load("fingerprints")
ROWS = {row["name"]: row for row in RECORD["rows"]}
HERE = {package: metadata.version(package) for package in ("torch", "transformers")}


def test_every_case_is_recorded() -> None:
    assert [*ROWS] == [*fingerprints.CASES]


@pytest.mark.parametrize("name", fingerprints.QUICK)
def test_programs_are_as_recorded_and_no_stage_changes_its_arguments(name: str) -> None:
    """`python benchmarks/fingerprints.py --record` records a change that is meant."""
    with nothing_changes():
        row = fingerprints.CASES[name].row(name)
    if HERE.items() <= RECORD["versions"].items():  # others trace other operations
        assert row == ROWS[name]


def test_a_program_does_not_depend_on_those_built_before(tmp_path: Path) -> None:
    """Fused experts are sliced, and slices that are sharded are joined: with one mesh, and not with the other."""
    folder = architectures.folder(tmp_path, "qwen3_moe")
    meshes = ("{fsdp: 2, tp: 2}", "{fsdp: 4}")
    settings = [
        Setting.of(loads(f"""
name: theirs
mesh: {mesh}
model: {{transformers: {folder}, seq_len: 16}}
batch: {{global_sequences: 8, per_device: 2}}
"""))
        for mesh in meshes
    ]  # fmt: skip
    shared = Variants()
    alone = [Variants().build(setting) for setting in settings]
    after = [shared.build(setting) for setting in (*settings, *settings)]
    actual = [(built.micro.fingerprint, built.micro.warnings) for built in after]
    assert actual == [(built.micro.fingerprint, built.micro.warnings) for built in alone] * 2
