"""Where a model's checkpoint lies: a local folder, or one that the hub gives."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import huggingface_hub
from huggingface_hub.errors import HfHubHTTPError, HFValidationError

from pipeline.config import SpecError


def find_checkpoint(model: str, revision: str | None, files: Sequence[str], rule: str) -> Path:
    """The folder of a checkpoint; of one on the hub, `files` are downloaded if need be.

    Args:
        model: a local folder, or the name of a model on the hub.
        files: patterns of file names.
        rule: What `model` must be, for the error message.

    Raises:
        SpecError: for `model`: it is neither.
    """
    if model and Path(model).is_dir():  # an empty path is the working directory's
        return Path(model)
    if not re.fullmatch(r"\w[\w.-]*(/[\w.-]*\w)?", model):
        raise SpecError("model", model, rule, "is not a folder or hub name")
    try:
        folder = huggingface_hub.snapshot_download(
            model, revision=revision, allow_patterns=list(files)
        )
    except (OSError, HfHubHTTPError, HFValidationError) as error:
        problem = f"is not a folder and cannot be loaded from the hub ({type(error).__name__})"
        note = "; offline, use a folder or a model in the hub's cache (HF_HOME)"
        raise SpecError("model", model, rule, problem, note) from None
    return Path(folder)
