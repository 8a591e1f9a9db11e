"""Resolution of model checkpoints to local folders, and checks of their files."""

from __future__ import annotations

import contextlib
import errno
import json
import re
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import httpx2
import huggingface_hub
import safetensors
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
    SafetensorsParsingError,
    StrictDataclassError,
)

from pipeline.config import SpecError, reading

#: Errors of transformers and its libraries on invalid files, besides `OSError`.
LOAD_ERRORS = (
    *(ArithmeticError, AttributeError, ImportError, LookupError, RuntimeError, TypeError),
    *(ValueError, safetensors.SafetensorError, StrictDataclassError),
)
#: Files of a checkpoint of OpenCLIP.
OPEN_CLIP_CONFIG = "open_clip_config.json"
OPEN_CLIP_WEIGHTS = "open_clip_model.safetensors"
#: Settings of a checkpoint of transformers, peft and sentence-transformers.
SETTINGS = ("config.json", "adapter_config.json", "modules.json")
#: Weights that are converted before they are loaded, because they are pickled.
PICKLES = ("pytorch_model*.bin", "adapter_model.bin", "open_clip_pytorch_model.bin")
FOLDER_RULE = "the folder of a checkpoint"
#: First bytes of the file that git checks out in place of one that git-lfs stores.
LFS_POINTER = b"version https://git-lfs"
LFS_REMEDY = "; run `git lfs pull` there, or get the files with `hf download`"

#: Commits by model and revision inside `same_commits`.
_commits: ContextVar[dict[tuple[str, str | None], str] | None] = ContextVar("commits", default=None)


@contextlib.contextmanager
def same_commits() -> Iterator[None]:
    """Looks up the commit of each model on the hub only once inside the block."""
    token = _commits.set({})
    try:
        yield
    finally:
        _commits.reset(token)


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
        if revision is not None:
            raise SpecError("revision", revision, "null if model is a folder, which has none")
        return Path(model)
    if Path(model).is_file():
        raise SpecError("model", model, rule, "is a file", "; use the folder that contains it")
    if not re.fullmatch(r"\w[\w.-]*(/[\w.-]*\w)?", model):
        raise SpecError("model", model, rule, "is not a folder or hub name")
    commits, key = _commits.get(), (model, revision)
    try:
        with reading_hub(model, revision, rule):
            folder = Path(
                huggingface_hub.snapshot_download(
                    model,
                    revision=commits.get(key, revision) if commits else revision,
                    allow_patterns=[*files, OPEN_CLIP_CONFIG],
                )
            )
    except httpx2.TransportError as error:
        raise SpecError("model", model, rule, *_hub_problem(error)) from None
    if not folder.is_dir():
        raise SpecError("model", model, rule, f"has no {files[0]} on the hub")
    if commits is not None:
        commits[key] = folder.name
    return folder


def list_model(
    model: str, revision: str | None, rule: str
) -> huggingface_hub.hf_api.ModelInfo | None:
    """Returns the files and the card of a model on the hub, or None for a folder and offline.

    Raises `SpecError` like `find_checkpoint`.
    """
    if Path(model).is_dir() or huggingface_hub.is_offline_mode():
        return None
    with contextlib.suppress(httpx2.TransportError), reading_hub(model, revision, rule):
        return huggingface_hub.HfApi().model_info(model, revision=revision)
    return None


@contextlib.contextmanager
def reading_hub(
    model: str, revision: str | None, rule: str, field: str = "model"
) -> Iterator[None]:
    """Converts errors of the client of the hub inside the block to a `SpecError` with a remedy.

    Args:
        model: Name of the model, or for another field of a data set, on the hub.
        revision: Its revision.
        rule: Description of valid values of `field`, used in the error message.
        field: Field of the name.
    """
    try:
        yield
    except RevisionNotFoundError:
        rule = f"a branch, tag, commit or refs/pr/N of {model}"
        raise SpecError("revision", revision, rule, "does not exist on the hub") from None
    except (
        *(OSError, HfHubHTTPError, HFValidationError, SafetensorsParsingError),
        json.JSONDecodeError,  # of a page in the place of the hub
    ) as error:
        is_model = field == "model" and isinstance(error, RepositoryNotFoundError)
        if is_model and _is_dataset(model):
            raise SpecError(field, model, rule, "is a data set") from None
        raise SpecError(field, model, rule, *_hub_problem(error)) from None


def _is_dataset(name: str) -> bool:
    try:
        return huggingface_hub.HfApi().repo_exists(name, repo_type="dataset")
    except (OSError, HfHubHTTPError):
        return False


