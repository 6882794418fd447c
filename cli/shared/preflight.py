"""Checks of a recipe before anything is built: its own constraints, and whether model and mesh fit.

Reads presets or a folder's config.json; does not import torch.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpshard.diagnostics.diagnostic import Diagnostic, Exit, Mistakes
from tpshard.files.hub_folder import PREFIX
from tpshard.models.adapters.adapted_model import AdaptedModel
from tpshard.models.model_spec import ModelSpec
from tpshard.models.open_model import manifest_of, open_model, saved_model
from tpshard.programs.fit.fit import misfits
from tpshard.programs.fit.parameter_groups import idle_of
from tpshard.programs.fit.recipe_model import carried_by, carried_instead, opened
from tpshard.programs.fit.trained_parts import TrainedParts, trained_parts
from tpshard.programs.fit.wrong_model import wrong_model
from tpshard.recipes.keys.data_keys import BYTE_TOKENS
from tpshard.recipes.keys.schema import DEVICES
from tpshard.recipes.keys.stores import is_url
from tpshard.recipes.reading import load as recipes

if TYPE_CHECKING:
    from torch import nn
    from tpshard.recipes.keys.schema import Recipe
    from tpshard.train.data.corpus import Corpus
    from tpshard.train.data.row_columns import Columns, Labelled


FITTED = (
    "cluster", "mesh", "model", "sharding", "batch", "fsdp.wrap", "fsdp.bucket", "fsdp.axis", "adapters", "quantize",
    "train.freeze",
)  # fmt: skip
"""The keys whose values must be sound for a model to be opened and fitted."""
BYTES_OF_TOKEN = 32
"""Bytes of a file for each token of a batch above which it holds a batch surely: no tokenizer's mean token is longer,
and `validate` need not tokenize the text."""


def load_checked(
    path: str, overrides: Sequence[str] = (), *, text: bool = False, weights: bool = True
) -> tuple[Recipe, list[Diagnostic]]:
    """Reads and checks a recipe; returns it with its warnings. text: whether to check its data and tokenizer too.
    weights: whether models that it names on the hub are fetched with their weights.

    Raises `Mistakes` with all its errors.
    """
    store = path if is_url(path) else None
    examined = recipes.examine(on_this_host(path), overrides, store=store, weights=weights)
    found = list(examined.diagnostics)
    if examined.sound(*FITTED):
        found += model_errors(examined.recipe)
    if examined.sound("cluster.device"):
        found += device_file(examined.recipe)
    if text and examined.sound("data", "task"):
        told = text_errors(examined.recipe)
        known = examined.sound("model", "batch") and not any(d.severity == "error" for d in [*found, *told])
        found += [*told, *(too_little(examined.recipe) if known else ())]
    if text and examined.sound("model", "task", "adapters", "quantize", "train.freeze"):
        found += code_errors(examined.recipe)
    if text and examined.sound("schedule", "optimizer.lr", "train"):
        found += schedule_errors(examined.recipe)
    if text and examined.sound(*FITTED, "train.init_from") and not any(d.severity == "error" for d in found):
        found += [*begin_errors(examined.recipe), *adapter_errors(examined.recipe)]
    diagnostics = recipes.in_order(found)
    if any(d.severity == "error" for d in diagnostics):
        raise Mistakes(diagnostics)
    return examined.recipe, diagnostics


def on_this_host(recipe: str) -> str:
    """The name of a recipe, where it is a run in an object store that of a folder with its small files. Raises
    `Mistakes` (exit 5, 7) where the store cannot be reached, or holds no run there."""
    if not is_url(recipe):
        return recipe
    from tpshard.train.checkpoints.store_path import StorePath
    from tpshard.train.run.run_store import fetched_run

    return str(fetched_run(StorePath(recipe)))


def device_file(recipe: Recipe) -> tuple[Diagnostic, ...]:
    """The errors in the device file that the recipe names; shipped files have none."""
    if recipe.cluster is None or recipe.cluster.stored()["device"] in DEVICES:
        return ()
    from tpshard.devices.read import device

    try:
        device(recipe.cluster.device, recipe.where("cluster.device"))
    except Mistakes as mistakes:
        return mistakes.diagnostics
    return ()


def model_errors(recipe: Recipe) -> list[Diagnostic]:
    """The errors of a valid recipe that depend on its model's numbers."""
    try:
        spec = _model(recipe)
    except Mistakes as mistakes:
        return [*mistakes.diagnostics, *misfits(recipe, None)]
    if spec is None:
        return misfits(recipe, None)
    return [*misfits(recipe, spec), *_positions(recipe, spec), *_weights(recipe, spec), *_tokens(recipe, spec.vocab)]


