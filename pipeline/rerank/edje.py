"""EDJE as it is kept: an adapter and its joint encoder, in one folder.

edje.json            settings, widths, the vision encoder, fingerprints
adapter.safetensors  the adapter, for what is done offline
heads.safetensors    matching and the text's embedding
model.safetensors    the language model, beside its config.json and its tokenizer's files
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
from pipeline.encoders.loading import SETTINGS, hashed
from pipeline.rerank.adapter import Adapter
from pipeline.rerank.joint import JointEncoder
from pipeline.schema import Precision

ABOUT = "edje.json"
ADAPTER = "adapter.safetensors"
HEADS = "heads.safetensors"
FORMAT = 1
#: Fields of the joint encoder's spec that say where its model came from.
FROM = ("model", "revision", "adapter")
NOT_IN_FINGERPRINTS = (*FROM, "max_batch_tokens", "trust_remote_code")


class Edje(torch.nn.Module):
    """An adapter with the joint encoder that reads its tokens.

    Args:
        adapter, joint: what is in it.
        vision: of the encoder whose states the adapter reads, its `spec` and `fingerprint`.
    """

    def __init__(self, adapter: Adapter, joint: JointEncoder, vision: Mapping[str, Any]):
        super().__init__()
        assert adapter.dim == joint.dim
        self.adapter, self.joint, self.vision = adapter, joint, dict(vision)

    def save(self, folder: Path) -> None:
        """Writes all of it into a folder."""
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
        about: dict[str, Any] = {
            "format": FORMAT,
            "vision": {**self.vision, "dim": self.adapter.width},
            "adapter": config.dump(self.adapter.spec),
            # What is written is all of it, low-rank matrices included.
            "joint": config.dump(self.joint.spec) | dict.fromkeys(FROM, None) | {"model": "."},
            "dim": self.joint.dim,
            "text_dim": self.joint.recover.out_features,
        }
        about["fingerprints"] = {part: fingerprint(folder, part, about) for part in PARTS}
        (folder / ABOUT).write_text(json.dumps(about, indent=1), "utf-8")

    @classmethod
    def load(cls, folder: str | Path, field: str = "edje", **changes: Any) -> Edje:
        """What `save` wrote, ready for use.

        Args:
            field: what the user names the folder by, for messages.
            changes: of the joint encoder's spec: its dtype, attention or max_batch_tokens.

        Raises:
            SpecError: for `field`: it is no such folder, or what is in it is damaged.
        """
        about = about_of(folder, field)
        adapter = load_adapter(folder, field)
        return cls(adapter, load_joint(folder, field, **changes), about["vision"])


#: The files that decide what each part computes.
PARTS = {"adapter": [ADAPTER], "joint": [HEADS, "model*.safetensors", *SETTINGS]}


def fingerprint(folder: Path, part: str, about: Mapping[str, Any]) -> str:
    """The hash of a part's weights and settings; the adapter's also of the encoder before it."""
    ignored = NOT_IN_FINGERPRINTS if part == "joint" else ()
    settings = {name: value for name, value in about[part].items() if name not in ignored}
    before = about["vision"]["fingerprint"] if part == "adapter" else None
    files = hashed(folder, PARTS[part])
    return config.digest({"files": files, "settings": settings, "vision": before})


def about_of(folder: str | Path, field: str = "edje") -> dict[str, Any]:
    """What a folder says of itself: settings, widths, fingerprints.

    Raises:
        SpecError: for `field`: it is none that training wrote, or files are not what was written.
    """
    rule = "a folder written by EDJE training"
    folder = Path(folder)
    try:
        about = json.loads((folder / ABOUT).read_text("utf-8"))
        if about["format"] != FORMAT:
            problem = f"has the format {about['format']!r}"
            raise SpecError(field, str(folder), f"an EDJE of format {FORMAT}", problem)
        now = {part: fingerprint(folder, part, about) for part in PARTS}
        changed = [part for part in PARTS if about["fingerprints"][part] != now[part]]
        _ = about["dim"], about["text_dim"], about["vision"]["dim"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, SpecError):
            raise
        problem = f"has no {ABOUT}" if isinstance(error, OSError) else f"has a corrupted {ABOUT}"
        raise SpecError(field, str(folder), rule, problem) from None
    for part in changed:
        missing = [name for name in PARTS[part] if "*" not in name and name.endswith("safetensors")]
        missing = [name for name in missing if not (folder / name).is_file()]
        what = f"has no {missing[0]}" if missing else f"has modified files of its {part}"
        raise SpecError(field, str(folder), f"{rule} and unmodified", what)
    return about


def load_adapter(folder: str | Path, field: str = "edje") -> Adapter:
    """The adapter of a folder, for what is done offline; see `Edje.load`."""
    about = about_of(folder, field)
    with _readable(folder, field):
        spec = config.parse(Adapter.Spec, about["adapter"])
        adapter = Adapter(spec, about["vision"]["dim"], about["dim"])
        adapter.load_state_dict(safetensors.torch.load_file(Path(folder) / ADAPTER))
    adapter.to("cuda" if torch.cuda.is_available() else "cpu")
    return adapter.eval().requires_grad_(False)


def computed_in(precision: Precision | None) -> dict[str, Any]:
    """What of a joint encoder's spec makes it compute in a precision; None: nothing.

    >>> computed_in("int8"), computed_in(None)
    ({'dtype': 'float32', 'quantise': 'int8'}, {})
    """
    if precision is None:
        return {}
    in_int8 = precision == "int8"
    return {"dtype": "float32" if in_int8 else precision, "quantise": "int8" if in_int8 else None}


def load_joint(folder: str | Path, field: str = "edje", **changes: Any) -> JointEncoder:
    """The joint encoder of a folder, for what is done online; see `Edje.load`."""
    about = about_of(folder, field)
    with _readable(folder, field):
        spec = config.parse(JointEncoder.Spec, about["joint"] | {"model": str(folder)} | changes)
        joint = JointEncoder(spec, about["text_dim"], may_lack=())
        heads = safetensors.torch.load_file(Path(folder) / HEADS)
        joint.load_state_dict(heads, strict=False)
        if set(heads) != {f"{h}.{w}" for h in ("match", "recover") for w in ("weight", "bias")}:
            raise ValueError(f"{HEADS} has other weights")
        if joint.dim != about["dim"]:
            raise ValueError(f"the model's embeddings have {joint.dim} numbers")
    return joint.eval().requires_grad_(False)


@contextlib.contextmanager
def _readable(folder: str | Path, field: str) -> Iterator[None]:
    """What goes wrong inside is an error of the folder."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (safetensors.SafetensorError, RuntimeError, ValueError, KeyError, OSError) as error:
        rule = "a folder written by EDJE training"
        problem = f"cannot be read ({config.first_line(error)})"
        raise SpecError(field, str(folder), rule, problem) from None


def check_tokens(folder: str | Path, written_by: str, field: str = "edje") -> None:
    """Raises `SpecError` if cached tokens were written by another adapter than a folder's.

    Args:
        written_by: the adapter's fingerprint, as it is kept with the tokens.
    """
    check_adapter(about_of(folder, field), folder, written_by, field)


def check_adapter(
    about: Mapping[str, Any], folder: str | Path, written_by: str, field: str = "edje"
) -> None:
    """`check_tokens` of a folder that was looked at before: `about` is what it says of itself."""
    own = about["fingerprints"]["adapter"]
    if own != written_by:
        rule, problem = f"an EDJE with the index's adapter {written_by}", f"has the adapter {own}"
        raise SpecError(field, str(folder), rule, problem)


def _write(weights: Mapping[str, torch.Tensor], path: Path) -> None:
    safetensors.torch.save_file(
        {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}, path
    )
