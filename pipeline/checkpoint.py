"""Where a model's checkpoint lies: a local folder, or one that the hub gives."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import huggingface_hub
from huggingface_hub.errors import HfHubHTTPError, HFValidationError

from pipeline.config import SpecError


def find_checkpoint(model: str, revision: str | None, files: Sequence[str], rule: str) -> Path:
    """Returns the folder of a checkpoint; missing files are downloaded from the model hub.

    Args:
        model: Local folder, or name of a model on the hub.
        revision: Branch, tag or commit on the hub; None for the default branch.
        files: Patterns of the names of the files to download.
        rule: What `model` must be, for the error message.

    Raises:
        SpecError: For `model`: it is neither a folder nor a model on the hub.
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
