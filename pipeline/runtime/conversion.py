"""Conversion of checkpoints with pickled weights to safetensors, in a process without rights."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from fnmatch import fnmatch
from pathlib import Path, PurePath

from pipeline.config import SpecError, absolute, reading
from pipeline.paths import is_uri
from pipeline.runtime.atomic import check_writable
from pipeline.runtime.checkpoint import (
    LOAD_ERRORS,
    OPEN_CLIP_CONFIG,
    PICKLES,
    check_pointers,
    check_safetensors,
    find_checkpoint,
    list_model,
    same_commits,
)

MODEL_RULE = "a checkpoint with pickled weights or of OpenCLIP"
#: Patterns of the files of a model on the hub besides its weights.
HUB_FILES = ["*.json", "*.txt", "*.model", "*.jinja", "*.md"]
#: End of the name of a file of weights, or of one of their shards.
SHARD = r"(-\d+-of-\d+)?\.safetensors$"
PROGRAM = Path(__file__).with_name("unpickle.py")
#: Processor time of a conversion: in total, and in bytes per second.
SECONDS, BYTES_PER_SECOND = 120, 20_000_000
#: Converts the OpenCLIP model in the last folder to a CLIP of transformers in the same folder.
OpenClip = Callable[[str, Path], None]
#: Weights in all formats that are read.
WEIGHTS = ("*.safetensors", *(f"*{name}" for name in PICKLES))


def convert(
    model: str,
    output: str,
    revision: str | None,
    convert_open_clip: OpenClip,
    report: Callable[[str], None],
) -> None:
    """Writes a copy of a checkpoint that has all its weights as safetensors.

    The folder appears when it is complete.

    Args:
        model: A local folder, or the name of a model on the Hugging Face Hub.
        output: Folder to write, which must not exist.
        revision: Git revision of the model on the hub.
        convert_open_clip: Function that makes a CLIP of transformers of an OpenCLIP folder.
        report: Function that prints a line.

    Raises:
        SpecError: The checkpoint is incomplete, or has nothing to convert, or its weights are not
            only tensors, or the output exists.
    """
    target = Path(absolute(output))
    if is_uri(output) or target.exists():
        problem = "is a URI" if is_uri(output) else "exists"
        raise SpecError("output", output, "the path of a new folder", problem)
    check_writable(output, "output")
    with same_commits():
        source = _find(model, revision)
    paths = sorted(path for path in source.rglob("*") if _is_part(path, source))
    for folder in sorted({path.parent for path in paths} | {source}):
        check_pointers(model, folder)
    copied, pickles, is_open_clip = _split(model, [str(p.relative_to(source)) for p in paths])
    sizes = [(source / name).stat().st_size for name in (*copied, *pickles)]
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    _check_space(output, target, sum(sizes))
    try:
        with reading("output", output, "on a disk with free space", problem="cannot be written"):
            for name in (*copied, *pickles):
                place = temporary / name
                place.parent.mkdir(parents=True, exist_ok=True)
                if name in copied:
                    shutil.copyfile(source / name, place)
                else:
                    converted = place.with_name(_converted(place.name))
                    report(_convert_file(model, source / name, converted))
        with reading("model", model, "a checkpoint with a valid index of shards", *LOAD_ERRORS):
            _rename_shards(temporary)
        if is_open_clip:
            convert_open_clip(model, temporary)
            report("converted OpenCLIP to CLIP of transformers")
        if any(temporary.glob("*.safetensors")):
            check_safetensors(model, temporary)
        temporary.rename(target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    report(f"wrote {target} with {len(copied)} copied files")


def _is_part(path: Path, source: Path) -> bool:
    hidden = any(part.startswith(".") for part in path.relative_to(source).parts)
    return path.is_file() and not hidden


def _find(model: str, revision: str | None) -> Path:
    """Returns the folder of a checkpoint. Weights on the hub are downloaded in one format."""
    find_checkpoint(model, revision, HUB_FILES, MODEL_RULE)
    files = [*HUB_FILES, *WEIGHTS]
    if info := list_model(model, revision, MODEL_RULE):
        names = [file.rfilename for file in info.siblings or ()]
        copied, pickles, _ = _split(model, names)
        files = [name for name in (*copied, *pickles) if any(fnmatch(name, f) for f in files)]
    return find_checkpoint(model, revision, files, MODEL_RULE)


def _split(model: str, names: Sequence[str]) -> tuple[list[str], list[str], bool]:
    """Returns the files to copy and those to convert, and whether they are of OpenCLIP.

    Weights that the checkpoint also has in another format are in neither.

    >>> _split("", ["config.json", "pytorch_model.bin", "open_clip_model.safetensors"])
    (['config.json'], ['pytorch_model.bin'], False)
    """
    is_open_clip = OPEN_CLIP_CONFIG in names and not any(
        name.startswith(("model", "pytorch_model")) for name in names if "/" not in name
    )
    other = () if is_open_clip else ("open_clip_model", "open_clip_pytorch_model")
    names = [name for name in names if not name.startswith(other)]
    pickles = [name for name in names if any(PurePath(name).match(file) for file in PICKLES)]
    stems = {re.sub(SHARD, "", name) for name in names if name.endswith(".safetensors")}
    new = [name for name in pickles if re.sub(SHARD, "", _converted(name)) not in stems]
    if not new and not is_open_clip:
        raise SpecError("model", model, MODEL_RULE, "has neither")
    return [name for name in names if name not in pickles], new, is_open_clip


def _converted(name: str) -> str:
    """Returns the name of the safetensors file in place of a pickled one.

    >>> [_converted(name) for name in ("pytorch_model.bin", "1_Dense/adapter_model.bin")]
    ['model.safetensors', '1_Dense/adapter_model.safetensors']
    """
    return f"{name.replace('pytorch_model', 'model').removesuffix('.bin')}.safetensors"


def _check_space(output: str, target: Path, size: int) -> None:
    parent = next(parent for parent in target.parents if parent.exists())
    if (free := shutil.disk_usage(parent).free) < size:
        rule = f"on a disk with {size / 1e9:.1f} GB of free space"
        raise SpecError("output", output, rule, f"has {free / 1e9:.1f} GB")


def _convert_file(model: str, source: Path, target: Path) -> str:
    """Converts a file in a process of its own and returns a summary."""
    seconds = SECONDS + source.stat().st_size // BYTES_PER_SECOND
    command = [sys.executable, "-I", *map(str, (PROGRAM, source, target, seconds))]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    try:
        reply = json.loads(done.stdout)
    except ValueError:
        reply = {"error": f"stopped its process, which is limited to {seconds} s"}
    if "error" in reply:
        rule = "a checkpoint whose pickled weights are only tensors"
        raise SpecError("model", model, rule, f"has {source.name}, which {reply['error']}")
    copies = f" ({reply['shared']} shared memory)" if reply["shared"] else ""
    return f"converted {source.name} to {target.name}: {reply['tensors']} tensors{copies}"


def _rename_shards(folder: Path) -> None:
    """Rewrites the index of pickled shards as that of safetensors files."""
    path = folder / "pytorch_model.bin.index.json"
    if not path.is_file():
        return
    index = json.loads(path.read_text("utf-8"))
    shards = {name: _converted(file) for name, file in index["weight_map"].items()}
    text = json.dumps({**index, "weight_map": shards}, indent=2)
    path.with_name("model.safetensors.index.json").write_text(text, "utf-8")
    path.unlink()
