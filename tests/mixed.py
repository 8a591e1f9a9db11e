"""A folder with files of all types. Each file contains a distinct word."""

from __future__ import annotations

import io
import zipfile
from email.message import EmailMessage
from pathlib import Path

import numpy as np
import soundfile

from tests.images import noise, png
from tests.media import tones, write_video
from tests.pdfs import Page, pdf

WORD_XML = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"
DRAWING = "http://schemas.openxmlformats.org/drawingml/2006/main"
SHEET = "http://schemas.openxmlformats.org/spreadsheetml/2006/main"
RELATION = "http://schemas.openxmlformats.org/officeDocument/2006/relationships"
PACKAGE = "http://schemas.openxmlformats.org/package/2006/relationships"
TEXT_XML = "urn:oasis:names:tc:opendocument:xmlns:text:1.0"


def archive(members: dict[str, str | bytes]) -> bytes:
    """Returns a ZIP archive. A member `mimetype` is not compressed."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as file:
        for name, value in members.items():
            stored = zipfile.ZIP_STORED if name == "mimetype" else zipfile.ZIP_DEFLATED
            file.writestr(name, value, stored)
    return content.getvalue()


def relations(*targets: tuple[str, str]) -> str:
    rows = (
        f'<Relationship Id="r{n}" Type="{RELATION}/{kind}" Target="{target}"/>'
        for n, (kind, target) in enumerate(targets, 1)
    )
    return f'<Relationships xmlns="{PACKAGE}">{"".join(rows)}</Relationships>'


def docx(*paragraphs: str, main: str = "word/document.xml", extra: str = "") -> bytes:
    rows = "".join(f"<w:p><w:r><w:t>{text}</w:t></w:r></w:p>" for text in paragraphs)
    body = f'<w:document xmlns:w="{WORD_XML}"><w:body>{extra}{rows}</w:body></w:document>'
    return archive({"_rels/.rels": relations(("officeDocument", main)), main: body})


def pptx(*slides: str) -> bytes:
    targets = [("slide", f"slides/slide{len(slides) - n}.xml") for n in range(len(slides))]
    ids = "".join(f'<p:sldId r:id="r{n}"/>' for n in range(1, len(slides) + 1))
    main = f'<p:presentation xmlns:p="p" xmlns:r="{RELATION}">{ids}</p:presentation>'
    members = {
        "_rels/.rels": relations(("officeDocument", "ppt/presentation.xml")),
        "ppt/presentation.xml": main,
        "ppt/_rels/presentation.xml.rels": relations(*targets),
    }
    for (_, target), text in zip(targets, slides, strict=True):
        body = f"<a:p><a:r><a:t>{text}</a:t></a:r></a:p>"
        members[f"ppt/{target}"] = f'<sld xmlns:a="{DRAWING}">{body}</sld>'
    return archive(members)


def xlsx(name: str, *rows: tuple[str | float, ...]) -> bytes:
    """Returns a workbook with one sheet. Texts are shared strings."""
    strings = [cell for row in rows for cell in row if isinstance(cell, str)]
    cells = (
        "".join(
            f'<c t="s"><v>{strings.index(cell)}</v></c>'
            if isinstance(cell, str)
            else f"<c><v>{cell}</v></c>"
            for cell in row
        )
        for row in rows
    )
    body = "".join(f"<row>{row}</row>" for row in cells)
    shared = "".join(f"<si><t>{text}</t></si>" for text in strings)
    targets = (("worksheet", "worksheets/sheet1.xml"), ("sharedStrings", "sharedStrings.xml"))
    sheet = f'<sheet name="{name}" r:id="r1"/>'
    return archive(
        {
            "_rels/.rels": relations(("officeDocument", "/xl/workbook.xml")),
            "xl/workbook.xml": f'<workbook xmlns="{SHEET}" xmlns:r="{RELATION}">{sheet}</workbook>',
            "xl/_rels/workbook.xml.rels": relations(*targets),
            "xl/worksheets/sheet1.xml": f'<worksheet xmlns="{SHEET}">{body}</worksheet>',
            "xl/sharedStrings.xml": f'<sst xmlns="{SHEET}">{shared}</sst>',
        }
    )


def open_document(kind: str, *paragraphs: str) -> bytes:
    rows = "".join(f"<t:p>{text}</t:p>" for text in paragraphs)
    return archive(
        {
            "mimetype": f"application/vnd.oasis.opendocument.{kind}",
            "content.xml": f'<office xmlns:t="{TEXT_XML}">{rows}</office>',
        }
    )


def epub(title: str, *chapters: str) -> bytes:
    names = [f"c{n}.xhtml" for n in range(len(chapters))]
    items = "".join(f'<item id="{name}" href="{name}"/>' for name in names)
    spine = "".join(f'<itemref idref="{name}"/>' for name in names)
    book = f'<package xmlns:dc="d"><dc:title>{title}</dc:title>{items}{spine}</package>'
    return archive(
        {
            "mimetype": "application/epub+zip",
            "META-INF/container.xml": '<container><rootfile full-path="O/b.opf"/></container>',
            "O/b.opf": book,
            **{f"O/{name}": text for name, text in zip(names, chapters, strict=True)},
        }
    )


def mail(subject: str, text: str, attachment: str = "") -> bytes:
    message = EmailMessage()
    message["From"], message["To"] = "ann@example.com", "bob@example.com"
    message["Subject"], message["Date"] = subject, "Mon, 02 Nov 2026 10:00:00 +0000"
    message.set_content(text)
    if attachment:
        message.add_attachment(b"x", "application", "octet-stream", filename=attachment)
    return message.as_bytes()


#: Files whose text is found by the word that is the key, and the id of the item.
TEXTS: dict[str, tuple[str, bytes, str]] = {
    "lighthouse": ("notes.txt", b"The lighthouse keeper sleeps.", ""),
    "vineyard": ("sub/plan.md", b"# Plan\n\nWork in the vineyard.", ""),
    "glacier": ("page.html", b"<title>Ice</title><script>x</script><p>A glacier melts.", ""),
    "ferry": ("trip.eml", mail("Trip", "The ferry leaves at noon.", "map.png"), ""),
    "anvil": ("tools.csv", b"name,use\nhammer,nails\nanvil,forging\n", "#row=2"),
    "comet": ("sky.jsonl", b'{"text": "A bright comet."}\n{"text": "A dull moon."}\n', "#row=1"),
    "dredging": ("report.docx", docx("Harbour report", "The dredging of the basin."), ""),
    "beacon": ("deck.pptx", pptx("Title slide", "Paint the beacon."), "#slide=2"),
    "walnut": ("stock.xlsx", xlsx("Stock", ("walnut", 12.5), ("oak", 3)), "#sheet=1"),
    "ballot": ("minutes.odt", open_document("text", "Minutes", "The ballot was secret."), ""),
    "orchid": ("flowers.ods", open_document("spreadsheet", "An orchid."), ""),
    "whale": ("tales.epub", epub("Tales", "<p>A storm.</p>", "<p>A whale sang.</p>"), "#chapter=2"),
    "turbine": ("manual.pdf", pdf(Page([(10, 50, "The turbine manual")])), "#page=1"),
    "pepper": ("recipe without suffix", b"Grind the pepper.", ""),
    "saffron": ("spice 100% \xf0\x9f\x8c\xb6.txt".encode("latin-1").decode(), b"Add saffron.", ""),
    "violin": ("a.docx.bin", docx("A violin concert."), ""),
}
#: Files that are rejected, with the reason.
REJECTED: dict[str, tuple[bytes, str]] = {
    "empty.txt": (b"", "empty file"),
    "blank.txt": (b" \n", "empty text"),
    "latin.txt": (b"caf\xe9 au lait", "not UTF-8"),
    "archive.zip": (archive({"a.txt": "text"}), "unsupported type"),
    "program": (b"\x7fELF\0\0\1\2", "unsupported type"),
    "old.doc": (b"\xd0\xcf\x11\xe0" + bytes(600), "unsupported type"),
    "table.parquet": (b"PAR1\0\0\0\0PAR1", "unsupported type"),
    ".hidden": (b"text", "hidden"),
    "broken.docx": (docx("text")[:-60], "corrupted DOCX file"),
    "secret.docx": (
        b"\xd0\xcf\x11\xe0" + "EncryptedPackage".encode("utf-16-le"),
        "encrypted",
    ),
    "bomb.docx": (
        archive(
            {
                "_rels/.rels": relations(("officeDocument", "word/document.xml")),
                "word/document.xml": '<!DOCTYPE a [<!ENTITY b "bb">]><a>&b;</a>',
            }
        ),
        "unsafe XML",
    ),
    "broken.pdf": (b"%PDF-1.7 and nothing else", "corrupted PDF"),
    "broken.jpg": (b"\xff\xd8\xff\xe0 and nothing else", "corrupted image"),
    "line\nbreak.txt": (b"text", "bad id"),
}


def write(folder: Path) -> Path:
    """Writes all files into a folder."""
    for name, content, _ in TEXTS.values():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    for name, (content, _) in REJECTED.items():
        (folder / name).write_bytes(content)
    return folder


def write_media(folder: Path) -> None:
    """Writes an image, a video and an audio file without words."""
    (folder / "photo.png").write_bytes(png(noise(64, 48)))
    write_video(folder / "clip.mp4", np.arange(30) / 30)
    soundfile.write(folder / "tones.wav", tones(1.0), 16_000)
