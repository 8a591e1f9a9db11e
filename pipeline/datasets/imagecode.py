"""ImageCoDe: a caption selects one of ten similar images.

- `train_data.json`, `valid_data.json` and `test_data_unlabeled.json` have the captions of each set.
- `image-sets.zip` has the images, `<set>/img<frame>.jpg`.
"""

from __future__ import annotations

import functools
import json
import posixpath
import re
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from pipeline import config
from pipeline.config import SpecError, Uri
from pipeline.datasets.files import read_json
from pipeline.datasets.items import ListedImages, ListedImagesSpec
from pipeline.datasets.queries import CollectionQueries, QueriesSpec
from pipeline.eval import BenchmarkRow
from pipeline.runtime.atomic import write_atomic

#: Number of images per set.
SET_SIZE = 10
_FRAME = re.compile(r"(?:.*/)?(?P<set>[^/]+)/img(?P<frame>\d+)\.jpg")


def read_sets(uri: str) -> dict[str, dict[str, str]]:
    """Reads the captions of each set, by the index of their image ("0" to "9").

    Unlabelled captions have negative indices.

    Raises:
        SpecError: For `path`: the file is missing or malformed.
    """
    rule = 'ImageCoDe\'s {set: {"<index from 0 to 9>": caption}} or {set: [caption]}'
    sets = read_json(uri, "path", Annotated[dict[str, Any], Field(min_length=1)], rule)
    found: dict[str, dict[str, str]] = {}
    for name, value in sets.items():
        valid = set(map(str, range(SET_SIZE)))
        if isinstance(value, list):
            value = {str(-1 - number): caption for number, caption in enumerate(value)}
            valid = set(value)
        is_valid = isinstance(value, dict) and value.keys() <= valid and "/" not in name
        if not is_valid or not all(isinstance(c, str) and c.strip() for c in value.values()):
            raise SpecError("path", {name: value}, rule, f"has an invalid set {name}")
        found[name] = {index: " ".join(caption.split()) for index, caption in value.items()}
    return found


def sorted_frames(names: Iterable[str], sets: Iterable[str]) -> dict[str, list[str]]:
    """Returns the files of each set, in ascending order of their frame numbers.

    >>> sorted_frames(["s/img10.jpg", "s/img9.jpg", "s/notes.txt"], ["s"])
    {'s': ['s/img9.jpg', 's/img10.jpg']}
    """
    wanted = set(sets)
    found: dict[str, list[tuple[int, str]]] = {}
    for name in names:
        match = _FRAME.fullmatch(name)
        if match and match["set"] in wanted:
            found.setdefault(match["set"], []).append((int(match["frame"]), name))
    return {name: [file for _, file in sorted(files)] for name, files in found.items()}


def is_video(name: str) -> bool:
    """Checks whether the images of a set are frames of a video."""
    return "open-images" not in name


class Items(ListedImages):
    """Images of the sets of ImageCoDe, one item each.

    `path` is `train_data.json`, `valid_data.json` or `test_data_unlabeled.json`, whose keys are the
    sets. `images` is `image-sets.zip`, or the folder that it contains. The files of a set are
    `<set>/img<frame>.jpg`. Their index is the position in the order of the frame numbers, and the
    id of an item is `<set>/<index>`. The benchmark `imagecode` has the queries.
    """

    class Spec(ListedImagesSpec):
        """Options of the ImageCoDe source."""

        name: Literal["imagecode"] = "imagecode"  # type: ignore[assignment]

    spec: Spec

    def documents(self) -> Iterator[dict[str, Any]]:
        """Yields the images of all sets of the split, in the order of their frames."""
        sets = read_sets(self.spec.path)
        frames = sorted_frames(self._names(), sets)
        for name in sets:
            found = frames.get(name, [])
            if self.spec.missing == "error" and len(found) != SET_SIZE:
                rule = f"a location with {SET_SIZE} images img<frame>.jpg in the folder of each set"
                problem = f"has {len(found)} images of the set {name}"
                raise SpecError("images", self.spec.images or self.spec.path, rule, problem)
            for index, file_name in enumerate(found):
                fields = {"set": name, "index": index, "is_video": is_video(name)}
                yield {"id": f"{name}/{index}", "file_name": file_name, **fields}


class Queries(CollectionQueries["Queries.Spec"]):
    """Captions as queries, each with the ten images of its set as candidate pool.

    `path` is `train_data.json` or `valid_data.json`. Query ids are `<set>/<index>`, which is also
    the id of the relevant image. The metric is the accuracy, which equals R@1. The predictions of
    each row are written to `imagecode/<row>.json` in the output folder, in the format of the
    submission, `{set: {index of the caption: predicted index}}`. Sets of static images
    (`open-images`) and of video frames are query categories. The documents are indexed with the
    source `imagecode`.
    """

    class Spec(QueriesSpec):
        """Options of the ImageCoDe benchmark."""

        name: Literal["imagecode"] = "imagecode"
        path: Uri
        """JSON file of the captions of a labelled split."""

    measure = "R@1"

    @functools.cached_property
    def _captions(self) -> dict[str, str]:
        captions = {
            f"{name}/{index}": caption
            for name, by_index in read_sets(self.spec.path).items()
            for index, caption in by_index.items()
        }
        if any("/-" in query_id for query_id in captions):
            rule = "a split with labels, such as valid_data.json"
            raise SpecError("path", self.spec.path, rule, "has no labels")
        return captions

    def queries(self) -> dict[str, str]:
        """Returns the captions."""
        return self._captions

    def judgments(self) -> dict[str, dict[str, int]]:
        """Returns the image of each caption."""
        return {query_id: {query_id: 1} for query_id in self._captions}

    def categories(self, query_ids: set[str]) -> dict[str, dict[str, list[str]]]:
        """Groups the captions by static images and video frames, if there are both."""
        media: dict[str, list[str]] = {}
        for query_id in self._captions:
            media.setdefault("video" if is_video(query_id) else "image", []).append(query_id)
        return {"media": media} if len(media) > 1 else {}

    def options(self) -> dict[str, Any]:
        """Returns the images of the set of each caption."""
        sets = {query_id: query_id.rpartition("/")[0] for query_id in self._captions}
        pools = {q: tuple(f"{name}/{i}" for i in range(SET_SIZE)) for q, name in sets.items()}
        return {"pools": pools}

    def write_result(self, folder: str, row: BenchmarkRow) -> str:
        """Writes the predicted images of a row."""
        found: dict[str, dict[str, int]] = {}
        for query_id, scores in row.rankings.items():
            name, _, index = query_id.rpartition("/")
            if scores:
                best = max(scores, key=lambda document: scores[document])
                found.setdefault(name, {})[index] = int(best.rpartition("/")[2])
        path = posixpath.join(config.absolute(folder), "imagecode", f"{row.name}.json")
        write_atomic(path, json.dumps(found, indent=1))
        return path
