"""Weights of query tokens by their inverse document frequency (IDF).

The document frequencies are an artefact of the index, which `pipeline.search.token_weights_job`
writes. Its hash is an entry of the configuration of the dataset.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from pipeline.config import SpecError
from pipeline.index.artefacts import load_artefact
from pipeline.index.info import RepresentationInfo
from pipeline.index.reader import Index

#: Prefix of the entries of the dataset's configuration. The encoder and the column of texts follow.
CONFIG_KEY = "maxray.token_frequencies"


@dataclass(frozen=True)
class TokenFrequencies:
    """Numbers of items that contain the tokens of an encoder.

    Attributes:
        num_items: Number of items.
        counts: Number of items per token in lower case. Tokens in no item are missing.
        markers: Tokens that the encoder adds to every query, such as `[CLS]`.
    """

    num_items: int
    counts: dict[str, int]
    markers: frozenset[str]

    def weights(self, token_texts: Sequence[str], power: float) -> torch.Tensor:
        """Computes the weights of the tokens of a query.

            idf(t) = ln(1 + (N - n_t + 0.5) / (n_t + 0.5))

        Here N is the number of items and n_t the number of items with token t. The weights of the
        tokens of the text are `idf(t) ** power`, divided by their mean over the query. The weights
        of marker tokens are 1. The scale of the scores therefore remains about the same.

        Args:
            token_texts: Texts of the tokens of the query.
            power: Exponent of the inverse document frequency, at least 0.

        Returns:
            (M,) float32.

        >>> frequencies = TokenFrequencies(4, {"the": 4, "wing": 1}, frozenset(["[CLS]"]))
        >>> weights = frequencies.weights(["[CLS]", "The", "wing"], 1.0)
        >>> [round(weight, 2) for weight in weights.tolist()]
        [1.0, 0.16, 1.84]
        """
        is_text_M = np.array([token not in self.markers for token in token_texts], bool)
        counts_M = np.array([self.counts.get(token.lower(), 0) for token in token_texts])
        idf_M = np.log1p((self.num_items - counts_M + 0.5) / (counts_M + 0.5)) ** power
        weights_M = np.ones(len(token_texts))
        if is_text_M.any():
            weights_M[is_text_M] = idf_M[is_text_M] / idf_M[is_text_M].mean()
        return torch.from_numpy(weights_M.astype(np.float32))

    def to_artefact(self) -> dict[str, np.ndarray]:
        """Converts the frequencies to arrays. Equal frequencies yield equal arrays."""
        tokens = sorted(self.counts)
        return {
            "num_items": np.array(self.num_items),
            "tokens": _to_bytes(tokens),
            "counts": np.array([self.counts[token] for token in tokens], np.int64),
            "markers": _to_bytes(sorted(self.markers)),
        }

    @classmethod
    def from_artefact(cls, artefact: dict[str, np.ndarray]) -> TokenFrequencies:
        """Creates frequencies from the arrays of `to_artefact`."""
        tokens, markers = (json.loads(artefact[name].tobytes()) for name in ("tokens", "markers"))
        counts = dict(zip(tokens, artefact["counts"].tolist(), strict=True))
        return cls(int(artefact["num_items"]), counts, frozenset(markers))


def _to_bytes(texts: list[str]) -> np.ndarray:
    """Encodes texts as JSON. An array of strings would need the length of the longest for each."""
    return np.frombuffer(json.dumps(texts).encode(), np.uint8)


# -- the artefact of an index ----------------------------------------------------------------------


def artefact_name(index: Index, info: RepresentationInfo) -> str | None:
    """Returns the hash of the token frequencies for a representation, or None without any."""
    return index.dataset.config().get(config_key(info))


def check_token_frequencies(index: Index, info: RepresentationInfo, idf_power: float) -> str:
    """Returns the hash of the token frequencies for a representation.

    Raises:
        SpecError: They were not counted.
    """
    name = artefact_name(index, info)
    if name is None:
        problem = f"needs token frequencies, which {info.name} lacks"
        note = "; count them with `maxray token_frequencies INDEX`"
        raise SpecError("idf_power", idf_power, "null", problem, note)
    return name


def token_frequencies(index: Index, info: RepresentationInfo, idf_power: float) -> TokenFrequencies:
    """Loads the token frequencies for a representation.

    Args:
        index: Index.
        info: Representation.
        idf_power: Value of the search option that needs them, for messages.

    Raises:
        SpecError: They were not counted, or their artefact is missing or corrupted.
    """
    name = check_token_frequencies(index, info, idf_power)
    return TokenFrequencies.from_artefact(load_artefact(index.uri, name, metadata(info)))


def config_key(info: RepresentationInfo) -> str:
    """Returns the key of the entry of the dataset's configuration."""
    return f"{CONFIG_KEY}.{info.encoder.fingerprint}.{info.text_column}"


def metadata(info: RepresentationInfo) -> dict[str, Any]:
    """Returns the settings for which the tokens were counted."""
    return {"encoder": info.encoder.fingerprint, "text_column": info.text_column}
