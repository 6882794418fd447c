"""What a run carries of the folders that it began from, so that it can go on, be served and exported without them."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

from tpshard.files.atomic import write_aside
from tpshard.models.folders.folder_files import carried, copy_small_files
from tpshard.models.folders.hf_json import file_inside

logger = logging.getLogger(__name__)


def carry(
    run: Path, base: Path | None, tokenizer: Path | None, *, again: bool = False, template: str | None = None
) -> None:
    """Copies what a run carries, of the model's folder `base` and of its tokenizer, unless it has it already and
    not `again`. template: a chat template in place of the tokenizer's. A failure is a warning: training needs none of
    it."""
    place = carried(run)
    if (place.exists() and not again) or (base is None and tokenizer is None):
        return
    try:
        with write_aside(place, overwrite=True, of_own_run=True) as aside:
            copy_small_files(aside, tokenizer, base)
            if template is not None:
                (aside / "chat_template.jinja").write_text(template, encoding="utf-8")
            if base is not None:
                shutil.copyfile(file_inside(base, "config.json"), aside / "config.json")
    except (ValueError, OSError) as error:
        logger.warning("the run does not carry its model's small files and tokenizer: %s", error)
