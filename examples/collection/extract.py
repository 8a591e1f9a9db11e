"""Sections of the files of packages: descriptions, dictionaries, manual pages and HTML pages."""

from __future__ import annotations

import bz2
import gzip
import lzma
import re
import tarfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import pyarrow as pa

from examples.collection import markup

#: Size of passages. The number of tokens is about proportional to the bytes in all scripts.
MIN_BYTES, MAX_BYTES = 30, 600
#: Number of characters of a query, and what makes a heading a signature or a name.
QUERY_CHARACTERS = range(8, 120)
#: Regions whose language differs in vocabulary or script.
REGIONS = ("BR", "CN", "TW", "HK")
_IS_NAME = re.compile(
    r"[()<>*&=_{}\\/|$@]|::|[a-z][A-Z]|\w\.\w|--|^\W*(Class|Interface|Enum|Uses of|Package) "
)


class Section(NamedTuple):
    """A text with the query that it answers.

    Attributes:
        key: Name of what the text describes. Sections with equal keys describe the same thing.
        edition: Language or dictionary, which distinguishes the sections of a key.
        query: Heading, synopsis or headword, or empty.
        alternative: Text that asks for other editions of the key; empty for `query`.
    """

    key: str
    edition: str
    language: str
    kind: str
    query: str
    paragraphs: list[str]
    path: str
    alternative: str = ""


def members(path: Path) -> Iterator[tuple[str, bytes]]:
    """Yields names and contents of the files in a `.deb`: an `ar` archive with a `data.tar`.

    Raises:
        ValueError: The file is not such an archive.
    """
    with path.open("rb") as file:
        if file.read(8) == b"!<arch>\n":
            while len(header := file.read(60)) == 60:
                if header.startswith(b"data.tar"):
                    yield from _data(file, header[:16].decode().rstrip(" /"))
                    return
                size = int(header[48:58])
                file.seek(size + size % 2, 1)
    raise ValueError(f"{path.name} has no data.tar")


def _data(file: BinaryIO, name: str) -> Iterator[tuple[str, bytes]]:
    """Reads a tar archive to its end. What follows it in the file is not read."""
    if name.endswith(".zst"):
        file = pa.CompressedInputStream(pa.PythonFile(file, "r"), "zstd")
    mode: Any = "r|" if name.endswith((".tar", ".zst")) else f"r|{name[9:]}"
    with tarfile.open(fileobj=file, mode=mode) as archive:
        for member in archive:
            if member.isfile() and (content := archive.extractfile(member)):
                yield member.name.removeprefix("./"), content.read()


def descriptions(path: Path, language: str) -> Iterator[Section]:
    """Yields the long descriptions of packages; the short ones are the queries.

    The name of the package is removed from both.
    """
    decompress = lzma.decompress if path.suffix == ".xz" else bz2.decompress
    for block in decompress(path.read_bytes()).decode().split("\n\n"):
        found = re.search(r"^Description-\w+: (.*)\n((?: .*\n?)+)", block, re.M)
        if (name := re.search(r"^Package: (\S+)", block, re.M)) and found:
            word = re.compile(rf"(?<![\w-]){re.escape(name[1])}(?![\w-])", re.I)
            query, text = (" ".join(word.sub("", part).split(" ")) for part in found.groups())
            paragraphs = text.split("\n .\n")
            key = f"description/{name[1]}"
            yield Section(key, language, language, "description", query, paragraphs, name[1])


def wordnet(path: Path, language: str) -> Iterator[Section]:
    """Yields the glosses of WordNet; words with one sense are queries.

    The words of a gloss are replaced by `~` in its examples, and the definition without examples
    asks for other dictionaries.
    """
    synsets = []
    for name, content in members(path):
        if Path(name).name.startswith("data."):
            for line in content.decode().splitlines():
                fields, _, gloss = line.partition(" | ")
                if gloss and not line.startswith("  "):
                    parts = fields.split()
                    found = parts[4 : 4 + 2 * int(parts[3], 16) : 2]
                    words = [re.sub(r"\(\w+\)$", "", word).replace("_", " ") for word in found]
                    synsets.append((f"{Path(name).name}/{parts[0]}", words, gloss.strip()))
    senses = Counter(word.casefold() for _, words, _ in synsets for word in set(words))
    for identity, words, gloss in synsets:
        query = next((word for word in words if senses[word.casefold()] == 1), "")
        text = gloss
        for word in words:
            text = without_word(text, word)
        definition = text.partition('; "')[0]
        key = f"word/{query.casefold()}" if query else identity
        yield Section(key, "wordnet", language, "definition", query, [text], identity, definition)


