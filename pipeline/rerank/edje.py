"""Saves and loads an EDJE, an adapter and its joint encoder, in one folder.

edje.json            settings, dimensions, the vision encoder, fingerprints
adapter.safetensors  the adapter, which encodes items offline
heads.safetensors    the matching head and the text-embedding head
model.safetensors    the language model, with its config.json and the files of its tokenizer
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
from pipeline.config import SpecError
from pipeline.encoders.loading import SETTINGS, hash_files
from pipeline.rerank.adapter import Adapter
from pipeline.rerank.joint import JointEncoder
from pipeline.schema import Precision

METADATA = "edje.json"
ADAPTER = "adapter.safetensors"
HEADS = "heads.safetensors"
FORMAT = 1
#: Fields of the joint encoder's spec that name the origin of its model.
FROM = ("model", "revision", "adapter")
NOT_IN_FINGERPRINTS = (*FROM, "max_batch_tokens", "trust_remote_code")


class Edje(torch.nn.Module):
    """An adapter with the joint encoder that reads its tokens.

    Args:
        adapter: The adapter, which writes the tokens.
        joint: The joint encoder, which reads them.
        vision: `spec` and `fingerprint` of the encoder whose states the adapter reads.
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
            # What is written is all of it, low-rank matrices included.
            "joint": config.dump(self.joint.spec) | dict.fromkeys(FROM, None) | {"model": "."},
            "dim": self.joint.dim,
            "text_dim": self.joint.recover.out_features,
        }
        metadata["fingerprints"] = {part: fingerprint(folder, part, metadata) for part in PARTS}
        (folder / METADATA).write_text(json.dumps(metadata, indent=1), "utf-8")

    @classmethod
    def load(cls, folder: str | Path, field: str = "edje", **changes: Any) -> Edje:
        """Loads what `save` wrote.

        Args:
            folder: Folder of an EDJE.
            field: Option that names the folder, for error messages.
            changes: Other fields of the joint encoder's spec: `dtype`, `attention`,
                `max_batch_tokens`.

        Raises:
            SpecError: For `field`: the folder is not that of an EDJE, or is corrupted.
        """
        metadata = read_metadata(folder, field)
        adapter = load_adapter(folder, field)
        return cls(adapter, load_joint(folder, field, **changes), metadata["vision"])


#: The files that decide what each part computes.
PARTS = {"adapter": [ADAPTER], "joint": [HEADS, "model*.safetensors", *SETTINGS]}


def fingerprint(folder: Path, part: str, metadata: Mapping[str, Any]) -> str:
    """Returns the hash of a part's weights and settings; of the adapter's vision encoder too."""
    ignored = NOT_IN_FINGERPRINTS if part == "joint" else ()
    settings = {name: value for name, value in metadata[part].items() if name not in ignored}
    before = metadata["vision"]["fingerprint"] if part == "adapter" else None
    files = hash_files(folder, PARTS[part])
    return config.digest({"files": files, "settings": settings, "vision": before})


def read_metadata(folder: str | Path, field: str = "edje") -> dict[str, Any]:
    """Returns the metadata of a folder: settings, dimensions and fingerprints.

    Raises:
        SpecError: For `field`: the folder is not that of an EDJE, or its files were changed.
    """
    rule = "a folder written by EDJE training"
    folder = Path(folder)
    try:
        metadata = json.loads((folder / METADATA).read_text("utf-8"))
        if metadata["format"] != FORMAT:
            problem = f"has the format {metadata['format']!r}"
            raise SpecError(field, str(folder), f"an EDJE of format {FORMAT}", problem)
        now = {part: fingerprint(folder, part, metadata) for part in PARTS}
        changed = [part for part in PARTS if metadata["fingerprints"][part] != now[part]]
        _ = metadata["dim"], metadata["text_dim"], metadata["vision"]["dim"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, SpecError):
            raise
        problem = (
            f"has no {METADATA}" if isinstance(error, OSError) else f"has a corrupted {METADATA}"
        )
        raise SpecError(field, str(folder), rule, problem) from None
    for part in changed:
        missing = [name for name in PARTS[part] if "*" not in name and name.endswith("safetensors")]
        missing = [name for name in missing if not (folder / name).is_file()]
        what = f"has no {missing[0]}" if missing else f"has modified files of its {part}"
        raise SpecError(field, str(folder), f"{rule} and unmodified", what)
    return metadata


