"""The source of the images of ImageCoDe."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import PurePosixPath
from typing import Any, Literal

from pipeline.config import SpecError
from pipeline.sources.annotated import Annotated, AnnotatedSpec, Document
from pipeline.sources.annotations import read_json

#: Number of images per set.
SET_SIZE = 10
_FRAME = re.compile(r"(?:.*/)?(?P<set>[^/]+)/img(?P<frame>\d+)\.jpg")


class ImageCode(Annotated):
    """Images of the sets of ImageCoDe, one item each.

    `path` is `train_data.json`, `valid_data.json` or `test_data_unlabeled.json`, whose keys are the
    sets. `images` is `image-sets.zip`, or the folder that it contains. The files of a set are
    `<set>/img<frame>.jpg`. Their index is the position in the order of the frame numbers, and the
    id of an item is `<set>/<index>`. The benchmark `imagecode` has the queries.
    """

    class Spec(AnnotatedSpec):
        """Options of the ImageCoDe source."""

        name: Literal["imagecode"] = "imagecode"  # type: ignore[assignment]

    spec: Spec

    def documents(self) -> Iterator[Document]:
        """Yields the images of all sets of the split, in the order of their frames."""
        sets = read_sets(self.spec.path, "path")
        frames = sorted_frames(self._names(), sets)
        for name in sets:
            found = frames.get(name, [])
            if self.spec.missing == "error" and len(found) != SET_SIZE:
                rule = f"a location with {SET_SIZE} images img<frame>.jpg in the folder of each set"
                problem = f"has {len(found)} images of the set {name}"
                raise SpecError("images", self.spec.images or self.spec.path, rule, problem)
            for index, file_name in enumerate(found):
                is_video = "open-images" not in name
                fields = {"set": name, "index": index, "is_video": is_video}
                yield {"id": f"{name}/{index}", "file_name": file_name, **fields}


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


def read_sets(uri: str, field: str) -> dict[str, dict[str, str]]:
    """Reads the captions of each set.

    Args:
        uri: Path or URI of the JSON file.
        field: Spec field that errors name.

    Returns:
        Caption by the index of its image ("0" to "9"), by set. Unlabelled captions have negative
        indices.

    Raises:
        SpecError: The file is missing or malformed.
    """
    rule = 'ImageCoDe\'s {set: {"<index from 0 to 9>": caption}} or {set: [caption]}'
    value = read_json(uri, field)
    if not isinstance(value, dict) or not value:
        raise SpecError(field, uri, rule, "has another format")
    return {name: _captions(name, captions, rule, field) for name, captions in value.items()}


def _captions(name: str, value: Any, rule: str, field: str) -> dict[str, str]:
    valid = {str(index) for index in range(SET_SIZE)}
    if isinstance(value, list):
        value = {str(-1 - number): caption for number, caption in enumerate(value)}
        valid = set(value)
    is_valid = isinstance(value, dict) and value.keys() <= valid
    if not is_valid or not all(isinstance(c, str) and c.strip() for c in value.values()):
        raise SpecError(field, {name: value}, rule, f"has invalid captions of the set {name}")
    if PurePosixPath(name).name != name:
        raise SpecError(field, name, "a set without slashes in its name")
    return {index: " ".join(caption.split()) for index, caption in value.items()}
