"""Text of office documents, e-mails and HTML pages, and malformed files."""

from __future__ import annotations

import io
import zipfile
from email.message import EmailMessage
from pathlib import Path

import pytest

from pipeline.data.decode import Unreadable, document
from tests import mixed


@pytest.fixture
def read(tmp_path: Path):
    """Returns a function that reads a document and returns its sections."""

    def read(content: bytes, kind: str) -> list[list[str | None]]:
        (tmp_path / "file").write_bytes(content)
        return document.read_document(str(tmp_path / "file"), kind)["sections"]

    return read


def test_docx_has_rows_breaks_and_no_fallbacks(read):
    extra = (
        '<w:p><w:pPr><w:tabs><w:tab w:val="left"/></w:tabs></w:pPr>'
        "<w:r><w:t>one</w:t><w:br/><w:t>two</w:t><w:tab/><w:t>three</w:t></w:r></w:p>"
        "<w:tbl><w:tr><w:tc><w:p><w:r><w:t>a</w:t></w:r></w:p><w:p/></w:tc>"
        "<w:tc><w:p><w:r><w:t>b</w:t></w:r></w:p></w:tc></w:tr></w:tbl>"
        "<w:p><w:Fallback><w:t>again</w:t></w:Fallback><w:instrText>PAGE</w:instrText></w:p>"
    )
    content = mixed.docx("end", extra=extra, main="word/document2.xml")
    assert read(content, "DOCX") == [["", None, "one\ntwo\tthree\na\tb\n\nend"]]


def test_slides_are_in_the_order_of_the_presentation(read):
    sections = read(mixed.pptx("first", "second"), "PPTX")
    assert sections == [["#slide=1", None, "first"], ["#slide=2", None, "second"]]


def test_cells_and_chapters(read):
    assert read(mixed.xlsx("S", ("a", 1.5), ("b", 2)), "XLSX") == [
        ["#sheet=1", "S", "a\t1.5\nb\t2"]
    ]
    sections = read(mixed.epub("T", "<h1>A</h1>b", "<p>c</p>"), "EPUB")
    assert sections == [["#chapter=1", "T", "A\nb"], ["#chapter=2", "T", "c"]]


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ('<meta charset="latin-1"><p>caf\xe9'.encode("latin-1"), "caf\xe9"),
        ("<p>caf\xe9".encode("cp1252"), "caf\xe9"),
        ("<p>caf\xe9".encode("utf-16"), "caf\xe9"),
        ("<p>caf\xe9</p><style>p {}</style><br/>x".encode(), "caf\xe9\n\nx"),
        (b"<p>a &amp; b&eacute;", "a & b\xe9"),
        (b"<script>never closed", ""),
        ("<p>caf\xe9".encode("utf-16-le"), "caf\xe9"),
        (b"a<![unknown[ x><p>b", "a\nb"),
    ],
)
def test_html(read, content, text):
    assert read(content, "HTML") == [["", None, text]]


def test_emails(read, tmp_path):
    message = EmailMessage()
    message["From"], message["Subject"] = "\xc5sa <a@b.c>", "Gr\xfc\xdfe"
    message.set_content("<p>Only <b>HTML</b>", subtype="html")
    assert read(message.as_bytes(), "e-mail") == [
        ["", "Gr\xfc\xdfe", "From: \xc5sa <a@b.c>\n\nOnly HTML"]
    ]
    raw = b"From: x\xff\nContent-Type: text/plain; charset=nonsense\n\nbody \xe9"
    assert read(raw, "e-mail")[0][2].endswith("body \xe9")
    (tmp_path / "file").write_bytes(mixed.mail("S", "text", "a.pdf"))
    metadata = document.read_document(str(tmp_path / "file"), "e-mail")["metadata"]
    assert (metadata["attachments"], metadata["to"]) == ("a.pdf", "bob@example.com")


def test_large_members_are_refused(read, monkeypatch):
    monkeypatch.setattr(document, "MAX_MEMBER_BYTES", 1000)
    with pytest.raises(Unreadable, match="too large"):
        read(mixed.docx("x" * 2000), "DOCX")


def encrypted() -> bytes:
    """Returns an archive whose member is marked as encrypted."""
    content = bytearray(mixed.docx("text"))
    for signature, offset in ((b"PK\3\4", 6), (b"PK\1\2", 8)):
        start = -1
        while (start := content.find(signature, start + 1)) >= 0:
            content[start + offset] |= 1
    return bytes(content)


@pytest.mark.parametrize(
    ("content", "kind", "reason"),
    [
        (encrypted(), "DOCX", "encrypted"),
        (
            mixed.archive({"META-INF/manifest.xml": "<encryption-data>"}),
            "OpenDocument",
            "encrypted",
        ),
        (mixed.archive({"META-INF/rights.xml": ""}), "EPUB", "encrypted"),
        (mixed.archive({"a": "b"}), "DOCX", "corrupted DOCX file"),
        (mixed.archive({"a": "b"}), "EPUB", "corrupted EPUB file"),
        (mixed.docx("a & b"), "DOCX", "corrupted DOCX file"),
        (b"PK\3\4", "XLSX", "corrupted XLSX file"),
        (b"Content-Type: message/rfc822\n\n" * 3000, "e-mail", "corrupted e-mail file"),
        (
            mixed.archive({"content.xml": "<!DOCTYPE a [<!ENTITY b 'c'>]><a/>".encode("utf-16")}),
            "OpenDocument",
            "unsafe XML",
        ),
    ],
)
def test_files_that_cannot_be_read(read, content, kind, reason):
    with pytest.raises(Unreadable) as error:
        read(content, kind)
    assert error.value.reason == reason


def test_a_corrupted_member_is_reported(read):
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("content.xml", "<p>text</p>" * 50)
    data = bytearray(content.getvalue())
    data[45:50] = b"\xff" * 5
    with pytest.raises(Unreadable, match="corrupted OpenDocument file"):
        read(bytes(data), "OpenDocument")
