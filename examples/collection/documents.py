"""Reads the pages of PDF documents, and removes the lines that their queries quote."""

from __future__ import annotations

import ctypes
import gzip
import io
import itertools
import re
import time
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pypdfium2 as pdfium
import pypdfium2.raw as raw

from examples.collection.extract import clean_query, members
from examples.collection.parts import hash64
from pipeline.data.decode.pdf import is_legible
from pipeline.index.languages import language_shares

#: Licences of the parts of TeX Live that are clearly free, by their names in its catalogue.
FREE = re.compile(
    r"lppl|l?gpl|fdl|pd$|bsd|mit$|x11|apache|artistic|ofl|gfl|gfsl|cc-by-(sa-)?\d|cc-0"
)
#: Documents with more pages are not used. A scan has at most that many, and one document of
#: `SCAN_INTERVAL` is one.
MAX_PAGES, MAX_SCAN_PAGES, SCAN_INTERVAL = 1_000, 40, 16
#: Pages per query of each kind, the most queries of a document, and how many pages an answer has.
#: PDFium reads the whole document for each page that it writes.
PAGES_PER_QUERY, MAX_QUERIES, MAX_SECTION = 24, 10, 3
#: A heading on more pages (itself, contents, running heads) has subsections on other pages.
MAX_REPEATED = MAX_SECTION + 2
#: Number of characters below a heading.
MIN_BELOW = 300
#: Lines up to this share of the longest one of their page do not continue on the next one.
SHORT_LINE = 0.75
SCAN_DPI, SCAN_QUALITY = 100, 60
#: Share of the words of an edited page that may differ.
MAX_LOST = 0.02
#: Number of characters that must be legible.
NUM_LEGIBLE = 5_000
_CAPTION = (
    r"(?:fig(?:ure|\.|ura)|tab(?:le|elle|leau|la|ela|\.)|abb(?:ildung|\.)|listing|obr(?:ázek|\.)|"
    r"рис(?:унок|\.)|таблица|図|表|rys(?:unek|\.))\s*[A-Z]?\d[\d.]*\d?"
)
_LABEL = re.compile(
    rf"^(?:{_CAPTION}[.:]\s+|(?:chapter |§ ?)?(?:[A-Z]?\d[\d.]*|[A-Z]\.[\d.]*)\s+)", re.I
)
_LEADERS = re.compile(r"[\s.·]*\s(?:\d+|[ivx]+)?$|[\s.]+$")
_IS_CAPTION = re.compile(rf"{_CAPTION}[.:]\s+(\S.*)", re.I)
#: Lines of a list of figures, and headings of lists.
_IS_LISTED = re.compile(r"(\. ?){4}|\s\d+$")
_IS_LIST = re.compile(r"\b(index|contents|bibliography|references|list of)\b")
#: Language of documents of no known language.
UNKNOWN = "und"


class Asked(NamedTuple):
    """A query whose answers are `num_pages` pages from `page` on.

    `overlap` is the share of its words in the other lines of these pages.
    """

    kind: str
    text: str
    page: int
    num_pages: int
    overlap: float = 0


def part_licences(path: Path) -> dict[str, str]:
    """Returns the licences in the catalogue of TeX Live by the folders of the documentation."""
    licences: dict[str, str] = {}
    for name, content in members(path):
        if re.fullmatch(r"usr/share/doc/texlive-[\w-]+/Licenses\.gz", name):
            licence = ""
            for line in gzip.decompress(content).decode(errors="replace").splitlines():
                if line.startswith("texmf-dist/doc/"):
                    folder = line.removeprefix("texmf-dist/doc/").rpartition("/")[0]
                    licences.setdefault(folder, licence)
                else:
                    licence = line.partition(": ")[2].strip()
            break
    return licences


def contents(path: Path) -> Iterator[tuple[str, bytes]]:
    """Yields the PDF documents in a package, except parts of TeX Live that are not clearly free."""
    licences = part_licences(path) if "texlive" in path.name else {}
    for name, content in members(path):
        if name.endswith((".pdf", ".pdf.gz")):
            _, is_part, folder = name.rpartition("/")[0].partition("usr/share/doc/texlive-doc/")
            while is_part and folder and folder not in licences:
                folder = folder.rpartition("/")[0]
            if not is_part or FREE.match(licences.get(folder, "")):
                is_compressed = name.endswith(".gz")
                name = name.removeprefix("usr/share/").removesuffix(".gz")
                name = re.sub(r"[^\w.+/-]", "_", name, flags=re.A)
                yield name, gzip.decompress(content) if is_compressed else content


