"""Folders of transformers are read and written with equal logits, and invalid ones are refused."""

from __future__ import annotations

import copy
import json
import os
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from tpshard.models import build, from_hf, to_hf
from tpshard.models.families.presets import PRESETS, ModelConfig, preset
from tpshard.models.folders.hf_config import read_config
from tpshard.models.folders.hf_folder import HFFolder, write_hf
from tpshard.models.folders.hf_names import Home, hf_modules
from tpshard.models.initialization import init_plan, initial_block
from tpshard.programs.compare.float64 import distance, float64

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 24,
}
BASE = {"vocab_size": 97, "max_position_embeddings": 64, "bos_token_id": 3, "eos_token_id": 4, "num_hidden_layers": 2}
LLAMAS: dict[str, dict[str, Any]] = {
    "grouped": {
        "hidden_size": 42,
        "intermediate_size": 50,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 10,
        "rope_parameters": {**LLAMA3, "rope_theta": 5000.0},
    },
    "tied": {
        "hidden_size": 35,
        "intermediate_size": 17,
        "num_attention_heads": 5,
        "num_key_value_heads": 1,
        "head_dim": 6,
        "tie_word_embeddings": True,
        "attention_bias": True,
        "mlp_bias": True,
        "rms_norm_eps": 0.01,
    },
}
SHAPE = {"hidden_size": 48, "intermediate_size": 40, "num_attention_heads": 6, "num_key_value_heads": 2}
WINDOWED = {"use_sliding_window": True, "sliding_window": 7, "num_hidden_layers": 3}
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral": ("Mistral", {
        **SHAPE, "sliding_window": 9, "head_dim": 12, "rope_parameters": {**LLAMA3, "rope_theta": 2e3}
    }),
    "mistral without window": ("Mistral", {**SHAPE, "sliding_window": None, "tie_word_embeddings": True}),
    "qwen2": ("Qwen2", SHAPE),
    "qwen2 with windows": ("Qwen2", {**SHAPE, **WINDOWED, "max_window_layers": 1, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {**SHAPE, "head_dim": 10, "rms_norm_eps": 0.01}),
    "qwen3 with windows": ("Qwen3", {
        **SHAPE, **WINDOWED, "head_dim": 16, "attention_bias": True, "tie_word_embeddings": True,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    }),
}  # fmt: skip
ROUTED = {"num_experts_per_tok": 2, "head_dim": 8, "tie_word_embeddings": False}
OTHERS |= {
    "mixtral": ("Mixtral", {**SHAPE, **ROUTED, "num_local_experts": 4, "sliding_window": 9}),
    "mixtral with loss": ("Mixtral", {**SHAPE, **ROUTED, "num_local_experts": 3, "output_router_logits": True}),
    "qwen3_moe": ("Qwen3Moe", {**SHAPE, **ROUTED, "num_experts": 6, "moe_intermediate_size": 12}),
    "qwen3_moe normed": ("Qwen3Moe", {
        **SHAPE, **ROUTED, "num_experts": 4, "moe_intermediate_size": 20, "norm_topk_prob": True,
        "use_sliding_window": True, "sliding_window": 11,
    }),
    "dots1": ("Dots1", {
        **SHAPE, **ROUTED, "n_routed_experts": 6, "n_shared_experts": 2, "moe_intermediate_size": 12,
        "norm_topk_prob": True, "routed_scaling_factor": 2.5, "num_key_value_heads": 3,
    }),
}  # fmt: skip
KINDS = [*LLAMAS, "multi-query", "multi-head", *OTHERS]
GRANITES: dict[str, dict[str, Any]] = {
    "multi-query": {"n_embd": 39, "n_head": 3, "n_inner": 71},
    "multi-head": {"n_embd": 20, "n_head": 5, "multi_query": False, "tie_word_embeddings": False},
}
IDS = torch.randint(97, (2, 33), generator=torch.Generator().manual_seed(0))


