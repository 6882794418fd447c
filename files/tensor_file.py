"""Writing a safetensors file with the folder's permissions, and an OSError where the write fails."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Writes contiguous tensors that share no memory into a safetensors file. Raises OSError where the disk is full or
    cannot be written.
    """
    try:
        save_file(dict(tensors), path, {"format": "pt"})
    except SafetensorError as error:  # safetensors' own type, also for a full disk
        number = re.search(r"\(os error (\d+)\)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error
    path.chmod(path.parent.stat().st_mode & 0o666)  # safetensors creates files that only the owner can read
