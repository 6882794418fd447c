"""Writes the folder of a quantized model."""

from __future__ import annotations

import re
from pathlib import Path

from tpshard.files.atomic import write_aside
from tpshard.kernels.quantized.gptq_config import GPTQConfig
from tpshard.kernels.quantized.gptq_format import write_into
from tpshard.models.folders.folder_files import copy_small_files
from tpshard.models.folders.hf_folder import other_settings
from tpshard.serve.quantizing.quantize_layers import Quantizer
from tpshard.serve.quantizing.quantize_report import Quantizing


def _pattern(module: str) -> str:
    """A regular expression for a module's name, in which `*` stands for a number."""
    return re.escape(module).replace(r"\*", r"\d+")


def write_quantized(
    quantizer: Quantizer,
    out: str | Path,
    *,
    tokenizer: Path | None = None,
    base: Path | None = None,
    overwrite: bool = False,
) -> Quantizing:
    """Quantizes the model and writes the folder, complete or not at all. base: see `write_hf`.

    FileExistsError if `out` is not empty, OSError if it cannot be written, ValueError as for `Quantizer`.
    """
    settings = quantizer.settings
    gptq = GPTQConfig(
        bits=settings.bits,
        group_size=settings.group_size,
        desc_act=quantizer.order != "none" and quantizer.method == "gptq" and not settings.static_groups,
        sym=settings.sym,
        static_groups=settings.static_groups,
        damp_percent=settings.damp,
        dynamic={f"-:{_pattern(module)}$": {} for module in quantizer.dense_modules},
    )
    model = quantizer.layered.config_json(other_settings(tokenizer, base))
    with write_aside(out, overwrite=overwrite) as folder:
        write_into(folder, model, quantizer.run(), quantizer.dense(), gptq)
        copy_small_files(folder, tokenizer, base)
    return quantizer.report