def _model(recipe: Recipe) -> ModelSpec | None:
    """The recipe's model; None where it names none, which is told elsewhere, and where its folder's environment
    variable is not set, which validation does not need. Raises `Mistakes` where the hub's cannot be had."""
    try:
        return None if recipe.model.named_by is None else opened(recipe, weights=False)
    except Mistakes:
        if str(recipe.model.stored()[recipe.model.named_by or "preset"]).startswith(PREFIX):
            raise
        return None
    except (ValueError, OSError) as error:
        raise wrong_model(recipe, error) from None


def _positions(recipe: Recipe, spec: ModelSpec) -> list[Diagnostic]:
    """The diagnostic for sequences longer than the model's positions. Rotary ones go on beyond, which is a warning."""
    length, positions = recipe.model.seq_len, spec.positions
    if positions is None or length <= positions.most or (positions.end and positions.key):  # told by `programs.fit`
        return []
    fix = f"model.seq_len: {positions.most}" + (f", or {positions.key}: {length}" if positions.key else "")
    return [
        Diagnostic(
            f"sequences of {length:,} tokens, but the model has {positions.most:,} positions",
            exit=Exit.FIT, where=recipe.where("model.seq_len"), fix=fix,
            why="" if positions.end else "it was not made for the positions beyond",
            severity="error" if positions.end else "warning",
        )
    ]  # fmt: skip


def _weights(recipe: Recipe, spec: ModelSpec) -> list[Diagnostic]:
    """A warning where `train` would refuse an `hf` folder, since it has no weights."""
    on_hub = str(recipe.model.stored().get(spec.source.key)).startswith(PREFIX)
    if on_hub or not spec.refusal("train") or carried_instead(recipe) is not None:
        return []
    return [
        Diagnostic(
            f"{spec.source.name} has no weights", severity="warning", where=recipe.where(f"model.{spec.source.key}"),
            why="`train` starts from a folder's weights, and refuses without",
            fix="add its *.safetensors; or model.transformers, which starts from random values",
        )
    ]  # fmt: skip


def require_weights(recipe: Recipe) -> None:
    """Raises `Mistakes` (exit 3) where `train` would refuse a folder, or a model of the hub, since it has no weights;
    what it carries of a folder that is gone is not asked for them."""
    spec = _model(recipe)
    if spec is not None and carried_instead(recipe) is None and (why := spec.refusal("train")):
        raise wrong_model(recipe, ValueError(why))


def require_beginning(recipe: Recipe) -> None:
    """Raises `Mistakes` (exit 7) where a new run would begin from what is not on this machine."""
    named, run = recipe.train.stored()["init_from"], recipe.run
    if named is None or is_url(str(named)) or run.store is not None or (run.folder / "checkpoints").is_dir():
        return
    place, spec = str(recipe.train.init_from), _model(recipe)
    if spec is not None and not os.path.exists(place):
        from tpshard.train.run.initial_values import begin

        begin(recipe, place, spec)


def code_errors(recipe: Recipe) -> list[Diagnostic]:
    """The mistakes in the module and the task that a recipe names, which are imported and built without values; and in
    the names of adapters and frozen parameters, where only the built module has them."""
    found: list[Diagnostic] = []
    try:
        spec = _model(recipe)
        if isinstance(spec, AdaptedModel) and spec.outline is None:
            spec.check()
        if spec is not None and spec.outline is None:
            found += idle_of(recipe, spec)
        if spec is not None and spec.reads_code:
            found += _forward_errors(recipe, spec.build())
    except Mistakes:
        pass  # told by `model_errors`
    except Exception as error:  # the user's code may raise anything
        found += wrong_model(recipe, error).diagnostics
    if ":" in recipe.task:
        from tpshard.models.assemble import import_object

        try:
            import_object("task", recipe.task)
        except Exception as error:
            found.append(Diagnostic(str(error), exit=Exit.RECIPE, where=recipe.where("task"), fix="correct the class"))
    return found


