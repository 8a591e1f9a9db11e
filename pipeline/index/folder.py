"""Index of the files in folders: the spec of its job, and the account of the files."""

from __future__ import annotations

import glob
import itertools
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

import yaml

from pipeline.config import SpecError, dump, location
from pipeline.data.base import Source
from pipeline.data.combined import Combined
from pipeline.data.files import escape, existing_root, open_root
from pipeline.data.folder import INDEX_MEMBER, KINDS, OTHER, Folder
from pipeline.defaults import CODEC, COMPRESSOR
from pipeline.extras import is_installed
from pipeline.index import JOBS, SUFFIX, job
from pipeline.index.checks import check
from pipeline.index.executor import Executor
from pipeline.index.info import representation_infos
from pipeline.index.listing import id_hash
from pipeline.index.reader import IndexReader, contains_index, exists, open_folder, quote
from pipeline.index.spec import IndexResources, IndexSpec
from pipeline.index.upsert import stored_representation
from pipeline.paths import is_uri
from pipeline.runtime.text import Table

#: Representations of a new index: all vectors, and the default budget.
REPRESENTATIONS = (
    {"compressor": "none", "codec": CODEC, "id": "full"},
    {"compressor": COMPRESSOR, "codec": CODEC},
)
#: Recognisers of the encoder `transcript`, and the packages that they need.
RECOGNISERS = {"ocr": "rapidocr", "speech": "pocketsphinx"}
#: Reason of the default encoder for files without words, and what to do about it.
NO_WORDS, NO_WORDS_NOTE = "no text, no speech", "; --see finds images and frames by what they show"
#: Representation of the vectors of `--see`.
SEEN = {"compressor": "none", "field": "image", "id": "seen"}


def folder_spec(
    paths: Sequence[str],
    index: str | None = None,
    encoder: str | Mapping[str, Any] = "minilm",
    see: str | None = None,
) -> dict[str, Any]:
    """Returns the spec of the job that indexes folders and files.

    Args:
        paths: Folders, files and glob patterns; local or URIs.
        index: URI of the index. Defaults to `FOLDER.maxray` beside a single folder or file.
        encoder: Encoder. The default, `minilm`, also encodes the text that OCR and speech
            recognition find, if they are installed.
        see: Checkpoint of CLIP or SigLIP, a folder or a name on the hub, which encodes images and
            video frames. An index that has one keeps it.

    Raises:
        SpecError: A path does not exist or is an index, or the index must be named.
    """
    folders: dict[str, list[str]] = {}
    paths = [location(path, "path") for path in paths]
    for path in paths:
        folder, name = _split(path)
        folders.setdefault(folder, []).append(name)
    if index is None:
        filesystem, first = open_root(paths[0])
        is_root = "/" not in first.rstrip("/")  # beside a bucket is another bucket
        if len(paths) > 1 or is_root or not filesystem.exists(first):
            rule = "given for several paths, for a pattern and for the root of a storage"
            raise SpecError("index", None, rule, note="; use --index")
        index = f"{paths[0].rstrip('/')}{SUFFIX}"
    index = location(index, "index")
    sources = [_source(folder, names) for folder, names in folders.items()]
    if encoder == "minilm":
        missing = [f for f, module in RECOGNISERS.items() if not is_installed(module)]
        if len(missing) < len(RECOGNISERS):
            encoder = {"name": "transcript", **dict.fromkeys(missing)}
    columns: list[Any] = list(REPRESENTATIONS)
    if exists(index) and contains_index(index):
        stored = representation_infos(IndexReader(index).dataset.schema).values()
        columns = [dump(stored_representation(info)) for info in stored] or columns
        models = [info.encoder.spec["model"] for info in stored if info.field == "image"]
        see = next(iter(models), None) if see is None else see
    source = sources[0] if len(sources) == 1 else sources
    spec = {"index": index, "source": source, "encoder": encoder}
    if see is not None:
        spec["see"] = {"name": "dual", "model": see, "layer": "single"}
        if all(column.get("field") != "image" for column in columns):
            columns.append(SEEN)
    return {**spec, "representations": columns}


def _split(path: str) -> tuple[str, str]:
    """Returns the folder of a path, and the pattern of a file in it, or "" for the folder."""
    path = path if is_uri(path) else os.path.abspath(path)
    folder, _, name = path.rpartition("/")
    try:
        fs, location = existing_root(path)
    except SpecError:
        literal = re.split(r"/(?=[^/]*[*?[])", path, maxsplit=1)
        if len(literal) == 1:
            raise
        return literal[0], literal[1]
    if not fs.isdir(location):
        return folder, glob.escape(name)
    if fs.exists(f"{location}/{INDEX_MEMBER}"):  # other folders may have a member `jobs`
        raise SpecError("path", path, "a folder of files", "is an index; search it, or omit it")
    return path.rstrip("/"), ""


def _source(folder: str, patterns: Sequence[str]) -> dict[str, Any]:
    """Returns the source of a folder. The ids of its files begin with its name."""
    parent, _, name = folder.rpartition("/")
    if parent.endswith(":/") or not name:  # the root of a storage
        parent, name = folder or "/", ""
    paths = [f"{glob.escape(name)}/{pattern}".strip("/") for pattern in patterns]
    fields = {"path": parent or "/", "only": paths if all(paths) else []}
    return {"name": "folder", **fields, "collection": PurePosixPath(folder).name or "files"}


