"""A cached plan is used if and only if everything it depends on is unchanged."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import architectures
import gptq_folders
import pytest
from safetensors.torch import load_file, save_file
from small_recipe import RECIPE
from tpshard.cli.main import run as tpshard
from tpshard.diagnostics.diagnostic import Exit
from tpshard.models import transformers_model
from tpshard.plan import command, outputs, plan_cache, saved_plan
from tpshard.recipes.reading.load import load, loads

DEVICE = """
schema: 1
name: box
kind: cpu
backend: gloo
memory: 8 GiB
memory_bandwidth: 20 GB/s
rates: {fp32: RATE GFLOP/s}
host:
  devices: 64
  cores: 4
  inside: {bandwidth: 2 GB/s, latency: 60 us, shared: true}
  across: {bandwidth: 1 GB/s, latency: 100 us, shared: true}
"""


def test_a_second_plan_says_the_same_without_torch(small: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert tpshard(["plan", "small.yaml"]) == Exit.DONE
    first = capsys.readouterr().out
    written = {path.name: path.read_bytes() for path in (small.parent / "runs" / "small").iterdir()}
    assert written.keys() == {"plan.json", "plan.html", "plan.trace.json"}
    for path in (small.parent / "runs" / "small").iterdir():
        path.unlink()
    again = "import sys; from tpshard.cli.main import run; code = run(sys.argv[1:]); assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", f"{again}; sys.exit(code)", "plan", "small.yaml"],
                          capture_output=True, text=True, check=False)  # fmt: skip
    assert (done.returncode, done.stdout) == (0, first), done.stderr
    assert {path.name: path.read_bytes() for path in (small.parent / "runs" / "small").iterdir()} == written

    def refuse(*_: object) -> None:
        raise AssertionError("planned again")

    monkeypatch.setattr(command, "run", refuse)
    assert tpshard(["plan", "small.yaml", "--dry-run"]) == Exit.DONE
    assert capsys.readouterr().out == first
    assert tpshard(["plan", "small.yaml", "--json", "--svg", "small.svg", "--dry-run"]) == Exit.DONE
    assert json.loads(capsys.readouterr().out)["name"] == "small"
    for anew in (["--no-cache"], ["batch.per_device=1"]):
        assert tpshard(["plan", "small.yaml", *anew]) == Exit.BUG
        assert "planned again" in capsys.readouterr().err


def test_an_entry_is_of_all_that_a_plan_depends_on(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def entry(*overrides: str, **options: Any) -> plan_cache.PlanEntry | None:
        return outputs.entry(load("small.yaml", overrides), outputs.PlanOptions(**options))

    box = small.parent / "box.yaml"
    box.write_text(DEVICE.replace("RATE", "100"))
    same = {entry(), entry()}
    on_box = entry("cluster.device=box.yaml")
    box.write_text(DEVICE.replace("RATE", "200"))
    others = [on_box, entry("cluster.device=box.yaml"), entry("remat=full"), entry(what="decode")]
    small.write_text("# a line more\n" + RECIPE)  # reasons name lines
    others.append(entry())
    monkeypatch.setattr(saved_plan, "code_of", lambda rooms: "other code")
    others.append(entry())
    assert len(same) == 1 and len({*same, *others}) == 7 and None not in others
    assert entry(search=True) is None
    assert entry("task=package:Class") is None


def test_an_entry_sees_a_folders_class_and_what_is_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Either key of a folder records transformers' version, and a server's entry the order of the inputs it serves."""
    theirs = architectures.folder(tmp_path / "theirs", "gpt_neox")
    served = tmp_path / "served"

    def entry(model: str) -> plan_cache.PlanEntry | None:
        recipe = loads(f"model: {{{model}, seq_len: 16}}\nserve: {{checkpoint: {served}}}")
        return outputs.entry(recipe, outputs.PlanOptions(what="decode"))

    before = [entry(f"{key}: {theirs}") for key in ("hf", "transformers")]
    monkeypatch.setitem(architectures.CONFIGS, "llama", architectures.config_of("llama") | gptq_folders.WIDER)
    gptq_folders.quantized("llama", served)
    after = entry(f"hf: {theirs}")
    tensors = load_file(served / "model.safetensors")
    order = next(name for name in tensors if name.endswith(".g_idx"))
    save_file(tensors | {order: tensors[order].flip(0)}, served / "model.safetensors")
    other = entry(f"hf: {theirs}")
    monkeypatch.setattr(transformers_model, "version", lambda package: "6")
    newer = entry(f"hf: {theirs}")
    assert None not in before and len({*before, after, other, newer}) == 5


def test_a_broken_or_full_cache_is_no_mistake(small: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cached = outputs.entry(load("small.yaml"), outputs.PlanOptions())
    assert cached is not None and cached.read(["screen"]) is None
    cached.write({"screen": "said"})
    assert cached.read(["screen"]) == {"screen": "said"} and cached.read(["screen", "exit"]) is None
    for damage in (b"", b"half", gzip.compress(b""), gzip.compress(b"other text than was written" * 9)):
        (cached.folder / "screen.gz").write_bytes(damage)
        assert cached.read(["screen"]) is None
        cached.write({"screen": "again"})
        assert cached.read(["screen"]) == {"screen": "again"}
    monkeypatch.setattr(plan_cache, "MOST", 2)
    (cached.folder.parent / "sample").mkdir()  # what others keep there stays
    for digit in "abc":
        plan_cache.PlanEntry(cached.folder.with_name(32 * digit)).write({"screen": digit})
    assert sorted(path.name for path in cached.folder.parent.iterdir()) == [32 * "b", 32 * "c", "sample"]
    blocked = small.parent / "file"
    blocked.write_text("")
    plan_cache.PlanEntry(blocked / "entry").write({"screen": "nowhere"})