def _hub_problem(error: Exception) -> tuple[str, str]:
    """Returns what is wrong with a model that cannot be downloaded, and the remedy."""
    match error:
        case GatedRepoError():
            note = "; accept its terms on its page there, then run `hf auth login`"
            return "is gated on the hub", note
        case RepositoryNotFoundError():
            note = "; if it is private, run `hf auth login`"
            return "is not a folder and does not exist on the hub", note
        case SafetensorsParsingError():
            return "has a truncated or corrupted safetensors file on the hub", ""
        case OSError(errno=errno.ENOSPC | errno.EDQUOT | errno.EFBIG):
            return "cannot be downloaded (no space left)", "; free space, or set HF_HOME"
        case OSError(errno=None) if type(error) is OSError:
            return "was downloaded incompletely", "; run the command again"
    note = "; offline, use a folder or a model in the hub's cache (HF_HOME)"
    name = type(error).__name__
    return f"is not a folder and cannot be loaded from the hub ({name})", note


def check_folder(model: str, folder: Path, field: str = "model") -> None:
    """Checks that the files of a checkpoint are in its folder and are the files themselves.

    `model` is the value of `field`, the spec field of the folder.

    Raises:
        SpecError: The folder has pointers of git-lfs, or no config.json because it is empty, that
            of an OpenCLIP model or one level above the checkpoint.
    """
    check_pointers(model, folder, field)
    if any((folder / name).is_file() for name in SETTINGS):
        return
    if (folder / OPEN_CLIP_CONFIG).is_file():
        problem = "is a checkpoint of OpenCLIP"
        raise SpecError(field, model, FOLDER_RULE, problem, conversion_note(model))
    for name in ("config.json", "adapter_config.json"):
        if not any(folder.iterdir()) or any(folder.glob(f"*/{name}")):
            raise SpecError(field, model, FOLDER_RULE, *missing_file(model, folder, name))


def check_pointers(model: str, folder: Path, field: str = "model") -> None:
    """Raises `SpecError` if a folder has pointers of git-lfs in place of files."""
    for path in sorted(folder.iterdir()):
        if path.is_file() and path.stat().st_size < 1024:
            with path.open("rb") as file:
                if file.read(len(LFS_POINTER)) == LFS_POINTER:
                    problem = f"has a git-lfs pointer in place of {path.name}"
                    raise SpecError(field, model, FOLDER_RULE, problem, LFS_REMEDY)


def missing_file(model: str, folder: Path, name: str) -> tuple[str, str]:
    """Returns the problem of a folder without a file (a name or a pattern), and the remedy."""
    if not any(folder.iterdir()):
        return "is an empty folder", ""
    problem = f"has no {name.replace('*.safetensors', 'safetensors file')}"
    others = find_pickles(folder) + sorted(folder.glob(OPEN_CLIP_WEIGHTS))
    # Other weights of a model on the hub are not downloaded.
    if name.endswith(".safetensors") and (others or not Path(model).is_dir()):
        only = f", only {others[0].name}" if others else ""
        return f"{problem} to load{only}", conversion_note(model)
    below = sorted({str(path.parent) for path in folder.glob(f"*/{name}")})
    return problem, f"; use {' or '.join(below[:3])}" if below else ""


def find_pickles(folder: Path) -> list[Path]:
    """Returns the files of a folder with pickled weights."""
    return sorted(path for pattern in PICKLES for path in folder.glob(pattern))


def conversion_note(model: str) -> str:
    """Returns the remedy for weights in a format that is not loaded."""
    return f"; convert it with `maxray convert {model} FOLDER` and use FOLDER"


def check_safetensors(model: str, folder: Path, field: str = "model") -> None:
    """Checks that a checkpoint has all its weights in complete files that are not pickled.

    Only the headers of the files are read. `model` is the value of `field`.

    Raises:
        SpecError: Files are missing, truncated or corrupted.
    """
    check_pointers(model, folder, field)
    rule = "a checkpoint with weights as *.safetensors (pickled weights are not loaded)"
    names = {path.name for path in folder.glob("*.safetensors")} - {OPEN_CLIP_WEIGHTS}
    if not names:
        raise SpecError(field, model, rule, *missing_file(model, folder, "*.safetensors"))
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        with reading(field, model, rule, *LOAD_ERRORS, problem=f"has an invalid {index.name}"):
            shards = set(json.loads(index.read_text("utf-8"))["weight_map"].values())
        if missing := sorted(shards - names):
            problem = f"has no {missing[0]}, which its {index.name} lists"
            raise SpecError(field, model, rule, problem, "; download it again")
    elif any(re.match(r"model-\d+-of-\d+\.", name) for name in names):
        problem = f"has no {index.name}, which lists its files"
        raise SpecError(field, model, rule, problem, "; download it again")
    for name in sorted(names):
        try:
            with safetensors.safe_open(folder / name, "pt"):
                pass
        except (OSError, safetensors.SafetensorError) as error:
            problem = f"has a truncated or corrupted {name} ({error})"
            raise SpecError(field, model, rule, problem, "; download it again") from None


def read_headers(folder: Path) -> dict[str, dict[str, Any]]:
    """Returns dtype, shape and data_offsets of all weights in the safetensors files of a folder."""
    headers: dict[str, dict[str, Any]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            headers |= json.loads(file.read(int.from_bytes(file.read(8), "little")))
    headers.pop("__metadata__", None)
    return headers