@dataclass(frozen=True)
class FileResult:
    """Result of indexing a file.

    Attributes:
        kind: Its type, a key of `pipeline.data.folder.KINDS`, or "other".
        status: "indexed", "unchanged" or "rejected".
        num_items: Number of its items in the index.
        reason: Reason why the file, or a part of it, was rejected; else empty.
    """

    path: str
    kind: str
    status: str
    num_items: int
    reason: str


@dataclass(frozen=True)
class Account:
    """Results of all files. `str` formats them as a table by type, and the rejected files."""

    files: list[FileResult]
    counts: job.Counts

    def __str__(self) -> str:
        columns = ("type", "files", "indexed", "unchanged", "rejected", "items")
        rows = [_row(kind, [f for f in self.files if f.kind == kind]) for kind in (*KINDS, OTHER)]
        rows = [row for row in rows if row[1] != "0"]
        lines = [Table([columns, *rows, _row("all", self.files)]).text()]
        by_reason: dict[str, list[FileResult]] = {}
        for file in self.files:
            if file.reason:
                part = "" if file.status == "rejected" else "parts of "
                by_reason.setdefault(f"{part}files: {file.reason}", []).append(file)
        for reason, files in sorted(by_reason.items(), key=lambda entry: -len(entry[1])):
            shown = job.examples([repr(file.path) for file in files])
            is_seen = any(file.kind in ("image", "video") for file in files)
            note = NO_WORDS_NOTE if reason.endswith(NO_WORDS) and is_seen else ""
            lines.append(f"rejected {reason}: {len(files):,} ({shown}){note}")
        return "\n".join(lines)


def _row(name: str, files: Sequence[FileResult]) -> tuple[str, ...]:
    counts = Counter(file.status for file in files)
    statuses = (counts[status] for status in ("indexed", "unchanged", "rejected"))
    numbers = (len(files), *statuses, sum(file.num_items for file in files))
    return (name, *(f"{number:,}" for number in numbers))


def index_files(
    spec: IndexSpec,
    resources: IndexResources,
    *,
    job_id: str,
    report: Callable[[str], None],
    executor: Executor | None = None,
    **options: Any,
) -> Account:
    """Indexes the source `folder` of a spec, and returns what became of each file.

    Rows of changed files are replaced, and those of deleted files removed.

    Args:
        options: Further arguments of `pipeline.index.job.run`.
    """
    check(spec)
    _check_same_folders(spec)
    before = _documents(spec)
    options = {"remove_missing": None, **options}
    counts = job.run(spec, resources, job=job_id, report=report, executor=executor, **options)
    after = _documents(spec)
    source = spec.build_source()
    whole, parts = dict[str, str](), dict[str, str]()
    for reject in IndexReader(spec.index).rejects().to_pylist():
        if reject["source"] in source.collections:
            name, *others = _documents_of_id(reject["item_id"])
            whole.setdefault(name, reject["reason"])
            parts |= {other: reject["reason"] for other in others if other not in parts}
    files = []
    for entry in itertools.chain.from_iterable(folder.entries() for folder in folders(source)):
        name = escape(entry.path)
        reason = whole.get(name) or parts.get(name, "")
        status = "unchanged" if before.get(name) == after.get(name) else "indexed"
        if name not in after or name in whole:
            status, reason = "rejected", reason or "changed while it was read; run again"
        number = after.get(name, (0, 0))[0]
        files.append(FileResult(name, entry.kind, status, number, reason))
    return Account(files, counts)


def folders(source: Source) -> list[Folder]:
    """Returns the folders of a source."""
    sources = source.parts if isinstance(source, Combined) else [source]
    return [part for part in sources if isinstance(part, Folder)]


def _documents(spec: IndexSpec) -> dict[str, tuple[int, int]]:
    """Returns the number and a hash of the items of each document of the source."""
    found: dict[str, tuple[int, int]] = {}
    if not (exists(spec.index) and contains_index(spec.index)):
        return found
    columns = ["parent_id", "item_id", "revision"]
    condition = f"source IN ({', '.join(map(quote, spec.build_source().collections))})"
    for batch in IndexReader(spec.index).batches(columns, filter=condition):
        for parent, *item in zip(*(batch[name].to_pylist() for name in columns), strict=True):
            number, state = found.get(parent, (0, 0))
            found[parent] = number + 1, state ^ id_hash(str(item))
    return found


def _documents_of_id(item_id: str) -> Iterator[str]:
    """Yields the ids of the documents to which a rejected id may belong."""
    name = re.sub(r"~\d{6}:\d+$", "", item_id)
    yield name
    while match := re.match(r"(.+)[#:][^/]*$", name, re.DOTALL):
        name = match[1]
        yield name


def _check_same_folders(spec: IndexSpec) -> None:
    """Raises `SpecError` if the index has the files of another folder of the same name."""
    paths = {folder.collection: folder.spec.path for folder in folders(spec.build_source())}
    filesystem, location = open_folder(spec.index, JOBS)
    for file in filesystem.glob(f"{glob.escape(location)}/*/spec.yaml"):
        with filesystem.open(file, "r", encoding="utf-8") as stream:
            fields = yaml.safe_load(stream).get("source")
        sources = fields.get("sources", [fields]) if isinstance(fields, dict) else []
        for other in sources:
            path = paths.get(other.get("collection"), other.get("path"))
            if path != other.get("path") and exists(f"{other['path']}/{other['collection']}"):
                problem = f"has the files of {other['path']}/{other['collection']}, another folder"
                note = "; name another index, or set source.collection"
                raise SpecError("index", spec.index, f"the index of {path}", problem, note)
