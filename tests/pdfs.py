"""Minimal PDF documents for tests, with words at given positions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Page:
    """A page with words (x, y, string) in 10 point Courier.

    Coordinates are in points from the lower left corner.
    """

    words: Sequence[tuple[float, float, str]] = ()
    size: tuple[float, float] = (200.0, 100.0)
    rotate: int = 0
    crop: tuple[float, float, float, float] | None = None
    drawing: str = ""  # additional operators
    annotations: Sequence[str] = ()  # entries of annotations and form fields

    def content(self) -> bytes:
        """Returns the operators of the page."""
        text = "".join(f"BT /F 10 Tf {x} {y} Td ({word}) Tj ET\n" for x, y, word in self.words)
        return f"{text}{self.drawing}".encode()


def pdf(
    *pages: Page, forms: Sequence[str] = (), title: str = "", inherited: str = "", root: str = ""
) -> bytes:
    """Returns a document.

    Args:
        pages: The pages.
        forms: Drawings that pages can draw by name, /X0, /X1, ...
        title: Title, or its hexadecimal digits in angle brackets.
        root: Entries of the catalogue.
        inherited: Entries that all pages inherit, in place of their size.
    """
    num_forms = len(forms)
    first_page = 5 + num_forms
    kids = " ".join(f"{first_page + 2 * i} 0 R" for i in range(len(pages)))
    names = " ".join(f"/X{i} {5 + i} 0 R" for i in range(num_forms))
    annotations = [entries for page in pages for entries in page.annotations]
    first_annotation = first_page + 2 * len(pages)
    references = [f"{first_annotation + i} 0 R" for i in range(len(annotations))]
    acro_form = f"/AcroForm << /Fields [{' '.join(references)}] /DR 4 0 R >>" if references else ""
    objects = [
        f"<< /Type /Catalog /Pages 2 0 R {acro_form} {root} >>".encode(),
        f"<< /Type /Pages /Kids [{kids}] /Count {len(pages)} {inherited} >>".encode(),
        b"<< /Type /Font /Subtype /Type1 /BaseFont /Courier >>",
        f"<< /Font << /F 3 0 R >> /XObject << {names} >> >>".encode(),
    ]
    form = "/Type /XObject /Subtype /Form /BBox [0 0 9999 9999] /Resources 4 0 R"
    objects += [_stream(drawing.encode(), form) for drawing in forms]
    for i, page in enumerate(pages):
        crop = f"/CropBox [{' '.join(map(str, page.crop))}]" if page.crop else ""
        box = "" if inherited else f"/MediaBox [0 0 {page.size[0]} {page.size[1]}]"
        number = len(page.annotations)
        page_annotations, references = references[:number], references[number:]
        objects.append(
            f"<< /Type /Page /Parent 2 0 R /Resources 4 0 R /Rotate {page.rotate} {crop} {box}"
            f" /Annots [{' '.join(page_annotations)}]"
            f" /Contents {first_page + 2 * i + 1} 0 R >>".encode()
        )
        objects.append(_stream(page.content()))
    objects += [f"<< /Type /Annot {entries} >>".encode() for entries in annotations]
    objects.append(f"<< /Title {title if title.startswith('<') else f'({title})'} >>".encode())

    data = b"%PDF-1.7\n"
    offsets = []
    for number, content in enumerate(objects, start=1):
        offsets.append(len(data))
        data += b"%d 0 obj\n%s\nendobj\n" % (number, content)
    table = "".join(f"{offset:010} 00000 n \n" for offset in offsets)
    data += f"xref\n0 {len(objects) + 1}\n0000000000 65535 f \n{table}".encode()
    trailer = f"/Root 1 0 R /Info {len(objects)} 0 R /Size {len(objects) + 1}"
    return data + f"trailer << {trailer} >>\nstartxref\n{data.rfind(b'xref')}\n%%EOF".encode()


def _stream(content: bytes, entries: str = "") -> bytes:
    return f"<< {entries} /Length {len(content)} >>\nstream\n".encode() + content + b"\nendstream"


def bomb(depth: int = 12, width: int = 10) -> bytes:
    """Returns a small document whose page draws width ** depth times and cannot be rendered."""
    forms = [" ".join([f"/X{i + 1} Do"] * width) for i in range(depth)]
    dot = "BT /F 1 Tf 5 5 Td (x) Tj ET 0 0 1 1 re f"
    return pdf(
        Page([(10, 50, "before")], drawing="/X0 Do"), Page([(10, 50, "after")]), forms=[*forms, dot]
    )
