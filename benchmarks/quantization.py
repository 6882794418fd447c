"""Measures the loss of 4-bit quantization of the quickstart's model: GPTQ against rounding to nearest, for three seeds.

    python benchmarks/quantization.py [--seeds 1,2,3] [--group-size 64] [--sequences 256] [--record] [--json]

Trains the quickstart once per seed (about a minute each on two cores), quantizes its checkpoint by GPTQ and by rounding
to nearest (`tpshard quantize`, without and with `--nearest`), and prints the held-out losses. Exits with 1 if GPTQ
costs more than 0.05 nats, or more than 0.7 of the cost of rounding, on average.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from statistics import mean
from typing import Any

from record import Record, parser_of
from running import tpshard

COST, SHARE = 0.05, 0.7


def quantized(run: Path, group_size: int, sequences: int, *options: str) -> dict[str, Any]:
    """The report of `tpshard quantize`: held-out loss before and after, in nats a token."""
    settings = [f"quantize.group_size={group_size}", f"evaluate.sequences={sequences}"]
    with tempfile.TemporaryDirectory() as folder:
        printed = tpshard("quantize", "quickstart", f"{folder}/out", f"run.dir={run}", *settings, "--json", *options)
    report: dict[str, Any] = json.loads(printed)
    return report


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--group-size", type=int, default=64)
    parser.add_argument("--sequences", type=int, default=256, help="of held-out text")
    arguments = parser.parse_args()
    record = Record("quantization", quiet=arguments.json)
    record.say("seed   dense loss   GPTQ costs   rounding costs   share   tokens")
    costs, rounding = [], []
    for seed in arguments.seeds.split(","):
        with tempfile.TemporaryDirectory() as folder:
            run = Path(folder) / "run"
            tpshard("train", "quickstart", f"seed={seed}", f"run.dir={run}", "logging.wandb=null")
            solved, nearest = (
                quantized(run, arguments.group_size, arguments.sequences, *options) for options in ((), ("--nearest",))
            )
        costs.append(solved["loss_after"] - solved["loss_before"])
        rounding.append(nearest["loss_after"] - nearest["loss_before"])
        record.rows.append({"seed": int(seed), "gptq": solved, "nearest": nearest})
        record.say(
            f"{seed:<6} {solved['loss_before']:>10.4f} {costs[-1]:>12.5f} {rounding[-1]:>16.5f} "
            f"{costs[-1] / rounding[-1]:>7.2f} {solved['held_out_tokens']:>8}"
        )  # fmt: skip
    cost, share = mean(costs), mean(costs) / mean(rounding)
    record.say(f"mean   {'':>10} {cost:>12.5f} {mean(rounding):>16.5f} {share:>7.2f}")
    good = cost <= COST and share <= SHARE
    record.say(f"at most {COST} nats and {SHARE} of rounding's: {'yes' if good else 'NO'}")
    record.figure("gptq.cost", cost, "nats, mean")
    record.figure("nearest.cost", mean(rounding), "nats, mean")
    record.close(write=arguments.record, as_json=arguments.json)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
