"""MMEB-V2: tasks whose queries have their own candidates, and video retrieval tasks.

- Image tasks are configs of `MMEB_Test_Instruct`, Parquet files with `IMAGE_COLUMNS`.
- Video retrieval tasks are Parquet files with `VIDEO_COLUMNS`.
- `mmeb_v1.tar.gz` has the images, `video-tasks/frames/video_ret` the frames of the videos.
- Visual document tasks are ViDoRe data sets, see `vidore`.
"""

from __future__ import annotations

import functools
import hashlib
import io
import posixpath
import re
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Any, Literal, NamedTuple

import numpy as np
from PIL import Image
from pydantic import Field

from pipeline import config
from pipeline.config import MissingField, SpecError
from pipeline.data.base import make_revision
from pipeline.data.decode import Unreadable
from pipeline.data.decode.untrusted import open_file
from pipeline.data.files import existing_root, open_root, walk
from pipeline.data.images import Images
from pipeline.datasets.files import read_table
from pipeline.datasets.items import ListedImages, ListedImagesSpec
from pipeline.datasets.queries import CollectionQueries, ImageFiles, QueriesSpec
from pipeline.schema import Item, Reject, item_id_problem

#: Columns of the image tasks, and of the video retrieval tasks.
IMAGE_COLUMNS = ("qry_text", "qry_img_path", "tgt_text", "tgt_img_path")
VIDEO_COLUMNS = ("video_id", "caption")
#: Token of Phi-3-V that marks the image in the texts of MMEB. Encoders insert their own.
IMAGE_TOKEN = "<|image_1|>"


class Candidate(NamedTuple):
    """Candidate of a query: a text, an image, or an image with a text."""

    text: str
    image: str

    @property
    def id(self) -> str:
        """Id of the item: text, path or `path:text`, or a hash if that is not a valid id."""
        name = self.image if not self.text else f"{self.image}:{self.text}".lstrip(":")
        if item_id_problem(name):
            return hashlib.blake2b(name.encode("utf-8", "replace"), digest_size=16).hexdigest()
        return name


def candidates(row: dict[str, Any]) -> list[Candidate]:
    """Returns the candidates of a row of an image task. The first is the relevant one.

    Raises:
        SpecError: For `path`: the row has no candidates, or different numbers of texts and images.
    """
    texts, images = row["tgt_text"] or [], row["tgt_img_path"] or []
    texts = texts or [""] * len(images)
    images = images or [""] * len(texts)
    found = [Candidate((t or "").strip(), i or "") for t, i in zip(texts, images, strict=False)]
    is_filled = all(candidate.text or candidate.image for candidate in found)
    if not found or len(texts) != len(images) or not is_filled:
        rule = "a row with as many tgt_text as tgt_img_path, at least one, and none of them empty"
        problem = f"has {len(texts)} texts and {len(images)} images"
        raise SpecError("path", row.get("qry_text"), rule, problem)
    return found


def clean_text(text: str | None) -> str:
    r"""Removes the marker of an image and surrounding white space.

    >>> clean_text("<|image_1|>\nFind a similar image: ")
    'Find a similar image:'
    """
    return (text or "").replace(IMAGE_TOKEN, "").strip()


class QueryRow(NamedTuple):
    """Query of a task.

    Attributes:
        text: Text without instruction, or empty.
        image: Path of the image, or empty.
        instruction: Instruction of the row, or empty.
        relevant: Id of the relevant document.
        pool: Ids of the candidates, or empty to rank all documents.
        location: Row, for messages.
    """

    text: str
    image: str
    instruction: str
    relevant: str
    pool: tuple[str, ...]
    location: str


def read_queries(uri: str) -> Iterator[QueryRow]:
    """Yields the queries of an image task or of a video retrieval task.

    Raises:
        SpecError: For `path`: a file is missing or malformed.
    """
    _, first = next(read_table(uri, (), "path"), ("", {}))
    if "video_id" in first:
        for location, row in read_table(uri, VIDEO_COLUMNS, "path"):
            captions, video = row["caption"], str(row["video_id"])
            caption = captions[0] if isinstance(captions, list) else captions
            yield QueryRow(clean_text(caption), "", "", video, (), location)
        return
    for location, row in read_table(uri, IMAGE_COLUMNS, "path"):
        text, image = clean_text(row["qry_text"]), row["qry_img_path"] or ""
        pool = tuple(dict.fromkeys(candidate.id for candidate in candidates(row)))
        instruction = clean_text(row.get("qry_inst"))
        yield QueryRow(text, image, instruction, pool[0], pool, location)


