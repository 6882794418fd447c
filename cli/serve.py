"""`tpshard serve`: serves a recipe's model over HTTP with OpenAI's API."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from tpshard.cli.shared.arguments import Device, Json, Overrides, RecipeArgument, load, on_device
from tpshard.diagnostics.diagnostic import Exit, Mistakes
from tpshard.recipes.text.other_tools import hub_fix

if TYPE_CHECKING:
    from tpshard.cli.shared.source_model import SourceModel
    from tpshard.models.folders.folder_tokenizer import FolderTokenizer
    from tpshard.programs.server.served import Served
    from tpshard.recipes.keys.schema import Recipe
    from tpshard.serve.api.need import Need
    from tpshard.serve.api.service import Service

Check = Annotated[bool, typer.Option("--check", help="Print the memory and programs needed, load nothing, and exit.")]
Insecure = Annotated[bool, typer.Option("--insecure", help="Serve beyond this machine without an API key.")]
KeyFile = Annotated[Path | None, typer.Option("--api-key-file", metavar="FILE", help="A file with the API key.")]


def serve(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    check: Check = False,
    as_json: Json = False,
    insecure: Insecure = False,
    api_key_file: KeyFile = None,
    device: Device = None,
) -> int:
    """Serve a recipe's latest checkpoint, or the run or folder that `serve.checkpoint` names."""
    from tpshard.serve.api import http

    overrides = on_device(overrides, device)
    loaded = load(recipe, overrides, trained=True)
    section = loaded.serve
    if section.adapter_root is not None and not Path(section.adapter_root).is_dir():
        message, where = f"there is no folder {section.adapter_root}", loaded.where("serve.adapter_root")
        why = "clients load adapters from below it"
        raise Mistakes.one(message, exit=Exit.CHECKPOINT, where=where, why=why, fix="make it, or name another")
    key = http.read_key(api_key_file, section.api_key)
    if check:
        need_before_start = memory_need(loaded, _shape(recipe, overrides or [], loaded))
        sys.stdout.write(
            json.dumps(need_before_start.as_json(), indent=1) + "\n" if as_json else f"{need_before_start}\n"
        )
        return 0
    http.check_exposure(section.host, key, insecure, loaded.where("serve.host"))
    model = model_of(recipe, overrides or [], loaded)
    requirements = memory_need(loaded, stored_model(loaded, model))
    sock = http.bind(section.host, section.port, loaded.where("serve.port"))
    http.log_to_stderr()
    print(requirements, file=sys.stderr)
    return _run(loaded, model, requirements, sock, key)


def model_of(recipe: str, overrides: list[str], loaded: Recipe) -> SourceModel:
    """The model to serve, its weights not yet read."""
    from tpshard.cli.shared.sources import model_place, open_source, opened_location

    checkpoint = loaded.serve.checkpoint
    if checkpoint == "latest":
        return open_source(recipe, overrides, modules=True)
    if (place := model_place(checkpoint, loaded, "serve.checkpoint")) is None:
        from tpshard.files.folder_json import FolderError
        from tpshard.models.folders.foreign_formats import refuse_format

        folder = opened_location(checkpoint)
        try:
            if isinstance(folder, Path):
                refuse_format(folder)
        except FolderError as error:
            where = loaded.where("serve.checkpoint")
            raise Mistakes.one(str(error), exit=Exit.CHECKPOINT, where=where, fix=error.fix) from error
        raise Mistakes.one(
            f"{checkpoint} is neither a checkpoint nor a Hugging Face folder", exit=Exit.CHECKPOINT,
            where=loaded.where("serve.checkpoint"), why="it has no manifest.json, config.json or checkpoints",
            fix=_other_checkpoint(recipe, checkpoint, loaded),
        )  # fmt: skip
    return open_source(str(place), modules=True, trusted=loaded)


def _other_checkpoint(recipe: str, named: str, loaded: Recipe) -> str:
    """The fix for a `serve.checkpoint` that is none: the run's own of that name, or a model on the hub."""
    from tpshard.cli.shared.sources import holds_model

    for run in (Path(recipe), loaded.run.folder):
        if holds_model(run / "checkpoints" / named):
            return f"serve.checkpoint={run / 'checkpoints' / named}"
    return hub_fix(named) or "a checkpoint being written gets its manifest last: wait for it, or name another"


