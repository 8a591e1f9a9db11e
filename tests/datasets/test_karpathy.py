"""COCO and Flickr30K in the formats of COCO, Karpathy and Flickr30K Entities."""

from __future__ import annotations

import io
import json

import numpy as np
import pytest
from PIL import Image

from pipeline.config import SpecError
from pipeline.datasets.karpathy import Entities, read_coco_boxes
from tests import datasets
from tests.data.listing import build, read
from tests.datasets.loading import benchmark, load
from tests.train.data.files import CAPTIONS, IMAGES, NAMES, PHOTOS, build_data, epoch_batches

IMAGE = ("image", "text")


@pytest.mark.parametrize("as_zip", [False, True])
def test_karpathy_images(tmp_path, as_zip):
    folder = datasets.karpathy(tmp_path / "coco", as_zip=as_zip)
    images = {"images": str(folder / "val2014.zip")} if as_zip else {}
    path = str(folder / "dataset_coco.json")
    source = build("karpathy", IMAGE, path=path, **images, num_documents=4)
    items, rejects = read(source)
    assert list(items) == ["100", "101", "102", "103"] and not rejects
    for item, data in zip(items.values(), datasets.photos(4), strict=True):
        stored = Image.open(io.BytesIO(item.payload["image"]))
        assert stored.size == Image.open(io.BytesIO(data)).size
        assert source.preview_image({**item.row(), "metadata": item.metadata})


def test_karpathy_captions(tmp_path):
    path = str(datasets.karpathy(tmp_path) / "dataset_coco.json")
    items, rejects = read(build("karpathy", IMAGE, path=path, content="captions", split="restval"))
    assert {key: item.text for key, item in items.items()} == {
        "104#0": "Photo 4, sentence 0.",
        "104#1": "Photo 4, sentence 1.",
    }
    assert not rejects and items["104#0"].modality == "text"


def test_missing_files_are_named(tmp_path):
    folder = datasets.karpathy(tmp_path)
    (folder / "val2014/COCO_val2014_000000000002.jpg").unlink()
    fields = {"path": str(folder / "dataset_coco.json")}
    with pytest.raises(SpecError, match=r"lacks 1 of them: val2014/COCO_val2014_000000000002\.jpg"):
        build("karpathy", **fields)
    items, (reject,) = read(build("karpathy", **fields, missing="skip"))
    assert len(items) == 3 and (reject.item_id, reject.reason) == ("102", "missing file")
    with pytest.raises(SpecError, match=r"num_documents must be the number of documents .*\(4\)"):
        build("karpathy", **fields, num_documents=5000)
    with pytest.raises(SpecError, match=r"must be one of restval, test.* is not a split of"):
        build("karpathy", **fields, split="dev")


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
        f" got '{tmp_path}/Annotations/12.xml', which does not exist"
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


def instances(*boxes, **fields):
    annotations = [
        {"image_id": 7, "bbox": box, "id": 70 + n, **fields} for n, box in enumerate(boxes)
    ]
    return {"images": [{"id": 7, "width": 200, "height": 100}], "annotations": annotations}


def coco_boxes(folder, value):
    (folder / "instances.json").write_text(json.dumps(value))
    return read_coco_boxes(str(folder / "instances.json"))


def test_read_coco_boxes(tmp_path):
    value = instances([0, 0, 100, 50], [100, 50, 100.5, 50], [0, 0, 5, 5])
    assert coco_boxes(tmp_path, value)["7"].tolist() == [[0, 0, 0.5, 0.5], [0.5, 0.5, 1, 1]]
    assert coco_boxes(tmp_path, instances([0, 0, 100, 50], iscrowd=1)) == {}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            instances([150, 0, 100, 50]),
            "a box within the image of 200 x 100 pixels, got [150.0, 0.0, 250.0, 50.0]"
            " (annotation 70 of {})",
        ),
        (
            instances([0, 0, 0.5, 0.5]),
            "a file with bbox: [x, y, width, height] in pixels, got '{}', which has relative boxes",
        ),
        (
            {"images": [], "annotations": [{"id": 1, "image_id": 5, "bbox": [0, 0, 9, 9]}]},
            "the id of an image of the file, got '5' (annotation 1 of {})",
        ),
        (
            [],
            "COCO instances {images: [{id, width, height}], annotations: [{image_id, bbox}]}, got"
            " '{}', which has another format (the file must be a valid dictionary or instance of"
            " _Instances, got [])",
        ),
        (
            instances([0, 0, 100]),
            "COCO instances {images: [{id, width, height}], annotations: [{image_id, bbox}]}, got"
            " '{}', which has another format (field 'bbox[3]' is required in annotations[0])",
        ),
    ],
)
def test_malformed_instances(tmp_path, value, message):
    with pytest.raises(SpecError) as error:
        coco_boxes(tmp_path, value)
    message = message.replace("{}", str(tmp_path / "instances.json"))
    assert str(error.value) == f"instances must be {message}"


