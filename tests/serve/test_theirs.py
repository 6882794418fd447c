"""A transformers model over HTTP, batched or from the cache, gives the tokens of `generate`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import architectures
import gptq_folders
import pytest
import torch
from servers import folder_runner, programs_of, ranks_of
from tokenizers import Tokenizer as Rust
from torch import Tensor
from tpshard.kernels.quantized.gptq_solver import Settings
from tpshard.models.transformers.architecture import Architecture
from tpshard.models.transformers.class_weights import FolderWeights
from tpshard.models.transformers_model import TransformersModel
from tpshard.serve.api.service import Limits
from tpshard.serve.quantizing.quantize_layers import Quantizer
from tpshard.serve.quantizing.task_rows import text_rows
from tpshard.serve.quantizing.write_quantized import write_quantized
from web import web

HEAD = [7, 3, 11, 40, 9, 22, 5, 5, 61, 30, 12, 2, 45, 17, 8, 33]
"""A block of the cache, which prompts share."""
PROMPTS = ([*HEAD, 4, 19], [13, 6, 50], [*HEAD, 4, 20, 21, 6], [*HEAD, 4, 19])
LENGTH = 10
ALL = [*(name for name in architectures.CONFIGS if name != "mamba"), "deepseek_v32", "glm_moe_dsa", "hy_v4"]


@pytest.fixture
def ids(tokenizer_folder: Path) -> Callable[[Sequence[str]], list[int]]:
    tokenizer = Rust.from_file(str(tokenizer_folder / "tokenizer.json"))
    return lambda spelled: [tokenizer.token_to_id(token) for token in spelled]


def varied(name: str) -> dict[str, Tensor]:
    """Values with which a model repeats itself less: layers count for more than tables of tokens."""
    own, values = architectures.own(name), architectures.values(name)
    tables = {id(table.weight) for table in (own.get_input_embeddings(), own.get_output_embeddings())}
    for path, parameter in own.named_parameters():
        if parameter.dim() > 1 and not path.endswith("A_log"):
            values[path] *= 0.3 if id(parameter) in tables else 3.0
    return values


def expected(name: str, values: dict[str, Tensor]) -> list[list[int]]:
    """The tokens that transformers generates for each prompt alone."""
    model = architectures.own(name)
    model.load_state_dict(values, strict=False)
    model.generation_config.eos_token_id = None
    options: Any = {"max_new_tokens": LENGTH, "do_sample": False, "pad_token_id": 0}
    return [model.generate(torch.tensor([p]), **options)[0, len(p) :].tolist() for p in PROMPTS]


def answers(url: str, ids: Callable[[Sequence[str]], list[int]]) -> list[list[int]]:
    """The tokens of the server: all prompts at once, then the last one again from the cache."""

    def ask(prompt: list[int]) -> list[int]:
        body = {"model": "tiny", "prompt": prompt, "max_tokens": LENGTH, "temperature": 0, "ignore_eos": True}
        response = web.post(f"{url}/v1/completions", json=body | {"logprobs": 0})
        assert response.status_code == 200, response.text
        return ids(response.json()["choices"][0]["logprobs"]["tokens"])

    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        return [*pool.map(ask, PROMPTS[:-1]), ask(PROMPTS[-1])]


@contextlib.contextmanager
def running(folder: Path, tp: int, served: Any, *overrides: str) -> Iterator[str]:
    how = (f"serve.mesh.tp={tp}", "serve.requests=8", "serve.step_tokens=16", *overrides)
    make = (lambda: folder_runner(folder, *how, blocks=64)) if tp == 1 else (lambda: ranks_of(folder, *how, blocks=64))
    with served(make, Limits(running=8, queue=8, body_bytes=1 << 16)) as server:
        yield server.url


def hits(url: str) -> float:
    lines = web.get(f"{url}/metrics").text.splitlines()
    return next(float(line.split()[-1]) for line in lines if line.startswith("tpshard_prefix_hit_tokens_total"))


QUICK = [("gemma2", 1), ("deepseek_v32", 1)]
WHOLE = [(name, tp) for name in ALL for tp in (1, 2, 4) if (name, tp) not in QUICK]


@pytest.mark.parametrize(("name", "tp"), [*QUICK, *(pytest.param(*one, marks=pytest.mark.slow) for one in WHOLE)])
def test_tokens_over_http_are_those_of_generate(name: str, tp: int, tmp_path: Path, served: Any, ids: Any) -> None:
    values = varied(name)
    reference = expected(name, values)
    assert len({token for tokens in reference for token in tokens}) > 5, "a model that repeats itself shows little"
    with running(architectures.folder(tmp_path, name, weights=values), tp, served) as url:
        assert answers(url, ids) == reference
        assert hits(url) >= 16


# ---- quantized folders ----------------------------------------------------------------------------------------------
CODED = (
    "qwen2", "qwen3", "mistral", "phi3", "gpt2", "gemma2", "gemma3_text", "olmo2", "granite", "mixtral", "qwen2_moe",
    "qwen3_moe",
)  # fmt: skip
NOT_TURNED = ("gpt2", "phi3", "mixtral", "qwen3_moe")
"""Models whose gates and values lie in one matrix, or in one operation with the rest of an expert."""


@pytest.mark.parametrize(
    ("name", "tp", "layout"),
    [
        ("phi3", 1, "tp_aware"),
        ("gpt2", 1, "tp_aware"),
        *(
            pytest.param(name, tp, layout, marks=pytest.mark.slow)
            for name in CODED
            for tp, layout in ((1, "tp_aware"), (2, "tp_aware"), (2, "naive"), (2, "local_sort"))
        ),
    ],
)
def test_a_gptq_folder_gives_the_tokens_of_its_dense_weights(
    name: str, tp: int, layout: str, tmp_path: Path, served: Any, ids: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    wider = {key: value for key, value in gptq_folders.WIDER.items() if key in architectures.CONFIGS[name]}
    monkeypatch.setitem(architectures.CONFIGS, name, {**architectures.CONFIGS[name], **wider})
    folder, values = gptq_folders.quantized(name, tmp_path / name)
    if tp > 1 and layout == "tp_aware" and name not in NOT_TURNED:
        overrides = (f"serve.mesh.tp={tp}", "serve.step_tokens=8", "serve.requests=8")
        turned = programs_of(folder, *overrides).arrangement.columns
        assert len(turned) == 4 and all("gate" in one or "up" in one for one in turned), "no order is left of the MLP"
    with running(folder, tp, served, f"serve.layout={layout}") as url:
        assert answers(url, ids) == expected(name, values)


@pytest.mark.parametrize(
    ("name", "tp"),
    [
        ("qwen2_moe", 1),
        *(
            pytest.param(*one, marks=pytest.mark.slow)
            for one in (("phi3", 2), ("qwen2_moe", 2), ("gpt2", 2), ("gemma3_text", 2))
        ),
    ],
)
def test_what_quantize_writes_is_served(
    name: str, tp: int, tmp_path: Path, served: Any, ids: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokens are those of the dense weights that the folder stands for."""
    wider = {key: value for key, value in gptq_folders.WIDER.items() if key in architectures.CONFIGS[name]}
    monkeypatch.setitem(architectures.CONFIGS, name, {**architectures.CONFIGS[name], **wider})
    architecture, values = Architecture(architectures.config_of(name)), varied(name)
    tokens = torch.randint(0, 64, (8, 16), generator=torch.Generator().manual_seed(0))
    spec = TransformersModel(architecture.raw)
    write_quantized(
        Quantizer(
            spec,
            values.__getitem__,
            text_rows(tokens, tokens),
            None,
            Settings(group_size=16),
            "global",
        ),
        tmp_path / "out",
    )
    stored = FolderWeights(tmp_path / "out", architecture, architecture.build())
    dequantized = {path: stored.block(path, (), ()).float() for path in values}
    with running(tmp_path / "out", tp, served) as url:
        assert answers(url, ids) == expected(name, dequantized)
