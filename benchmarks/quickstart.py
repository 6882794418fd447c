"""Produces the transcripts in README and docs: trains, serves and quantizes the quickstart as a user does.

    python benchmarks/quickstart.py [--record] [--json]

Records what the commands print. Takes about three minutes on two cores.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

from record import ROOT, Record, parser_of
from running import COMMAND, serving, tpshard

PROMPT = {"model": "quickstart", "prompt": "The return value of", "max_tokens": 24, "temperature": 0}


def printed_by(folder: str, *arguments: str) -> str:
    """What a command prints into a terminal, with paths from the folder on."""
    return tpshard(*arguments, cwd=folder, stderr=subprocess.STDOUT).replace(f"{folder}/", "")


def completion(folder: str, recipe: str) -> dict[str, Any]:
    """The response of a server that is started for one request."""
    with serving([*COMMAND, "serve", recipe, "serve.port=0"], cwd=folder) as address:
        body, kind = json.dumps(PROMPT).encode(), {"content-type": "application/json"}
        question = urllib.request.Request(f"{address}/completions", body, kind)
        answer: dict[str, Any] = json.load(urllib.request.urlopen(question))
    return answer


def main() -> None:
    options = parser_of(__doc__).parse_args()
    record = Record("quickstart", quiet=options.json)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "recipes").symlink_to(ROOT / "recipes")
        begun = time.perf_counter()
        printed = printed_by(folder, "train", "recipes/quickstart.yaml")
        record.figure("train", time.perf_counter() - begun, "s")
        record.texts["train"] = printed
        record.figure("train.held_out", float(re.findall(r"held-out loss (\S+)\n", printed)[-1]), "nats")
        record.figure("train.speed", float(re.findall(r"speed +(\S+)k tokens/s", printed)[-1]), "k tokens/s")
        record.texts["completion"] = json.dumps(completion(folder, "recipes/quickstart.yaml"), indent=1)
        begun = time.perf_counter()
        arguments = ("quantize", "quickstart", "quickstart-gptq", "quantize.group_size=64")
        record.texts["quantize"] = printed_by(folder, *arguments)
        record.figure("quantize", time.perf_counter() - begun, "s")
    for name, text in record.texts.items():
        record.say(f"--- {name}\n{text}")
    record.close(write=options.record, as_json=options.json)


if __name__ == "__main__":
    main()
