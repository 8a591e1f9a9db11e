"""Statistics of an index, which `jobs.status` and evaluation tables show."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from typing import Any

import numpy as np
import pyarrow.compute as pc

from pipeline.compression import MAX_TOKENS
from pipeline.config import SpecError
from pipeline.index import JOBS
from pipeline.index.columns import RERANK_TOKENS, codec_name
from pipeline.index.info import tap_names
from pipeline.index.isotropy import mean_cosine
from pipeline.index.languages import index_language_warnings
from pipeline.index.positions import element_bytes, stored_bytes
from pipeline.index.reader import IndexReader, open_folder


def status(uri: str, num_jobs: int = 3) -> dict[str, Any]:
    """Collects the statistics of an index for `jobs.status`.

    Args:
        uri: URI of the index.
        num_jobs: Maximum number of recent jobs.

    Raises:
        SpecError: The index does not exist or is corrupted.
    """
    index = IndexReader(uri)
    lease = index.lease()
    infos, pooled = index.representations().values(), index.pooled_columns.values()
    encoders = {(info.encoder.name, info.encoder.fingerprint) for info in infos}
    encoders |= {(info.encoder, info.fingerprint) for info in pooled}
    reasons = Counter(index.rejects()["reason"].to_pylist())
    return {
        "index": uri,
        "version": index.version,
        "fragments": len(index.dataset.get_fragments()),
        "items": len(index),
        "lease": lease and f"{lease.job} on {lease.host}, process {lease.pid}",
        "encoders": [{"name": n, "fingerprint": f} for n, f in sorted(encoders)],
        "representations": {
            name: {**representation_stats(index, name), "cosine": _cosine(index, name)}
            for name in index.representations()
        },
        "candidates": candidates_stats(index),
        "taps": tap_names(index.schema),
        "rerank_tokens": rerank_token_stats(index),
        "warnings": index_language_warnings(index, index.representations()),
        "rejects": dict(reasons.most_common()),
        "jobs": recent_jobs(uri, num_jobs, lease.job if lease else None),
    }


def _cosine(index: IndexReader, representation: str) -> float | None:
    """Returns the mean cosine of the vectors, or None for a former codec."""
    try:
        index.representation(representation).resolve_codec()
    except SpecError:
        return None
    return mean_cosine(index, representation)


def rejects(uri: str) -> list[dict[str, Any]]:
    """Returns `reason`, `item_id`, `collection`, `stage` and `detail` of all rejects, sorted."""
    rows = [
        {
            "reason": row["reason"],
            "item_id": row["item_id"],
            "collection": row["source"],
            "stage": row["stage"],
            "detail": row["detail"],
        }
        for row in IndexReader(uri).rejects().to_pylist()
    ]
    return sorted(rows, key=lambda row: (row["reason"], row["collection"], row["item_id"]))


def representation_stats(
    index: IndexReader, representation: str, filter: str | None = None
) -> dict[str, Any]:
    """Computes the size statistics of a representation for all items, or those matching a filter.

    The sizes of a prefix are those of a column with its vectors.

    Returns:
        The settings and these means over the items that have the representation: `vectors`, and in
        bytes `bytes_vectors`, `bytes_assignment` (assignment of tokens to vectors),
        `bytes_positions` (token positions, which all representations of an encoder share) and
        `bytes_all`, their sum. `filled` is the fraction of items that have the representation.
    """
    info = index.representation(representation)
    companions = [name for name in info.token_columns if name in index.schema.names]
    num_rows = num_filled = num_vectors = 0
    num_bytes: Counter[str] = Counter()
    vector_bytes = element_bytes(index.schema.field(info.column).type)
    for batch in index.batches([info.column, *companions], filter=filter):
        filled = np.asarray(pc.is_valid(batch[info.column]))
        num_rows += batch.num_rows
        num_filled += int(filled.sum())
        for name in companions:
            sizes_B = stored_bytes(batch[name])
            if name == info.assignment_column and info.assignment_form == "indices":
                # One token per vector, so a prefix of the vectors has a prefix of the tokens.
                size = element_bytes(index.schema.field(name).type)
                sizes_B = sizes_B.clip(max=size * (info.max_vectors or MAX_TOKENS))
            num_bytes[name] += int(sizes_B[filled].sum())
        lengths = pc.list_value_length(batch[info.column]).fill_null(0).to_numpy()[filled]
        num_vectors += int(lengths.clip(max=info.max_vectors).sum())
    num_bytes[info.column] = num_vectors * vector_bytes
    per_item = max(1, num_filled)
    return {
        "method": info.compressor["name"],
        "num_vectors": info.num_vectors,
        "ratio": info.ratio,
        "codec": codec_name(info.codec),
        "vectors": num_vectors / per_item,
        "bytes_vectors": num_bytes[info.column] / per_item,
        "bytes_assignment": num_bytes[info.assignment_column or ""] / per_item,
        "bytes_positions": sum(num_bytes[p] for p in info.positions.values()) / per_item,
        "bytes_all": sum(num_bytes.values()) / per_item,
        "filled": num_filled / max(1, num_rows),
        "artefact": info.artefact,
        "codec_artefact": info.codec_artefact,
    }


def candidates_stats(index: IndexReader) -> list[dict[str, Any]]:
    """Returns the candidate generators, with their `items` and the number of `coded` ones."""
    return [
        {
            "representation": info.representation,
            "generator": info.generator_name,
            "revision": info.revision,
            "numbers": info.numbers,
            "coded": index.dataset.count_rows(f"`{info.name}` IS NOT NULL"),
            "items": index.dataset.count_rows(f"`{info.representation}` IS NOT NULL"),
        }
        for info in index.candidates_columns.values()
    ]


def rerank_token_stats(index: IndexReader, filter: str | None = None) -> dict[str, Any] | None:
    """Computes means per item of the column `rerank_tokens`, or returns None without it."""
    info = index.rerank_columns.get(RERANK_TOKENS)
    if info is None:
        return None
    num_rows = num_filled = num_tokens = 0
    for batch in index.batches([RERANK_TOKENS], filter=filter):
        num_rows += batch.num_rows
        num_filled += batch.num_rows - batch[RERANK_TOKENS].null_count
        num_tokens += pc.sum(pc.list_value_length(batch[RERANK_TOKENS])).as_py() or 0
    per_item = num_tokens / max(1, num_filled)
    element = index.schema.field(RERANK_TOKENS).type
    return {
        "adapter": info.adapter,
        "tokens": per_item,
        "bytes": per_item * element_bytes(element),
        "filled": num_filled / max(1, num_rows),
    }


def recent_jobs(uri: str, number: int, writer: str | None) -> list[dict[str, Any]]:
    """Returns the summaries of the most recent jobs. The newest job comes first.

    Args:
        writer: Job that holds the lease. Other jobs recorded as "running" were killed.
    """
    filesystem, path = open_folder(uri, JOBS)
    if not filesystem.exists(path):
        return []
    folders = sorted((p.rstrip("/") for p in filesystem.ls(path, detail=False)), reverse=True)
    summaries: list[dict[str, Any]] = []
    for folder in folders:
        if len(summaries) == number:
            break
        with (
            contextlib.suppress(FileNotFoundError, ValueError),  # killed early, or corrupted
            filesystem.open(f"{folder}/summary.json", "r") as file,
        ):
            summary = json.load(file)
            if summary["state"] == "running" and summary["job"] != writer:
                summary["state"] = "killed"
            summaries.append(summary)
    return summaries
