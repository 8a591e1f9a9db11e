"""Describes a checkpoint, and the spec that loads it, without its weights.

The configuration, the headers of the weight files and the table of published models are read.
"""

from __future__ import annotations

import io
import textwrap
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from PIL import Image
from pydantic import Field

from pipeline import config
from pipeline.config import Spec, SpecError
from pipeline.data.decode import Unreadable
from pipeline.data.pages import Pages
from pipeline.defaults import CODEC, COMPRESSOR
from pipeline.encoders import Encoder
from pipeline.encoders.published import published_fields
from pipeline.encoders.sequences import SequenceEncoder
from pipeline.eval.planning.identify import Identity, identify
from pipeline.index.spec import IndexSpec
from pipeline.registry import CODECS, ENCODERS
from pipeline.runtime.checkpoint import same_commits

#: Sources of the printed specs, over the shipped collections, by the input that they provide.
SOURCES: dict[str, list[dict[str, Any]]] = {
    "text": [{"name": "text", "path": "jobs/data/cranfield", "collection": "cranfield"}],
    "image": [
        {"name": "pages", "path": "jobs/data/pages/pdf"},
        {"name": "images", "path": "jobs/data/photos/images", "collection": "photos"},
    ],
    "frames": [{"name": "video", "path": "jobs/data/clips", "window_seconds": 10, "fps": 1}],
    "audio": [{"name": "audio", "path": "jobs/data/speech", "collection": "speech"}],
}
#: Maximum size of the vectors of a page, in bytes, which decides what the printed spec stores.
MAX_UNCOMPRESSED, MAX_COMPRESSED = 1 << 20, 1 << 16
#: Assumed number of tokens per page if it is unknown.
TOKENS = 1024


class PublishedModel(Spec):
    """A model in the table of published models."""

    encoder: dict[str, Any] = Field(default_factory=dict)
    """Fields of the encoder's spec that the files of the checkpoint do not tell."""
    languages: list[str] = Field(default_factory=list)
    """Languages of the model as ISO 639 codes, or empty if they are unknown."""
    revision: str | None = None
    """Commit to which the source refers."""
    refused: str | None = None
    """Reason why no encoder loads the model."""
    source: str | None = None
    """Origin of these facts."""


@dataclass(frozen=True)
class ModelPlan:
    """Description of a checkpoint and its index spec.

    Attributes:
        lines: Description, one fact per line.
        spec: Fields of the spec.
    """

    lines: list[str]
    spec: dict[str, Any]

    def text(self) -> str:
        """Returns a YAML spec with the description as comments."""
        wrapped = [
            textwrap.wrap(line, 98, subsequent_indent="  ", break_on_hyphens=False)
            for line in self.lines
        ]
        comments = "".join(f"# {line}\n" for lines in wrapped for line in lines)
        fields = yaml.safe_dump(
            self.spec, sort_keys=False, allow_unicode=True, default_flow_style=None, width=100
        )
        return comments + fields


def published_models() -> dict[str, PublishedModel]:
    """Returns the table of published models by hub name."""
    return {
        name: config.parse(PublishedModel, fields) for name, fields in published_fields().items()
    }


@same_commits()
def plan_model(model: str, overrides: Sequence[str] = ()) -> ModelPlan:
    """Describes a checkpoint and returns the spec that loads it.

    Args:
        model: Folder or hub name. Of a hub model, only settings and headers are downloaded.
        overrides: Assignments to fields of the spec, such as `encoder.revision=v1`.

    Raises:
        SpecError: The model does not exist, is not accessible, or no encoder loads it.
    """
    known = published_models().get(model, PublishedModel())
    if known.refused:
        raise SpecError("model", model, "a model that an encoder loads", known.refused)
    pinned = {"revision": known.revision} if known.revision else {}
    fields = config.override({"encoder": {"model": model, **pinned, **known.encoder}}, overrides)
    identity = None
    if "name" not in fields["encoder"]:
        given = {name: fields["encoder"].get(name) for name in ("revision", "adapter")}
        identity = identify(model, **{name: value and str(value) for name, value in given.items()})
        fields["encoder"] = {"name": identity.encoder, **fields["encoder"]}
    defaults = {"index": f"out/{Path(model).name}/index", "source": SOURCES["text"]}
    spec = config.parse(IndexSpec, {**defaults, **fields})
    encoder = ENCODERS.load(spec.encoder.name)
    inputs = encoder.supported_inputs(spec.encoder)
    width, tokens = getattr(spec.encoder, "dim", None), None
    lines = [f"{model}: {_family(identity, spec.encoder)}"]
    if identity:
        encoder.check(spec.encoder)
        lines += _facts(model, identity)
        width, tokens = identity.width, _tokens_per_page(encoder, spec.encoder)
    if known.source:
        presets = ", ".join(known.encoder) or "none besides the revision"
        lines.append(f"presets: {presets}; source: {known.source}")
    lines += _vectors(width, tokens)
    lines.append("Save this output, set index and source to your files, and run maxray index.")
    printed = {
        **defaults,
        "source": _sources(inputs),
        "encoder": {},
        "sweep": _sweep(width or 128, tokens, "image" in inputs),
        "unit_items": 16,  # a large image takes several megabytes of model input
        **spec.model_dump(mode="json", include=set(fields), exclude_unset=True),
    }
    return ModelPlan(lines, printed)