def randomize(model: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in (*model.parameters(), *(b for n, b in model.named_buffers() if "correction" in n)):
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return model


def theirs(kind: str) -> nn.Module:
    import transformers

    if kind in LLAMAS:
        result: nn.Module = transformers.LlamaForCausalLM(transformers.LlamaConfig(**BASE, **LLAMAS[kind]))
    elif kind in OTHERS:
        family, numbers = OTHERS[kind]
        result = getattr(transformers, f"{family}ForCausalLM")(
            getattr(transformers, f"{family}Config")(**BASE | numbers)
        )
    else:
        base = {"vocab_size": 97, "n_positions": 64, "n_layer": 2, "bos_token_id": 3, "eos_token_id": 4}
        result = transformers.GPTBigCodeForCausalLM(transformers.GPTBigCodeConfig(**base, **GRANITES[kind]))
    return randomize(result).eval()


def assert_equals_theirs(model: nn.Module, folder: Path) -> None:
    """Our logits are those of transformers, both computed in float64."""
    import transformers

    plain = {"dtype": torch.float32, "experts_implementation": "eager"}  # the others have no products of float64
    other = transformers.AutoModelForCausalLM.from_pretrained(folder, **plain).eval().double()
    with torch.no_grad(), float64():
        ours, expected = copy.deepcopy(model).double()(IDS), other(IDS).logits
    assert float(expected.abs().max()) > 0.3  # or nothing would be compared
    assert distance(ours, expected) <= 1e-7  # transformers keeps the frequencies of its rotations in float32


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A folder that transformers wrote, by kind; not to be changed."""
    root = tmp_path_factory.mktemp("hf")

    def folder(kind: str) -> Path:
        if not (root / kind).exists():
            shard = {"max_shard_size": "8KB"} if kind in ("grouped", "multi-query") else {}
            theirs(kind).save_pretrained(root / kind, **shard)
        return root / kind

    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_reads_what_transformers_writes(kind: str, folders: Callable[[str], Path]) -> None:
    folder = folders(kind)
    assert (folder / "model.safetensors.index.json").exists() == (kind in ("grouped", "multi-query"))
    model = from_hf(folder)
    assert_equals_theirs(model, folder)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shard_bytes", [9000, 5_000_000_000], ids=["shards", "file"])
def test_transformers_reads_what_is_written(
    kind: str, shard_bytes: int, folders: Callable[[str], Path], tmp_path: Path
) -> None:
    model = randomize(build(HFFolder(folders(kind)).config, device="cpu"))
    to_hf(model, tmp_path / "out", shard_bytes=shard_bytes)
    files = sorted(p.name for p in (tmp_path / "out").iterdir())
    assert len({p.stat().st_mode for p in (tmp_path / "out").iterdir()}) == 1  # all readable by whom the umask lets
    assert ("model.safetensors" in files) == (shard_bytes > 9000)
    assert_equals_theirs(model, tmp_path / "out")
    again = from_hf(tmp_path / "out")
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), again.state_dict().values()))


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_read_is_written_back(kind: str, folders: Callable[[str], Path], tmp_path: Path) -> None:
    """The same tensors bit for bit, and a config.json that means the same here and to transformers."""
    import transformers

    to_hf(from_hf(folders(kind)), tmp_path / "back")
    written = load_file(tmp_path / "back" / "model.safetensors")
    read = {name: value for file in folders(kind).glob("*.safetensors") for name, value in load_file(file).items()}
    assert written.keys() == read.keys() and all(torch.equal(written[name], read[name]) for name in read)
    assert HFFolder(tmp_path / "back").config == HFFolder(folders(kind)).config
    first, second = (transformers.AutoConfig.from_pretrained(f).to_dict() for f in (folders(kind), tmp_path / "back"))
    changed = {key: (first.get(key), second.get(key)) for key in {*first, *second} if first.get(key) != second.get(key)}
    nothing_computed = {"_name_or_path", "bos_token_id", "eos_token_id", "max_window_layers", "head_dim", "n_inner"}
    if "moe" in kind or "dots" in kind:  # what only layers without experts, and with windows, would read
        nothing_computed |= {"intermediate_size"} | ({"sliding_window"} if "dots" in kind else set())
    nothing_computed |= {"attn_pdrop", "embd_pdrop", "resid_pdrop", "rope_theta", "rope_scaling"}
    assert changed.keys() <= nothing_computed, changed


@pytest.mark.parametrize(
    ("kind", "changes", "window", "full"),
    [
        ("mistral", {"sliding_window": ...}, 4096, ()),
        ("mistral", {"sliding_window": None}, None, ()),
        ("qwen2", {"sliding_window": 5}, None, ()),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 1, "layer_types": ...}, 4096, (0,)),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 2, "layer_types": None}, None, ()),
        ("qwen2", {"use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"]}, 4096, (1,)),
    ],
)
def test_windows_of_a_configuration(
    kind: str, changes: dict[str, Any], window: int | None, full: tuple[int, ...], folders: Callable[[str], Path]
) -> None:
    raw = json.loads((folders(kind) / "config.json").read_text()) | {"sliding_window": 4096} | changes
    config = read_config({key: value for key, value in raw.items() if value is not ...})
    assert (config.window, config.full_layers) == (window, full)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["full_attention"]}, "each of 2 layers"),
        ({"layer_types": ["full_attention", "chunked_attention"]}, "layer_types"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "no `sliding_window` is in use"),
        ({"use_sliding_window": True, "sliding_window": 0}, "sliding_window: 0"),
        ({"use_sliding_window": "yes"}, "use_sliding_window"),
    ],
)
def test_windows_that_make_no_sense(changes: dict[str, Any], message: str, folders: Callable[[str], Path]) -> None:
    raw = json.loads((folders("qwen2") / "config.json").read_text())
    with pytest.raises(ValueError, match=message):
        read_config(raw | changes)


def test_a_key_that_is_null_is_not_one_that_is_missing(folders: Callable[[str], Path]) -> None:
    raw = json.loads((folders("mistral") / "config.json").read_text())
    raw |= {"num_attention_heads": 16, "num_key_value_heads": None}
    assert read_config(raw).kv_heads == 16
    del raw["num_key_value_heads"]
    assert read_config(raw).kv_heads == 8


def test_both_generations_of_configuration(folders: Callable[[str], Path]) -> None:
    raw = json.loads((folders("grouped") / "config.json").read_text())
    modern = read_config(raw)
    assert (
        modern.rope_theta == 5000.0 and modern.rope_scaling is not None and modern.rope_scaling.original_max_seq == 24
    )
    rope = raw.pop("rope_parameters")
    old = {**raw, "torch_dtype": raw.pop("dtype"), "rope_theta": rope.pop("rope_theta")}
    del old["dtype"]
    old["rope_scaling"] = {("type" if key == "rope_type" else key): value for key, value in rope.items()}
    assert read_config(old) == modern
    both = {**old, "dtype": "float32", "rope_parameters": {**rope, "rope_theta": 5000.0}}
    assert read_config(both) == modern
    assert read_config({**old, "torch_dtype": "bfloat16"}).dtype == "bf16"
    with pytest.raises(ValueError, match="contradict"):
        read_config({**both, "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}})


@pytest.mark.parametrize("name", ["llama3-1b", "llama3-8b", "llama3-70b", "llama3-405b", "granite-20b"])
def test_presets_survive_the_trip(name: str) -> None:
    from tpshard.models.folders.hf_config import write_config

    config = PRESETS[name]
    assert read_config(write_config(config, config.dtype)) == config


def test_half_precision_and_old_buffers(folders: Callable[[str], Path], tmp_path: Path) -> None:
    model = from_hf(folders("grouped"), dtype=torch.bfloat16)
    to_hf(model, tmp_path / "half")
    values = load_file(tmp_path / "half" / "model.safetensors")
    values["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(5)
    save_file(values, tmp_path / "half" / "model.safetensors")
    again = from_hf(tmp_path / "half")
    assert next(again.parameters()).dtype == torch.bfloat16
    assert from_hf(tmp_path / "half", dtype=torch.float32)(IDS).dtype == torch.float32


@pytest.mark.parametrize("kind", ["grouped", "multi-query", "multi-head"])
def test_blocks_of_parameters(kind: str, folders: Callable[[str], Path]) -> None:
    source = HFFolder(folders(kind))
    whole = dict(from_hf(folders(kind)).named_parameters())
    assert source.shapes == {name: tuple(value.shape) for name, value in whole.items()}
    for name, shape in source.shapes.items():
        starts, sizes = tuple(n // 3 for n in shape), tuple(n - n // 3 - n // 4 for n in shape)
        expected = whole[name][tuple(slice(a, a + n) for a, n in zip(starts, sizes))]
        assert torch.equal(source.block(name, starts, sizes), expected)
        assert source.block(name, starts, (0,) * len(shape), torch.float16).dtype == torch.float16


def test_names_serve_quantized_folders_too() -> None:
    homes = hf_modules(preset("tiny"))
    assert homes["layers.3.attention.wq"] == Home("model.layers.3.self_attn.q_proj")
    assert homes["layers.0.mlp.down"] == Home("model.layers.0.mlp.down_proj")
    granite = replace(PRESETS["granite-tiny"], layers=1)
    fused = torch.arange(2 * 160).view(2, 160)  # [packed rows, outputs] as in `qweight`
    parts = [hf_modules(granite)[f"layers.0.attention.{name}"].take(fused, dim=1) for name in ("wq", "wk", "wv")]
    assert [part.shape[1] for part in parts] == [128, 16, 16] and torch.equal(torch.cat(parts, 1), fused)


# What is refused. Each case changes a sound folder in one way.


def edit_config(**changes: Any) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        raw = json.loads((folder / "config.json").read_text())
        for key, value in changes.items():
            if value is None:
                del raw[key]
            else:
                raw[key] = value
        (folder / "config.json").write_text(json.dumps(raw))

    return edit


def edit_tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        values = load_file(folder / "model.safetensors")
        change(values)
        save_file(values, folder / "model.safetensors")

    return edit


def index_to(file: str) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        names = list(load_file(folder / "model.safetensors"))
        (folder / "model.safetensors").rename(folder.parent / "x.safetensors")
        (folder / "inner").mkdir()
        places = dict.fromkeys(names, file.replace("ABSOLUTE", str(folder.parent)))
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))

    return edit


def link_out(name: str) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        (folder / name).rename(folder.parent / "outside")
        (folder / name).symlink_to(folder.parent / "outside")

    return edit


def write_bytes(name: str, content: bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes(content) and None


def header(text: str, rest: bytes = b"") -> bytes:
    return struct.pack("<Q", len(text)) + text.encode() + rest


def truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    os.truncate(path, path.stat().st_size - 100)


def only_a_pickle(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


NEST = b"[" * 100_000
OVERLAP = '{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}}'
REFUSED: dict[str, tuple[Callable[[Path], None], str]] = {
    "code": (edit_config(auto_map={"AutoModel": "evil.Model"}), "auto_map"),
    "quantized how": (edit_config(quantization_config={"quant_method": "awq", "bits": 4}), "AWQ"),
    "quantized where": (edit_config(quantization_config={"quant_method": "gptq", "bits": 4}), "no `qweight`"),
    "activation": (edit_config(hidden_act="gelo", architectures=None), "hidden_act: gelo"),
    "rope": (edit_config(rope_parameters={"rope_type": "yarn", "rope_theta": 1e4}), "yarn"),
    "no theta": (edit_config(rope_parameters={"rope_type": "default", "rope_theta": -1}), "rope_theta"),
    "experts": (edit_config(num_local_experts=8), "num_local_experts"),
    "window": (edit_config(sliding_window=16), "sliding_window"),
    "heads": (edit_config(num_key_value_heads=3), "KV heads"),
    "a string": (edit_config(hidden_size="35"), "hidden_size"),
    "missing size": (edit_config(intermediate_size=None), "intermediate_size"),
    "a billion layers": (edit_config(num_hidden_layers=10**9), "layers"),
    "dtype": (edit_config(dtype="float8_e4m3fn"), "float8"),
    "shape": (edit_config(vocab_size=98), "embed_tokens.weight.*98"),
    "missing tensor": (edit_tensors(lambda t: t.pop("model.norm.weight")), "model.norm.weight.*missing"),
    "another tensor": (edit_tensors(lambda t: t.update({"model.extra": torch.ones(1)})), "model.extra"),
    "integers": (edit_tensors(lambda t: t.update({"model.norm.weight": torch.ones(35).int()})), "I32"),
    "untied head": (edit_tensors(lambda t: t.update({"lm_head.weight": torch.ones(97, 35)})), "tie_word_embeddings"),
    "parent": (index_to("../x.safetensors"), "not the name of a file"),
    "absolute": (index_to("ABSOLUTE/x.safetensors"), "not the name of a file"),
    "subfolder": (index_to("inner/../../x.safetensors"), "not the name of a file"),
    "not a shard": (index_to("config.json"), "not a safetensors file"),
    "missing shard": (index_to("model-00001-of-00001.safetensors"), "missing"),
    "weights link out": (link_out("model.safetensors"), "leads out"),
    "configuration links out": (link_out("config.json"), "leads out"),
    "pickle": (only_a_pickle, "pickle"),
    "truncated": (truncate, "not a valid safetensors"),
    "huge header": (write_bytes("model.safetensors", struct.pack("<Q", 2**62) + b"{}"), "not a valid safetensors"),
    "overlap": (write_bytes("model.safetensors", header(OVERLAP, bytes(12))), "not a valid safetensors"),
    "empty file": (write_bytes("model.safetensors", b""), "not a valid safetensors"),
    "not JSON": (write_bytes("config.json", b"{"), "not valid JSON"),
    "nested JSON": (write_bytes("config.json", NEST), "not valid JSON"),
    "a list": (write_bytes("config.json", b"[]"), "list"),
    "empty index": (write_bytes("model.safetensors.index.json", b"{}"), "weight_map"),
}


@pytest.mark.parametrize("case", list(REFUSED))
def test_refused(case: str, folders: Callable[[str], Path], tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for file in folders("tied").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    from_hf(folder)  # sound before
    change, output = REFUSED[case]
    change(folder)
    with pytest.raises(ValueError, match=output):
        from_hf(folder)


def test_an_index_that_lies_about_a_shard(folders: Callable[[str], Path], tmp_path: Path) -> None:
    to_hf(from_hf(folders("tied")), tmp_path / "m", shard_bytes=9000)
    path = tmp_path / "m" / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    places = index["weight_map"]
    first, *_, last = places
    places[first], places[last] = places[last], places[first]
    path.write_text(json.dumps(index))
    with pytest.raises(ValueError, match="does not place there"):
        from_hf(tmp_path / "m")


def test_a_snapshot_of_the_hubs_cache(folders: Callable[[str], Path], tmp_path: Path) -> None:
    snapshot, blobs = tmp_path / "snapshots" / "abc", tmp_path / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for file in folders("tied").iterdir():
        (blobs / file.name).write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to(f"../../blobs/{file.name}")
    from_hf(snapshot)


# What is written.


def small() -> ModelConfig:
    return preset("tiny", {"layers": 1, "width": 16, "mlp": 8, "vocab": 20})


def test_refuses_to_write_over_something(tmp_path: Path) -> None:
    model = build(small(), device="cpu")
    (tmp_path / "file").write_text("mine")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("mine")
    (tmp_path / "empty").mkdir()
    for name in ("file", "full"):
        with pytest.raises(FileExistsError):
            to_hf(model, tmp_path / name)
    assert (tmp_path / "file").read_text() == (tmp_path / "full" / "mine").read_text() == "mine"
    for name in ("empty", "new/below"):
        to_hf(model, tmp_path / name)
    to_hf(model, tmp_path / "full", overwrite=True)
    assert not (tmp_path / "full" / "mine").exists()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["empty", "file", "full", "new"]


def test_a_failure_leaves_nothing(tmp_path: Path) -> None:
    def read(name: str) -> torch.Tensor:
        if name == "norm.weight":
            raise OSError("the disk is gone")
        shape = plan[name].shape
        return initial_block(plan, name, (0,) * len(shape), shape, 0)

    plan = init_plan(build(small()))
    with pytest.raises(OSError, match="disk is gone"):
        write_hf(small(), read, tmp_path / "out", dtype=torch.float32, shard_bytes=2000)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"width": 20, "heads": 8}, "heads to divide"),
        ({"base": "granite-tiny", "head_dim": 8}, "heads \\* head_dim"),
        ({"base": "granite-tiny", "kv_heads": 2}, "KV head"),
        ({"base": "granite-tiny", "mlp_bias": False}, "biases"),
    ],
    ids=str,
)
def test_models_without_a_form(overrides: dict[str, Any], message: str, tmp_path: Path) -> None:
    config = preset(overrides.pop("base", "tiny"), {"layers": 1, **overrides})
    with pytest.raises(ValueError, match=message):
        to_hf(build(config, device="cpu"), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_only_models_of_this_package_with_values(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Linear is not a model of tpshard"):
        to_hf(nn.Linear(1, 1), tmp_path / "out")
    with pytest.raises(ValueError, match="meta"):
        to_hf(build(small()), tmp_path / "out")


def test_the_tokenizer_goes_along(tmp_path: Path) -> None:
    source = tmp_path / "tokenizer"
    source.mkdir()
    (source / "tokenizer.json").write_text(json.dumps({"added_tokens": [{"id": 7, "content": "<end>"}]}))
    (source / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>", "bos_token": None}))
    (source / "private.txt").write_text("no part of it")
    to_hf(build(small(), device="cpu"), tmp_path / "out", tokenizer=source)
    names = {p.name for p in (tmp_path / "out").iterdir()}
    assert names == {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    raw = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (raw["eos_token_id"], raw["bos_token_id"]) == (7, None)
    (source / "tokenizer_config.json").write_text(json.dumps({"auto_map": {"AutoTokenizer": ["evil.Tokenizer", None]}}))
    with pytest.raises(ValueError, match="auto_map"):
        to_hf(build(small(), device="cpu"), tmp_path / "again", tokenizer=source)
    assert not (tmp_path / "again").exists()


def test_large_shards_are_written_one_at_a_time(tmp_path: Path) -> None:
    """Nothing but the shard at hand is asked for before it is written."""
    plan, requested = init_plan(build(small())), list[tuple[str, int]]()

    def read(name: str) -> torch.Tensor:
        written = len(list(tmp_path.glob(".out.writing-*/*.safetensors")))
        requested.append((name, written))
        shape = plan[name].shape
        return initial_block(plan, name, (0,) * len(shape), shape, 0)

    write_hf(small(), read, tmp_path / "out", dtype=torch.float32, shard_bytes=9000)
    assert [written for _, written in requested] == sorted(written for _, written in requested)
    assert len({written for _, written in requested}) == len(list((tmp_path / "out").glob("*.safetensors"))) > 2