def load_adapter(folder: str | Path, field: str = "edje") -> Adapter:
    """Loads only the adapter of a folder; see `Edje.load`."""
    metadata = read_metadata(folder, field)
    with _readable(folder, field):
        spec = config.parse(Adapter.Spec, metadata["adapter"])
        adapter = Adapter(spec, metadata["vision"]["dim"], metadata["dim"])
        adapter.load_state_dict(safetensors.torch.load_file(Path(folder) / ADAPTER))
    adapter.to("cuda" if torch.cuda.is_available() else "cpu")
    return adapter.eval().requires_grad_(False)


def computed_in(precision: Precision | None) -> dict[str, Any]:
    """Returns the fields of a joint encoder's spec that set a precision; none for None.

    >>> computed_in("int8"), computed_in(None)
    ({'dtype': 'float32', 'quantise': 'int8'}, {})
    """
    if precision is None:
        return {}
    in_int8 = precision == "int8"
    return {"dtype": "float32" if in_int8 else precision, "quantise": "int8" if in_int8 else None}


def load_joint(folder: str | Path, field: str = "edje", **changes: Any) -> JointEncoder:
    """Loads only the joint encoder of a folder; see `Edje.load`."""
    metadata = read_metadata(folder, field)
    with _readable(folder, field):
        spec = config.parse(JointEncoder.Spec, metadata["joint"] | {"model": str(folder)} | changes)
        joint = JointEncoder(spec, metadata["text_dim"], may_lack=())
        heads = safetensors.torch.load_file(Path(folder) / HEADS)
        joint.load_state_dict(heads, strict=False)
        if set(heads) != {f"{h}.{w}" for h in ("match", "recover") for w in ("weight", "bias")}:
            raise ValueError(f"{HEADS} has other weights")
        if joint.dim != metadata["dim"]:
            raise ValueError(f"the model's embeddings have {joint.dim} numbers")
    return joint.eval().requires_grad_(False)


@contextlib.contextmanager
def _readable(folder: str | Path, field: str) -> Iterator[None]:
    """Turns errors of reading into a `SpecError` of the folder."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (safetensors.SafetensorError, RuntimeError, ValueError, KeyError, OSError) as error:
        rule = "a folder written by EDJE training"
        problem = f"cannot be read ({config.first_line(error)})"
        raise SpecError(field, str(folder), rule, problem) from None


def check_tokens(folder: str | Path, written_by: str, field: str = "edje") -> None:
    """Checks that cached tokens were written by the adapter of a folder.

    Args:
        folder: Folder of an EDJE.
        written_by: Fingerprint of the adapter that is stored with the tokens.
        field: Option that names the folder, for error messages.

    Raises:
        SpecError: For `field`: another adapter wrote them.
    """
    check_adapter(read_metadata(folder, field), folder, written_by, field)


def check_adapter(
    metadata: Mapping[str, Any], folder: str | Path, written_by: str, field: str = "edje"
) -> None:
    """Checks as `check_tokens` does, given the metadata of the folder."""
    adapter = metadata["fingerprints"]["adapter"]
    if adapter != written_by:
        rule = f"an EDJE with the index's adapter {written_by}"
        raise SpecError(field, str(folder), rule, f"has the adapter {adapter}")


def _write(weights: Mapping[str, torch.Tensor], path: Path) -> None:
    safetensors.torch.save_file(
        {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}, path
    )
