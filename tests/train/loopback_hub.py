"""A hub for one repository on loopback: what `datasets` needs for streaming, and models, of Hugging Face's API."""

from __future__ import annotations

import hashlib
import json
import re
import threading
import urllib.parse
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

README = """---
configs:
- config_name: en
  data_files:
  - split: train
    path: en/c4-train.*.json.gz
  - split: validation
    path: en/c4-validation.*.json.gz
---
"""


class Hub:
    """Serves `files` (path in the repository: bytes) as data set or model `repo`; a context manager.

    `requested` lists the paths of files whose bytes were asked for.
    """

    def __init__(self, files: Mapping[str, bytes], repo: str = "allenai/c4", kind: str = "datasets"):
        self.files = {"README.md": README.encode(), **files} if kind == "datasets" else dict(files)
        self.repo, self.kind = repo, kind
        self.revision = hashlib.sha1(repr(sorted(self.files)).encode()).hexdigest()
        self.requested: list[str] = []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                hub.answer(self)

            do_HEAD = do_POST = do_GET

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    def __enter__(self) -> Hub:
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        length = int(request.headers.get("Content-Length") or 0)
        body = request.rfile.read(length)
        path = urllib.parse.unquote(urllib.parse.urlsplit(request.path).path)
        api = f"/api/{self.kind}/{self.repo}"
        home = f"/datasets/{self.repo}" if self.kind == "datasets" else f"/{self.repo}"
        if match := re.fullmatch(rf"{home}/resolve/[^/]+/(.+)", path):
            self._file(request, match.group(1))
        elif path == api or path in (f"{api}/revision/main", f"{api}/revision/{self.revision}"):
            siblings = [{"rfilename": name} for name in self.files]
            info = {"_id": "0", "id": self.repo, "sha": self.revision, "private": False, "gated": False, "tags": []}
            self._json(request, {**info, "disabled": False, "downloads": 0, "likes": 0, "siblings": siblings})
        elif match := re.fullmatch(rf"{api}/tree/[^/]+/?(.*)", path):
            self._json(request, self._tree(match.group(1), "recursive=True" in request.path or "=true" in request.path))
        elif re.fullmatch(rf"{api}/paths-info/[^/]+", path):
            expected = json.loads(body)["paths"] if body[:1] == b"{" else urllib.parse.parse_qs(body.decode())["paths"]
            entries = self._tree("", recursive=True)
            self._json(request, [entry for entry in entries if entry["path"] in expected])
        else:
            lacks = "RevisionNotFound" if path.startswith(api) else "RepoNotFound"
            self._json(request, {"error": "not here"}, 404, {"X-Error-Code": lacks})

    def _tree(self, under: str, recursive: bool) -> list[dict[str, Any]]:
        prefix = f"{under}/" if under else ""
        entries: dict[str, dict[str, Any]] = {}
        for name, data in self.files.items():
            if not name.startswith(prefix):
                continue
            parts = name.removeprefix(prefix).split("/")
            for depth in range(1, len(parts)):
                folder = prefix + "/".join(parts[:depth])
                entries[folder] = {"type": "directory", "oid": "0" * 40, "size": 0, "path": folder}
            oid = hashlib.sha1(data).hexdigest()
            entries[name] = {"type": "file", "oid": oid, "size": len(data), "path": name}
        return [e for e in entries.values() if recursive or "/" not in e["path"].removeprefix(prefix)]

    def _file(self, request: BaseHTTPRequestHandler, name: str) -> None:
        if name not in self.files:
            self._json(request, {"error": "not here"}, 404, {"X-Error-Code": "EntryNotFound"})
            return
        data, status = self.files[name], 200
        headers = {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": self.revision}
        headers["Accept-Ranges"] = "bytes"
        if request.command == "GET":
            self.requested.append(name)
            if match := re.fullmatch(r"bytes=(\d+)-(\d*)", request.headers.get("Range") or ""):
                start, end = int(match.group(1)), int(match.group(2) or len(data) - 1)
                headers["Content-Range"] = f"bytes {start}-{min(end, len(data) - 1)}/{len(data)}"
                data, status = data[start : end + 1], 206
        self._send(request, data, status, headers)

    def _json(
        self, request: BaseHTTPRequestHandler, value: object, status: int = 200, more: Mapping[str, str] | None = None
    ) -> None:
        self._send(request, json.dumps(value).encode(), status, {"Content-Type": "application/json", **(more or {})})

    def _send(self, request: BaseHTTPRequestHandler, data: bytes, status: int, headers: Mapping[str, str]) -> None:
        request.send_response(status)
        for key, value in headers.items():
            request.send_header(key, value)
        request.send_header("Content-Length", str(len(data)))
        request.end_headers()
        if request.command != "HEAD":
            request.wfile.write(data)
