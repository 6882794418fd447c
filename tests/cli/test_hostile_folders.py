"""Whatever the files of a model's folder say or are, reading it ends in an answer: exit 3, 6 or 7, no traceback."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tpshard.cli.convert import check_tokenizer
from tpshard.cli.main import run
from tpshard.cli.preflight.preflight import load_checked
from tpshard.cli.shared.sources import open_source
from tpshard.diagnostics.diagnostic import Exit, Mistakes
from tpshard.models import to_hf
from tpshard.models.family_model import FamilyModel
from tpshard.models.folders.folder_tokenizer import FolderTokenizer
from tpshard.programs.server.served import model_to_serve
from tpshard.programs.setting.setting import Setting
from tpshard.recipes.reading.load import loads
from tpshard.train.data.tokens import load_tokenizer

ANSWERS = {Exit.DONE, Exit.RECIPE, Exit.DATA, Exit.CHECKPOINT}
RECIPE = (
    "model: {hf: folder, seq_len: 16}\nmesh: {fsdp: 1}\ncluster: {device: cpu}\n"
    "serve: {mesh: {tp: 1}, checkpoint: folder}\ndata: {source: text.txt, tokenizer: folder}\n"
)
FILES = {
    "tokenizer_config.json": {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": {"content": "</s>"},
        "add_bos_token": True, "chat_template": "{{ messages }}", "model_max_length": 256,
        "added_tokens_decoder": {"0": {"content": "<s>", "special": True}},
    },
    "special_tokens_map.json": {"eos_token": "</s>", "bos_token": {"content": "<s>"}, "pad_token": None},
    "generation_config.json": {"eos_token_id": [1], "bos_token_id": 0, "temperature": 0.6, "top_p": 0.9},
}  # fmt: skip
FURTHER = {
    "config.json": ("sliding_window", "rope_scaling", "quantization_config", "auto_map", "layer_types", "text_config",
                    "num_experts", "transformers_version", "max_window_layers", "compression_config"),
    "tokenizer_config.json": ("auto_map", "unk_token"), "special_tokens_map.json": ("additional_special_tokens",),
    "generation_config.json": ("pad_token_id", "stop_strings"), "tokenizer.json": ("unknown",),
}  # fmt: skip
"""Keys that the files do not have."""
VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 1, 2**31, 10**30, -(10**30), 1e308, float("nan"), float("inf"), "", "x", "\ud800", "a" * 5000,
    [], [[]], [[["default"]]], {}, {"a": {}}, [1, "a", None], [{"name": ["x"], "template": "t"}], ["default"] * 3,
    {"bits": 4, "dynamic": {"(a+)+$": {}}}, {"quant_method": ["gptq"]}, json.loads("[" * 400 + "]" * 400),
)  # fmt: skip
TEXTS = {
    "nothing": b"", "half": b'{"a": [1,', "deep": b"[" * 200_000, "deep objects": b'{"a":' * 5000 + b"1" + b"}" * 5000,
    "a list": b"[]", "text": b'"x"', "null": b"null", "a mark": b"\xef\xbb\xbf{}", "UTF-16": "{}".encode("utf-16"),
    "zeros": bytes(64), "a number": b'{"vocab_size": ' + b"1" * 6000 + b"}", "Latin": b'{"a": "\xe9"}', "empty": b"{}",
    "a header": (2**40).to_bytes(8, "little") + b"{}", "a header of lists": (50).to_bytes(8, "little") + b"[" * 50,
}  # fmt: skip


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model with a tokenizer, in a folder beside which its recipe lies."""
    place = tmp_path_factory.mktemp("hostile")
    sizes = {"layers": 1, "width": 32, "mlp": 32, "vocab": 300, "heads": 2, "kv_heads": 2, "head_dim": 16}
    to_hf(FamilyModel.of_preset("tiny", sizes).build(device="cpu"), place / "sound")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=290, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(["the quick brown fox"] * 9, trainer)
    tokenizer.save(str(place / "sound" / "tokenizer.json"))
    for name, content in FILES.items():
        (place / "sound" / name).write_text(json.dumps(content))
    (place / "r.yaml").write_text(RECIPE)
    (place / "text.txt").write_text("the quick brown fox\n" * 50)
    return place