def _shape(recipe: str, overrides: list[str], loaded: Recipe) -> Served:
    """The model as it would be served, without its weights; a recipe's own model needs no checkpoint."""
    from tpshard.programs.server.served import LATEST, model_to_serve

    if loaded.serve.checkpoint == LATEST:
        return model_to_serve(loaded, _kind(loaded))
    return stored_model(loaded, model_of(recipe, overrides, loaded))


def stored_model(loaded: Recipe, model: SourceModel) -> Served:
    """An existing model as it would be served: its specification, dtype and quantization."""
    from tpshard.programs.server.served import stored_model

    names = {"torch.float32": "fp32", "torch.bfloat16": "bf16", "torch.float16": "fp16"}
    dtype = names.get(str(model.dtype), "fp32")
    return stored_model(loaded, model.spec, Path(model.name), dtype, _kind(loaded))


def memory_need(loaded: Recipe, served: Served) -> Need:
    """The memory that serving needs on one device. Raises `Mistakes` where it does not fit."""
    import psutil
    from tpshard.programs.server.serve_setting import ServeSetting
    from tpshard.programs.server.serving import build_serving
    from tpshard.serve.api.need import need

    setting = ServeSetting.of(loaded, served, _kind(loaded))
    ranks = setting.mesh.ranks
    free = psutil.virtual_memory().available // ranks
    if setting.kind == "gpu":
        from tpshard.devices.machine import require_server

        free = require_server(loaded, ranks, served.dtype)
    return need(build_serving(setting), free)


def _kind(loaded: Recipe) -> Any:
    """The kind of device: cpu or gpu."""
    from tpshard.cli.shared.worker_errors import device_kind

    return "gpu" if device_kind(loaded) == "cuda" else "cpu"


def _run(loaded: Recipe, model: SourceModel, need: Need, sock: Any, key: str | None) -> int:
    from tpshard.serve.api import http
    from tpshard.serve.api.access import Access, is_loopback
    from tpshard.serve.api.app import Server, make_app
    from tpshard.serve.api.preprocess_pool import PreprocessPool, PreprocessSetup

    section = loaded.serve
    tokenizer = open_tokenizer(loaded, model, need)
    defaults = generation_defaults(loaded, model)
    signal.signal(signal.SIGTERM, _end)
    service = start_service(loaded, model, need)
    folder, rows = str(model.tokenizer), need.programs.vocab
    pool = PreprocessPool(PreprocessSetup(folder, rows, tokenizer.chat_template, loaded.name, defaults))
    root = None if section.adapter_root is None else Path(section.adapter_root)
    server = Server(loaded.name, service, tokenizer, pool, need.programs.listed, defaults, root)
    app = make_app(server, Access(key, section.cors, local=key is None and is_loopback(section.host)))
    stop = _to_wandb(loaded, service)
    try:
        return http.run(app, service, sock, lambda: _announce(loaded, sock, key))
    finally:
        pool.close()
        stop()


def open_tokenizer(loaded: Recipe, model: SourceModel, need: Need) -> FolderTokenizer:
    """The model's tokenizer. Raises `Mistakes` (exit 6) where there is none, or one of another model."""
    from tpshard.models.folders.folder_tokenizer import FolderTokenizer

    if model.tokenizer is None:
        raise Mistakes.one(
            f"{model.name} has no tokenizer", exit=Exit.DATA, where=loaded.where("data.tokenizer"),
            fix="name its folder in `data.tokenizer`",
        )  # fmt: skip
    try:
        tokenizer = FolderTokenizer(model.tokenizer, need.programs.vocab, model.folders)
    except (ValueError, OSError) as error:
        own = "name the folder of the model's own tokenizer in `data.tokenizer`"
        raise Mistakes.one(str(error), exit=Exit.DATA, fix=own) from error
    for note in tokenizer.notes:
        print(f"warning: {note}", file=sys.stderr)
    return tokenizer


def generation_defaults(loaded: Recipe, model: SourceModel) -> Mapping[str, Any]:
    """The sampling settings of requests that set none, from the model's folder, unless the recipe says `none`.

    Raises `Mistakes` (exit 7) where the folder has a wrong value. Keys that are not obeyed are named on stderr.
    """
    from tpshard.serve.api.generation_defaults import FILE, read_generation_defaults

    if loaded.serve.generation_defaults == "none":
        return {}
    folders = [*model.folders, *([model.tokenizer] if model.tokenizer is not None else [])]
    folder = next((folder for folder in folders if (folder / FILE).exists()), folders[0])
    try:
        read = read_generation_defaults(folder)
    except ValueError as error:
        fix = "correct it, or `serve.generation_defaults=none`"
        raise Mistakes.one(str(error), exit=Exit.CHECKPOINT, fix=fix) from error
    if read.not_obeyed:
        print(f"warning: {folder / FILE}: not obeyed: {', '.join(read.not_obeyed)}", file=sys.stderr)
    return read.values


