"""`tpshard plan`: what a recipe would do, before it costs anything."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from tpshard.cli.arguments import Device, Json, OptionalRecipe, Overrides, Overwrite, load, on_device

DryRun = Annotated[bool, typer.Option("--dry-run", help="Write nothing but the files named here.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Everything, however many lines.")]
Html = Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write one self-contained page.")]
Trace = Annotated[Path | None, typer.Option("--trace", metavar="FILE", help="Write a trace for Perfetto.")]
Svg = Annotated[Path | None, typer.Option("--svg", metavar="FILE", help="Draw timeline and memory.")]
Explain = Annotated[str | None, typer.Option("--explain", metavar="NAME", help="Why a tensor is sharded as it is.")]
Diff = Annotated[str | None, typer.Option("--diff", metavar="OTHER", help="Compare with another recipe.")]
Search = Annotated[bool, typer.Option("--search", help="Try meshes, recomputation and micro-batches.")]
What = Annotated[str, typer.Option("--for", metavar="WHAT", help="train, prefill or decode.")]


def plan(
    recipe: OptionalRecipe = None,
    overrides: Overrides = None,
    dry_run: DryRun = False,
    as_json: Json = False,
    verbose: Verbose = False,
    html: Html = None,
    trace: Trace = None,
    svg: Svg = None,
    explain: Explain = None,
    diff: Diff = None,
    search: Search = False,
    what: What = "train",
    overwrite: Overwrite = False,
    device: Device = None,
) -> int:
    """Say what a recipe would do: shardings, collectives, memory, time. Needs no GPU, network or other process."""
    from tpshard.cli.files import refuse

    for file in filter(None, (html, trace, svg)):
        refuse(file, overwrite)
    if what not in ("train", "prefill", "decode"):
        raise typer.BadParameter(f"{what!r} is not train, prefill or decode", param_hint="--for")
    overrides = on_device(overrides, device)
    loaded = load(recipe, overrides)
    from tpshard.plan import command

    asked = command.Asked(
        source=recipe if recipe is not None and "=" not in recipe else "", what=what, dry_run=dry_run, as_json=as_json,
        verbose=verbose, html=html, trace=trace, svg=svg, explain=explain, search=search,
    )  # fmt: skip
    other = load(diff, overrides) if diff is not None else None
    done = command.run(loaded, asked, other, note=lambda text: print(text, file=sys.stderr))
    sys.stdout.write(done.text)
    return done.exit
