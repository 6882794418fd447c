"""Produces the transcripts in README and docs: trains, serves and quantizes the quickstart as a user does.

    python benchmarks/quickstart.py [--record] [--json]

Records what the commands print. Takes about three minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

from record import ROOT, Record, add_options

PROMPT = {"model": "quickstart", "prompt": "The return value of", "max_tokens": 24, "temperature": 0}
COMMAND = [sys.executable, "-m", "tpshard.cli.main"]


def tpshard(folder: str, *arguments: str) -> str:
    """The output of a tpshard command; ends this script if it fails."""
    command = [*COMMAND, *arguments]
    done = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        sys.exit(done.stdout)
    return done.stdout


def completion(folder: str, *arguments: str) -> dict[str, Any]:
    """The response of a server that is started for one request."""
    serving = subprocess.Popen(
        [*COMMAND, "serve", *arguments, "serve.port=0"], cwd=folder, stdout=subprocess.PIPE, text=True,
        env={k: v for k, v in os.environ.items() if k != "TPSHARD_API_KEY"},
    )  # fmt: skip
    try:
        assert serving.stdout is not None
        url = serving.stdout.readline().split()[-1] + "/completions"
        question = urllib.request.Request(url, json.dumps(PROMPT).encode(), {"content-type": "application/json"})
        answer: dict[str, Any] = json.load(urllib.request.urlopen(question))
        return answer
    finally:
        serving.terminate()
        serving.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    options = parser.parse_args()
    record = Record("quickstart", quiet=options.json)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "recipes").symlink_to(ROOT / "recipes")
        begun = time.perf_counter()
        printed = tpshard(folder, "train", "recipes/quickstart.yaml")
        record.figure("train", time.perf_counter() - begun, "s")
        record.texts["train"] = printed
        record.figure("train.held_out", float(re.findall(r"held-out loss (\S+)\n", printed)[-1]), "nats")
        record.figure("train.speed", float(re.findall(r"speed +(\S+)k tokens/s", printed)[-1]), "k tokens/s")
        record.texts["completion"] = json.dumps(completion(folder, "recipes/quickstart.yaml"), indent=1)
        begun = time.perf_counter()
        record.texts["quantize"] = tpshard(
            folder, "quantize", "quickstart", "quickstart-gptq", "quantize.group_size=64"
        )
        record.figure("quantize", time.perf_counter() - begun, "s")
    for name, text in record.texts.items():
        record.say(f"--- {name}\n{text}")
    record.close(write=options.record, as_json=options.json)


if __name__ == "__main__":
    main()
