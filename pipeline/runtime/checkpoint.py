"""Resolution of model checkpoints to local folders."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import huggingface_hub
from huggingface_hub.errors import HfHubHTTPError, HFValidationError

from pipeline.config import SpecError

#: Errors of transformers and its libraries on invalid files, besides `OSError`.
LOAD_ERRORS = (ValueError, KeyError, TypeError, AttributeError, ImportError)


def find_checkpoint(model: str, revision: str | None, files: Sequence[str], rule: str) -> Path:
    """Returns the local folder of a checkpoint, which is downloaded from the hub if necessary.

    Args:
        model: A local folder, or the name of a model on the Hugging Face Hub.
        revision: Git revision of the model on the hub. Defaults to the main branch.
        files: Glob patterns of the files to download.
        rule: Description of valid values of `model`, used in the error message.

    Raises:
        SpecError: `model` is not a folder and cannot be loaded from the hub.
    """
    if model and Path(model).is_dir():  # Path("") is the working directory
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


def check_safetensors(model: str, folder: Path) -> None:
    """Checks that a checkpoint has weights that are not pickled."""
    if not any(folder.glob("*.safetensors")):
        rule = "a checkpoint with weights as *.safetensors (pickled weights are not loaded)"
        raise SpecError("model", model, rule, "has no safetensors file")
