"""Projection of token vectors to fewer dimensions by a principal component analysis."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
import yaml

from examples.collection.table import REFERENCE
from pipeline.config import SpecError
from pipeline.eval.topics import read_qrels
from pipeline.index.reader import IndexReader, id_filter

DIM = 128


def fit_projection(output: Path, dim: int = DIM) -> Path:
    """Writes the projection on the principal components of the answers of *choose*.

    The components are those of the second moments, without a mean, so that the projection is
    linear.

    Args:
        output: Output folder of an evaluation of a slice, whose index has uncompressed vectors.
        dim: Number of dimensions.

    Returns:
        The folder of the projection, for the field `projection` of an encoder.

    Raises:
        SpecError: The folder is not the output of an evaluation of a slice.
    """
    if not (output / "spec.yaml").exists():
        rule = "the output folder of `maxray evaluate examples/collection/evaluate.yaml`"
        raise SpecError("DATA", str(output), rule, "has no spec.yaml")
    spec = yaml.safe_load((output / "spec.yaml").read_text())
    qrels = read_qrels(str(Path(spec["benchmark"]["path"]) / "qrels" / "choose.tsv"), "split")
    answers = sorted({item for items in qrels.values() for item in items})
    moments: Any = 0
    reader = IndexReader(spec["index"])
    name = REFERENCE.partition(".")[0]
    for _, vectors, _ in reader.tokens(name, filter=id_filter(answers)):
        moments = moments + vectors.astype(np.float64).T @ vectors
    components = np.linalg.eigh(moments)[1].T[::-1][:dim]  # the largest eigenvalues are the last
    folder = output / f"projection_{dim}"
    folder.mkdir(exist_ok=True)
    weights = {"weight": np.ascontiguousarray(components, np.float32)}
    safetensors.numpy.save_file(weights, folder / "projection.safetensors")
    return folder
