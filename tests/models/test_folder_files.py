"""What a folder says beyond its weights travels with the model: ids, generation settings, files of others."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tpshard.models import from_hf
from tpshard.models.folders.folder_files import copy_small_files
from tpshard.models.folders.hf_folder import HFFolder, write_hf

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
SAID = {
    "eos_token_id": [2, 7], "pad_token_id": 5, "bos_token_id": 1, "initializer_range": 0.015, "use_cache": False,
    "attention_dropout": 0.25, "task_specific_params": {"a": 1}, "id2label": {"0": "x"},
}  # fmt: skip


def folder(place: Path, kind: str = "Llama", **more: Any) -> Path:
    config = getattr(transformers, f"{kind}Config")(**SIZES, **more)
    getattr(transformers, f"{kind}ForCausalLM")(config).save_pretrained(place)
    return place


def rewrite(place: Path, name: str, **values: Any) -> None:
    path = place / name
    path.write_text(json.dumps((json.loads(path.read_text()) if path.exists() else {}) | values))


@pytest.mark.parametrize("old", [False, True], ids=["keys of transformers 5", "keys of transformers 4"])
@pytest.mark.parametrize("kind", ["Llama", "Qwen2", "Mistral", "Qwen3"])
def test_config_json_keeps_what_does_not_describe_the_computation(kind: str, old: bool, tmp_path: Path) -> None:
    place = folder(tmp_path / "in", kind)
    raw = json.loads((place / "config.json").read_text()) | SAID
    if old:
        rope = raw.pop("rope_parameters")
        raw |= {"rope_theta": rope["rope_theta"], "rope_scaling": None, "torch_dtype": raw.pop("dtype")}
    (place / "config.json").write_text(json.dumps(raw))
    opened = HFFolder(place)
    write_hf(opened.config, opened.read, tmp_path / "out", dtype=torch.float32, base=place)
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    before, after = (transformers.AutoConfig.from_pretrained(path).to_dict() for path in (place, tmp_path / "out"))
    equivalent = ("_name_or_path", "max_window_layers", "head_dim")  # no layer has a window
    assert {k: v for k, v in after.items() if k not in equivalent} == {
        k: v for k, v in before.items() if k not in equivalent
    }
    assert SAID.items() <= written.items() and set(written) >= set(raw)
    assert torch.equal(from_hf(tmp_path / "out")(torch.arange(8)[None]), from_hf(place)(torch.arange(8)[None]))


def test_files_of_named_kinds_go_along_and_no_others(tmp_path: Path) -> None:
    base, outside, out = tmp_path / "base", tmp_path / "outside.json", tmp_path / "out"
    (base / "additional_chat_templates").mkdir(parents=True)
    (base / "onnx").mkdir()
    out.mkdir()
    outside.write_text('{"secret": 1}')
    kept = {"generation_config.json", "preprocessor_config.json", "LICENSE", "README.md", "words.txt",
            "additional_chat_templates/tool.jinja", "tokenizer_config.json"}  # fmt: skip
    left = {"modeling_x.py", "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "config.json",
            "quantize_config.json", "training_args.bin", ".hidden.json", "onnx/x.json", "run.sh", "a.pkl"}  # fmt: skip
    for name in kept | left:
        (base / name).write_text('{"a": 1}')
    os.symlink(outside, base / "linked.json")
    os.symlink(tmp_path, base / "up.json")
    (base / "inside.json").symlink_to("generation_config.json")
    with (base / "large.md").open("wb") as file:
        file.truncate(2 << 20)
    copy_small_files(out, None, base)
    written = {path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file()}
    assert written == kept | {"inside.json"}
    assert all((out / name).read_text() == '{"a": 1}' and not (out / name).is_symlink() for name in written)


def test_another_tokenizer_takes_the_place_of_the_folders(tmp_path: Path) -> None:
    for name in ("base", "tokenizer", "out"):
        (tmp_path / name).mkdir()
    for name in ("tokenizer.json", "special_tokens_map.json", "vocab.json", "generation_config.json"):
        (tmp_path / "base" / name).write_text("{}")
    (tmp_path / "tokenizer" / "tokenizer.json").write_text('{"own": 1}')
    copy_small_files(tmp_path / "out", tmp_path / "tokenizer", tmp_path / "base")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"tokenizer.json", "generation_config.json"}
    assert json.loads((tmp_path / "out" / "tokenizer.json").read_text()) == {"own": 1}