SIZES = {str(image["id"]): (image["width"], image["height"]) for image in CAPTIONS["images"]}


def captions(path=PHOTOS / "captions.json", batch_size=17, **more):
    return build_data(batch_size, name="captions", path=path, images=IMAGES, **more)


def write_karpathy(folder):
    """Writes four photos with one caption each, in splits of two, one and one."""
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


def test_coco_format():
    data = captions()
    assert len(data.training.rows) == 85 and len(data.training.documents) == 17
    captions_by_image = {
        (str(a["image_id"]), a["caption"].strip()) for a in CAPTIONS["annotations"]
    }
    assert {
        (data.training.documents[r.document].id, r.query) for r in data.training.rows
    } == captions_by_image
    (first, *_) = data.batches(0, 0, 0, 1)
    assert first.boxes is None and first.document_labels.dtype == first.query_labels.dtype
    for document, key in zip(first.documents, first.document_keys, strict=True):
        name = key.split()[1].rpartition("/")[2]
        assert document["image"] == (IMAGES / name).read_bytes()


def test_coco_boxes(tmp_path):
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


def test_karpathy_format_and_splits(tmp_path):
    path = write_karpathy(tmp_path)
    fields = {"images": PHOTOS, "name": "captions", "path": path}
    data = build_data(
        3, splits=["train", "restval"], validation={"path": str(path), "splits": ["val"]}, **fields
    )
    assert [row.query for row in data.training.rows] == ["Photo 0.", "Photo 1.", "Photo 2."]
    assert [document.id for document in data.training.documents] == [
        str(int(name[:-4])) for name in NAMES[:3]
    ]
    assert data.validation().queries == ["Photo 3."] and data.validation().phrases is None
    with pytest.raises(SpecError) as error:
        build_data(3, splits=["test"], **fields)
    assert str(error.value) == (
        f"data.splits must be one of restval, train, val, got 'test', which is not a split of"
        f" {path}"
    )


def link_image_11(folder):
    """Links a photo as the image of the entities."""
    folder.mkdir(exist_ok=True)
    (folder / "11.jpg").symlink_to(IMAGES / NAMES[0])
    return folder


def test_entities_format(tmp_path):
    write_entities(tmp_path, f"{SENTENCE}\nA photo .")
    (tmp_path / "train.txt").write_text("11\n")
    fields = {
        "name": "captions",
        "images": link_image_11(tmp_path / "images"),
        "entities": tmp_path,
    }
    validation = {"path": str(tmp_path / "train.txt")}
    data = build_data(2, path=tmp_path / "train.txt", validation=validation, **fields)
    (batch,) = data.batches(0, 0, 0, 1)
    assert sorted(batch.queries) == ["A photo .", "Two men with red shirts in it ."]
    assert [boxes.tolist() for boxes in batch.boxes] == [[[0, 0.5, 0.5, 1], [0.5, 0, 1, 1]]]
    phrases = data.validation().phrases
    assert phrases.texts == ("Two men", "red shirts") and phrases.documents == (0, 0)
    assert phrases.boxes[1].tolist() == [[0.5, 0, 1, 1]]
    # Karpathy's captions are not tokenised.
    images = [{"filename": "11.jpg", "sentences": [{"raw": "Two men with red shirts in it."}]}]
    (tmp_path / "flickr.json").write_text(json.dumps({"images": images}))
    data = build_data(1, path=tmp_path / "flickr.json", phrases=1, **fields)
    ((row,), ((words, boxes), _)) = data.training.rows, data.training.rows[0].phrases
    assert (row.query, words) == ("Two men with red shirts in it.", "Two men")
    np.testing.assert_array_equal(row.boxes, boxes)


def test_boxes_depend_on_captions_in_batch(tmp_path):
    write_entities(tmp_path, f"{SENTENCE}\nA photo .")
    (tmp_path / "train.txt").write_text("11\n")
    data = build_data(
        1,
        name="captions",
        path=tmp_path / "train.txt",
        images=link_image_11(tmp_path / "images"),
        entities=tmp_path,
    )
    found = {batch["queries"][0]: len(batch["boxes"][0]) for batch in epoch_batches(data)}
    assert found == {"Two men with red shirts in it .": 2, "A photo .": 0}