@pytest.fixture
def changed(sound: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """A function that makes a fresh copy of the folder, and returns the path of one of its files."""
    monkeypatch.chdir(sound)

    def make(name: str) -> Path:
        shutil.rmtree("folder", ignore_errors=True)
        shutil.copytree("sound", "folder")
        return sound / "folder" / name

    return make


def readers(name: str) -> dict[str, Callable[[], object]]:
    """What commands do with a folder before they compute anything, as far as they read this file."""
    tokenizer: dict[str, Callable[[], object]] = {
        "convert's tokenizer": lambda: check_tokenizer(Path("folder")),
        "train's tokenizer": lambda: load_tokenizer("folder"),
        "serve's tokenizer": lambda: FolderTokenizer(Path("folder"), models=[Path("folder")]),
    }
    recipe = loads(RECIPE)
    model: dict[str, Callable[[], object]] = {
        "validate": lambda: load_checked("r.yaml", text=True), "convert": lambda: open_source("folder"),
        "plan": lambda: Setting.of(recipe), "serve": lambda: model_to_serve(recipe, "cpu"),
    }  # fmt: skip
    if name == "config.json":
        return model | {"serve's tokenizer": tokenizer["serve's tokenizer"]}
    if name == "tokenizer.json":
        return tokenizer | {"validate": model["validate"]}
    return model if "model" in name or "quantize" in name else tokenizer


def wrong_answers(name: str, label: str) -> Iterator[str]:
    for reader, read in readers(name).items():
        code: object = Exit.DONE
        try:
            read()
        except Mistakes as mistakes:
            code = mistakes.exit
        except (ValueError, OSError) as error:
            code = Exit.CHECKPOINT if reader == "serve's tokenizer" else repr(error)
        except BaseException as error:
            code = repr(error)
        if code not in ANSWERS:
            yield f"{reader} of {name} {label}: {code}"


def keys_of(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of a JSON value, of lists only the first entries."""
    items = value.items() if isinstance(value, dict) else enumerate(value[:2]) if isinstance(value, list) else ()
    for key, item in items:
        yield (*path, key)
        yield from keys_of(item, (*path, key))


@pytest.mark.parametrize("name", FURTHER)
def test_whatever_a_key_says_is_an_answer(name: str, sound: Path, changed: Callable[[str], Path]) -> None:
    text, chance, wrong = (sound / "sound" / name).read_text(), random.Random(name), list[str]()
    paths = [path for path in keys_of(json.loads(text)) if len(path) < 4 and path[:2] != ("model", "vocab")]
    for path in [(), *paths, *((key,) for key in FURTHER[name])]:
        for value in VALUES if path in ((), ("model_type",)) else chance.sample(VALUES, 2):
            content = json.loads(text)
            inside = content
            for key in path[:-1]:
                inside = inside[key]
            if path:
                inside[path[-1]] = value
            changed(name).write_text(json.dumps(content if path else value))
            wrong += wrong_answers(name, f"with {'.'.join(map(str, path))}: {str(value)[:60]}")
    assert not wrong, "\n".join(wrong)


def kinds(path: Path) -> Iterator[tuple[str, Callable[[], object]]]:
    """What may lie where a file is expected, each with a function that puts it there."""
    for label, text in TEXTS.items():
        yield label, lambda text=text: path.write_bytes(text)
    for target in ("/etc/passwd", "/dev/zero", path.name, "nowhere", "../sound/config.json"):
        yield f"a link to {target}", lambda target=target: path.symlink_to(target)
    yield "a folder", path.mkdir
    yield "a pipe", lambda: os.mkfifo(path)
    if path.name != "config.json":  # without it a folder is no model's
        yield "nothing at all", lambda: None


@pytest.mark.parametrize(
    "name", [*FURTHER, "chat_template.jinja", "added_tokens.json", "quantize_config.json", "model.safetensors",
             "model.safetensors.index.json", "chat_template.json", "tokenizer.model"],
)  # fmt: skip
def test_whatever_lies_where_a_file_is_expected_is_an_answer(name: str, changed: Callable[[str], Path]) -> None:
    wrong = []
    for label, put in kinds(changed(name)):
        changed(name).unlink(missing_ok=True)
        put()
        wrong += wrong_answers(name, f"as {label}")
    assert not wrong, "\n".join(wrong)


def test_a_template_outside_of_the_folder_is_not_read(sound: Path, changed: Callable[[str], Path]) -> None:
    (sound / "secret").write_text("secret")
    changed("chat_template.jinja").symlink_to(sound / "secret")
    with pytest.raises(ValueError, match="leads out of the folder"):
        FolderTokenizer(Path("folder"))


def test_a_tokenizer_whose_pattern_never_ends_is_named(
    changed: Callable[[str], Path], capfd: pytest.CaptureFixture[str]
) -> None:
    """The library's panic is no Exception of Python."""
    file = changed("tokenizer.json")
    content = json.loads(file.read_text())
    content["pre_tokenizer"] = {
        "type": "Split", "pattern": {"Regex": "(x+x+)+y"}, "behavior": "Isolated", "invert": False,
    }  # fmt: skip
    file.write_text(json.dumps(content))
    tokenizer = load_tokenizer("folder")
    with pytest.raises(Mistakes, match="fails on a document that begins with 'xxx") as refused:
        tokenizer.encode("x" * 60)
    assert refused.value.exit == Exit.DATA
    with pytest.raises(ValueError, match="library failed"):
        FolderTokenizer(Path("folder")).encode("x" * 60)


def test_commands_end_with_these_codes(changed: Callable[[str], Path], capsys: pytest.CaptureFixture[str]) -> None:
    changed("config.json").write_text('{"model_type": ["llama"]}')
    assert run(["validate", "r.yaml"]) == run(["plan", "r.yaml", "--dry-run"]) == Exit.RECIPE
    assert run(["convert", "folder", "out"]) == run(["quantize", "folder", "out"]) == Exit.CHECKPOINT
    assert run(["serve", "r.yaml", "--check"]) in (Exit.RECIPE, Exit.CHECKPOINT)
    changed("tokenizer.json").write_text("[7]")
    assert run(["convert", "folder", "out"]) == Exit.CHECKPOINT
    assert "bug" not in capsys.readouterr().err and not Path("out").exists()


@pytest.mark.parametrize("command", [["convert"], ["quantize"]], ids=" ".join)
@pytest.mark.parametrize("content", [None, "{"], ids=["without a config", "half a config"])
def test_a_folder_without_a_readable_config_is_answered_by_name(
    command: list[str], content: str | None, changed: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    config = changed("config.json")
    config.unlink() if content is None else config.write_text(content)
    assert run([*command, "folder", "out"]) == Exit.CHECKPOINT
    said = capsys.readouterr().err
    assert "config.json" in said and "recipe" not in said