def select_frames(names: Sequence[str], number: int) -> list[str]:
    """Returns evenly spaced frames, or the middle one, sorted by the numbers in their names.

    >>> frames = [f"{i}.jpg" for i in (10, 9, 8, 7)]
    >>> select_frames(frames, 2), select_frames(frames, 1)
    (['7.jpg', '10.jpg'], ['9.jpg'])
    """
    ordered = sorted(names, key=lambda name: ([int(n) for n in re.findall(r"\d+", name)], name))
    if len(ordered) <= number:
        return ordered
    if number == 1:
        return [ordered[len(ordered) // 2]]
    last = len(ordered) - 1
    return [ordered[round(i * last / (number - 1))] for i in range(number)]


class Items(ListedImages):
    """Candidates of a task of MMEB-V2, one item each.

    **Image tasks.** `path` is the Parquet file of a task, or the folder with its files (a config of
    `MMEB_Test_Instruct`, or of `image-tasks` in MMEB-V2). The rows have their own candidates
    (`tgt_text`, `tgt_img_path`). An item is a text, an image, or both; candidates that occur in
    several rows are one item. `images` is the folder of the paths, `image-tasks` with the unpacked
    `mmeb_v1.tar.gz`.

    **Video retrieval tasks.** The rows have `video_id` and `caption`. `frames` is the folder of
    the unpacked frames, such as `video-tasks/frames/video_ret/MSR-VTT`, with a folder per video. An
    item has `num_frames` evenly spaced frames, or all if there are fewer. Their times are unknown
    and counted in seconds from 0.

    Visual document tasks are ViDoRe data sets: see the benchmark `vidore`.
    """

    class Spec(ListedImagesSpec):
        """Options of the MMEB source."""

        name: Literal["mmeb"] = "mmeb"  # type: ignore[assignment]
        frames: config.Uri | None = None
        """Folder with a folder of frames per video, for video tasks."""
        num_frames: int = Field(8, ge=1, le=4096)
        """Maximum number of frames per video."""

    provides = ("item_id", "text", "image", "scan", "caption", "frames")
    spec: Spec

    @classmethod
    def provided_inputs(cls, spec: Images.Spec) -> tuple[str, ...]:
        """Returns `frames` for a video task, and the other inputs for an image task."""
        assert isinstance(spec, Items.Spec)
        if spec.frames is not None:
            return ("item_id", "frames")
        return tuple(name for name in cls.provides if name != "frames")

    def settings(self) -> dict[str, Any]:
        """Returns the options that affect the stored content."""
        settings = super().settings()
        if self.spec.frames is not None:
            # Indexes from before the middle frame was selected have the first one.
            settings["num_frames"] = "middle" if self.spec.num_frames == 1 else self.spec.num_frames
        return settings

    def documents(self) -> Iterator[dict[str, Any]]:
        """Yields the distinct candidates of all rows, or the videos."""
        if self.spec.frames is not None:
            yield from self._videos()
            return
        known: set[str] = set()
        for _, row in read_table(self.spec.path, IMAGE_COLUMNS, "path"):
            for candidate in candidates(row):
                if candidate.id not in known:
                    known.add(candidate.id)
                    fields = {"file_name": candidate.image, "text": candidate.text}
                    yield {"id": candidate.id, **{k: v for k, v in fields.items() if v}}

    def _videos(self) -> Iterator[dict[str, Any]]:
        assert self.spec.frames is not None
        fs, folder = existing_root(self.spec.frames, "frames")
        missing = []
        for _, row in read_table(self.spec.path, VIDEO_COLUMNS, "path"):
            video = str(row["video_id"])
            frames = []
            if fs.isdir(posixpath.join(folder, video)):
                frames = [name for name, _ in walk(fs, posixpath.join(folder, video))]
                frames = [name for name in frames if name.lower().endswith(self.suffixes)]
            if not frames:
                missing.append(video)
            yield {"id": video, "frames": select_frames(frames, self.spec.num_frames)}
        if missing and self.spec.missing == "error":
            rule = "a folder with the frames of each video of the task"
            problem = f"lacks the frames of {len(missing):,} videos, such as {missing[0]}"
            note = "; add them, or set missing: skip"
            raise SpecError("frames", self.spec.frames, rule, problem, note)

    def scan(self, shard: dict[str, Any]) -> Iterator[Item | Reject]:
        """Yields the items of a shard."""
        if self.spec.frames is None:
            yield from super().scan(shard)
            return
        fs, folder = open_root(self.spec.frames)
        for _, document in shard["listed"]:
            video, names = document["id"], document["frames"]
            revision = ""
            try:
                if not names:
                    raise Unreadable("missing file", f"no frames in {self.spec.frames}/{video}")
                sizes = [fs.size(posixpath.join(folder, video, name)) for name in names]
                revision = make_revision(self.settings(), list(zip(names, sizes, strict=True)))
            except (Unreadable, OSError) as error:
                yield self.reject(video, revision, error, "list")
                continue
            yield Item(video, video, self.collection, "video", revision, handle=document)

    def decode(
        self, shard: dict[str, Any], items: Sequence[tuple[int, Item]]
    ) -> Iterator[Item | Reject]:
        """Decodes images or the frames of videos."""
        if self.spec.frames is None:
            yield from super().decode(shard, items)
            return
        for _, item in items:
            if "frames" not in self.payload.names:
                yield item
                continue
            try:
                yield replace(item, payload={"frames": self._frames(item.handle)})
            except (Unreadable, OSError) as error:
                yield self.reject(item.item_id, item.revision, error, "decode")

    def _frames(self, document: dict[str, Any]) -> list[dict[str, Any]]:
        """Returns the rows of `schema.FRAME` of a video."""
        assert self.spec.frames is not None
        fs, folder = open_root(self.spec.frames)
        frames = []
        for number, name in enumerate(document["frames"]):
            path = posixpath.join(folder, document["id"], name)
            with open_file(fs, path) as stream:
                data = stream.read(self.spec.max_file_bytes)
            with tempfile.NamedTemporaryFile(suffix=PurePosixPath(name).suffix) as copy:
                copy.write(data)
                copy.flush()
                (result,) = self._read(copy.name)
            if isinstance(result, Unreadable):
                raise result
            pixels = np.asarray(Image.open(io.BytesIO(result["image"])).convert("RGB"))
            frames.append(
                {
                    "index": number,
                    "seconds": float(number),
                    "height": pixels.shape[0],
                    "width": pixels.shape[1],
                    "pixels": pixels.tobytes(),
                }
            )
        return frames


class Queries(CollectionQueries["Queries.Spec"]):
    """Queries of a task of MMEB-V2. The main metric is hit@1, which equals Success@1.

    **Image tasks.** Queries are texts, images, or both, with the candidates of their row as pool.
    The first candidate is relevant. Query ids are the numbers of the rows.

    **Video retrieval tasks.** The queries are the captions, and all videos of the task are ranked.

    **Instructions.** With `instruction: text`, the instruction of the task precedes the text of
    each query, as in MMEB. With `template`, it replaces the instruction in the query template of
    encoders that have one; all rows must have the same. Markers of images are removed, because
    encoders insert their own.

    The documents are indexed with the source `mmeb`.
    """

    class Spec(QueriesSpec):
        """Options of the MMEB benchmark."""

        name: Literal["mmeb"] = "mmeb"
        path: config.Uri
        """Parquet file of a task, or the folder with its files."""
        images: config.Uri | None = None
        """Folder of the query images, such as `image-tasks`; null if the queries are texts."""
        instruction: Literal["text", "template", "none"] = "text"
        """Place of the instruction: in the `text` of the query, in the query `template` of the
        encoder, or `none` to ignore it."""
        video_instruction: str = ""
        """Instruction of a video task, whose rows contain none."""

    measure = "Success@1"

    @functools.cached_property
    def _rows(self) -> dict[str, QueryRow]:
        """The queries by id, with the instruction of the spec for videos."""
        rows = {}
        for number, row in enumerate(read_queries(self.spec.path)):
            if not row.pool:
                row = row._replace(instruction=self.spec.video_instruction)
            rows[str(number)] = row
        return rows

    def queries(self) -> dict[str, str]:
        """Returns the texts, with their instruction if it belongs to the text."""
        texts = {}
        for query_id, row in self._rows.items():
            parts = (row.instruction if self.spec.instruction == "text" else "", row.text)
            texts[query_id] = " ".join(filter(None, parts))
            if row.pool and not row.image and not texts[query_id]:
                rule = "a row with qry_text or qry_img_path"
                raise SpecError("path", self.spec.path, rule, f"has neither in {row.location}")
        return texts

    def judgments(self) -> dict[str, dict[str, int]]:
        """Returns the relevant document of each query."""
        return {query_id: {row.relevant: 1} for query_id, row in self._rows.items()}

    def options(self) -> dict[str, Any]:
        """Returns the instruction, the query images and the candidates."""
        spec, rows = self.spec, self._rows
        options: dict[str, Any] = {}
        if spec.instruction == "template":
            instructions = {row.instruction for row in rows.values()}
            if len(instructions) > 1:
                problem = f"has {len(instructions)} different instructions"
                raise SpecError("instruction", "template", "text for this task", problem)
            options["instruction"] = next(iter(instructions)) or None
        if images := {query_id: row.image for query_id, row in rows.items() if row.image}:
            if spec.images is None:
                rule = "the folder of the query images, to which their paths are relative"
                raise MissingField("images", None, rule)
            uris = {q: posixpath.join(spec.images, path) for q, path in images.items()}
            options["media"] = {"image": ImageFiles(uris)}
        if pools := {query_id: row.pool for query_id, row in rows.items() if row.pool}:
            options["pools"] = pools
        return options
