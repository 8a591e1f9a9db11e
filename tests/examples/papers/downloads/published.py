"""The data sets of miniatures in the form in which servers publish them, on a local hub."""

from __future__ import annotations

import functools
import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from examples.papers.downloads.spec import DataSet, Download
from examples.papers.tables import layouts
from examples.papers.tables.spec import load_data_sets
from examples.papers.verbs.run import PAPERS
from tests.datasets import make_tar_gz, make_zip, write_files
from tests.hub import Hub

#: Names of the members of archives, by regular expression of the paths below the data folder.
MEMBERS = {
    r".+/msrvtt_data\.zip": (r"msrvtt/(MSRVTT_.+)", r"msrvtt_data/\1"),
    r".+/MSRVTT\.zip": (r"msrvtt/videos/(.+)", r"MSRVTT/videos/all/\1"),
    r".+/caption_datasets\.zip": (r"(?:flickr30k|coco)/(dataset_.+)", r"\1"),
    r".+/annotations\.zip": (r"flickr30k_entities/((?:Sentences|Annotations)/.+)", r"\1"),
    r".+/((?:train|val)2014)\.zip": (r"coco/((?:train|val)2014/.+)", r"\1"),
    r".+/BEIR/datasets/.+\.zip": (r"beir/(.+)", r"\1"),
    r"flickr30k-images\.zip": (r"flickr30k/images/(.+)", r"flickr30k-images/\1"),
    r".+/mmeb_v1\.tar\.gz": (r"mmeb/image-tasks/(.+)", r"MMEB/\1"),
    r".+/video_ret\.tar\.gz": (
        r"mmeb/video-tasks/frames/video_ret/([^/]+)/(.+)",
        r"data/ziyan/video_retrieval/\1/frames/\2",
    ),
}


#: Data sets that differ from another one only in the names of their sources.
SAME = re.compile(r"vidore_v1_(?!docvqa)|vidore_v2_(?!esg$)|beir_(?!arguana)")


def layout(folder: Path) -> Path:
    """Writes the data sets in the layout that tables read."""
    for name, write in layouts.writers(load_data_sets(PAPERS)).items():
        if not SAME.match(name):
            write(folder)
    return folder


@functools.cache
def layout_files(folder: Path) -> dict[str, bytes]:
    """Returns the files of a layout, which does not change."""
    return files(folder)


def files(folder: Path) -> dict[str, bytes]:
    """Returns the visible files below a folder, except the cards of the hub."""
    paths = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*")}
    return {
        name: path.read_bytes()
        for name, path in paths.items()
        if path.is_file() and not re.search(r"(^|/)\.|README.md$", name)
    }


def archive(source: str, data: Path) -> bytes:
    """Returns a published archive of files in the layout `data`, and one that is not needed."""
    pattern, name = next(v for key, v in MEMBERS.items() if re.fullmatch(key, source))
    members = [("LICENSE", b"")]
    for path, content in layout_files(data).items():
        if match := re.fullmatch(pattern, path):
            members.append((match.expand(name), content))
    assert len(members) > 1, source
    return make_tar_gz(members) if source.endswith("gz") else make_zip(members)


def _table(rows: list[dict[str, Any]]) -> bytes:
    stream = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), stream)
    return stream.getvalue()


def distillation_lists(data: Path) -> dict[str, bytes]:
    """Returns the tables of MS MARCO. One of them has lists as text."""
    pairs = [json.loads(line) for line in (data / "train.jsonl").read_text().splitlines()]
    texts = [json.loads(line) for line in (data / "documents.jsonl").read_text().splitlines()]
    unused = {"document_id": "unused", "text": "A document of no list."}
    lists = [
        {
            "query_id": number,
            "document_ids": [pair["document_id"], *pair["negatives"], "beyond the 16 ways"],
            "scores": [*pair["scores"], 0.0],
        }
        for number, pair in enumerate(pairs)
    ]
    as_text = [
        {**row, **{key: str(row[key]) for key in ("document_ids", "scores")}} for row in lists
    ]
    return {
        "queries/train-00000-of-00001.parquet": _table(
            [{"query_id": number, "text": pair["query"]} for number, pair in enumerate(pairs)]
        ),
        "documents/train-00000-of-00001.parquet": _table([unused, *texts]),
        "train/train-00000-of-00002.parquet": _table(lists[:2]),
        "train/train-00001-of-00002.parquet": _table(as_text[2:]),
        "train_unnormalised/train-00000-of-00001.parquet": b"not downloaded",
    }


def video_queries(data: Path) -> dict[str, bytes]:
    """Returns the file of a video retrieval task, whose format and columns depend on the task."""
    rows = pq.read_table(data / "test-00000-of-00001.parquet").to_pylist()
    task, pairs = data.name, [(row["video_id"], row["caption"]) for row in rows]
    if task == "YouCook2":
        table = [{"id": v, "video_path": f"{v}.mp4", "sentence": c} for v, c in pairs]
        return {"data/val-00000-of-00001.parquet": _table(table), "data/test-0.parquet": b"other"}
    variants: dict[str, Callable[[str, str], dict[str, Any]]] = {
        "MSR-VTT": lambda v, c: {"video_id": v, "video": f"{v}.mp4", "caption": c},
        "DiDeMo": lambda v, c: {"video": f"test/{v}.mp4", "caption": c},
        "MSVD": lambda v, c: {"video_id": v, "video": f"{v}.avi", "caption": [c, "another"]},
        "VATEX": lambda v, c: {"videoID": v, "enCap": [c, "another"]},
    }
    content = [variants[task](*pair) for pair in pairs]
    text = "\n".join(map(json.dumps, content)) if task == "VATEX" else json.dumps(content)
    name = "msrvtt_test_1k.json" if task == "MSR-VTT" else f"{task.lower()}_test.json"
    return {name: text.encode(), name.replace("test", "train"): b"other"}


def publish(server: Hub, data: Path, folder: Path) -> dict[str, DataSet]:
    """Publishes the downloads of `data.yaml` and returns its data sets with local sources.

    The commits, hashes and numbers of rows are omitted.
    """
    found = {}
    repositories: dict[str, dict[str, bytes]] = {}
    for name, data_set in load_data_sets(PAPERS).items():
        if SAME.match(name):
            continue
        downloads = []
        for download in data_set.downloads:
            content = _content(download, data)
            if download.hub is not None:
                repositories.setdefault(download.hub, {}).update(content)
                downloads.append(download.model_copy(update={"revision": None}))
            else:
                ((_, file),) = content.items()
                downloads.append(local(server, folder, download, file))
        found[name] = data_set.model_copy(update={"downloads": downloads, "counts": {}})
    for repository, content in repositories.items():
        source = folder / repository
        write_files(source, list(content.items()))
        server.publish(repository, source, kind="datasets")
    return found


def local(server: Hub, folder: Path, download: Download, content: bytes) -> Download:
    """Serves the file of a download and returns the download with its local URL."""
    name = download.source.rpartition("/")[2]
    write_files(folder, [(f"urls/{name}", content)])
    server.blobs[name] = folder / "urls" / name
    return download.model_copy(update={"url": f"{server.url}/blobs/{name}", "hash": None})


def _content(download: Download, data: Path) -> dict[str, bytes]:
    """Returns the published files of a download."""
    if download.convert is not None:
        assert download.to is not None
        return globals()[download.convert](data / download.to)
    if download.members is not None:
        (name,) = download.patterns or [download.source]
        return {name: archive(name, data)}
    assert download.to is not None
    if download.url is not None:
        path = data / download.to
        return {download.url: path.read_bytes() if path.exists() else b"1\n"}
    return files(data / download.to)