def schedule_errors(recipe: Recipe) -> tuple[Diagnostic, ...]:
    """The mistakes in a user's functions of a schedule, which are imported and called at its borders."""
    if not any(":" in one.name for one in (recipe.schedule, *recipe.schedule.stages)):
        return ()
    from tpshard.train.run.learning_rate import require_schedule

    try:
        require_schedule(recipe)
    except Mistakes as mistakes:
        return mistakes.diagnostics
    return ()


def trained_here(recipe: Recipe) -> TrainedParts | None:
    """What a sound recipe's patterns pick; None where it has none, or its model's folder is elsewhere."""
    spec = _model(recipe)
    return None if spec is None else trained_parts(recipe, spec)


def begin_errors(recipe: Recipe) -> tuple[Diagnostic, ...]:
    """The errors in what a new run begins from, where it is on this machine; a run that goes on needs it no more."""
    named, spec = recipe.train.stored()["init_from"], _model(recipe)
    beside = Path(recipe.file).parent
    if named is None or spec is None or str(named).startswith(PREFIX) or is_url(str(named)):
        return ()
    try:
        place = str(recipe.train.init_from)
    except Mistakes:  # its environment variable is not set
        return ()
    if not os.path.exists(place) and (os.path.isabs(place) or (beside / "checkpoints").is_dir()):
        return ()
    from tpshard.train.run.initial_values import begin

    try:
        begin(recipe, place, spec)
    except Mistakes as mistakes:
        return mistakes.diagnostics
    return ()


def adapter_errors(recipe: Recipe) -> tuple[Diagnostic, ...]:
    """The errors in the adapters that the recipe's server holds, where these and the model are on this machine."""
    named, folders = str(recipe.serve.stored()["checkpoint"]), recipe.serve.stored()["adapters"].values()
    away = any(os.path.isabs(str(folder)) and not os.path.exists(str(folder)) for folder in folders)
    if not folders or away or named.startswith(PREFIX):
        return ()
    from tpshard.programs.server.adapter_slots import slots_of

    try:
        if named == "latest":
            spec = _model(recipe)
        elif (manifest := manifest_of(Path(named))) is not None:
            spec, _ = saved_model(manifest, recipe.model.module)
        else:
            spec = open_model(Path(named)) if (Path(named) / "config.json").is_file() else None
        if spec is not None:
            slots_of(recipe, spec.plain)
    except Mistakes as mistakes:
        return mistakes.diagnostics
    except (ValueError, OSError):  # of the model's folder, which `serve` tells
        return ()
    return ()


def _forward_errors(recipe: Recipe, module: nn.Module) -> tuple[Diagnostic, ...]:
    """The mistake that a module's forward pass writes to a buffer. What else fails on tensors without values is told
    when a step is captured."""
    import torch
    from tpshard.models.module_state import WrittenBuffer
    from tpshard.models.objectives.tasks import task_of
    from tpshard.programs.parts.checks import written_buffer

    try:
        task = task_of(recipe.task, recipe.model.seq_len)
        fields = task.fields.items()
        rows = {name: torch.empty(2, *field.shape, dtype=field.dtype, device="meta") for name, field in fields}
        module.to("meta")(*task.inputs(rows))
    except WrittenBuffer as error:
        return written_buffer(recipe, error).diagnostics
    except Exception:
        return ()
    return ()


