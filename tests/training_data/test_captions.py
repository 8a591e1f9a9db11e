"""Captioned pictures: COCO's form, Karpathy's, and Flickr30K Entities."""

from __future__ import annotations

import json

import numpy as np
import pytest

from pipeline.config import SpecError
from tests.training_data.files import CAPTIONS, IMAGES, NAMES, PHOTOS, built, every
from tests.training_data.test_boxes import SENTENCE, entities

SIZES = {str(image["id"]): (image["width"], image["height"]) for image in CAPTIONS["images"]}


def captions(path=PHOTOS / "captions.json", batch_size=17, **more):
    return built(batch_size, name="captions", path=path, images=IMAGES, **more)


def karpathy(folder):
    """Four photographs with a caption each, in splits of two, one and one."""
    images = [
        {
            "filename": name,
            "filepath": "images",
            "cocoid": int(name[:-4]),
            "split": split,
            "sentences": [{"raw": f"Photo {n}. ", "tokens": ["photo"], "sentid": n}],
            "sentids": [n],
        }
        for n, (name, split) in enumerate(
            zip(NAMES[:4], ("train", "train", "restval", "val"), strict=True)
        )
    ]
    path = folder / "dataset.json"
    path.write_text(json.dumps({"images": images, "dataset": "coco"}))
    return path


def test_cocos_form():
    data = captions()
    assert len(data.rows.rows) == 85 and len(data.rows.documents) == 17
    said = {(str(a["image_id"]), a["caption"].strip()) for a in CAPTIONS["annotations"]}
    assert {(data.rows.documents[r.document].id, r.query) for r in data.rows.rows} == said
    (first, *_) = data.batches(0, 0, 0, 1)
    assert first.boxes is None and first.document_facts.dtype == first.query_facts.dtype
    for document, key in zip(first.documents, first.document_keys, strict=True):
        name = key.split()[1].rpartition("/")[2]
        assert document["image"] == (IMAGES / name).read_bytes()


def test_boxes_of_instances(tmp_path):
    width, height = SIZES["397133"]
    annotations = [
        {"id": 1, "image_id": 397133, "iscrowd": 0, "bbox": [0, 0, width / 2, height]},
        {"id": 2, "image_id": 397133, "iscrowd": 0, "bbox": [0, 0, 3, 3]},
    ]
    instances = {"images": CAPTIONS["images"], "annotations": annotations}
    (tmp_path / "instances.json").write_text(json.dumps(instances))
    data = captions(batch_size=85, instances=tmp_path / "instances.json")
    (batch,) = data.batches(0, 0, 0, 1)
    found = {key: b.tolist() for key, b in zip(batch.document_keys, batch.boxes, strict=True)}
    assert [boxes for boxes in found.values() if boxes] == [[[0, 0, 0.5, 1]]]
    (key,) = (key for key, boxes in found.items() if boxes)
    assert "000000397133.jpg" in key


def test_karpathys_form_and_its_splits(tmp_path):
    path = karpathy(tmp_path)
    given = {"images": PHOTOS, "name": "captions", "path": path}
    data = built(
        3, splits=["train", "restval"], validation={"path": str(path), "splits": ["val"]}, **given
    )
    assert [row.query for row in data.rows.rows] == ["Photo 0.", "Photo 1.", "Photo 2."]
    assert [document.id for document in data.rows.documents] == [
        str(int(name[:-4])) for name in NAMES[:3]
    ]
    assert data.validation().queries == ["Photo 3."] and data.validation().phrases is None
    with pytest.raises(SpecError) as error:
        built(3, splits=["test"], **given)
    assert str(error.value) == (
        f"data.splits must be one of restval, train, val, got 'test', which is not a split of"
        f" {path}"
    )


def photo_11(folder):
    """A photograph as the picture of the entities."""
    folder.mkdir(exist_ok=True)
    (folder / "11.jpg").symlink_to(IMAGES / NAMES[0])
    return folder


