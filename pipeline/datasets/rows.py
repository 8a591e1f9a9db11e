"""Training data of videos in published collections."""

from __future__ import annotations

import posixpath
import tarfile
from collections.abc import Iterable, Iterator

from pipeline.config import SpecError, reading
from pipeline.data.files import existing_root, find_files
from pipeline.eval.boxes import NO_BOXES
from pipeline.paths import open_file
from pipeline.train.data.rows import Document, Listing, Row
from pipeline.train.data.tables import ArchiveMember

VIDEO, AUDIO, ARCHIVE = ".mp4", ".m4a", ".tar"


def list_videos(folder: str, rows: Iterable[tuple[str, str, str]]) -> Listing:
    """Returns rows of a query, the id of its video and a location, with the videos as documents.

    The file of a video is `<id>.mp4` in any folder or uncompressed .tar archive below `folder`. If
    `<id>.m4a` exists, it replaces the audio of the video. Archives are not unpacked: only their
    headers are read. Missing files are expected in the folder itself.

    Raises:
        SpecError: For `videos`: the folder does not exist.
    """
    fs, root = existing_root(folder, "videos")
    if not fs.isdir(root):
        raise SpecError("videos", folder, "a folder of videos", "is not a folder")
    found: dict[str, str | ArchiveMember] = {}
    for path, _ in find_files(folder, (VIDEO, AUDIO, ARCHIVE)):
        uri = posixpath.join(folder, path)
        is_archive = path.lower().endswith(ARCHIVE)
        for name, media in _members(uri) if is_archive else [(path, uri)]:
            found.setdefault(posixpath.basename(name), media)
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


def _members(uri: str) -> Iterator[tuple[str, ArchiveMember]]:
    rule = "an uncompressed .tar archive"
    with (
        reading("videos", uri, rule, tarfile.TarError),
        open_file(uri) as stream,
        tarfile.open(fileobj=stream, mode="r:") as archive,
    ):
        for member in archive:
            if member.isreg() and member.name.lower().endswith((VIDEO, AUDIO)):
                yield member.name, ArchiveMember(uri, member.offset_data, member.size)
