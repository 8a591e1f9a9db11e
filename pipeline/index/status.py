"""What an index holds, in numbers: for `jobs.status` and for evaluation tables."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from typing import Any

import numpy as np
import pyarrow.compute as pc

from pipeline.index import JOBS
from pipeline.index.columns import RERANK_TOKENS, codec_name
from pipeline.index.info import tap_names
from pipeline.index.positions import bytes_of_element, stored_bytes
from pipeline.index.reader import Index, open_folder


def status(uri: str, num_jobs: int = 3) -> dict[str, Any]:
    """Everything `jobs.status` prints.

    Raises:
        SpecError: there is no whole index at the URI.
    """
    index = Index(uri)
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
        "representations": {name: stored(index, name) for name in index.representations()},
        "taps": tap_names(index.schema),
        "rerank_tokens": stored_tokens(index),
        "rejects": dict(reasons.most_common()),
        "jobs": last_jobs(uri, num_jobs, lease.job if lease else None),
    }


def stored(index: Index, representation: str, filter: str | None = None) -> dict[str, Any]:
    """What a representation takes, of all items or of those that a Lance filter lets through.

    Returns:
        `vectors`: mean per item; bytes per item that has it: `bytes_vectors`, `bytes_assignment`
        (which input token each vector stands for), `bytes_positions` (where the input tokens
        stand, which all representations of an encoder share) and `bytes_all`, their sum; `filled`:
        share of the items that have it.
    """
    info = index.representation(representation)
    others = [name for name in info.token_columns if name in index.schema.names]
    num_rows = num_filled = num_vectors = 0
    num_bytes: Counter[str] = Counter()
    columns = [representation, *others]
    for batch in index.batches(columns, filter=filter):
        filled = np.asarray(pc.is_valid(batch[representation]))
        num_rows += batch.num_rows
        num_filled += int(filled.sum())
        for name in columns:
            num_bytes[name] += int(stored_bytes(batch[name])[filled].sum())
        lengths = pc.list_value_length(batch[representation]).fill_null(0)
        num_vectors += int(lengths.to_numpy()[filled].sum())
    per_item = max(1, num_filled)
    return {
        "method": info.compressor["name"],
        "num_vectors": info.compressor.get("num_vectors"),
        "ratio": info.compressor.get("ratio"),
        "codec": codec_name(info.codec),
        "vectors": num_vectors / per_item,
        "bytes_vectors": num_bytes[representation] / per_item,
        "bytes_assignment": num_bytes[info.support_column or ""] / per_item,
        "bytes_positions": sum(num_bytes[p] for p in info.positions.values()) / per_item,
        "bytes_all": sum(num_bytes.values()) / per_item,
        "filled": num_filled / max(1, num_rows),
        "artefact": info.artefact,
        "codec_artefact": info.codec_artefact,
    }


def stored_tokens(index: Index, filter: str | None = None) -> dict[str, Any] | None:
    """What `rerank_tokens` takes, as `stored` has it of a representation; None without them.

    Returns:
        `tokens` and `bytes`: mean over the items that have any; `filled`; the `adapter`.
    """
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
        "bytes": per_item * bytes_of_element(element),
        "filled": num_filled / max(1, num_rows),
    }


def last_jobs(uri: str, number: int, writer: str | None) -> list[dict[str, Any]]:
    """Returns the summaries of the last jobs, newest first.

    Args:
        uri: URI of the index.
        number: Maximum number of jobs.
        writer: Job that holds the lease; other jobs whose record says `running` were killed.
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
            contextlib.suppress(FileNotFoundError, ValueError),  # killed early, or damaged
            filesystem.open(f"{folder}/summary.json", "r") as file,
        ):
            summary = json.load(file)
            if summary["state"] == "running" and summary["job"] != writer:
                summary["state"] = "killed"
            summaries.append(summary)
    return summaries