def _family(identity: Identity | None, spec: Any) -> str:
    if identity is None:
        is_endpoint = spec.name == "http"
        text = f"with the encoder {spec.name}"
        return f"{text}; start it with: vllm serve {spec.model}" if is_endpoint else text
    text = f"{identity.family} of {identity.library} (encoder {identity.encoder})"
    text += f", base {identity.base}" if identity.base else ""
    return text + (f", adapter {identity.adapter}" if identity.adapter else "")


def _facts(model: str, identity: Identity) -> list[str]:
    first, counts = identity.files[0], Counter[str]()
    for files in identity.files:
        counts.update(files.parameters)
    lines = [f"license field of the model card: {first.license or 'none'}"]
    if count := counts.total():
        sizes = {
            "on disk": sum(files.size for files in identity.files),
            "in bfloat16": 2 * count,
            "in float32": 4 * count,
        }
        shown = ", ".join(f"{size / 1e6:,.1f} MB {where}" for where, size in sizes.items())
        lines.append(f"weights: {count:,} parameters in {', '.join(sorted(counts))}, {shown}")
    needs = ["the extra training (peft)"] if identity.adapter else []
    needs += ["accepted terms and HF_TOKEN (gated)"] if first.gated else []
    if not any(name.endswith(".safetensors") for name in first.names):
        needs.append(f"a conversion (maxray convert {model} FOLDER)")
    return [*lines, *([f"needs: {'; '.join(needs)}"] if needs else [])]


def _vectors(width: int | None, tokens: int | None) -> list[str]:
    if width is None:
        return []
    if tokens is None:
        return [f"vectors: {width} dimensions"]
    size = tokens * CODECS.build(CODECS.resolve("float16")).token_bytes(width) / 1e6
    page = f"{tokens:,} tokens and {size:,.2f} MB in float16 per A4 page"
    return [f"vectors: {width} dimensions, {page}"]


def _tokens_per_page(encoder: type[Encoder[Any]], spec: Any) -> int | None:
    """Returns the number of tokens of an A4 page at the default resolution, or None if unknown."""
    if not issubclass(encoder, SequenceEncoder) or "image" not in encoder.supported_inputs(spec):
        return None
    dpi = Pages.Spec.model_fields["dpi"].default
    file = io.BytesIO()
    Image.new("RGB", (round(210 / 25.4 * dpi), round(297 / 25.4 * dpi)), "white").save(file, "PNG")
    try:
        sequences = encoder.reader(spec).read_item({"image": file.getvalue()})
    except Unreadable:  # such as an image with more tokens than the model reads
        return None
    return sum(int(sequence.keep.sum()) for sequence in sequences)


def _sources(inputs: Sequence[str]) -> list[dict[str, Any]]:
    """Returns the sources of the inputs; texts only for encoders that read nothing else."""
    names = [
        name for name in SOURCES if name in inputs and (name != "text" or "image" not in inputs)
    ]
    return [source for name in names for source in SOURCES[name]]


def _sweep(width: int, tokens: int | None, has_images: bool) -> list[dict[str, Any]]:
    """Returns the representations: uncompressed vectors if they are small, and fixed budgets."""
    budget = 64 if has_images else 32
    while budget > 16 and budget * width > MAX_COMPRESSED:
        budget //= 2
    compressed = {"compressor.name": [COMPRESSOR["name"]], "compressor.num_vectors": [budget]}
    if width > 128:
        compressed["codec"] = [CODEC]
    is_small = (tokens or TOKENS) * width * 2 <= MAX_UNCOMPRESSED
    return [*([{"compressor": ["none"]}] if is_small else []), compressed]
