"""Boxes: conversion from pixels, and validation."""

from __future__ import annotations

import numpy as np
import pytest

from pipeline.config import SpecError
from pipeline.eval.boxes import Entities, check_boxes, read_coco_boxes

SENTENCE = "[/EN#1/people Two men] with [/EN#2/clothing/other red shirts] in [/EN#0/notvisual it] ."
OBJECTS = """<object><name>1</name><bndbox><xmin>{}</xmin><ymin>51</ymin><xmax>100</xmax>
<ymax>100</ymax></bndbox></object>
<object><name>1</name><name>2</name><bndbox><xmin>101</xmin><ymin>1</ymin><xmax>200</xmax>
<ymax>100</ymax></bndbox></object>
<object><name>2</name><bndbox><xmin>1</xmin><ymin>1</ymin><xmax>5</xmax><ymax>5</ymax></bndbox>
</object><object><name>3</name><scene>1</scene><nobndbox>1</nobndbox></object>"""


def write_entities(folder, sentences: str = SENTENCE, xmin: str = "1", objects: str = OBJECTS):
    """Writes the entities of image 11, which has 200 x 100 pixels."""
    for name in ("Sentences", "Annotations"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / "Sentences/11.txt").write_text(sentences)
    size = "<size><width>200</width><height>100</height><depth>3</depth></size>"
    xml = f"<annotation>{size}{objects.format(xmin)}</annotation>"
    (folder / "Annotations/11.xml").write_text(xml)
    return folder


def test_entities(tmp_path):
    ((text, phrases),) = Entities(str(write_entities(tmp_path))).read("11")
    assert text == "Two men with red shirts in it ."
    assert [(words, boxes.tolist()) for words, boxes in phrases] == [
        ("Two men", [[0, 0.5, 0.5, 1], [0.5, 0, 1, 1]]),
        ("red shirts", [[0.5, 0, 1, 1]]),  # the other box is too small
    ]


def test_malformed_entities(tmp_path):
    def message(image_id: str = "11") -> str:
        with pytest.raises(SpecError) as error:
            Entities(str(tmp_path)).read(image_id)
        return str(error.value)

    assert message("12") == (
        "entities must be a folder with Sentences/<id>.txt and Annotations/<id>.xml for each image,"
        f" got '{tmp_path}/Annotations/12.xml', which cannot be read (FileNotFoundError)"
    )
    write_entities(tmp_path, xmin="-30")
    assert message() == (
        "entities must be a box within the image of 200 x 100 pixels, got [-31.0, 50.0, 100.0,"
        f" 100.0] ({tmp_path}/Annotations/11.xml)"
    )
    write_entities(tmp_path, xmin="many")
    assert f"got '{tmp_path}/Annotations/11.xml', which cannot be read (could" in message()
    write_entities(tmp_path, objects="<object>")
    assert f"got '{tmp_path}/Annotations/11.xml', which cannot be read (mism" in message()
    write_entities(tmp_path, f"{SENTENCE}\n[/EN#1/people Two men")
    assert message() == (
        "entities must be a line with phrases [/EN#<number>/<type> words], got '[/EN#1/people Two"
        f" men' (line 2 of {tmp_path}/Sentences/11.txt)"
    )


def coco(*boxes, **fields):
    annotations = [
        {"image_id": 7, "bbox": box, "id": 70 + n, **fields} for n, box in enumerate(boxes)
    ]
    return {"images": [{"id": 7, "width": 200, "height": 100}], "annotations": annotations}


def test_read_coco_boxes():
    boxes = read_coco_boxes(coco([0, 0, 100, 50], [100, 50, 100.5, 50], [0, 0, 5, 5]), "file")
    assert boxes["7"].tolist() == [[0, 0, 0.5, 0.5], [0.5, 0.5, 1, 1]]
    assert read_coco_boxes(coco([0, 0, 100, 50], iscrowd=1), "file") == {}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            coco([150, 0, 100, 50]),
            "a box within the image of 200 x 100 pixels, got [150.0, 0.0, 250.0, 50.0]"
            " (annotation 70"
            " of file)",
        ),
        (
            coco([0, 0, 0.5, 0.5]),
            "a file with bbox: [x, y, width, height] in pixels, got 'file', which has"
            " relative boxes",
        ),
        (
            {"images": [], "annotations": [{"id": 1, "image_id": 5, "bbox": [0, 0, 9, 9]}]},
            "the id of an image of the file, got '5' (annotation 1 of file)",
        ),
        (
            [],
            "COCO instances {images: [{id, width, height}], annotations: [{image_id, bbox}]}, got"
            " 'file', which has another format (TypeError: list indices must be integers or"
            " slices, not str)",
        ),
    ],
)
def test_malformed_instances(value, message):
    with pytest.raises(SpecError) as error:
        read_coco_boxes(value, "file")
    assert str(error.value) == f"instances must be {message}"


def test_check_boxes():
    assert check_boxes([[0, 0, 1.0005, 1]], "boxes", "line 1").tolist() == [[0, 0, 1, 1]]
    assert check_boxes([], "boxes", "line 1").shape == (0, 4)
    for boxes in (
        [[0, 0, np.nan, 1]],
        [[-0.5, 0, 1, 1]],
        [[0, 0, 640, 1]],
        ["x"],
        5,
        [[1, 0, 0, 1]],
    ):
        with pytest.raises(SpecError, match=r"^boxes must be boxes .*, got .* \(line 1\)"):
            check_boxes(boxes, "boxes", "line 1")
