"""A worker of the tests' pool: runs the functions that tests send, each in a new process group."""

from __future__ import annotations

import importlib.util
import os
import pickle
import sys
import traceback
from multiprocessing.connection import Connection
from types import ModuleType
from typing import Any

from forked import enter


def load(name: str, path: str) -> ModuleType:
    """The test's module under the name that pytest gave it, so that its classes travel both ways."""
    response = sys.modules.get(name)
    if response is not None and getattr(response, "__file__", None) == path:
        return response
    sys.path.insert(0, os.path.dirname(path))  # helpers that lie beside the test
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def run(job: dict[str, Any], rank: int) -> Any:
    from tpshard.parallelism.mesh import Mesh
    from tpshard.parallelism.runtime.context import connect
    from tpshard.parallelism.runtime.place import WorkerPlace

    function: Any = load(job["module"], job["path"])
    for part in job["function"].split("."):
        function = getattr(function, part)
    place = WorkerPlace(rank, job["world"], rank, job["world"], f"file:{job['store']}", "tpshard")
    limits = {"start_s": job["timeout"], "step_s": job["timeout"], "watch": False}
    with connect(place, Mesh(job["mesh"]), device=job["device"], **limits) as context:
        return function(context, *pickle.loads(job["args"]))


def main(rank: int, pipe: Connection, environment: dict[str, str], log: str) -> None:
    enter(environment, log, log)
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import _unregister_all_process_groups

    torch.set_num_threads(1)
    while True:
        try:
            job = pipe.recv()
        except EOFError:
            return
        try:
            answer = ("done", pickle.dumps(run(job, rank)))
        except BaseException as error:
            from tpshard.parallelism.runtime.messages import is_lost_peer

            answer = ("lost" if is_lost_peer(error) else "failed", traceback.format_exc())
            pipe.send(answer)
            # Leaving the group politely would wait for the others: forget it, and let this process serve again.
            if dist.is_initialized():
                os._exit(0)
            continue
        finally:
            _unregister_all_process_groups()
        pipe.send(answer)
