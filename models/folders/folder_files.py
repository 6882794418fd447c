"""The small files of a Hugging Face folder that travel with a model: its tokenizer, its generation settings, and what
tpshard does not read. No torch."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from tpshard.models.folders.folder_tokenizer import SLOW, TOOL_USE_FILE
from tpshard.models.folders.foreign_formats import MODELOPT
from tpshard.models.folders.hf_json import TOKENIZER, file_inside, read_json, refuse_code

logger = logging.getLogger(__name__)

_KINDS = {
    ".json": 64 << 20, ".jsonl": 64 << 20, ".txt": 64 << 20, ".model": 64 << 20, ".tiktoken": 64 << 20,
    ".vocab": 64 << 20, ".bpe": 64 << 20, ".jinja": 1 << 20, ".md": 1 << 20,
}  # fmt: skip
"""The kinds of files that are copied as they are, by suffix, each with its largest size in bytes."""
_NAMES = ("LICENSE", "LICENCE", "NOTICE", "USE_POLICY")
"""Names without a suffix that are copied too."""
_FOLDERS = ("additional_chat_templates",)
_WRITTEN = ("config.json", "quantize_config.json", MODELOPT, "manifest.json", "adapter_config.json")
"""Files that describe the weights, which are written anew or belong to none."""
_MOST = 100
"""Files that are copied at most."""


def carried(run: Path) -> Path:
    """The folder of a run with the small files of the model's folder (config.json, generation settings) and with the
    run's tokenizer. Not every run has one."""
    return run / "model"


def copy_small_files(target: Path, tokenizer: Path | None, base: Path | None) -> None:
    """Copies the files of a tokenizer's folder, and all other small files of the model's folder `base`.

    Code, weights and files of other kinds are left. So are links out of the folder and files of more bytes than
    `_KINDS` allows, which a warning names. ValueError for a tokenizer that needs code.
    """
    if tokenizer is not None:
        copy_tokenizer(tokenizer, target)
    if base is not None:
        own = tokenizer is None or tokenizer.resolve() == base.resolve()
        foreign = () if own else (*TOKENIZER, *SLOW, "chat_template.json", *_FOLDERS)
        for name in _small_files(base):
            if (target / name).exists() or name.split("/")[0] in foreign:
                continue
            if not _copy(base, name, target):
                logger.warning("%s is not copied: it is a link out of the folder, or too large", base / name)


def copy_tokenizer(source: Path, target: Path) -> None:
    """Copies a tokenizer's files. Errors as in `tokenizer_paths`."""
    for name, path in tokenizer_paths(source).items():
        if not (target / name).exists():
            (target / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(path, target / name)


def tokenizer_paths(source: Path) -> dict[str, Path]:
    """The files of a tokenizer by name. ValueError for one that needs code, or names what is no file of its folder."""
    paths = {}
    for name in dict.fromkeys((*TOKENIZER, *SLOW, "chat_template.json", TOOL_USE_FILE)):
        if os.path.lexists(source / name):
            below, _, plain = name.rpartition("/")
            paths[name] = file_inside(source, plain, below)
            if not paths[name].is_file():
                raise ValueError(f"{source / name} is no file")
            if name.endswith(".json"):
                values = read_json(source, name)
                if name == "tokenizer_config.json":
                    refuse_code(values, source / name)
    return paths


def _small_files(folder: Path) -> Iterator[str]:
    """The names of files of a copied kind, in order, at most `_MOST`."""
    found = [folder, *(folder / name for name in _FOLDERS if (folder / name).is_dir())]
    paths = sorted(path for place in found for path in place.iterdir() if not path.name.startswith("."))
    small = [path for path in paths if path.suffix in _KINDS or path.stem.upper() in _NAMES]
    for path in [path for path in small if not path.is_dir()][:_MOST]:
        if path.name not in _WRITTEN and not path.name.endswith(".index.json"):
            yield path.relative_to(folder).as_posix()


def _copy(base: Path, name: str, target: Path) -> bool:
    """Copies a file, unless it is a link out of its folder, no plain file, or too large."""
    place = base / name
    try:
        source = file_inside(place.parent, place.name)
    except ValueError:
        return False
    inside = base.resolve() in place.parent.resolve().parents or place.parent.resolve() == base.resolve()
    if not inside or not source.is_file() or source.stat().st_size > _KINDS.get(place.suffix, 1 << 20):
        return False
    (target / name).parent.mkdir(exist_ok=True)
    shutil.copyfile(source, target / name)
    return True