def _tokens(recipe: Recipe, vocab: int | None) -> list[Diagnostic]:
    """The error where the vocabulary is smaller than the tokenizer's."""
    count = _tokenizer_size(recipe)
    if count is None or vocab is None or count <= vocab:
        return []
    made = recipe.data.made_tokens is not None
    if not made and recipe.data.stored()["tokenizer"] is not None:
        from tpshard.models.folders.folder_tokenizer import FolderTokenizer

        with contextlib.suppress(ValueError, OSError):  # texts can contain the others
            notes = FolderTokenizer(Path(recipe.data.tokenizer_folder or ""), vocab).notes
            fix = "nothing, unless texts should contain them"
            return [Diagnostic(n, severity="warning", where=recipe.where("data.tokenizer"), fix=fix) for n in notes]
    keys = ("model.vocab", "data.tokenizer.train", "data.tokenizer", "model")
    stored, rounded = recipe.model.named_by != "preset", -(-count // 128) * 128
    own = "name the model's own tokenizer in `data.tokenizer`, or " if stored else ""
    fix = f"{own}model.vocab: {rounded}"
    if made and vocab > BYTE_TOKENS:
        fix += f", or data.tokenizer: {{train: {vocab}}}"
    return [
        Diagnostic(
            f"the tokenizer has {count:,} tokens, but the model's vocabulary has {vocab:,}",
            exit=Exit.RECIPE,
            where=next((s for k in keys if (s := recipe.where(k)).line), None),
            why=f"{count - vocab:,} tokens would have no embedding row",
            fix=fix,
        )
    ]


def text_errors(recipe: Recipe) -> list[Diagnostic]:
    """The mistakes in a recipe's text and tokenizer. Commands that read neither need not call this.

    An absolute path that does not exist is a warning: the recipe may be for other machines.
    """
    if recipe.task not in ("lm", "mlm"):
        return []
    from tpshard.train.data.hub import is_on

    diagnostics: list[Diagnostic] = []
    named = [("source", number) for number in range(len(recipe.data.all_sources))]
    for key, number in (*named, ("tokenizer", 0)):
        value, unset = None, None
        try:
            value = recipe.data.all_sources[number].source if key == "source" else recipe.data.tokenizer_folder
        except Mistakes as mistakes:  # its environment variable is not set
            unset = mistakes.diagnostics[0]
        if unset is not None and key == "tokenizer":
            diagnostics.append(_no_tokenizer(recipe, unset))
        if value is None or (key == "source" and (value == "sample" or is_on(value))):
            continue
        from tpshard.models.folders.folder_tokenizer import tokenizer_files
        from tpshard.train.data.bad_rows import peek
        from tpshard.train.data.corpus import open_text
        from tpshard.train.data.open_data import columns_of
        from tpshard.train.data.tokens import require_tokenizer

        if key == "tokenizer" and not os.path.isdir(value) and tokenizer_files(carried_by(recipe)):
            continue  # the folder has moved since the run began, which carries it
        where = recipe.source_place(number) if key == "source" else recipe.where("data.tokenizer")
        try:
            if key == "source":
                one = recipe.data.all_sources[number]
                columns = columns_of(recipe, number)
                text = open_text(value, columns, where=where, split=one.split, key=recipe.source_key(number)).train
                peek(text, recipe.data.bad_rows, learn=_learner(recipe, columns))
            else:
                require_tokenizer(value, where=where)
        except Mistakes as mistakes:
            named_by = recipe.source_key(number) if key == "source" else "data.tokenizer"
            elsewhere = Diagnostic(
                f"{value} is not on this machine", severity="warning", where=where,
                why="`train` needs it on every host", fix=f"correct `{named_by}`, unless the recipe is for other hosts",
            )  # fmt: skip
            diagnostics += [elsewhere] if _is_elsewhere(value) else mistakes.diagnostics
    return diagnostics


def too_little(recipe: Recipe) -> tuple[Diagnostic, ...]:
    """The error of text that `train` would refuse, since it holds less than one batch: where the only source is a small
    one of this machine, whose tokenizer is here too."""
    from tpshard.train.data.bad_rows import SMALL_CONVERSATIONS
    from tpshard.train.data.hub import is_on
    from tpshard.train.data.open_data import open_data, open_sources

    data, rows, length = recipe.data, recipe.batch.global_sequences, recipe.model.seq_len
    if recipe.task not in ("lm", "mlm") or len(data.all_sources) > 1 or data.epochs is not None:
        return ()
    try:
        (only,) = data.all_sources
        if only.source == "sample" or is_on(only.source) or only.exhausted == "stop":
            return ()
        (text,) = (corpus.train for corpus in open_sources(recipe))
        paths = [file.place for file in text.files if isinstance(file.place, Path)]
        size = sum(path.stat().st_size for path in paths)
        if len(paths) < len(text.files) or size > min(SMALL_CONVERSATIONS, BYTES_OF_TOKEN * rows * length):
            return ()
        from tpshard.train.data.made_tokenizer import made_tokenizer
        from tpshard.train.data.source_reader import SourceReader
        from tpshard.train.data.tokens import TextTokenizer, load_tokenizer

        def tokenizer(corpus: Corpus) -> TextTokenizer:
            made = None if data.made_tokens is None else made_tokenizer(corpus.train, data.made_tokens)
            folder = made or data.tokenizer_folder or corpus.tokenizer or ""
            return load_tokenizer(folder, bos=data.bos, eos=data.eos, where=recipe.where("data.tokenizer"))

        (share,) = open_data(recipe, length, tokenizer).mixture.shares
        try:
            reader = SourceReader(share.text, share.tokenizer, None, 1, (), 1, recipe.seed, data.bad_rows, checks=False)
            reader.check_enough(rows, length)
        except Mistakes as mistakes:
            return mistakes.diagnostics
    except (Mistakes, OSError, ValueError):  # of the text or the tokenizer, which are told as they are
        return ()
    return ()


def _learner(recipe: Recipe, columns: Columns) -> Callable[[str], Labelled | None] | None:
    """What reads rows of conversations, as far as their template and tokenizer are here. Raises `Mistakes` for a
    template that cannot be read."""
    if columns.key == "column":
        return None
    from tpshard.train.data.conversations import answer_tokenizer, renders
    from tpshard.train.data.open_data import template_of
    from tpshard.train.data.tokens import load_tokenizer

    template, folder, where = template_of(recipe), "", recipe.where("data.tokenizer")
    with contextlib.suppress(Mistakes):
        folder = recipe.data.tokenizer_folder or ""
    if folder and os.path.isdir(folder) and recipe.data.made_tokens is None:
        try:
            read = load_tokenizer(folder, bos=recipe.data.bos, eos=recipe.data.eos, where=where)
        except Mistakes:  # told of the tokenizer
            return None
        where = where if template is None else recipe.where("data.chat_template")
        return answer_tokenizer(read, columns, recipe.model.seq_len, recipe.data.too_long, where, template).labelled
    if template is None or columns.key != "messages":
        return None
    return renders(template, recipe.where("data.chat_template"))


def _no_tokenizer(recipe: Recipe, unset: Diagnostic) -> Diagnostic:
    """The diagnostic for a tokenizer of which nothing is known here: an error where the text is on this machine."""
    source = recipe.data.stored()["source"]
    here = source not in ("sample", "c4") and os.path.exists(str(source))
    return replace(
        unset, message=f"`data.tokenizer` is not known here: {unset.message}", exit=Exit.DATA,
        severity="error" if here else "warning",
    )  # fmt: skip


def _is_elsewhere(path: str) -> bool:
    """Whether an absolute path, or the folder of an absolute glob, does not exist here."""
    start, *pattern = re.split(r"[*?\[]", path)
    return os.path.isabs(path) and not os.path.exists(os.path.dirname(start) if pattern else start)


def _tokenizer_size(recipe: Recipe) -> int | None:
    """The size of the recipe's tokenizer, where it can be read without loading it."""
    if (made := recipe.data.made_tokens) is not None:
        return made
    if recipe.data.stored()["tokenizer"] is None:
        if recipe.data.stored()["source"] != "sample":
            return None
        from tpshard.train.data.sample import VOCAB

        return VOCAB
    from tpshard.files.folder_json import read_json

    try:
        raw: Any = read_json(Path(recipe.data.tokenizer_folder or ""), "tokenizer.json")
        ids = [*raw["model"]["vocab"].values(), *(token["id"] for token in raw.get("added_tokens", ()))]
        return max(ids) + 1
    except (Mistakes, OSError, ValueError, KeyError, TypeError, AttributeError):
        return None  # the code that loads the tokenizer reports its errors
