"""Training data of videos in published collections."""

from __future__ import annotations

import posixpath
from collections.abc import Iterable

from pipeline.config import SpecError
from pipeline.data.files import existing_root, find_files
from pipeline.eval.boxes import NO_BOXES
from pipeline.train.data.rows import Document, Listing, Row

VIDEO, AUDIO = ".mp4", ".m4a"


def list_videos(folder: str, rows: Iterable[tuple[str, str, str]]) -> Listing:
    """Returns rows of a query, the id of its video and a location, with the videos as documents.

    The file of a video is `<id>.mp4` in any folder below `folder`. If `<id>.m4a` exists, it
    replaces the audio of the video. Missing files are expected in the folder itself.

    Raises:
        SpecError: For `videos`: the folder does not exist.
    """
    fs, root = existing_root(folder, "videos")
    if not fs.isdir(root):
        raise SpecError("videos", folder, "a folder of videos", "is not a folder")
    found: dict[str, str] = {}
    for path, _ in find_files(folder, (VIDEO, AUDIO)):
        found.setdefault(posixpath.basename(path), posixpath.join(folder, path))
    listing = Listing()
    for query, video, location in rows:
        number = listing.numbers.get(video)
        if number is None:
            name = f"{video}{VIDEO}"
            file, audio = found.get(name), found.get(f"{video}{AUDIO}")
            file = file or posixpath.join(folder, name)
            number = listing.add(Document(video, None, None, location, NO_BOXES, file, audio))
        listing.rows.append(Row(query, number))
    return listing
