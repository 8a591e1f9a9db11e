"""Saving and loading of EDJE models, which consist of an adapter and a joint encoder.

A model is a folder with these files:

edje.json            settings, dimensions, vision encoder and fingerprints
adapter.safetensors  adapter, which encodes items offline
heads.safetensors    matching head and text-embedding head
model.safetensors    language model, with its config.json and tokenizer files
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch

from pipeline import config
from pipeline.config import SpecError, reading
from pipeline.encoders.edje.adapter import Adapter
from pipeline.encoders.edje.joint import JointEncoder
from pipeline.encoders.loading import SETTINGS, hash_files
from pipeline.schema import Precision

METADATA = "edje.json"
ADAPTER = "adapter.safetensors"
HEADS = "heads.safetensors"
FORMAT = 1
#: Fields of the joint encoder's spec that name the origin of its model.
FROM = ("model", "revision", "adapter")
NOT_IN_FINGERPRINTS = (*FROM, "max_batch_tokens", "trust_remote_code")


class Edje(torch.nn.Module):
    """EDJE model, which consists of an adapter and the joint encoder that reads its tokens.

    `vision` has `spec` and `fingerprint` of the vision encoder whose states the adapter compresses.
    """

    def __init__(self, adapter: Adapter, joint: JointEncoder, vision: Mapping[str, Any]):
        super().__init__()
        assert adapter.dim == joint.dim
        self.adapter, self.joint, self.vision = adapter, joint, dict(vision)

    def save(self, folder: Path) -> None:
        """Writes the adapter and the joint encoder into a folder."""
        folder.mkdir(parents=True, exist_ok=True)
        _write(self.adapter.state_dict(), folder / ADAPTER)
        heads = {"match": self.joint.match, "recover": self.joint.recover}
        _write(
            {
                f"{name}.{key}": tensor
                for name, head in heads.items()
                for key, tensor in head.state_dict().items()
            },
            folder / HEADS,
        )
        self.joint.language.save_pretrained(folder)
        self.joint.tokenizer.save_pretrained(folder)
        metadata: dict[str, Any] = {
            "format": FORMAT,
            "vision": {**self.vision, "dim": self.adapter.width},
            "adapter": config.dump(self.adapter.spec),
            # The saved weights are complete and include merged low-rank matrices.
            "joint": config.dump(self.joint.spec) | dict.fromkeys(FROM, None) | {"model": "."},
            "dim": self.joint.dim,
            "text_dim": self.joint.recover.out_features,
        }
        metadata["fingerprints"] = {part: fingerprint(folder, part, metadata) for part in PARTS}
        (folder / METADATA).write_text(json.dumps(metadata, indent=1), "utf-8")

    @classmethod
    def load(cls, folder: str | Path, field: str = "edje", **changes: Any) -> Edje:
        """Loads a model from a folder written by `save`.

        Args:
            folder: Folder of the model.
            field: Name of the option that specifies the folder, for error messages.
            changes: Fields of the joint encoder's spec to override, such as `dtype`.

        Raises:
            SpecError: The folder does not contain a valid EDJE model.
        """
        metadata = read_metadata(folder, field)
        adapter = load_adapter(folder, field)
        return cls(adapter, load_joint(folder, field, **changes), metadata["vision"])


#: Files that determine the output of each part; they enter its fingerprint.
PARTS = {"adapter": [ADAPTER], "joint": [HEADS, "model*.safetensors", *SETTINGS]}


def fingerprint(folder: Path, part: str, metadata: Mapping[str, Any]) -> str:
    """Hashes the weights and settings of a part, and those of the adapter's vision encoder."""
    ignored = NOT_IN_FINGERPRINTS if part == "joint" else ()
    settings = {name: value for name, value in metadata[part].items() if name not in ignored}
    vision = metadata["vision"]["fingerprint"] if part == "adapter" else None
    files = hash_files(folder, PARTS[part])
    return config.digest({"files": files, "settings": settings, "vision": vision})


