"""Generated data and untrained models of the miniatures of tables."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from examples.papers.tables import layouts
from examples.papers.tables.plan import MINIATURE
from examples.papers.tables.spec import DataSet
from pipeline.config import SpecError
from tests.peers import remake
from tests.tiny import checkpoints
from tests.tiny import untrained as tiny

#: Subfolder of the models, by family.
MODELS = "models"
#: Fields that a miniature may change, by their last name, because they only affect sizes. All other
#: fields, such as sources, benchmarks, paths and prompts, are those of the table.
SIZES = {
    # An untrained model of the same family, computed on a CPU.
    *("model", "dtype", "precision", "fsdp", "activation_checkpointing", "rank", "hidden"),
    *("adapter_dim", "device"),
    # Steps and batches.
    *("batch_size", "mini_batch_size", "gradient_accumulation_steps", "epochs", "max_steps"),
    "eval_every",
    # Numbers of rows, which the specs of tables check against those of the published data sets.
    *("num_documents", "num_queries", "num_items"),
    # Lengths of documents, which small models with few positions limit.
    *("min_pixels", "max_pixels", "num_frames", "max_frames", "max_audio_seconds"),
    *("document_length", "query_length", "max_text_tokens"),
}


def generate_data(names: Iterable[str], data_sets: Mapping[str, DataSet], folder: Path) -> None:
    """Generates the data sets with the given names, if files are missing."""
    writers = layouts.writers(data_sets)
    for name in names:
        if not all((folder / file).exists() for file in data_sets[name].files):
            folder.mkdir(parents=True, exist_ok=True)
            writers[name](folder)


def generate_models(specs: Any, folder: Path) -> None:
    """Generates the models that the paths of specs below `folder` name, if missing."""
    for name in sorted(set(_names(specs, f"{folder}/"))):
        target = folder / name
        if target.exists():
            continue
        part = folder / f"{name}.part"
        shutil.rmtree(part, ignore_errors=True)
        part.parent.mkdir(parents=True, exist_ok=True)
        _generator(name)(part)
        part.rename(target)


def _names(value: Any, prefix: str) -> Iterator[str]:
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list):
        for inner in value:
            yield from _names(inner, prefix)
    elif isinstance(value, str) and value.startswith(prefix):
        yield "/".join(value.removeprefix(prefix).split("/")[:2])


def _generator(name: str) -> Callable[[Path], Any]:
    generators: dict[str, Callable[[Path], Any]] = {
        f"{MODELS}/bert": tiny.bert,
        f"{MODELS}/colqwen_omni": functools.partial(remake.checkpoint, "colqwen_omni"),
        **{
            f"{MODELS}/{family}": layouts.seeded(write)
            for family, write in checkpoints.FAMILIES.items()
        },
    }
    if name not in generators:
        raise SpecError.unknown_name(f"path below {MINIATURE}", name, generators)
    return generators[name]
