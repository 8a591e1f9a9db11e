"""Writes similarity maps of hits to files, and all hits to a contact sheet."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from pipeline.config import SpecError
from pipeline.runtime.atomic import write_atomic
from pipeline.schema import Composed
from pipeline.search.explain import NO_SPAN, printable
from pipeline.search.formatting import format_location
from pipeline.search.map_images import add_header, highlight
from pipeline.search.map_sheets import hit_sheet
from pipeline.search.maps import SimilarityMap, similarity_map
from pipeline.search.options import SearchOptions
from pipeline.search.previews import Previews
from pipeline.search.query import AnyQuery, Queries
from pipeline.search.results import Hit, Location
from pipeline.search.searcher import Searcher

#: Maximum number of query tokens that get a map of their own. Image queries have hundreds.
MAX_TOKEN_MAPS = 64


def write_hit_maps(
    folder: str,
    searcher: Searcher,
    query: AnyQuery,
    hits: Sequence[Hit],
    representation: str,
    documents: Mapping[str, str],
) -> Iterator[str]:
    """Writes the similarity maps of hits. Yields a line with the file or the error for each hit.

    Raises:
        SpecError: No hit has a map. The error of the first hit is raised.
    """
    previews = Previews(searcher.index, documents)
    text = query.text if isinstance(query, Composed) else query
    title = text if isinstance(text, str) else "image" if isinstance(query, bytes) else "vectors"
    errors = []
    encoded: dict[str, Queries] = {}
    for hit in hits:
        name = hit.representation or representation
        try:
            if name not in encoded:  # decoding audio and videos takes seconds
                encoded[name] = searcher.queries([query], name)
            map = similarity_map(searcher, encoded[name], hit.item_id, name)
            _write_maps(folder, hit.rank, previews, map, title)
        except SpecError as error:
            errors.append(error)
            if len(errors) < len(hits):
                yield f"map {hit.rank}: not written; {error}"
            continue
        best = map.best_word()
        location = Location(span=NO_SPAN, box=best.box, times=best.times)
        best_text = printable(best.text) or format_location(location)
        yield f"map {hit.rank}: {folder}/{hit.rank}.png; best match: {best_text}"
    if errors and len(errors) == len(hits):
        raise errors[0]


def _write_maps(
    folder: str, number: int, previews: Previews, map: SimilarityMap, title: str
) -> None:
    """Writes the map as PNG and JSON, and a PNG per query token if those can differ."""
    files: dict[str, bytes | str] = {
        f"{number}.png": add_header(highlight(previews, map), map, title),
        f"{number}.json": map.model_dump_json(),
    }
    has_locations = any(word.box or word.times for word in map.words)
    if has_locations and len(map.query_tokens) <= MAX_TOKEN_MAPS:
        for token, text in enumerate(map.query_tokens):
            name = re.sub(r"\W+", "_", text)[:20]
            image = add_header(highlight(previews, map, token), map, title, token)
            files[f"{number}-{token + 1:02d}-{name}.png"] = image
    for name, data in files.items():
        write_atomic(f"{folder}/{name}", data)


def write_hit_sheet(
    file: str, searcher: Searcher, query: str, hits: Sequence[Hit], options: SearchOptions
) -> str:
    """Writes a sheet with the images of all hits, one row per stage.

    Returns its path or the problem.
    """
    if not hits:
        return "sheet: not written; the query has no hits"
    title = f"{options.representation}, {options.score} score"
    rows = [(title, hits)]
    if any(hit.first_stage for hit in hits):
        rows = [(title, searcher.search_with([query], options)[0]), ("reranked", hits)]
    sheet, num_missing = hit_sheet(searcher, query, rows)
    write_atomic(file, sheet)
    missing = f"; {num_missing} hits have no readable image" if num_missing else ""
    return f"sheet: {file}{missing}"
