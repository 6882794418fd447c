"""Requests with adapters: in one batch each is answered as by a model with its adapter merged in, on any mesh."""

from __future__ import annotations

import json
from collections.abc import Iterator
from collections.abc import Sequence as Items
from dataclasses import replace
from pathlib import Path
from typing import Any

import architectures
import gptq_folders
import pytest
import torch
from servers import Lockstep, programs_of, setting
from tpshard.cli.main import run as tpshard
from tpshard.cli.preflight.model_checks import adapter_errors
from tpshard.cli.shared.serve_worker import stored_weights
from tpshard.cli.shared.sources import open_source
from tpshard.diagnostics.diagnostic import Exit, Mistakes
from tpshard.models import to_hf
from tpshard.models.adapters.adapted_model import AdaptedModel
from tpshard.models.adapters.lora import Lora
from tpshard.models.adapters.merging import merged_blocks
from tpshard.models.adapters.peft_folder import PeftFolder, write_peft
from tpshard.models.open_model import open_model
from tpshard.parallelism.runtime.context import alone
from tpshard.programs.scheduling.request import LoadedAdapter, Sampling, Sequence
from tpshard.programs.server.serving import build_serving
from tpshard.recipes.reading.load import loads
from tpshard.serve.api.service import Limits
from tpshard.serve.engine.engine import Engine
from tpshard.serve.engine.runner import ProgramRunner
from tpshard.serve.engine.weights import Weights
from web import web

LORAS = {
    "all": Lora(rank=4, alpha=6.0, alpha_pattern={"o_proj": 3.0}),
    "some": Lora(rank=2, alpha=4.0, targets=("q_proj", "down_proj"), use_rslora=True),
    "table": Lora(rank=3, alpha=4.0, targets=("embed_tokens", "v_proj")),
}
FEW = ("serve.requests=8", "serve.step_tokens=8")
LENGTHS = (2, 9)


def write_adapters(base: Path, place: Path, seed: int = 0, **loras: Lora) -> dict[str, Path]:
    """Folders of adapters for a base, with random values."""
    folders = {}
    for name, lora in loras.items():
        spec = AdaptedModel(open_model(base), lora)

        def noise(one: str, spec: AdaptedModel = spec) -> torch.Tensor:
            generator = torch.Generator().manual_seed(sum(map(ord, one)) + seed)
            return torch.randn(spec.shapes[one], generator=generator) * 0.3

        write_peft(spec, noise, place / name, base=str(base))
        folders[name] = place / name
    return folders


def named(folders: dict[str, Path]) -> str:
    return f"serve.adapters={{{', '.join(f'{name}: {folder}' for name, folder in folders.items())}}}"


def loaded(runner: Any, folders: dict[str, Path]) -> list[LoadedAdapter | None]:
    """The model alone, and the adapters, which are loaded into a runner's slots."""
    adapters = [LoadedAdapter(n, str(folder), i, bytes([i]) * 16) for i, (n, folder) in enumerate(folders.items())]
    for one in adapters:
        runner.adapt(one.slot, one.folder)
    return [None, *adapters]


def answers(runner: Any, adapters: Items[LoadedAdapter | None]) -> tuple[list[list[int]], list[float], list[int]]:
    """The greedy answers to prompts of LENGTHS with each adapter, in one batch; their scores, and what was cached."""
    engine, scores = Engine(runner), dict[int, list[float]]()
    sequences = [
        Sequence(tuple(range(3, 3 + n)), Sampling(temperature=0, logprobs=0), 3, adapter=adapter)
        for adapter in adapters for n in LENGTHS
    ]  # fmt: skip
    for s in sequences:
        engine.add(s)
    while engine.busy:
        for event in engine.step():
            assert event.logprob is not None
            scores.setdefault(event.sequence.id, []).append(event.logprob.logprob)
    cached = [s.cached or 0 for s in sequences]
    return [s.tokens for s in sequences], [x for s in sequences for x in scores[s.id]], cached


def merged(base: Path, folder: Path | None) -> Weights:
    """A folder's weights, dense, with an adapter merged into them."""
    stored = open_source(str(base))
    if folder is None:
        return Weights(stored.spec.shapes, stored.block)
    adapters = PeftFolder.of(folder, stored.spec)

    def read(name: str, *place: Any) -> torch.Tensor:
        return (adapters.block if name in adapters.places else stored.block)(name, *place).float()

    return Weights(stored.spec.shapes, merged_blocks(adapters.spec, read))


def expected_of(base: Path, folders: Items[Path | None]) -> tuple[list[list[int]], list[float]]:
    """The answers of a dense model for each of these adapters, or for none."""
    outline, tokens, scores = open_model(base).outline, list[list[int]](), list[float]()
    assert outline is not None
    programs = build_serving(setting(outline, *FEW))
    for folder in folders:
        own = answers(ProgramRunner(alone(torch.device("cpu")), programs, merged(base, folder), 64), [None])
        tokens += own[0]
        scores += own[1]
    return tokens, scores


