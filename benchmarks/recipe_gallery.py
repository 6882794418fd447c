"""Every shipped recipe: its command, the key figures of its plan, and where it was run.

    python benchmarks/recipe_gallery.py [--record] [--docs] [--steps N] [NAME ...]      rows of other names stay

plan: `tpshard plan NAME --dry-run --json`. run: recipes for a CPU are trained on this machine for N steps, in a folder
that is removed afterwards; of the others nothing was run here, and the table says so. `--docs` writes the table into
docs/gallery.md. Times of a busy machine mean little: the table shows losses, the record keeps tokens per second too.
The README shows the screen of one plan, from the record, and the picture of another, docs/llama3-8b.svg.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from record import ROOT, Record, close_with_table, parser_of
from running import COMMAND

SHOWN, DRAWN = "llama3-70b", "llama3-8b"
"""The recipe whose plan the README shows, and the one that it draws."""
PICTURE = ROOT / "docs" / f"{DRAWN}.svg"


def printed_plan(name: str, *options: str) -> str:
    """What `tpshard plan NAME --dry-run` prints."""
    done = subprocess.run([*COMMAND, "plan", name, "--dry-run", *options], capture_output=True, text=True)
    if done.returncode not in (0, 4) or not done.stdout:
        sys.exit(f"plan {name}: {done.stderr}")
    return done.stdout


def show(picture: Path) -> dict[str, str]:
    """The screen of the README's plan, and the hash of its picture, which is drawn into a file."""
    printed_plan(DRAWN, "--svg", str(picture), "--overwrite")
    picture.write_text(picture.read_text("utf-8").replace(f"{ROOT}/", ""), "utf-8")  # the places of annotations
    return {"screen": printed_plan(SHOWN), "picture": hashlib.sha256(picture.read_bytes()).hexdigest()}


def plan_recipe(name: str) -> dict[str, Any]:
    """The key figures of a recipe's plan."""
    plan = json.loads(printed_plan(name, "--json"))
    device = plan["device"]
    return {
        "fits": plan["fits"], "params": plan["params"], "mesh": plan["mesh"], "device": device["name"],
        "hosts": device["nodes"], "needed_bytes": plan["memory"]["needed_bytes"],
        "memory_bytes": device["memory_bytes"], "step_s": plan["time"]["step_s"],
        "exposed_comm_s": plan["time"]["exposed_comm_s"], "tokens_per_s_per_device": plan["tokens_per_s_per_device"],
        "mfu": plan["mfu"], "bottleneck": plan["bottleneck"],
    }  # fmt: skip


def train(name: str, steps: int) -> dict[str, Any]:
    """What a few steps gave on this machine, from random weights where the recipe begins from a run."""
    with tempfile.TemporaryDirectory() as place:
        overrides = [f"train.steps={steps}", f"run.dir={place}/run", "train.init_from=null"]
        done = subprocess.run([*COMMAND, "train", name, *overrides], cwd=place, capture_output=True, text=True)
        if done.returncode:
            return {"exit": done.returncode, "said": done.stderr.strip().splitlines()[:3]}
        rows = [json.loads(line) for line in (Path(place) / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows if "loss" in row]
    return {"exit": 0, "steps": steps, "first_loss": losses[0], "last_loss": losses[-1],
            "tokens_per_s": [row["tokens_per_s"] for row in rows if "loss" in row][-1]}  # fmt: skip


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    lines = [
        "| recipe | planned for | parameters | mesh | memory of a device | a step | tokens/s a device | MFU | run |",
        "|---" * 9 + "|",
    ]
    for row in rows:
        plan, ran = row["plan"], row["run"]
        mesh = " x ".join(f"{axis} {size}" for axis, size in plan["mesh"].items() if size > 1) or "one device"
        where = plan["device"] if plan["hosts"] == 1 else f"{plan['hosts']} hosts of {plan['device']}"
        memory = f"{plan['needed_bytes'] / 2**30:.2f} of {plan['memory_bytes'] / 2**30:.0f} GiB"
        shown = "not run: planned alone"
        if ran is not None:
            shown = f"exit {ran['exit']}"
            if not ran["exit"]:
                shown = f"{ran['steps']} steps, loss {ran['first_loss']:.3g} to {ran['last_loss']:.3g}"
        memory += "" if plan["fits"] else " (no)"
        cells = [
            f"`{row['name']}`", where, f"{plan['params'] / 1e6:,.1f} M", mesh, memory,
            f"{plan['step_s']:.3g} s", f"{plan['tokens_per_s_per_device']:,.0f}", f"{plan['mfu']:.2f}", shown,
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--steps", type=int, default=5, metavar="N", help="default 5")
    parser.add_argument("--train", metavar="NAME,...", help="run these alone; default: all that are for a CPU")
    parser.add_argument("--docs", action="store_true", help="write the table into docs/gallery.md")
    options = parser.parse_args()
    record = Record("recipe_gallery", quiet=options.json)
    shipped = sorted(path.stem for path in (ROOT / "recipes").glob("*.yaml"))
    for name in options.names or shipped:
        plan = plan_recipe(name)
        runs_on_cpu = "cpu" in str(plan["device"]).lower() and (
            options.train is None or name in options.train.split(",")
        )
        ran = train(name, options.steps) if runs_on_cpu else None
        record.rows.append({"name": name, "plan": plan, "run": ran})
        record.say(json.dumps(record.rows[-1]))
    record.keep_others(shipped)
    with tempfile.TemporaryDirectory() as place:
        record.texts |= show(PICTURE if options.docs else Path(place) / "picture.svg")
    close_with_table(record, table(record.rows), "gallery.md", options)


if __name__ == "__main__":
    main()
