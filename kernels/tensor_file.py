"""A safetensors file as other files are: readable by whoever may read its folder, and an OSError where it cannot be
written."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Writes contiguous tensors that share no memory. OSError where the disk is full or the file cannot be written."""
    try:
        save_file(dict(tensors), path, {"format": "pt"})
    except SafetensorError as error:  # its own kind, for a full disk too
        number = re.search(r"\(os error (\d+)\)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error
    path.chmod(path.parent.stat().st_mode & 0o666)  # safetensors makes files that only the owner can read
