"""Reader of the text of office documents, e-mails and HTML pages, with the standard library only.

Documents are untrusted: members of archives are read up to a limit, and XML with entity
declarations is refused. Formulas, images and macros are not read.
"""

from __future__ import annotations

import email
import email.policy
import html.parser
import posixpath
import re
import urllib.parse
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from email.message import EmailMessage
from typing import Any
from xml.etree import ElementTree

from pipeline.data.decode import Unreadable

#: Maximum size of a member of an archive, and of a document that is read as a whole, in bytes.
MAX_MEMBER_BYTES = 256 << 20
#: Elements after which a line ends, and elements of HTML that contain no text of the page.
BLOCKS = re.compile(
    "address|article|aside|blockquote|br|dd|div|dl|dt|figcaption|footer|form|h[1-6r]|header|li|main"
    "|nav|ol|p|pre|section|table|title|tr|ul"
).fullmatch
HIDDEN = ("script", "style", "template", "noscript", "svg")
#: Characters of the elements of office documents that contain none, and after elements that end.
CHARACTERS = {
    "tab": "\t",
    "br": "\n",
    "cr": "\n",
    "line-break": "\n",
    "s": " ",
    "noBreakHyphen": "-",
}
ENDS = {"p": "\n", "h": "\n", "tc": "\t", "table-cell": "\t", "tr": "\n", "table-row": "\n"}
#: Elements whose content repeats or comments on the text.
OMITTED = frozenset(("Fallback", "tabs", "tracked-changes", "annotation", "rPh"))
#: Elements that contain the text in OOXML and in OpenDocument.
TEXTS, PARAGRAPHS = ("t",), ("p", "h")
#: Errors of reading a malformed archive or its XML. `zipfile` raises the first three.
MALFORMED = (
    *(zipfile.BadZipFile, RuntimeError, NotImplementedError, zlib.error, EOFError),
    *(ElementTree.ParseError, LookupError, ValueError),
)

#: A part of a document: a suffix of its id such as "#slide=3", its title, and its text.
Section = tuple[str, str | None, str]


def read_document(path: str, kind: str) -> dict[str, Any]:
    """Returns the `sections` of a document and its `metadata`.

    Args:
        kind: HTML, e-mail, EPUB, DOCX, PPTX, XLSX or OpenDocument.

    Raises:
        Unreadable: The document is corrupted, encrypted or too large.
    """
    try:
        if kind in ("HTML", "e-mail"):
            with open(path, "rb") as file:
                content = _limited(file.read(MAX_MEMBER_BYTES + 1))
            is_email = kind == "e-mail"
            return _email(content) if is_email else _reply([("", *_html(_decoded(content)))])
        with zipfile.ZipFile(path) as archive:
            return _reply(READERS[kind](_Package(archive)))
    except MALFORMED as error:
        reason = "encrypted" if "encrypted" in str(error) else f"corrupted {kind} file"
        raise Unreadable(reason, f"{type(error).__name__}: {error}") from None