def start_service(loaded: Recipe, model: SourceModel, need: Need) -> Service:
    """The engine with its ranks, ready to answer. Raises `Mistakes`: exit 7 where weights cannot be used, 9 where
    the ranks do not start."""
    import torch
    from tpshard.parallelism.runtime.cores import sharing_note, vectors_note
    from tpshard.serve.api.metrics import Metrics
    from tpshard.serve.api.service import Limits, NotLoaded, Service
    from tpshard.serve.engine.job import Job
    from tpshard.serve.engine.ranks import Ranks
    from tpshard.serve.engine.step import WorkerLost

    section = loaded.serve
    if _kind(loaded) == "cpu":
        for slow in filter(None, (sharing_note(need.programs.setting.mesh.ranks), vectors_note())):
            print(f"note: {slow}", file=sys.stderr)
    job = Job.of(need.programs, model.name, need.blocks)
    limits = Limits(running=section.requests, queue=section.queue, request_s=section.request_s, grace_s=section.grace_s)
    torch.set_num_threads(1)  # idle threads of this process would spin on the ranks' cores
    command = [sys.executable, "-P", "-m", "tpshard.cli.shared.serve_worker"]
    service = Service(lambda: Ranks(command, job), limits, Metrics(), section.adapters)
    try:
        service.start()
    except NotLoaded as error:
        raise Mistakes.one(
            "an adapter cannot be loaded", exit=Exit.CHECKPOINT, where=loaded.where("serve.adapters"), why=str(error),
            fix="correct it, or name another",
        ) from error  # fmt: skip
    except WorkerLost as error:
        if error.exit == Exit.CHECKPOINT:
            raise Mistakes.one(
                f"{model.name} cannot be read", exit=Exit.CHECKPOINT, why=str(error), fix="correct it, or name another"
            ) from error
        fix = "the lines above name the cause; `tpshard doctor` checks this machine"
        raise Mistakes.one(f"the model could not be started: {error}", exit=Exit.WORKER_LOST, fix=fix) from error
    return service


def _end(*_: object) -> None:
    """Handles SIGTERM before the server is ready: no request has to finish."""
    print("ended before it was ready", file=sys.stderr)
    sys.exit(0)


def _announce(loaded: Recipe, sock: Any, key: str | None) -> None:
    host, port = sock.getsockname()[:2]
    host = f"[{host}]" if ":" in host else host
    print(f"serving {loaded.name} on http://{host}:{port}/v1", flush=True)
    header = ' -H "Authorization: Bearer $TPSHARD_API_KEY"' if key is not None else ""
    body = json.dumps({"model": loaded.name, "prompt": "The return value of", "max_tokens": 24})
    print(f"  curl http://{host}:{port}/v1/completions{header} -d '{body}'", file=sys.stderr, flush=True)


def _to_wandb(loaded: Recipe, service: Service) -> Any:
    """Logs the metrics to wandb every ten seconds if the recipe asks for it; returns a function that stops it."""
    import threading

    section = loaded.logging.wandb
    asked_for = loaded.where("logging.wandb").line  # by the recipe or on the command line, not by default
    if section is None or section.mode == "disabled" or not asked_for:
        return lambda: None
    import yaml
    from tpshard.train.records.wandb_sink import WandbSink

    folder = loaded.run.folder
    folder.mkdir(parents=True, exist_ok=True)
    sink = WandbSink(folder, section, name=f"{loaded.name}-serve", config=yaml.safe_load(loaded.to_yaml()))
    ended = threading.Event()

    def pass_on() -> None:
        step = 0
        while not ended.wait(10):
            step += 1
            sink({"step": step, **service.metrics.snapshot()})

    thread = threading.Thread(target=pass_on, name="wandb", daemon=True)
    thread.start()

    def end() -> None:
        ended.set()
        thread.join()
        sink.close(service.metrics.snapshot(), wait_s=5)

    return end