def test_phrases_of_entities(tmp_path):
    entities(tmp_path, f"{SENTENCE}\nA photo .")
    (tmp_path / "train.txt").write_text("11\n")
    given = {"name": "captions", "images": photo_11(tmp_path / "images"), "entities": tmp_path}
    validation = {"path": str(tmp_path / "train.txt")}
    data = built(2, path=tmp_path / "train.txt", validation=validation, **given)
    (batch,) = data.batches(0, 0, 0, 1)
    assert sorted(batch.queries) == ["A photo .", "Two men with red shirts in it ."]
    assert [boxes.tolist() for boxes in batch.boxes] == [[[0, 0.5, 0.5, 1], [0.5, 0, 1, 1]]]
    phrases = data.validation().phrases
    assert phrases.texts == ("Two men", "red shirts") and phrases.documents == (0, 0)
    assert phrases.boxes[1].tolist() == [[0.5, 0, 1, 1]]
    # With Karpathy's captions, which are not tokenised.
    images = [{"filename": "11.jpg", "sentences": [{"raw": "Two men with red shirts in it."}]}]
    (tmp_path / "flickr.json").write_text(json.dumps({"images": images}))
    data = built(1, path=tmp_path / "flickr.json", phrases=1, **given)
    ((row,), ((words, boxes), _)) = data.rows.rows, data.rows.rows[0].phrases
    assert (row.query, words) == ("Two men with red shirts in it.", "Two men")
    np.testing.assert_array_equal(row.boxes, boxes)


def test_boxes_are_those_of_the_captions_in_the_batch(tmp_path):
    entities(tmp_path, f"{SENTENCE}\nA photo .")
    (tmp_path / "train.txt").write_text("11\n")
    data = built(
        1,
        name="captions",
        path=tmp_path / "train.txt",
        images=photo_11(tmp_path / "images"),
        entities=tmp_path,
    )
    found = {batch["queries"][0]: len(batch["boxes"][0]) for batch in every(data)}
    assert found == {"Two men with red shirts in it .": 2, "A photo .": 0}


def coco(**image):
    return {"images": [{"id": 1, "file_name": NAMES[0], **image}], "annotations": []}


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (
            json.dumps(CAPTIONS, indent=1)[:3000],
            "a complete JSON file, got '{}', which ends in the middle of line 102",
        ),
        (
            '{"images":\n [}',
            "a complete JSON file, got '{}', which is malformed in line 2, column 3"
            " (Expecting value)",
        ),
        ("[3]", "has another format (neither a list of objects nor COCO's"),
        (json.dumps(coco()), "a file with at least one caption, got '{}', which has none"),
        (json.dumps(coco(file_name=None)), "a file name in file_name, got None (image 1 of {})"),
        (
            json.dumps({**coco(), "annotations": [{"image_id": 1, "caption": " "}]}),
            "a text with at least one word, got ' ' (a caption of image 1 of {})",
        ),
    ],
)
def test_bad_files(content, problem, tmp_path):
    path = tmp_path / "captions.json"
    path.write_text(content)
    with pytest.raises(SpecError) as error:
        captions(path)
    assert problem.replace("{}", str(path)) in str(error.value)
    assert str(error.value).startswith("data.path must be ") and "\n" not in str(error.value)


def test_what_is_missing(tmp_path):
    with pytest.raises(SpecError) as error:
        captions(tmp_path / "none.json")
    assert str(error.value) == (
        f"data.path must be an existing file or folder, got '{tmp_path}/none.json', which does not"
        " exist"
    )
    (tmp_path / "train.txt").write_text("11\n")
    with pytest.raises(SpecError) as error:
        captions(tmp_path / "train.txt")
    assert str(error.value) == (
        "field 'entities' is required in data; it must be a folder of Flickr30K Entities with the"
        " captions of the ids in `path`"
    )
    with pytest.raises(SpecError) as error:
        captions(instances=tmp_path / "none.json")
    assert str(error.value).endswith(f" got '{tmp_path}/none.json', which does not exist")