def coco(**image):
    return {"images": [{"id": 1, "file_name": NAMES[0], **image}], "annotations": []}


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (
            json.dumps(CAPTIONS, indent=1)[:3000],
            "a JSON file, got '{}', which ends in the middle of line 102",
        ),
        (
            '{"images":\n [}',
            "a JSON file, got '{}', which is malformed in line 2, column 3 (Expecting value)",
        ),
        ("[3]", "has another format (neither a list of objects nor COCO's"),
        (json.dumps(coco()), "a file with at least one caption, got '{}', which has no captions"),
        (json.dumps(coco(file_name=None)), "a file name in file_name, got None (image 1 of {})"),
        (
            json.dumps({**coco(), "annotations": [{"image_id": 1, "caption": " "}]}),
            "a text with at least one word, got ' ' (a caption of image 1 of {})",
        ),
    ],
)
def test_malformed_files(content, problem, tmp_path):
    path = tmp_path / "captions.json"
    path.write_text(content)
    with pytest.raises(SpecError) as error:
        captions(path)
    assert problem.replace("{}", str(path)) in str(error.value)
    assert str(error.value).startswith("data.path must be ") and "\n" not in str(error.value)


def test_missing_files(tmp_path):
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


def test_karpathy_in_both_directions(tmp_path):
    folder = datasets.karpathy(tmp_path)
    path = str(folder / "dataset_coco.json")
    texts = load("karpathy", path=path)
    assert list(texts.queries) == [f"{100 + i}#{j}" for i in range(4) for j in range(2)]
    assert texts.queries["101#1"] == "Photo 1, sentence 1." and texts.pools is None
    assert texts.qrels["101#1"] == {"101": 1} and texts.measure == "R@1"
    images = load("karpathy", path=path, direction="image_to_text")
    assert images.qrels["103"] == {"103#0": 1, "103#1": 1} and images.measure == "Success@1"
    inputs = list(images.inputs(["100", "102"]))
    assert inputs == [datasets.photos(3)[0], datasets.photos(3)[2]]
    first_captions = load("karpathy", path=path, max_captions=1)
    assert list(first_captions.queries) == [f"{100 + i}#0" for i in range(4)]


def test_images_of_queries_in_an_archive(tmp_path):
    folder = datasets.karpathy(tmp_path, as_zip=True)
    fields = {"path": str(folder / "dataset_coco.json"), "direction": "image_to_text"}
    judged = load("karpathy", **fields, images=str(folder / "val2014.zip"))
    assert list(judged.inputs(["101"])) == [datasets.photos(2)[1]]
    with pytest.raises(SpecError, match=r"benchmark must be .*all query images.*does not exist"):
        list(load("karpathy", **fields).inputs(["101"]))


@pytest.mark.parametrize("direction", ["text_to_image", "image_to_text"])
def test_folds_are_pools(tmp_path, direction):
    path = str(datasets.karpathy(tmp_path) / "dataset_coco.json")
    judged = load("karpathy", path=path, direction=direction, folds=2)
    assert judged.pools is not None
    for number, query_id in enumerate(judged.queries):
        fold = number * 2 // len(judged.queries)
        images = [str(100 + 2 * fold), str(101 + 2 * fold)]
        captions = [f"{image}#{i}" for image in images for i in range(2)]
        expected = images if direction == "text_to_image" else captions
        assert list(judged.pools[query_id]) == expected
        assert judged.qrels[query_id].keys() <= set(expected)
        assert query_id in judged.categories["fold"][f"fold {fold}"]
    with pytest.raises(SpecError, match=r"benchmark\.folds must be a divisor of the 4 images"):
        load("karpathy", path=path, folds=3)


def test_entities_are_phrases(tmp_path):
    folder = datasets.flickr30k(tmp_path)
    fields = {"path": str(folder / "dataset_flickr30k.json")}
    (phrase,) = benchmark("karpathy", **fields, entities=str(folder)).phrases()
    assert (phrase.item_id, phrase.text) == ("11", "Two men")
    np.testing.assert_allclose(phrase.boxes, [[0.1, 0.0, 0.5, 1.0]], atol=1e-6)
    with pytest.raises(SpecError, match=r"entities.*required"):
        benchmark("karpathy", **fields).phrases()
