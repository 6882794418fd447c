"""Models and tokenizers of a hub on loopback, in processes that read HF_ENDPOINT."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import architectures
from forked import python
from tpshard.files.hub_folder import PATIENCE_S

sys.path.insert(0, str(Path(__file__).parents[1] / "train"))
from loopback_hub import Hub

COMMANDS = """
import json
from tpshard.cli.main import run
print(json.dumps([run(line.split()) for line in {lines!r}]))
"""


def run(endpoint: str, home: Path, *lines: str, **more: str) -> tuple[list[int], str]:
    """The exit codes of commands, and what they say."""
    env = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_HUB_DOWNLOAD_TIMEOUT": "2", **more}
    env = {k: v for k, v in env.items() if not k.lower().endswith("_proxy")}
    done = python(COMMANDS.format(lines=lines), environment=env)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    codes: list[int] = json.loads(done.stdout.splitlines()[-1])
    return codes, done.stderr


def test_a_model_of_the_hub_is_planned_without_weights_and_converted(tmp_path: Path) -> None:
    """Of a revision too; the cache does without a network, and what is not JSON or safetensors is not asked for."""
    folder = architectures.folder(tmp_path / "base", "llama", weights=True)
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    files |= {"pytorch_model.bin": b"pickle", "modeling_own.py": b"code", "original/a.safetensors": b"other"}
    recipe = tmp_path / "a.yaml"
    recipe.write_text(
        "model: {hf: hf:some/base, seq_len: 8, vocab: 2048}\ndata: {source: sample}\nevaluate: {every_steps: 0}\n"
    )
    checks = [f"validate {recipe}", f"plan {recipe} --dry-run"]
    with Hub(files, repo="some/base", kind="models") as hub:
        codes, said = run(hub.url, tmp_path / "home", *checks)
        assert codes == [0, 0], said
        assert set(hub.requested) == {"config.json", "generation_config.json"}
        pinned = f"hf:some/base@{hub.revision}"
        codes, said = run(
            hub.url, tmp_path / "home", f"convert {pinned} {tmp_path}/out", f"convert hf:some/none {tmp_path}/b"
        )
        assert codes == [0, 6] and "hf:some/none cannot be read from the hub" in said, said
        assert set(hub.requested) == {"config.json", "generation_config.json", "model.safetensors"}
    assert (tmp_path / "out" / "model.safetensors").is_file()
    codes, said = run(hub.url, tmp_path / "home", *checks, f"convert hf:some/base@{hub.revision} {tmp_path}/again")
    assert codes == [0, 0, 0], said


def test_a_model_of_the_hub_without_weights_is_refused_before_workers_start(tmp_path: Path) -> None:
    folder = architectures.folder(tmp_path / "base", "llama", weights=False)
    recipe = tmp_path / "a.yaml"
    recipe.write_text(
        "model: {hf: hf:some/base, seq_len: 8, vocab: 2048}\ncluster: {device: cpu}\nmesh: {}\ndata: {source: sample}\n"
    )
    with Hub({path.name: path.read_bytes() for path in folder.iterdir()}, repo="some/base", kind="models") as hub:
        codes, said = run(hub.url, tmp_path / "home", f"train {recipe} run.dir={tmp_path}/run")
    assert codes == [3] and "has no weights" in said and "a.yaml:1:13" in said, said
    assert "starting" not in said and not (tmp_path / "run").exists(), said


def test_what_the_hub_lacks_is_told_in_words(tmp_path: Path) -> None:
    """Names of the library's errors say nothing; a folder that it fetched is not looked for beside the recipe."""
    with Hub({"tokenizer.json": b"{}"}, repo="some/base", kind="models") as hub:
        names = ("hf:some/base", "hf:some/none", "hf:some/base@v9")
        codes, said = run(hub.url, tmp_path, *(f"validate tiny model.hf={name}" for name in names))
    assert codes == [3, 6, 6] and "holds no config.json" in said and "there is no " not in said, said
    assert "none of this name, or it is private" in said and "not in this revision" in said, said
    codes, said = run(hub.url, tmp_path, "validate tiny model.hf=hf:some/none", HF_HUB_OFFLINE="1")
    assert codes == [6] and "HF_HUB_OFFLINE is set, and the cache is without it" in said, said


def test_no_network_is_told_at_once_with_the_place(tmp_path: Path) -> None:
    with Hub({}, kind="models") as hub:
        url = hub.url
    codes, said = run(url, tmp_path, "validate tiny model.hf=hf:some/base", "validate tiny model.hf=hf:wrong")
    assert codes == [6, 3] and "hf:some/base cannot be read" in said and "model.hf=" in said, said
    assert "hf:OWNER/NAME@REVISION" in said


def test_a_hub_that_takes_connections_and_never_answers_is_told_of_models_tokenizers_and_data(tmp_path: Path) -> None:
    """Once for a command: what names a model and a tokenizer there asks one time."""
    recipe = tmp_path / "a.yaml"
    recipe.write_text("model: {preset: tiny}\ndata: {source: hf:some/talks, tokenizer: hf:some/base}\n")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        model, data = "validate tiny model.hf=hf:some/base", f"train {recipe} run.dir={tmp_path}/run"
        codes, said = run(url, tmp_path, model, f"validate {recipe}", data)
        asked = 0
        silent.settimeout(0)
        try:
            while True:
                silent.accept()[0].close()
                asked += 1
        except BlockingIOError:
            pass
    assert codes == [6, 0, 6] and said.count(f"{url}: no answer within 2 s") == 3 and asked == 1, said
    assert "some/talks cannot be read from the hub" in said and "`data.tokenizer` is not known here" in said, said


class _SlowHub(Hub):
    """Its files take longer than the hub is waited for."""

    def _send(self, request: BaseHTTPRequestHandler, data: bytes, *answer: Any) -> None:
        if request.command == "GET" and request.path.endswith(".safetensors"):
            time.sleep(PATIENCE_S + 0.2)
        super()._send(request, data, *answer)


def test_a_hub_whose_large_files_take_long_is_waited_for(tmp_path: Path) -> None:
    folder = architectures.folder(tmp_path / "base", "llama", weights=True)
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    with _SlowHub(files, repo="some/base", kind="models") as hub:
        codes, said = run(hub.url, tmp_path, f"convert hf:some/base {tmp_path}/out", HF_HUB_DOWNLOAD_TIMEOUT="20")
    assert codes == [0], said