def runner_of(base: Path, *overrides: str, kind: str = "cpu") -> Any:
    programs, weights = programs_of(base, *FEW, *overrides, kind=kind), stored_weights(open_source(str(base)))
    if programs.setting.mesh.ranks > 1:
        return Lockstep(programs, weights, 64)
    return ProgramRunner(alone(torch.device("cpu")), programs, weights, 64)


@pytest.fixture(scope="module")
def base(model: torch.nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapted") / "base"
    to_hf(model, folder)
    return folder


@pytest.fixture(scope="module")
def folders(base: Path) -> dict[str, Path]:
    return write_adapters(base, base.parent, **LORAS)


@pytest.fixture(scope="module")
def expected(base: Path, folders: dict[str, Path]) -> tuple[list[list[int]], list[float]]:
    return expected_of(base, [None, *folders.values()])


@pytest.mark.parametrize(("tp", "kind"), [(1, "cpu"), (2, "gpu")])
def test_each_row_of_a_batch_has_its_own_adapter(
    tp: int, kind: str, base: Path, folders: dict[str, Path], expected: tuple[list[list[int]], list[float]]
) -> None:
    runner = runner_of(base, f"serve.mesh={{tp: {tp}}}", named(folders), kind=kind)
    tokens, scores, _ = answers(runner, loaded(runner, folders))
    assert tokens == expected[0] and len({tuple(one) for one in tokens[1::2]}) == 4
    assert scores == pytest.approx(expected[1], abs=2e-5)


def test_an_act_ordered_base_has_adapters_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wider = architectures.CONFIGS["llama"] | {"num_key_value_heads": 4, "intermediate_size": 64}
    monkeypatch.setitem(architectures.CONFIGS, "llama", wider)
    base, _ = gptq_folders.quantized("llama", tmp_path / "base")
    folders = write_adapters(base, tmp_path, some=Lora(2, 4.0, ("q_proj", "up_proj", "o_proj")))
    runner = runner_of(base, "serve.mesh={tp: 2}", named(folders))
    expected = expected_of(base, [None, *folders.values()])
    tokens, scores, _ = answers(runner, loaded(runner, folders))
    assert tokens == expected[0]
    assert scores == pytest.approx(expected[1], abs=1e-4)


def test_a_cached_prefix_belongs_to_one_version_of_an_adapter(base: Path, folders: dict[str, Path]) -> None:
    runner = runner_of(base, named(folders))
    adapters = loaded(runner, folders)
    engine = Engine(runner)

    def cached(adapter: LoadedAdapter | None) -> int | None:
        sequence = Sequence(tuple(range(3, 43)), Sampling(temperature=0), 2, adapter=adapter)
        engine.add(sequence)
        while engine.busy:
            engine.step()
        return sequence.cached

    assert [cached(one) for one in (*adapters, *adapters)] == [0] * 4 + [32] * 4
    first = adapters[1]
    assert first is not None
    assert cached(replace(first, root=b"another version!")) == 0


@pytest.fixture(scope="module")
def server(base: Path, folders: dict[str, Path], served: Any) -> Iterator[Any]:
    runner = runner_of(base, named({"all": folders["all"]}), f"serve.adapter_root={base.parent}", "serve.max_loras=2")
    own = {"all": str(folders["all"])}
    with served(lambda: runner, Limits(running=8), adapters=own, adapter_root=base.parent) as running:
        yield running


def post(server: Any, path: str, **body: Any) -> tuple[int, str]:
    response = web.post(f"{server.url}{path}", json=body)
    return response.status_code, response.text


def completed(server: Any, model: str) -> tuple[str, int]:
    """The answer of a model to a prompt of two blocks, and how many of its tokens were cached."""
    body = {"model": model, "prompt": list(range(3, 43)), "max_tokens": 5, "temperature": 0, "ignore_eos": True}
    response = web.post(f"{server.url}/v1/completions", json=body)
    assert response.status_code == 200, response.text
    answer = response.json()
    assert answer["model"] == model
    return answer["choices"][0]["text"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_adapters_are_loaded_and_dropped_while_serving(server: Any, folders: dict[str, Path]) -> None:
    names = [one["id"] for one in web.get(f"{server.url}/v1/models").json()["data"]]
    assert names == ["tiny", "all"] and web.get(f"{server.url}/v1/models/all").json()["parent"] == "tiny"
    plain, first = completed(server, "tiny"), completed(server, "all")
    assert plain[1] == first[1] == 0 and plain[0] != first[0]
    assert completed(server, "all") == (first[0], 32)
    assert post(server, "/v1/completions", model="some", prompt="x")[0] == 404
    assert post(server, "/v1/load_lora_adapter", lora_name="some", lora_path="some")[0] == 200
    second = completed(server, "some")
    assert second[1] == 0 and second[0] not in (plain[0], first[0])
    for name, says, param in (
        ("some", "`load_inplace: true` replaces it", "lora_name"), ("third", "2 slots", "lora_path"),
        ("tiny", "model itself", "lora_name"),
    ):  # fmt: skip
        answer = post(server, "/v1/load_lora_adapter", lora_name=name, lora_path="all", is_3d_lora_weight=False)
        assert answer[0] == 400 and says in answer[1] and json.loads(answer[1])["error"]["param"] == param, answer
    again = {"lora_name": "some", "lora_path": "all", "load_inplace": True}
    assert post(server, "/v1/load_lora_adapter", **again | {"lora_path": "base"})[0] == 400
    assert completed(server, "some") == (second[0], 32), "what cannot be loaded replaces nothing"
    assert post(server, "/v1/load_lora_adapter", **again)[0] == 200
    assert completed(server, "some") == (first[0], 0), "what was cached with the old adapter is not used"
    assert post(server, "/v1/unload_lora_adapter", lora_name="some")[0] == 200
    assert post(server, "/v1/unload_lora_adapter", lora_name="some")[0] == 404
    assert post(server, "/v1/completions", model="some", prompt="x")[0] == 404


def test_only_folders_below_the_root_are_loaded(server: Any, base: Path, tmp_path: Path) -> None:
    (base.parent / "link").symlink_to(tmp_path)
    for path in ("..", "some/../..", str(tmp_path), "link", "", "none", "a\0", "x" * 5000):
        status, text = post(server, "/v1/load_lora_adapter", lora_name="other", lora_path=path)
        assert status == 400 and "lora_path" in text
    status, text = post(server, "/v1/load_lora_adapter", lora_name="other", lora_path="base")
    assert status == 400 and "holds no adapters" in text
    assert (
        web.post(f"{server.url}/v1/load_lora_adapter", json={"lora_name": "/etc", "lora_path": "x"}).status_code == 400
    )


@pytest.mark.parametrize(("lora", "says"), [
    (Lora(2, 2.0, ("q_proj",), dora=True), "use_dora"),
    (Lora(2, 2.0, ("q_proj",), modules_to_save=("norm",)), "modules_to_save"),
    (Lora(8, 2.0, ("q_proj",)), "rank 8, above 4"),
])  # fmt: skip
def test_an_adapter_without_room_is_refused_at_the_recipe(lora: Lora, says: str, base: Path, tmp_path: Path) -> None:
    folders = write_adapters(base, tmp_path, own=lora)
    with pytest.raises(Mistakes) as raised:
        programs_of(base, *FEW, named(folders), "serve.max_lora_rank=4")
    (mistake,) = raised.value.diagnostics
    assert mistake.exit == Exit.CHECKPOINT and says in mistake.why and mistake.where is not None


def test_what_holds_no_adapters_is_told_with_what_to_do(base: Path, tmp_path: Path, capsys: Any) -> None:
    """A run, whose adapters are converted; a folder that is not there; a name that no adapter has."""
    (tmp_path / "run" / "checkpoints" / "step-000001").mkdir(parents=True)
    (tmp_path / "run" / "checkpoints" / "step-000001" / "manifest.json").write_text("{}")
    for place, says in (("run", f"`tpshard convert {tmp_path / 'run'} OUT`"), ("gone", "there is no such folder")):
        with pytest.raises(Mistakes) as raised:
            programs_of(base, *FEW, f"serve.adapters={{own: {tmp_path / place}}}")
        (mistake,) = raised.value.diagnostics
        assert mistake.exit == Exit.CHECKPOINT and says in mistake.why + mistake.fix
    assert tpshard(["generate", str(base), "text", "--adapter", "own"]) == Exit.USAGE
    assert "`--adapter own` is none of `serve.adapters`" in capsys.readouterr().err
    root = f"serve.adapter_root={tmp_path / 'gone'}"
    assert tpshard(["serve", "tiny", f"serve.checkpoint={base}", "--check", root]) == Exit.CHECKPOINT
    assert "there is no folder" in capsys.readouterr().err


def test_an_adapter_of_another_model_is_refused(base: Path, tmp_path: Path) -> None:
    other = architectures.folder(tmp_path / "other", "qwen2", weights=True)
    folders = write_adapters(other, tmp_path, own=Lora(2, 2.0, ("q_proj",)))
    with pytest.raises(Mistakes, match="cannot be served"):
        programs_of(base, *FEW, named(folders))
    (told,) = adapter_errors(loads(f"model: {{hf: {base}}}\nserve: {{adapters: {{own: {folders['own']}}}}}\n"))
    assert told.exit == Exit.CHECKPOINT and told.where is not None and told.where.line == 2