def _reply(
    sections: Iterable[Section], metadata: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    return {
        "sections": [[value and _unicode(value) for value in section] for section in sections],
        "metadata": {name: _unicode(value) for name, value in (metadata or {}).items()},
    }


def _unicode(text: str) -> str:
    return text.encode("utf-8", "replace").decode()  # headers may contain undecoded bytes


def _limited(content: bytes) -> bytes:
    if len(content) > MAX_MEMBER_BYTES:
        raise Unreadable("too large", f"a part must be at most {MAX_MEMBER_BYTES:,} bytes")
    return content


class _Package:
    """Members of an archive, and the relationships between them."""

    def __init__(self, archive: zipfile.ZipFile):
        self._archive, self.names = archive, frozenset(archive.namelist())

    def read(self, name: str) -> bytes:
        with self._archive.open(name) as member:
            return _limited(member.read(MAX_MEMBER_BYTES + 1))

    def tree(self, name: str) -> ElementTree.Element:
        """Returns the root element of a member. Names have no namespace."""
        content = self.read(name)
        if b"<!ENTITY" in content.replace(b"\0", b""):  # also in UTF-16
            raise Unreadable("unsafe XML", "it declares entities")
        root = ElementTree.fromstring(content)
        for element in root.iter():
            element.tag = element.tag.rpartition("}")[2]
            element.attrib = {k.rpartition("}")[2]: v for k, v in element.attrib.items()}
        return root

    def text(self, name: str, texts: tuple[str, ...] = TEXTS) -> str:
        """Returns the text in elements of these names, with a line per paragraph and table row."""
        return _tidy("".join(_strings(self.tree(name), texts)))

    def title(self, name: str) -> str | None:
        """Returns the title in the properties of a document."""
        return (name in self.names and self.tree(name).findtext(".//title")) or None

    def targets(self, name: str) -> dict[str, tuple[str, str]]:
        """Returns the type and the member of each relationship of a member, by id."""
        folder, _, file = name.rpartition("/")
        relations = posixpath.join(folder, "_rels", f"{file}.rels")
        if relations not in self.names:
            return {}
        found = {}
        for a in (element.attrib for element in self.tree(relations)):
            if a.get("TargetMode") != "External":
                target = posixpath.normpath(posixpath.join("/", folder, a["Target"])).lstrip("/")
                found[a["Id"]] = (a["Type"].rpartition("/")[2], target)
        return found

    def main(self) -> str:
        """Returns the main member of an OOXML document."""
        return next(t for kind, t in self.targets("").values() if kind == "officeDocument")


def _strings(
    element: ElementTree.Element,
    texts: tuple[str, ...],
    is_text: bool = False,
    in_cell: bool = False,
) -> Iterator[str]:
    """Yields the strings in elements of these names."""
    tag = element.tag
    if tag in OMITTED:
        return
    is_text, in_cell = is_text or tag in texts, in_cell or tag in ("tc", "table-cell")
    yield CHARACTERS.get(tag, "") * min(int(element.get("c", 1)), 1000)
    yield (is_text and element.text) or ""
    for child in element:
        yield from _strings(child, texts, is_text, in_cell)
        yield (is_text and child.tail) or ""
    yield " " if in_cell and tag in PARAGRAPHS else ENDS.get(tag, "")


def _tidy(text: str) -> str:
    r"""Removes repeated spaces, empty cells and repeated empty lines.

    >>> _tidy("a \t\tb  c \n\n\n\nd ")
    'a\tb c\n\nd'
    """
    rows = ([" ".join(cell.split()) for cell in line.split("\t")] for line in text.split("\n"))
    lines = ("\t".join(filter(None, row)) for row in rows)
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()


def _docx(package: _Package) -> Iterator[Section]:
    main, title = package.main(), package.title("docProps/core.xml")
    notes = (t for kind, t in package.targets(main).values() if kind in ("footnotes", "endnotes"))
    yield "", title, "\n\n".join(filter(None, map(package.text, (main, *sorted(notes)))))


def _pptx(package: _Package) -> Iterator[Section]:
    main, title = package.main(), package.title("docProps/core.xml")
    targets = package.targets(main)
    slides = (targets[slide.attrib["id"]][1] for slide in package.tree(main).iter("sldId"))
    for number, slide in enumerate(slides, 1):
        notes = (t for kind, t in package.targets(slide).values() if kind == "notesSlide")
        texts = filter(None, map(package.text, (slide, *notes)))
        yield f"#slide={number}", title, "\n\n".join(texts)


def _xlsx(package: _Package) -> Iterator[Section]:
    main = package.main()
    targets = package.targets(main)
    members = (member for kind, member in targets.values() if kind == "sharedStrings")
    strings = (string for member in members for string in package.tree(member).iter("si"))
    shared = ["".join(_strings(string, TEXTS)) for string in strings]

    def value(cell: ElementTree.Element) -> str:
        text = "".join(_strings(cell, ("t", "v")))
        return shared[int(text)] if cell.get("t") == "s" and text else text

    for number, sheet in enumerate(package.tree(main).iter("sheet"), 1):
        rows = package.tree(targets[sheet.attrib["id"]][1]).iter("row")
        lines = ("\t".join(map(value, row.iter("c"))) for row in rows)
        yield f"#sheet={number}", sheet.get("name"), _tidy("\n".join(lines))


def _open_document(package: _Package) -> Iterator[Section]:
    manifest = "META-INF/manifest.xml"
    if manifest in package.names and b"encryption-data" in package.read(manifest):
        raise Unreadable("encrypted")
    yield "", package.title("meta.xml"), package.text("content.xml", PARAGRAPHS)


def _epub(package: _Package) -> Iterator[Section]:
    if "META-INF/rights.xml" in package.names:
        raise Unreadable("encrypted", "the book has digital rights management")
    container = package.tree("META-INF/container.xml")
    member = next(container.iter("rootfile")).attrib["full-path"]
    book = package.tree(member)
    files = {item.get("id"): item.get("href", "") for item in book.iter("item")}
    title = book.findtext(".//title") or None
    chapters = [reference.get("idref") for reference in book.iter("itemref")]
    for number, chapter in enumerate(chapters, 1):
        href = urllib.parse.unquote(files[chapter])
        name = posixpath.normpath(posixpath.join(posixpath.dirname(member), href))
        yield f"#chapter={number}", title, _html(_decoded(package.read(name)))[1]


READERS: dict[str, Callable[[_Package], Iterator[Section]]] = {
    "DOCX": _docx,
    "PPTX": _pptx,
    "XLSX": _xlsx,
    "OpenDocument": _open_document,
    "EPUB": _epub,
}


class _Html(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.parts: list[str] = []
        self.title = ""
        self._open = {"title": 0, "hidden": 0}

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        if tag in HIDDEN:
            self._open["hidden"] += 1
        elif BLOCKS(tag):
            self.parts.append("\n")
        self._open["title"] |= tag == "title"

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.parts.append("\n" if BLOCKS(tag) else "")

    def handle_endtag(self, tag: str) -> None:
        if tag in HIDDEN:
            self._open["hidden"] = max(self._open["hidden"] - 1, 0)
        self.parts.append("\n" if BLOCKS(tag) else "\t" if tag in ("td", "th") else "")
        self._open["title"] &= tag != "title"

    def parse_marked_section(self, i: int, report: Any = True) -> int:
        """Skips sections whose type is unknown, as browsers do."""
        try:
            return super().parse_marked_section(i, report)
        except AssertionError:
            return self.parse_bogus_comment(i)

    def handle_data(self, data: str) -> None:
        if self._open["title"]:
            self.title += data
        elif not self._open["hidden"]:
            self.parts.append(re.sub(r"\s+", " ", data))


def _html(text: str) -> tuple[str | None, str]:
    """Returns the title and the text of an HTML page."""
    parser = _Html()
    parser.feed(text)
    parser.close()
    return " ".join(parser.title.split()) or None, _tidy("".join(parser.parts))


def _decoded(content: bytes) -> str:
    """Decodes HTML: by its byte order mark or `charset`, else as UTF-8, else as Windows-1252."""
    declared = re.search(rb"""(?:charset|encoding)\s*=\s*["']?([\w-]+)""", content[:2048])
    marks = {b"\xff\xfe": "utf-16", b"\xfe\xff": "utf-16", b"\xef\xbb\xbf": "utf-8-sig"}
    marks |= {b"<\0": "utf-16-le", b"\0<": "utf-16-be"}  # without a mark
    names = [name for mark, name in marks.items() if content.startswith(mark)]
    for name in (*names, *([declared[1].decode()] if declared else []), "utf-8"):
        try:
            return content.decode(name)
        except (UnicodeError, LookupError):
            continue
    return content.decode("cp1252", "replace")


def _email(content: bytes) -> dict[str, Any]:
    message = email.message_from_bytes(content, policy=email.policy.default)
    body = message.get_body(("plain", "html"))
    text = ""
    if isinstance(body, EmailMessage):
        payload = body.get_payload(decode=True)
        data = payload if isinstance(payload, bytes) else b""
        try:
            text = data.decode(body.get_content_charset() or "utf-8")
        except (UnicodeError, LookupError):
            text = _decoded(data)
        text = _html(text)[1] if body.get_content_type() == "text/html" else text.strip()
    names = ("from", "to", "cc", "date")
    headers = {name: str(message[name]) for name in names if message[name]}
    lines = [f"{name.capitalize()}: {value}" for name, value in headers.items() if name != "date"]
    if attachments := [part.get_filename() or "unnamed" for part in message.iter_attachments()]:
        headers["attachments"] = ", ".join(attachments)  # their content is not read
    subject = " ".join(str(message["subject"] or "").split())
    return _reply([("", subject or None, "\n".join([*lines, "", text]))], headers)