def gcide(path: Path, language: str) -> Iterator[Section]:
    """Yields the entries of the dictionary GCIDE, in which `~` replaces the headword."""
    content = next(content for name, content in members(path) if name.endswith(".dict.dz"))
    entries = re.split(r"\n(?=\S)", gzip.decompress(content).decode(errors="replace"))
    for number, entry in enumerate(entries):
        head = re.match(r"([^\\\n]+) \\[^\\]*\\", entry)
        if head is None:
            continue
        word = head[1].strip()
        body = re.sub(r"^ {8,}.*|--[A-Z].*", "", entry[head.end() :], flags=re.M)  # quotations
        body = re.sub(r"\[[^][]{1,4}\]|[{}]", "", body)  # accents
        body = re.sub(r"\[[^][]*\]|^[\s,]*\([^)]*\)", "", body).lstrip(", ")  # etymologies, sources
        paragraphs = [without_word(part, word) for part in re.split(r"\n\s*\n", body)]
        key = f"word/{word.casefold()}"
        yield Section(key, "gcide", language, "definition", word, paragraphs, str(number))


def without_word(text: str, word: str) -> str:
    """Replaces a word and its regular inflections by a swung dash.

    >>> without_word("a Cat; cats, category", "cat")
    'a ~; ~, category'
    """
    return re.sub(rf"(?<!\w){re.escape(word)}(?:e?s|e?d|ing)?(?!\w)", "~", text, flags=re.I)


#: Headings of the section that describes the subject of a manual page.
DESCRIPTION = markup.words(
    "DESCRIPTION BESCHREIBUNG DESCRIZIONE DESCRIPCIÓN DESCRIÇÃO DESCRIERE BESCHRIJVING BESKRIVELSE "
    "BESKRIVNING POPIS OPIS ОПИСАНИЕ ОПИС LEÍRÁS KUVAUS KETERANGAN DESKRIPSI 説明 描述 AÇIKLAMA "
    "TANIM ΠΕΡΙΓΡΑΦΗ"
)


def manuals(path: Path, language: str) -> Iterator[Section]:
    """Yields the sections of manual pages; the synopsis in NAME asks for the description."""
    for name, content in members(path):
        found = re.match(r"usr/share/man/(?:([^/]+)/)?man\w+/(.+)\.gz$", name)
        if found is None:
            continue
        edition, page = (found[1] or "en").partition(".")[0], found[2]
        synopsis = ""
        for number, (heading, paragraphs) in enumerate(
            markup.read_man(_text(gzip.decompress(content)))
        ):
            if number == 0:
                synopsis = re.split(r"\s[-–—‐―−]+\s", " ".join(paragraphs), maxsplit=1)[-1]
                continue
            is_subject = heading.strip().upper() in DESCRIPTION
            kind, query = ("synopsis", synopsis) if is_subject else ("heading", heading)
            key = f"man/{page}/{kind if is_subject else number}"
            where = f"{edition}/{page}/{number}"
            yield Section(key, edition, edition, kind, query, paragraphs, where)


#: Languages in paths of pages.
LANGUAGES = markup.words(
    "ca cs da de el en es es_ES fi fr hu id it it_IT ja ja_JP ko ko_KR nl nn pl pt pt-br pt_BR ro "
    "ru sv sv_SE tr uk vi zh-cn zh_CN zh_TW"
)


