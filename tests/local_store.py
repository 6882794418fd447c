"""An S3 of this machine, which can be told to fail: moto's server on loopback, in a thread."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest

BUCKET = "bucket-of-tests"
SECRETS = {"AWS_ACCESS_KEY_ID": "AKIAOFNOBODY", "AWS_SECRET_ACCESS_KEY": "a-secret-of-nobody"}


class LocalStore:
    """The store's address, and the rule by which requests fail."""

    def __init__(self, application: Any):
        from werkzeug.serving import make_server

        self.application = application
        self.fails: Callable[[str, str], bool] = lambda method, path: False
        """Whether a request of this method, for this path and query, is answered with 500."""
        self.requests: list[tuple[str, str]] = []
        self.server = make_server("127.0.0.1", 0, self._answer, threaded=True)
        self.environment = {
            **SECRETS, "AWS_DEFAULT_REGION": "us-east-1", "AWS_MAX_ATTEMPTS": "1",
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.server.server_port}",
        }  # fmt: skip

    def _answer(self, environ: Mapping[str, Any], start_response: Any) -> Any:
        method, path = environ["REQUEST_METHOD"], f"{environ['PATH_INFO']}?{environ['QUERY_STRING']}"
        self.requests.append((method, path))
        if self.fails(method, path):
            start_response("500 Internal Server Error", [("Content-Length", "0")])
            return [b""]
        return self.application(environ, start_response)


@contextmanager
def local_store() -> Iterator[LocalStore]:
    """Runs a store with an empty bucket; the environment names it meanwhile."""
    from moto.server import DomainDispatcherApplication, create_backend_app

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    store = LocalStore(DomainDispatcherApplication(create_backend_app))
    thread = threading.Thread(target=store.server.serve_forever, daemon=True)
    thread.start()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in store.environment.items():
            patch.setenv(name, value)
        enter(store.environment)
        from tpshard.train.checkpoints import store_path

        store_path._file_system("s3").call_s3("create_bucket", Bucket=BUCKET)
        yield store
        store_path._file_system.cache_clear()
    store.server.shutdown()
    thread.join()
    store.server.server_close()


def enter(environment: Mapping[str, str]) -> None:
    """Sets the environment of this process, such as a worker of the pool, and forgets clients of other stores."""
    from tpshard.train.checkpoints import store_path

    os.environ.update(environment)
    store_path._file_system.cache_clear()