def read_metadata(folder: str | Path, field: str = "edje") -> dict[str, Any]:
    """Reads and validates the metadata of a model: settings, dimensions and fingerprints."""
    rule = "a folder written by EDJE training"
    folder = Path(folder)
    errors = (ValueError, KeyError, TypeError, RecursionError)
    with reading(field, str(folder), rule, *errors, problem=f"has a corrupted {METADATA}"):
        metadata = json.loads((folder / METADATA).read_text("utf-8"))
        if metadata["format"] != FORMAT:
            problem = f"has format {metadata['format']!r}"
            raise SpecError(field, str(folder), f"an EDJE model of format {FORMAT}", problem)
        current = {part: fingerprint(folder, part, metadata) for part in PARTS}
        changed = [part for part in PARTS if metadata["fingerprints"][part] != current[part]]
        _ = metadata["dim"], metadata["text_dim"], metadata["vision"]["dim"]
    for part in changed:
        missing = [name for name in PARTS[part] if "*" not in name and name.endswith("safetensors")]
        missing = [name for name in missing if not (folder / name).is_file()]
        problem = f"has no {missing[0]}" if missing else f"has modified files of its {part}"
        raise SpecError(field, str(folder), f"{rule} and unmodified", problem)
    return metadata


def load_adapter(folder: str | Path, field: str = "edje") -> Adapter:
    """Loads only the adapter of a model, see `Edje.load`."""
    metadata = read_metadata(folder, field)
    with _readable(folder, field):
        spec = config.parse(Adapter.Spec, metadata["adapter"])
        adapter = Adapter(spec, metadata["vision"]["dim"], metadata["dim"])
        adapter.load_state_dict(safetensors.torch.load_file(Path(folder) / ADAPTER))
    adapter.to("cuda" if torch.cuda.is_available() else "cpu")
    return adapter.eval().requires_grad_(False)


def precision_fields(precision: Precision | None) -> dict[str, Any]:
    """Returns the fields of a joint encoder's spec for a precision, or empty for None.

    >>> precision_fields("int8"), precision_fields(None)
    ({'dtype': 'float32', 'quantise': 'int8'}, {})
    """
    if precision is None:
        return {}
    in_int8 = precision == "int8"
    return {"dtype": "float32" if in_int8 else precision, "quantise": "int8" if in_int8 else None}


def load_joint(folder: str | Path, field: str = "edje", **changes: Any) -> JointEncoder:
    """Loads only the joint encoder of a model, see `Edje.load`."""
    metadata = read_metadata(folder, field)
    with _readable(folder, field):
        fields = metadata["joint"] | {"model": str(folder)} | changes
        spec = config.parse(JointEncoder.Spec, fields)
        joint = JointEncoder(spec, metadata["text_dim"], may_lack=())
        heads = safetensors.torch.load_file(Path(folder) / HEADS)
        joint.load_state_dict(heads, strict=False)
        if set(heads) != {f"{h}.{w}" for h in ("match", "recover") for w in ("weight", "bias")}:
            raise ValueError(f"{HEADS} contains unexpected weights")
        if joint.dim != metadata["dim"]:
            raise ValueError(f"the embeddings of the model have dimension {joint.dim}")
    return joint.eval().requires_grad_(False)


@contextlib.contextmanager
def _readable(folder: str | Path, field: str) -> Iterator[None]:
    """Converts read errors to `SpecError`."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (safetensors.SafetensorError, RuntimeError, ValueError, KeyError, OSError) as error:
        rule = "a folder written by EDJE training"
        problem = f"cannot be read ({config.first_line(error)})"
        raise SpecError(field, str(folder), rule, problem) from None


def check_tokens(folder: str | Path, written_by: str, field: str = "edje") -> None:
    """Raises `SpecError` if another adapter, by its fingerprint, computed the stored tokens."""
    check_adapter(read_metadata(folder, field), folder, written_by, field)


def check_adapter(
    metadata: Mapping[str, Any], folder: str | Path, written_by: str, field: str = "edje"
) -> None:
    """Checks stored tokens against the metadata of a model, see `check_tokens`."""
    adapter = metadata["fingerprints"]["adapter"]
    if adapter != written_by:
        rule = f"an EDJE model with the adapter of the index, {written_by}"
        raise SpecError(field, str(folder), rule, f"has the adapter {adapter}")


def _write(weights: Mapping[str, torch.Tensor], path: Path) -> None:
    safetensors.torch.save_file(
        {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}, path
    )
