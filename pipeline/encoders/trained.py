"""Folders of trained compressors, which training writes next to the weights of the encoder.

A folder has the learned tokens that the encoder appends to items, the parameters of the compressor
if it has any, and the hashes of the encoder's weights with which both were trained.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy
import safetensors.torch
import torch
from transformers import AutoTokenizer

from pipeline.config import ComponentSpec, SpecError, TrainedSpec, dump, reading
from pipeline.encoders import Trainable
from pipeline.encoders.appended import VOCABULARY, AppendedTokens, AppendedTokensSpec
from pipeline.encoders.loading import CheckpointFields, hash_files, load_processor, sha256
from pipeline.registry import COMPRESSORS, ENCODERS

#: Folder of a trained compressor in the output folder of training, and its files.
SUBFOLDER = "compressor"
#: Record that training writes next to the weights.
TRAINING = "training.json"
METADATA = "compressor.json"
TOKENS = "appended_tokens.safetensors"
MODULE = "compressor.safetensors"
#: File of a projection that was trained without the model.
PROJECTION = "projection.safetensors"


@dataclass(frozen=True)
class TrainedCompressor:
    """Content of the file `compressor.json` in the folder of a trained compressor.

    Attributes:
        compressor: Resolved spec of the compressor.
        encoder: Name of the encoder with which it was trained.
        encoder_weights: Sorted SHA-256 hashes of the encoder's weight files after training.
        dim: Dimension of the encoder's token vectors.
        sha256: Hashes of the weight files in the folder, by name.
    """

    compressor: dict[str, Any]
    encoder: str
    encoder_weights: list[str]
    dim: int
    sha256: dict[str, str]

    def __post_init__(self) -> None:
        if not isinstance(self.compressor, dict) or "name" not in self.compressor:
            raise ValueError("the compressor has no name")

    @classmethod
    def read(cls, folder: str, field: str) -> tuple[TrainedCompressor, Path]:
        """Reads the description, with its folder, and checks the hashes of the weights.

        Raises:
            SpecError: The folder does not exist, is not that of a trained compressor, or its
                weights are modified or corrupted.
        """
        path = Path(folder)
        if (path / SUBFOLDER).is_dir():
            path = path / SUBFOLDER
        rule = "the folder of a trained compressor"
        errors = (ValueError, TypeError, RecursionError)
        with reading(field, folder, rule, *errors, problem=f"has an invalid {METADATA}"):
            described = cls(**json.loads((path / METADATA).read_text("utf-8")))
        if hash_files(path, ["*.safetensors"]) != described.sha256:
            raise SpecError(field, folder, rule, "has modified or corrupted weights")
        return described, path

    def check_encoder(self, encoder: str, hashes: list[str], field: str, folder: str) -> None:
        """Checks that the compressor is used with the encoder with which it was trained."""
        if (encoder, hashes) != (self.encoder, self.encoder_weights):
            rule = "the folder of a compressor that was trained with the weights of the encoder"
            problem = "was trained with other weights"
            if encoder != self.encoder:
                problem = f"was trained with the encoder {self.encoder}"
            note = "; the encoder must load the model, adapter and projection of the same run"
            raise SpecError(field, folder, rule, problem, note)

    def check_settings(self, compressor: TrainedSpec) -> None:
        """Checks that a compressor has the settings of the trained one."""
        name = self.compressor["name"]
        if name != compressor.name:
            rule, problem = f"the folder of a trained {compressor.name}", f"has a trained {name}"
            raise SpecError("weights", compressor.weights, rule, problem)
        trained = COMPRESSORS.resolve(self.compressor)
        for field, value in dump(compressor).items():
            if field != "weights" and value != (expected := getattr(trained, field)):
                note = "; it cannot be changed after training"
                rule = f"{expected}, as in {compressor.weights}"
                raise SpecError(field, value, rule, note=note)


def write_trained_compressor(
    folder: Path,
    compressor: Mapping[str, Any],
    encoder: str,
    encoder_weights: list[str],
    dim: int,
    appended: AppendedTokens | None,
    module: torch.nn.Module | None,
) -> None:
    """Writes the subfolder of a trained compressor into the output folder of a trained model."""
    path = folder / SUBFOLDER
    path.mkdir()
    if appended is not None:
        weight_MH = appended.weight.detach().cpu().contiguous()
        safetensors.torch.save_file({"weight": weight_MH}, path / TOKENS)
    if module is not None:
        weights = {name: t.detach().cpu().contiguous() for name, t in module.state_dict().items()}
        safetensors.torch.save_file(weights, path / MODULE)
    sha256 = hash_files(path, ["*.safetensors"])
    described = TrainedCompressor(dict(compressor), encoder, encoder_weights, dim, sha256)
    (path / METADATA).write_text(json.dumps(asdict(described), indent=1), "utf-8")


def supports_appended_tokens(encoder_class: type[Any]) -> bool:
    """Checks whether learned tokens can be appended to the items of an encoder."""
    return issubclass(encoder_class.Spec, AppendedTokensSpec)


def weight_hashes(encoder_class: type[Trainable[Any]], spec: Any) -> list[str]:
    """Returns the sorted SHA-256 hashes of the weight files of an encoder."""
    return sorted(map(sha256, encoder_class.weight_files(spec)))


def appended_hashes(spec: AppendedTokensSpec) -> dict[str, Any]:
    """Returns the fields of an `AppendedTokensSpec` for fingerprints, if not at their defaults.

    They do not affect query vectors, but the items of an index must have the same ones. Appended
    tokens are represented by their hash.
    """
    hashes: dict[str, Any] = {} if spec.normalise else {"normalise": False}
    if spec.appended_tokens == VOCABULARY:  # the weights are hashed
        hashes["appended_tokens"] = VOCABULARY
    elif spec.appended_tokens is not None:
        described, _ = TrainedCompressor.read(spec.appended_tokens, "appended_tokens")
        hashes["appended_tokens"] = described.sha256[TOKENS]
    return hashes


def check_trained_with(
    folder: str, field: str, encoder_class: type[Trainable[Any]], spec: Any
) -> TrainedCompressor:
    """Checks that a compressor was trained with the weights of an encoder (`SpecError`)."""
    described, _ = TrainedCompressor.read(folder, field)
    described.check_encoder(spec.name, weight_hashes(encoder_class, spec), field, folder)
    return described


def load_appended_tokens(encoder: Trainable[Any], spec: Any) -> AppendedTokens | None:
    """Loads the appended tokens that the spec of an encoder with loaded weights names, if any."""
    folder = getattr(spec, "appended_tokens", None)
    if folder is None:
        return None
    if folder == VOCABULARY:
        embeddings: Any = encoder.embedding.weight
        return AppendedTokens(embeddings[vocabulary_ids(spec)].detach().float())
    check_trained_with(folder, "appended_tokens", type(encoder), spec)
    with _open_tokens(folder) as file:
        return AppendedTokens(file.get_tensor("weight").float())


def check_appended_tokens(
    spec: AppendedTokensSpec, width: int, field: str = "", size: int = 0, limit: int = 0
) -> None:
    """Checks the appended tokens that the spec of an encoder names, if any, without the model.

    `width` is that of the model's input embeddings. `field` names the maximum `size` of the
    sequence to which the tokens are appended, and `limit` is the number of positions of the model,
    or 0 for no limit.
    """
    folder = spec.appended_tokens
    if folder is None:
        return
    num_tokens, actual_width = appended_shape(spec)
    if actual_width not in (width, None):
        rule = f"the folder of a trained compressor with tokens of width {width}"
        raise SpecError("appended_tokens", folder, rule, f"has tokens of width {actual_width}")
    check_positions(num_tokens, field, size, limit)


def appended_shape(spec: AppendedTokensSpec) -> tuple[int, int | None]:
    """Returns the number and the width of appended tokens, which is null for a vocabulary."""
    assert spec.appended_tokens is not None
    if spec.appended_tokens == VOCABULARY:
        return len(vocabulary_ids(spec)), None
    with _open_tokens(spec.appended_tokens) as file:
        num_tokens, width = file.get_slice("weight").get_shape()
    return num_tokens, width


def vocabulary_ids(spec: AppendedTokensSpec) -> list[int]:
    """Returns the ids of the appended tokens in the vocabulary of a checkpoint."""
    vocabulary: dict[str, int] = {}
    if isinstance(spec, CheckpointFields):
        vocabulary = load_processor(spec, AutoTokenizer).get_added_vocab()
    names = map("<|mem{}|>".format, itertools.count())
    ids = [vocabulary[name] for name in itertools.takewhile(vocabulary.__contains__, names)]
    if not ids:
        rule = "the folder of a trained compressor, unless the model has the token <|mem0|>"
        raise SpecError("appended_tokens", VOCABULARY, rule)
    return ids


def check_positions(num_tokens: int, field: str, size: int, limit: int) -> None:
    """Checks that appended tokens do not exceed the positions, see `check_appended_tokens`."""
    if limit and num_tokens >= limit:
        rule = f"fewer than {limit} tokens, the number of positions of the model"
        raise SpecError("appended_tokens", num_tokens, rule)
    if limit and size + num_tokens > limit:
        rule = f"at most {limit - num_tokens} with {num_tokens} appended tokens"
        raise SpecError(field, size, rule, f"exceeds the {limit} positions of the model")


def load_parameters(folder: str) -> dict[str, np.ndarray]:
    """Loads the parameters of a trained compressor by name."""
    _, path = TrainedCompressor.read(folder, "weights")
    rule = "the folder of a trained compressor with parameters"
    problem = f"has no readable {MODULE}"
    with reading("weights", folder, rule, safetensors.SafetensorError, problem=problem):
        return safetensors.numpy.load_file(path / MODULE)


def trained_encoder(folder: str, field: str) -> ComponentSpec:
    """Returns the spec of an encoder that loads a trained model with its appended tokens."""
    described, _ = TrainedCompressor.read(folder, field)
    if TOKENS not in described.sha256:
        raise SpecError(field, folder, "the folder of a model with appended tokens", "has none")
    rule, problem = "the output folder of contrastive training", f"has an invalid {TRAINING}"
    with reading(field, folder, rule, ValueError, KeyError, TypeError, problem=problem):
        learner = json.loads(Path(folder, TRAINING).read_text("utf-8"))["spec"]["learner"]
        fields, trainable = dict(learner["encoder"]), learner["trainable"]
    fields |= trained_fields(fields, trainable, folder)
    return ENCODERS.resolve({**fields, "appended_tokens": folder})


def trained_fields(
    encoder: Mapping[str, Any], trainable: str, folder: str
) -> dict[str, str | None]:
    """Returns the fields of an encoder's spec that load the weights after contrastive training."""
    if trainable == "all":
        fields: dict[str, str | None] = {"model": folder, "revision": None, "adapter": None}
        if encoder.get("projection", "identity") != "identity":  # the model contains it
            fields["projection"] = None
        return fields
    if trainable == "lora":
        return {"adapter": folder}
    return {"projection": folder} if Path(folder, PROJECTION).is_file() else {}


@contextlib.contextmanager
def _open_tokens(folder: str) -> Iterator[Any]:
    _, path = TrainedCompressor.read(folder, "appended_tokens")
    rule = "the folder of a trained compressor with appended tokens"
    errors, problem = (ValueError, safetensors.SafetensorError), f"has no readable {TOKENS}"
    with (
        reading("appended_tokens", folder, rule, *errors, problem=problem),
        safetensors.safe_open(path / TOKENS, "pt") as file,
    ):
        yield file