def read(path: Path, file: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields the pages of the documents of a package as rows.

    `queries` are those whose first answer is the page, and `lines` those that `edit` removes.
    """
    for name, content in contents(path):
        try:
            document = pdfium.PdfDocument(content)
            if 0 < len(document) <= MAX_PAGES:
                yield from _read(f"{file['package']}/{name}", document)
        except pdfium.PdfiumError:
            continue


def _read(identity: str, document: pdfium.PdfDocument) -> Iterator[dict[str, Any]]:
    texts = [_text(document, number) for number in range(len(document))]
    if not is_legible(" ".join(texts)[:NUM_LEGIBLE]):
        return
    pages_of: dict[str, set[int]] = defaultdict(set)
    for number, text in enumerate(texts):
        for line in text.splitlines():
            pages_of[plain(line)].add(number)
    candidates = [
        [query._replace(overlap=_overlap(query, texts)) for query in found]
        for found in (_sections(document, texts, pages_of), _captions(texts, pages_of))
    ]
    limit = min(1 + len(texts) // PAGES_PER_QUERY, MAX_QUERIES)
    queries = [
        query
        for found in candidates
        for query in sorted(found, key=lambda query: (query.overlap, hash64(query.text)))[:limit]
    ]
    lines: dict[int, set[str]] = defaultdict(set)
    for name in {plain(query.text) for query in queries}:
        for number in pages_of[name]:
            lines[number].add(name)
    refused = remove(document, lines)
    edited = {number: _text(document, number) for number in lines}
    if any(_is_damaged(texts[number], edited[number], lines[number]) for number in lines):
        queries, lines, edited = [], {}, {}
    for number, text in edited.items():
        texts[number] = text
        refused |= lines[number] & {plain(line) for line in text.splitlines()}
    is_scan = len(texts) <= MAX_SCAN_PAGES and hash64(f"scan {identity}") % SCAN_INTERVAL == 0
    language = next(iter(language_shares(texts)), UNKNOWN)
    for number, text in enumerate(texts):
        titles = [
            plain(query.text) for found in candidates for query in found if query.page == number
        ]
        used = [query for query in queries if query.page == number]
        yield {
            "_id": f"{identity}#page={number + 1}",
            "text": " ".join(text.split()),
            "language": language,
            "is_scan": is_scan,
            "titles": titles,
            "queries": [query for query in used if plain(query.text) not in refused],
            "lines": sorted(lines.get(number, ())),
        }


def _overlap(query: Asked, texts: list[str]) -> float:
    name = plain(query.text)
    lines = "\n".join(texts[query.page : query.page + query.num_pages]).splitlines()
    below = " ".join(line for line in lines if plain(line) != name)
    words = words_of(query.text)
    return len(words & words_of(below)) / max(len(words), 1)


def words_of(text: str) -> set[str]:
    """Returns the words of a text in lower case."""
    return set(re.findall(r"[^\W_]+", text.casefold()))


def _is_damaged(text: str, edited: str, names: set[str]) -> bool:
    """Returns whether a page lost other words than those of its removed lines.

    PDFium changes the characters of some fonts when it writes a page.
    """
    lines = [line for line in text.splitlines() if plain(line) not in names]
    words = Counter(" ".join(lines).split())
    return (words - Counter(edited.split())).total() > MAX_LOST * words.total() + 1


def _text(document: pdfium.PdfDocument, number: int) -> str:
    page = document[number]
    textpage = page.get_textpage()
    text = textpage.get_text_range(errors="replace")
    textpage.close()
    page.close()
    return text


def plain(line: str) -> str:
    """Returns a heading or caption without its number, and without the page number in a list.

    >>> plain("3.1 The Bode plot . . . . 12"), plain("Figure 2: The Bode plot.")
    ('the bode plot', 'the bode plot')
    """
    text = " ".join(unicodedata.normalize("NFKC", line).casefold().split())
    return _LEADERS.sub("", _LABEL.sub("", text))


def _sections(
    document: pdfium.PdfDocument, texts: list[str], pages_of: dict[str, set[int]]
) -> Iterator[Asked]:
    """Yields the headings in the outline whose section has few pages."""
    entries = []
    for bookmark in document.get_toc():
        target = bookmark.get_dest()
        page = target.get_index() if target else None
        if page is not None and page < len(texts):
            entries.append((bookmark.get_title(), page))
    counts = Counter(plain(title) for title, _ in entries)
    entries.append(("", len(texts)))
    for (title, page), (_, following) in itertools.pairwise(entries):
        name = plain(title)
        query = clean_query(_LABEL.sub("", title), is_heading=True)
        num_pages = max(following - page, 1)
        if not query or _IS_LIST.search(name) or plain(query) != name or page not in pages_of[name]:
            continue
        below = texts[page].casefold().rpartition(name)[2]
        is_small = num_pages <= MAX_SECTION and len(pages_of[name]) <= MAX_REPEATED
        if counts[name] == 1 and is_small and len(below) >= MIN_BELOW:
            yield Asked("section", query, page, num_pages)


def _captions(texts: list[str], pages_of: dict[str, set[int]]) -> Iterator[Asked]:
    """Yields the captions of one line of figures and tables."""
    for number, text in enumerate(texts):
        found = text.splitlines()
        longest = max(map(len, found), default=0)
        for line in found:
            match = _IS_CAPTION.match(line.strip())
            is_whole = line.rstrip().endswith((".", "!", "?")) or len(line) < SHORT_LINE * longest
            if match and is_whole and match[1][0].isupper() and not _IS_LISTED.search(line):
                query = clean_query(match[1].rstrip(". "), is_heading=True)
                is_unique = len(pages_of[plain(line)]) <= 2  # the page, and a list of figures
                if query and plain(query) == plain(line) and is_unique:
                    yield Asked("caption", query, number, 1)


def remove(document: pdfium.PdfDocument, lines: dict[int, set[str]]) -> set[str]:
    """Removes the text of lines, and returns those that other lines share a text object with.

    Args:
        lines: Lines by page, see `plain`.
    """
    refused = set()
    for number, names in lines.items():
        page = document[number]
        textpage = page.get_textpage()
        count = textpage.count_chars()
        # The text of PDFium omits some of its characters.
        text = "".join(chr(raw.FPDFText_GetUnicode(textpage, place)) for place in range(count))
        objects: dict[int, Any] = {}
        for found in re.finditer(r"[^\r\n]+", text):
            if (name := plain(found[0])) in names:
                start, stop = found.span()
                inside = _objects(textpage, range(start, stop))
                around = [*range(start - 4, start), *range(stop, min(stop + 4, count))]
                if inside.keys() & _objects(textpage, around).keys():
                    refused.add(name)
                else:
                    objects |= inside
        for item in objects.values():
            raw.FPDFPage_RemoveObject(page, item)
        textpage.close()
        page.gen_content()
        page.close()
    return refused


def _objects(textpage: pdfium.PdfTextPage, places: Iterable[int]) -> dict[int, Any]:
    """Returns the text objects of characters by their addresses."""
    found = [raw.FPDFText_GetTextObject(textpage, place) for place in places if place >= 0]
    return {ctypes.addressof(item.contents): item for item in found if item}


def edit(content: bytes, rows: list[dict[str, Any]]) -> bytes:
    """Returns a document without the lines of its rows, as images if it is a scan."""
    lines = {number: set(row["lines"]) for number, row in enumerate(rows) if row["lines"]}
    is_scan = rows[0]["is_scan"]
    if not lines and not is_scan:
        return content
    document, output = pdfium.PdfDocument(content), io.BytesIO()
    remove(document, lines)
    if is_scan:
        scans = [page.render(scale=SCAN_DPI / 72).to_pil().convert("L") for page in document]
        options: dict[str, Any] = {"creationDate": time.gmtime(0), "modDate": time.gmtime(0)}
        options |= {"resolution": SCAN_DPI, "quality": SCAN_QUALITY}
        scans[0].save(output, "PDF", save_all=True, append_images=scans[1:], **options)
    else:
        document.save(output)
    return output.getvalue()
