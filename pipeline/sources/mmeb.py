"""The source of the candidates of MMEB-V2 tasks."""

from __future__ import annotations

import hashlib
import io
import posixpath
import re
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import Any, Literal

import numpy as np
from PIL import Image
from pydantic import Field

from pipeline import config
from pipeline.config import SpecError
from pipeline.decoding import Unreadable
from pipeline.decoding.untrusted import open_file
from pipeline.schema import Item, Reject, item_id_problem
from pipeline.sources import make_revision
from pipeline.sources.annotated import Annotated, AnnotatedSpec, Document
from pipeline.sources.annotations import read_table
from pipeline.sources.files import existing_root, open_root, walk
from pipeline.sources.images import Images

#: Columns of the image tasks, and of the video retrieval tasks.
IMAGE_COLUMNS = ("qry_text", "qry_img_path", "tgt_text", "tgt_img_path")
VIDEO_COLUMNS = ("video_id", "caption")
#: Token of Phi-3-V that marks the image in the texts of MMEB. Encoders insert their own.
IMAGE_TOKEN = "<|image_1|>"


@dataclass(frozen=True)
class Candidate:
    """Candidate of a query: a text, an image, or an image with a text.

    Attributes:
        text: Text, or empty.
        image: Path of the image, or empty.
    """

    text: str
    image: str

    @property
    def id(self) -> str:
        """Id of the item: text, path or `path:text`, or a hash if that is not a valid id."""
        name = self.image if not self.text else f"{self.image}:{self.text}".lstrip(":")
        if item_id_problem(name):
            return hashlib.blake2b(name.encode("utf-8", "replace"), digest_size=16).hexdigest()
        return name


class Mmeb(Annotated):
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

    class Spec(AnnotatedSpec):
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
        assert isinstance(spec, Mmeb.Spec)
        if spec.frames is not None:
            return ("item_id", "frames")
        return tuple(name for name in cls.provides if name != "frames")

    def settings(self) -> dict[str, Any]:
        """Returns the options that affect the stored content."""
        settings = super().settings()
        if self.spec.frames is not None:
            settings["num_frames"] = self.spec.num_frames
        return settings

    def documents(self) -> Iterator[Document]:
        """Yields the distinct candidates of all rows, or the videos."""
        if self.spec.frames is not None:
            yield from self._videos()
            return
        known: set[str] = set()
        for _, row in read_table(self.spec.path, IMAGE_COLUMNS, "path"):
            for candidate in candidates(row, "path"):
                if candidate.id not in known:
                    known.add(candidate.id)
                    fields = {"file_name": candidate.image, "text": candidate.text}
                    yield {"id": candidate.id, **{k: v for k, v in fields.items() if v}}

    def _videos(self) -> Iterator[Document]:
        assert self.spec.frames is not None
        try:
            fs, folder = existing_root(self.spec.frames)
        except SpecError as error:
            raise error.at("frames") from None
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

    def _frames(self, document: Document) -> list[dict[str, Any]]:
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


def select_frames(names: Sequence[str], number: int) -> list[str]:
    """Returns evenly spaced frames, sorted by the numbers in their names.

    >>> select_frames([f"{i}.jpg" for i in (10, 9, 8, 7)], 2)
    ['7.jpg', '10.jpg']
    """
    ordered = sorted(names, key=lambda name: ([int(n) for n in re.findall(r"\d+", name)], name))
    if len(ordered) <= number:
        return ordered
    if number == 1:
        return ordered[:1]
    last = len(ordered) - 1
    return [ordered[round(i * last / (number - 1))] for i in range(number)]


def candidates(row: dict[str, Any], field: str) -> list[Candidate]:
    """Returns the candidates of a row of an image task. The first is the relevant one.

    Args:
        row: Columns of the row.
        field: Spec field that errors name.

    Raises:
        SpecError: The row has no candidates, or different numbers of texts and images.
    """
    texts, images = row["tgt_text"] or [], row["tgt_img_path"] or []
    texts = texts or [""] * len(images)
    images = images or [""] * len(texts)
    if not texts or len(texts) != len(images):
        rule = "a row with as many tgt_text as tgt_img_path, and at least one"
        problem = f"has {len(texts)} texts and {len(images)} images"
        raise SpecError(field, row.get("qry_text"), rule, problem)
    found = [Candidate((t or "").strip(), i or "") for t, i in zip(texts, images, strict=True)]
    if not all(candidate.text or candidate.image for candidate in found):
        rule = "a row whose candidates have a text or an image"
        raise SpecError(field, row.get("qry_text"), rule, "has an empty candidate")
    return found
