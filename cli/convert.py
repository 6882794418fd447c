"""`tpshard convert`: writes a checkpoint or a folder as a Hugging Face folder."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from tpshard.cli.shared.arguments import Overrides, Overwrite, recipe_argument, refuse_unread
from tpshard.cli.shared.files import refuse_folder
from tpshard.diagnostics.diagnostic import Exit, Mistakes
from tpshard.files.atomic import NeverReplaced
from tpshard.recipes.text.other_tools import hub_fix

if TYPE_CHECKING:
    from tpshard.cli.shared.source_model import SourceModel

Source = Annotated[
    str,
    recipe_argument(
        metavar="SOURCE", help="A recipe (its latest checkpoint), a checkpoint's folder, or a Hugging Face folder."
    ),
]
Out = Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write; it must not exist.", show_default=False)]


class Type(StrEnum):
    """The dtypes in which a folder can be written."""

    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"


def convert(
    source: Source,
    out: Out,
    overrides: Overrides = None,
    dtype: Annotated[
        Type | None, typer.Option(help="dtype of the weights. Default: as stored.", show_default=False)
    ] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="Folder of the tokenizer. Default: the source's.", show_default=False)
    ] = None,
    merge: Annotated[bool, typer.Option("--merge", help="Merge adapters into the dense model.")] = False,
    dequantize: Annotated[
        bool, typer.Option("--dequantize", help="With --merge: also into a quantized base, which becomes dense.")
    ] = False,
    overwrite: Overwrite = False,
) -> None:
    """Write the model in SOURCE as a Hugging Face folder OUT: safetensors, config.json and the tokenizer.

    OUT appears only when everything is written. The weights of a GPTQ folder become dense. Adapters are written alone,
    in PEFT's format, or with --merge in the model.
    """
    from tpshard.cli.shared.sources import keep_apart, open_source

    refuse_folder(out, overwrite)
    if tokenizer is not None and not tokenizer.is_dir():
        fix = hub_fix(str(tokenizer)) or "give the folder of a Hugging Face tokenizer"
        raise Mistakes.one(f"the tokenizer {tokenizer} is not a folder", exit=Exit.USAGE, fix=fix)
    refuse_unread("convert", overrides, ("data.tokenizer", "data.source", "run", "name"), "the model is the stored one")
    model = open_source(source, overrides or ())
    keep_apart(model, out)
    _require_mergeable(model, merge, dequantize)
    folder = tokenizer or model.tokenizer
    if folder is None:
        print("no tokenizer is written; --tokenizer names one", file=sys.stderr)
    else:
        check_tokenizer(folder)
    _write(model, out, dtype.value if dtype else None, folder, overwrite, merge)
    print(out)


def _require_mergeable(model: SourceModel, merge: bool, dequantize: bool) -> None:
    """Raises `Mistakes` (exit 2, 4) for adapters that are to be merged, and are not there or have a quantized base."""
    if not merge:
        return
    if model.adapted is None:
        raise Mistakes.one(f"{model.name} has no adapters to merge", exit=Exit.USAGE, fix="leave --merge out")
    stored = model.adapted.base.weights
    if stored is not None and stored.quantized and not dequantize:
        raise Mistakes.one(
            f"the base of {model.name} is quantized", exit=Exit.FIT, fix="--dequantize writes dense weights",
            why="what an adapter adds would be lost to the codes' steps",
        )  # fmt: skip


def _write(
    model: SourceModel, out: Path, dtype: str | None, tokenizer: Path | None, overwrite: bool, merge: bool
) -> None:
    from tpshard.models.folders.hf_folder import DTYPES

    number = DTYPES[dtype] if dtype else model.dtype
    try:
        if model.adapted is not None and not merge:
            from tpshard.models.adapters.peft_folder import write_peft
            from tpshard.models.folders.new_tokens import WidenedWeights

            base = model.adapted.base.source.folder
            stored = model.adapted.base.weights
            if isinstance(stored, WidenedWeights):
                raise ValueError("adapters alone have no rows for the tokens that model.vocab added; --merge has")
            place = str(base.absolute()) if base is not None else ""
            write_peft(model.adapted, model.read_own, out, base=place, tokenizer=tokenizer, overwrite=overwrite)
            return
        model.spec.write(model.read, out, dtype=number, tokenizer=tokenizer, base=model.base, overwrite=overwrite)
    except ValueError as error:
        raise Mistakes.one(
            f"{model.name} cannot be written as a Hugging Face folder", exit=Exit.FIT, why=str(error),
            fix="`tpshard serve` reads it where it is",
        ) from error  # fmt: skip
    except OSError as error:
        raise unwritten(out, error) from error


def check_tokenizer(folder: Path) -> None:
    """Raises `Mistakes` (exit 7) for a tokenizer that cannot be read, before the model is."""
    from tpshard.models.folders import hf_folder

    try:
        hf_folder.check_tokenizer(folder)
    except (ValueError, OSError) as error:
        fix = "copy it again, or name another"
        message = f"the tokenizer {folder} cannot be read"
        raise Mistakes.one(message, exit=Exit.CHECKPOINT, why=str(error), fix=fix) from error


def unwritten(out: Path, error: OSError) -> Mistakes:
    """The mistake for a folder that cannot be written, or that exists already (an error without `errno`)."""
    if isinstance(error, FileExistsError) and error.errno is None:
        fix = "choose another name" + (", or --overwrite" if not isinstance(error, NeverReplaced) else "")
        return Mistakes.one(str(error), exit=Exit.USAGE, fix=fix)
    fix = "choose a writable folder, on a disk with room for the model"
    return Mistakes.one(f"{out} cannot be written", exit=Exit.MACHINE, why=str(error), fix=fix)
