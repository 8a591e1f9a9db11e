"""Files of similarity maps: the maps of hits, and a sheet of the hits side by side."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from pipeline.atomic import write_atomic
from pipeline.config import SpecError
from pipeline.schema import Composed, Hit, Place
from pipeline.search.explain import NO_SPAN, printable
from pipeline.search.formatting import format_place
from pipeline.search.map_images import add_header, highlight
from pipeline.search.map_sheets import hit_sheet
from pipeline.search.maps import SimilarityMap, similarity_map
from pipeline.search.options import SearchOptions
from pipeline.search.previews import Previews
from pipeline.search.query import AnyQuery
from pipeline.search.searcher import Searcher

#: Maximum number of query tokens with a map each; queries of images have hundreds.
MAX_TOKEN_MAPS = 64


def write_hit_maps(
    folder: str,
    searcher: Searcher,
    query: AnyQuery,
    hits: Sequence[Hit],
    representation: str,
    documents: Mapping[str, str],
) -> Iterator[str]:
    """Writes the similarity maps of hits; yields a line per hit: the file, or why it has none.

    Args:
        folder: Path or URI of the output folder.
        searcher: Searcher of the index.
        query: Query of the hits.
        hits: Hits, best first.
        representation: Name of the representation.
        documents: See `Previews`.

    Raises:
        SpecError: No hit has a map; the error is that of the first hit.
    """
    previews = Previews(searcher.index, documents)
    text = query.text if isinstance(query, Composed) else query
    title = text if isinstance(text, str) else "image" if isinstance(query, bytes) else "vectors"
    errors = []
    for hit in hits:
        try:
            map = similarity_map(searcher, query, hit.item_id, representation)
            _write_maps(folder, hit.rank, previews, map, title)
        except SpecError as error:
            errors.append(error)
            if len(errors) < len(hits):
                yield f"map {hit.rank}: none; {error}"
            continue
        best = map.best_word()
        brightest = printable(best.text) or format_place(Place(NO_SPAN, best.box, best.times))
        yield f"map {hit.rank}: {folder}/{hit.rank}.png; brightest: {brightest}"
    if errors and len(errors) == len(hits):
        raise errors[0]


def _write_maps(
    folder: str, number: int, previews: Previews, map: SimilarityMap, title: str
) -> None:
    """Writes `<number>.png`, `<number>-<token>-<text>.png` and, with the values, `<number>.json`.

    Words without a location, such as those of a caption, are not highlighted, so the maps of the
    query tokens would be equal and are left out; so they are for queries of very many tokens.
    """
    files: dict[str, bytes | str] = {
        f"{number}.png": add_header(highlight(previews, map), map, title),
        f"{number}.json": map.to_json(),
    }
    has_places = any(word.box or word.times for word in map.words)
    if has_places and len(map.query_tokens) <= MAX_TOKEN_MAPS:
        for token, text in enumerate(map.query_tokens):
            name = re.sub(r"\W+", "_", text)[:20]
            image = add_header(highlight(previews, map, token), map, title, token)
            files[f"{number}-{token + 1:02d}-{name}.png"] = image
    for name, data in files.items():
        write_atomic(f"{folder}/{name}", data)


def write_hit_sheet(
    file: str, searcher: Searcher, query: str, hits: Sequence[Hit], options: SearchOptions
) -> str:
    """Writes the images of hits side by side, reranked ones below those of the first stage.

    Returns:
        A line that names the file, or says why there is none.
    """
    if not hits:
        return "sheet: none; there are no hits"
    title = f"{options.representation}, {options.score} score"
    rows = [(title, hits)]
    if any(hit.reranked for hit in hits):
        rows = [(title, searcher.search_with([query], options)[0]), ("reranked", hits)]
    sheet, num_missing = hit_sheet(searcher, query, rows)
    write_atomic(file, sheet)
    missing = f"; {num_missing} of its hits have no picture that can be read" if num_missing else ""
    return f"sheet: {file}{missing}"
