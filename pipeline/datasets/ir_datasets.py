"""Text collections that the package ir_datasets reads."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import os
import sys
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, Literal

from pipeline import config, extras
from pipeline.config import SpecError, close_match
from pipeline.data.base import Source, make_revision
from pipeline.data.decode import Unreadable
from pipeline.data.files import escape
from pipeline.data.manifests import to_json_value
from pipeline.data.text import join_title
from pipeline.datasets.queries import CollectionQueries
from pipeline.schema import Item, Reject, is_blank, item_id_problem

#: Number of documents per shard.
DOCUMENTS_PER_SHARD = 10_000
#: Environment variable with the folder of the package.
HOME = "IR_DATASETS_HOME"


class DatasetSpec(config.ComponentSpec):
    """Options that select a dataset of the package ir_datasets."""

    dataset: str
    """Id of the dataset, such as beir/scifact/test."""
    data: config.Uri | None = None
    """Local folder with the files of the package. Defaults to the environment variable
    IR_DATASETS_HOME, or ~/.ir_datasets."""
    download: bool = False
    """Whether missing files are downloaded."""


def open_dataset(spec: DatasetSpec, *parts: str) -> Any:
    """Returns a dataset of ir_datasets that has the given parts of docs, queries and qrels.

    Raises:
        MissingExtra: The package is not installed.
        SpecError: The dataset does not exist or lacks a part.
    """
    with reading(spec) as package:
        try:
            dataset = package.load(spec.dataset)
        except KeyError:
            note = close_match(spec.dataset, package.registry)
            rule = "the id of a dataset of the package ir_datasets"
            raise SpecError("dataset", spec.dataset, rule, note=note) from None
    for part in parts:
        if not dataset.has(part):
            raise SpecError("dataset", spec.dataset, f"a dataset with {part}", f"has no {part}")
    return dataset


@contextlib.contextmanager
def reading(spec: DatasetSpec) -> Iterator[Any]:
    """Context in which the package, its value, reads from the folder of a spec.

    Raises:
        MissingExtra: The package is not installed.
        SpecError: A file is missing and must not be downloaded, or cannot be read.
    """
    extras.require("ir_datasets")
    before = os.environ.get(HOME)
    if spec.data is not None:
        os.environ[HOME] = spec.data
    package = _import_for(os.environ.get(HOME))
    mirror = package.util.download.RequestsDownload
    original = mirror.stream
    if not spec.download:
        mirror.stream = _refuse
    try:
        yield package
    except Exception as error:
        if isinstance(error, SpecError):
            raise
        raise _unreadable(spec, error) from error
    finally:
        mirror.stream = original
        if spec.data is not None:
            os.environ.pop(HOME)
            os.environ |= {} if before is None else {HOME: before}


def _import_for(home: str | None) -> Any:
    """Imports the package again if its folder has changed, which it reads when it is imported."""
    global _home
    if _home != home:
        for name in [name for name in sys.modules if name.partition(".")[0] == "ir_datasets"]:
            del sys.modules[name]
        _home = home
    return importlib.import_module("ir_datasets")


_home: str | None = ""


def _refuse(mirror: Any) -> Any:
    raise _MissingFile(mirror.url)


class _MissingFile(OSError):
    """Raised instead of downloading a file."""


def _unreadable(spec: DatasetSpec, error: Exception) -> SpecError:
    causes: Sequence[Any] = [error]
    if error.args and isinstance(error.args[-1], list):  # one (mirror, error) pair per mirror
        causes = [cause for _, cause in error.args[-1]]
    urls = [str(cause) for cause in causes if isinstance(cause, _MissingFile)]
    rule = f"a folder with the files of {spec.dataset}"
    if urls:
        note = "; place it there as described in the documentation of ir_datasets, or download it"
        return SpecError("data", spec.data, rule, f"lacks the content of {urls[0]}", note)
    problem = f"cannot be read ({type(error).__name__}: {str(error)[:200]})"
    return SpecError("data", spec.data, rule, problem)


class Items(Source["Items.Spec"]):
    """Text documents of a dataset of the package ir_datasets.

    **Items.** Each document is one item. Its text is the field `text` or `body`, or else the
    package's default text, and begins with the title, as in the text source. Other fields become
    metadata.

    **Data.** The package reads the files of its folder. Files that are missing there are downloaded
    only if `download` is set.
    """

    class Spec(DatasetSpec):
        """Options of the ir_datasets source."""

        name: Literal["ir_datasets"] = "ir_datasets"
        collection: str = ""
        """Name of the collection. Defaults to the id of the dataset."""

    location_field = "data"
    provides = ("item_id", "text")

    @property
    def collection(self) -> str:
        """The name of the collection."""
        return self.spec.collection or self.spec.dataset

    @functools.cached_property
    def _dataset(self) -> Any:
        return open_dataset(self.spec, "docs")

    def check(self) -> None:
        """Raises `SpecError` if the dataset does not exist or its documents are missing."""
        with reading(self.spec):
            first = next(iter(self._dataset.docs_iter()), None)
        if first is None:
            rule = "a dataset with at least one document"
            raise SpecError("dataset", self.spec.dataset, rule, "is empty")

    def shards(self) -> Iterator[dict[str, Any]]:
        """Yields ranges of documents, `{"documents": [start, end]}`."""
        with reading(self.spec):
            documents = self._dataset.docs_iter()
            number = sum(1 for _ in documents)
        for start in range(0, number, DOCUMENTS_PER_SHARD):
            yield {"documents": [start, min(start + DOCUMENTS_PER_SHARD, number)]}

    def scan(self, shard: dict[str, Any]) -> Iterator[Item | Reject]:
        """Yields the documents of a range."""
        start, end = shard["documents"]
        with reading(self.spec):
            documents = self._dataset.docs_iter()
            try:  # formats with random access
                selected = documents[start:end]
            except (TypeError, NotImplementedError):
                selected = islice(documents, start, end)
            for document in selected:
                yield self._list(document)

    def _list(self, document: Any) -> Item | Reject:
        fields = {name: getattr(document, name) for name in document._fields}
        item_id = str(fields.pop("doc_id"))
        title = fields.pop("title", None)
        body = next((fields.pop(name) for name in ("text", "body") if name in fields), None)
        text = document.default_text() if body is None else join_title(title or "", body)
        metadata = to_json_value(fields) or None
        content = hashlib.blake2b(text.encode("utf-8", "replace")).hexdigest()
        revision = make_revision([title, metadata], content)
        try:
            if problem := item_id_problem(item_id):
                raise Unreadable("bad id", problem)
            if not text.strip():
                raise Unreadable("empty text")
        except Unreadable as error:
            return self.reject(escape(item_id), revision, error, "list")
        return Item(
            item_id=item_id,
            parent_id=item_id,
            source=self.collection,
            modality="text",
            revision=revision,
            title=title or None,
            text=text,
            metadata=metadata,
        )


class Queries(CollectionQueries["Queries.Spec"]):
    """Queries and judgments of a dataset of the package ir_datasets.

    The documents of the dataset are indexed with the source `ir_datasets`.
    """

    class Spec(DatasetSpec):
        """Options of the ir_datasets benchmark."""

        name: Literal["ir_datasets"] = "ir_datasets"
        query_field: str | None = None
        """Field of the queries with the text, such as title, description or narrative. Defaults to
        the package's default text."""
        ignore_identical_ids: bool = True
        """Removes the document that has the id of a query from the ranking of this query, unless it
        is judged relevant, as in BEIR's evaluation: queries of ArguAna and Quora are documents
        themselves. False if query ids and document ids coincide by chance."""

    location_field = "dataset"

    @functools.cached_property
    def _dataset(self) -> Any:
        return open_dataset(self.spec, "queries", "qrels")

    def queries(self) -> dict[str, str]:
        """Reads the queries that have a text."""
        with reading(self.spec):
            queries = self._dataset.queries_iter()
            texts = {query.query_id: self._text(query) for query in queries}
        return {query_id: text for query_id, text in texts.items() if not is_blank(text)}

    def judgments(self) -> dict[str, dict[str, int]]:
        """Reads the judgments."""
        with reading(self.spec):
            return self._dataset.qrels_dict()

    def options(self) -> dict[str, Any]:
        """Returns whether documents with the id of the query are removed."""
        return {"ignore_query_id": self.spec.ignore_identical_ids}

    def _text(self, query: Any) -> str:
        """Returns the text of a query, or an empty string for a null."""
        field = self.spec.query_field
        if field is None and hasattr(query, "default_text"):
            text = query.default_text()
        elif field is not None and field in query._fields:
            text = getattr(query, field)
        else:
            names = [name for name in query._fields if name != "query_id"]
            raise SpecError.unknown_name("query_field", str(field), names)
        if not isinstance(text, str | None):
            problem = f"has a {type(text).__name__} in the query {query.query_id}"
            raise SpecError("query_field", field, "a field with texts", problem)
        return text or ""