def pages(path: Path, language: str) -> Iterator[Section]:
    """Yields the sections of HTML pages; the headings are the queries.

    A part of the path that is the language of the page is ignored in the key. A package without a
    fixed language has pages in several.
    """
    for name, content in members(path):
        if not re.search(r"\.html?(\.gz)?$", name) or "maintainers" in name:
            continue
        text = _text(gzip.decompress(content) if name.endswith(".gz") else content)
        stem = re.sub(r"\.html?(\.gz)?$", "", name.removeprefix("usr/share/"))
        parts = stem.split("/")
        found = re.search(r'<html[^>]*\slang="([\w-]+)"', text)
        guess = next((part for part in parts if part in LANGUAGES), found[1] if found else "en")
        edition = (language or guess).replace("_", "-")
        parts = [part for part in parts if part.replace("_", "-").lower() != edition.lower()]
        for number, (heading, paragraphs) in enumerate(markup.read_html(text)):
            key = f"{'/'.join(parts)}/{number}"
            where = f"{stem}/{number}"
            yield Section(key, edition, edition, "heading", heading, paragraphs, where)


def _text(content: bytes) -> str:
    """Decodes UTF-8, or the character set that a page declares."""
    declared = re.search(rb"charset=[\"']?([\w-]+)", content[:2000])
    for name in ("utf-8", declared[1].decode() if declared else "latin-1"):
        try:
            return content.decode(name)
        except (UnicodeDecodeError, LookupError):
            pass
    return content.decode("latin-1")


def clean_query(text: str, is_heading: bool, is_word: bool = False) -> str:
    """Returns a heading, synopsis or headword as a query, or an empty string if it is unsuitable.

    >>> clean_query("2.1 How to use it", True), clean_query("Use it", True)
    ('How to use it', '')
    """
    query = " ".join(re.sub(r"^[\d.\s]+|¶|\[edit\]", "", text).split())
    is_phrase = is_word or query.count(" ") > 1 or not query.isascii()
    is_long = is_word or len(query) in QUERY_CHARACTERS
    return "" if not is_phrase or not is_long or (is_heading and _IS_NAME.search(query)) else query


def normalise_language(language: str) -> str:
    """Returns the code of a language, with the region only if it is another one than usual.

    >>> normalise_language("it_IT"), normalise_language("pt-br"), normalise_language("en-US")
    ('it', 'pt-BR', 'en')
    """
    name, _, region = language.replace("_", "-").partition("-")
    return f"{name}-{region.upper()}" if region.upper() in REGIONS else name


def passages(section: Section, package: str) -> Iterator[dict[str, Any]]:
    """Yields the passages of a section. The first has the query, unless that is unsuitable."""
    query = clean_query(section.query, section.kind == "heading", section.kind == "definition")
    language = normalise_language(section.language)
    for number, text in enumerate(chunks(section.paragraphs)):
        row = {
            "_id": f"{package}/{section.path}-{number}",
            "text": text,
            "language": language,
            "package": package,
            "key": section.key,
            "edition": section.edition,
        }
        if number == 0 and query:
            row |= {"kind": section.kind, "query": query, "alternative": section.alternative}
        yield row


def chunks(paragraphs: list[str]) -> Iterator[str]:
    """Joins and divides paragraphs to texts of at most `MAX_BYTES`, at ends of sentences.

    >>> [len(text) for text in chunks(["A sentence. " * 70, "The last one of the section."])]
    [599, 268]
    """
    pieces: list[str] = []
    for paragraph in paragraphs:
        for sentence in re.split(r"(?<=[.!?:;])\s+|(?<=[。！？])", " ".join(paragraph.split())):
            step = MAX_BYTES // 4  # a character has at most 4 bytes
            is_long = len(sentence.encode()) > MAX_BYTES
            starts = range(0, len(sentence), step) if is_long else [0]
            pieces += [sentence[at : at + step] if is_long else sentence for at in starts]
    text = ""
    for piece in [*pieces, ""]:
        joined = f"{text} {piece}".strip()
        if not piece or len(joined.encode()) > MAX_BYTES:
            if len(text.encode()) >= MIN_BYTES:
                yield text
            joined = piece
        text = joined


EXTRACTORS: dict[str, Callable[[Path, str], Iterator[Section]]] = {
    "descriptions": descriptions,
    "wordnet": wordnet,
    "gcide": gcide,
    "manuals": manuals,
    "pages": pages,
}
