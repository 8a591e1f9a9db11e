"""The images source: folders, archives and manifests."""

from __future__ import annotations

import io
import json
import os
import pickle
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from pipeline.config import SpecError, parse
from pipeline.data import manifests
from pipeline.data.base import items_table
from pipeline.data.decode import Unreadable
from pipeline.data.images import Images
from pipeline.schema import ITEM, Item, Reject
from tests.conftest import ROOT
from tests.data.decode.test_image import (
    NOISE,
    PAGES,
    bomb,
    encode_image,
    exif,
    is_near,
    tiff,
    two_colours,
)

PHOTOS = ROOT / "jobs/data/photos"
JPEG, PNG = encode_image(two_colours()), encode_image(two_colours(size=(30, 20)), "PNG")


def source(path: object, wants: tuple[str, ...] = ("image", "caption"), **options: Any) -> Images:
    options = {k: str(v) if isinstance(v, Path) else v for k, v in options.items()}
    return Images(parse(Images.Spec, {"path": str(path), **options}), wants)


def read(images: Images) -> dict[str, Item | Reject]:
    """Returns all items and rejects by id, in order, after pickling and JSON round trips as in a
    job.
    """
    images = pickle.loads(pickle.dumps(images))
    results: list[Item | Reject] = []
    for shard in images.shards():
        shard = json.loads(json.dumps(shard))
        entries = list(enumerate(images.scan(shard)))
        wanted = [(position, entry) for position, entry in entries if isinstance(entry, Item)]
        decoded = iter(list(images.decode(shard, wanted)))
        results += [next(decoded) if isinstance(entry, Item) else entry for _, entry in entries]
    items_table([r for r in results if isinstance(r, Item)], images.payload)
    ids = [result.item_id for result in results]
    assert len(ids) == len(set(ids))
    return dict(zip(ids, results, strict=True))


def preview(images: Images, item: Item) -> bytes:
    """Returns the preview of an item, read back from its row."""
    row = item.row()
    return images.preview_image({**row, "metadata": json.loads(row["metadata"] or "{}")})


def reasons(results: dict[str, Item | Reject]) -> dict[str, str]:
    return {i: r.reason for i, r in results.items() if isinstance(r, Reject)}


def captions(results: dict[str, Item | Reject]) -> dict[str, str | None]:
    return {i: r.caption for i, r in results.items() if isinstance(r, Item)}


def write_lines(path: Path, *rows: Any) -> Path:
    lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
    path.write_bytes(b"\n".join(lines))
    return path


def write_tar(path: Path, **members: bytes | str) -> Path:
    """Writes a tar archive; `__` in names represents a dot."""
    with tarfile.open(path, "w") as archive:
        for name, content in members.items():
            content = content.encode() if isinstance(content, str) else content
            info = tarfile.TarInfo(name.replace("__", "."))
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


# -- folders ---------------------------------------------------------------------------------


def test_images_of_folder(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep/b c.JPG").write_bytes(JPEG)
    (tmp_path / "a.png").write_bytes(PNG)
    (tmp_path / "notes.txt").write_text("not an image")
    (tmp_path / "rows.jsonl").write_text('{"image": "a.png"}')  # read only if `path` names it
    images = source(tmp_path, ("image", "scan"))
    images.check()
    results = read(images)
    assert list(results) == ["a.png", "deep/b c.JPG"]
    item = results["deep/b c.JPG"]
    assert item == Item(
        item_id="deep/b c.JPG",
        parent_id="deep/b c.JPG",
        source=tmp_path.name,
        modality="image",
        revision=item.revision,
        metadata={"width": 80, "height": 40},
        payload={"image": JPEG, "scan": JPEG},
        handle=item.handle,
    )


def test_single_file(tmp_path):
    (tmp_path / "a.png").write_bytes(PNG)
    images = source(tmp_path / "a.png")
    images.check()
    assert list(read(images)) == ["a.png"]


def test_images_are_not_decoded_unless_wanted(tmp_path):
    (tmp_path / "a.jpg").write_bytes(b"never opened")
    images = source(tmp_path, ("caption", "text"))
    assert images.payload.names == []
    assert images.unit_limit({}) == source(tmp_path).unit_limit({}) > 1000
    for unread, num_bytes in ((images, 0), (source(tmp_path), len(b"never opened"))):
        (shard,) = unread.shards()
        (item,) = unread.scan(shard)
        assert unread.item_size(shard, item).num_bytes == num_bytes
    assert (read(images)["a.jpg"].payload, read(images)["a.jpg"].metadata) == ({}, {})


def test_invalid_images_are_rejected(tmp_path):
    bad = {
        "empty.jpg": b"",
        "text.png": b"Dear Ada",
        "truncated.jpg": JPEG[:-100],
        "bomb.png": bomb(60_000, 60_000),
    }
    good = {
        "wrong.gif": JPEG,
        "grey.jpg": encode_image(two_colours("L", 0, 128)),
        "cmyk.jpg": encode_image(two_colours("CMYK", (0, 9, 9, 0), (0, 0, 0, 0))),
        "deep.png": encode_image(Image.new("I;16", (9, 9), 40_000), "PNG"),
        "moving.gif": encode_image(
            two_colours(), "GIF", save_all=True, append_images=[two_colours(left="lime")]
        ),
        "exif.jpg": encode_image(two_colours(), exif=exif(6)),
        "8k.jpg": encode_image(Image.new("RGB", (7680, 4320))),
    }
    for name, content in (bad | good).items():
        (tmp_path / name).write_bytes(content)
    os.symlink(tmp_path / "gone", tmp_path / "broken.jpg")
    results = read(source(tmp_path))
    assert reasons(results) == {
        "bomb.png": "decompression bomb",
        "broken.jpg": "unreadable",
        "empty.jpg": "empty file",
        "text.png": "not an image",
        "truncated.jpg": "corrupted image",
    }
    assert results["broken.jpg"].retryable and not results["bomb.png"].retryable
    for name in good:
        with Image.open(io.BytesIO(results[name].payload["image"])) as image:
            assert image.mode == "RGB" and image.size[0] * image.size[1] <= 4_000_000
    assert results["moving.gif"].metadata == {"width": 80, "height": 40, "frames": 2}
    assert results["exif.jpg"].metadata == {"width": 40, "height": 80}
    assert results["8k.jpg"].metadata == {"width": 7680, "height": 4320}


def test_pages_of_tiff_are_items(tmp_path):
    (tmp_path / "fax.tif").write_bytes(tiff(*PAGES))
    (tmp_path / "one.tiff").write_bytes(tiff(PAGES[0]))
    broken = bytearray(tiff(NOISE, NOISE, NOISE, compression="tiff_lzw"))
    with Image.open(io.BytesIO(broken)) as image:
        image.seek(1)
        start = image.tag_v2[273][0]  # of the second page
    broken[start : start + 2000] = bytes(2000)
    (tmp_path / "broken.tif").write_bytes(broken)
    (tmp_path / "moving.gif").write_bytes(
        encode_image(two_colours(), "GIF", save_all=True, append_images=[two_colours(left="lime")])
    )
    images = source(tmp_path)
    results = read(images)
    assert list(results) == [
        *(f"broken.tif#page={number}" for number in (1, 2, 3)),
        *(f"fax.tif#page={number}" for number in (1, 2, 3)),
        "moving.gif",
        "one.tiff",
    ]
    assert reasons(results) == {"broken.tif#page=2": "corrupted image"}
    for number, shade in enumerate((0, 100, 200), 1):
        item = results[f"fax.tif#page={number}"]
        assert (item.parent_id, item.span) == ("fax.tif", ("page", number, number))
        assert (item.modality, item.metadata) == ("image", {"width": 80, "height": 40})
        for data in (item.payload["image"], preview(images, item)):
            assert is_near(Image.open(io.BytesIO(data)), (20, 20), (shade,) * 3)
    (shard,) = images.shards()
    listed = [entry for entry in enumerate(images.scan(shard)) if entry[1].parent_id == "fax.tif"]
    (last,) = images.decode(shard, listed[2:])
    assert last == results["fax.tif#page=3"]


def test_pages_of_tiff_in_archives_and_manifests(tmp_path):
    write_tar(tmp_path / "a.tar", scan__tif=tiff(*PAGES[:2]), scan__txt="A letter.")
    results = read(source(tmp_path))
    assert captions(results) == {"scan#page=1": "A letter.", "scan#page=2": "A letter."}
    preview(source(tmp_path), results["scan#page=2"])
    (tmp_path / "b.tif").write_bytes(tiff(*PAGES))
    manifest = write_lines(tmp_path / "rows.jsonl", {"id": "b", "image": "b.tif"})
    assert list(read(source(manifest))) == ["b#page=1", "b#page=2", "b#page=3"]
    assert list(read(source(manifest, ("caption",)))) == ["b#page=1", "b#page=2", "b#page=3"]


def test_image_beyond_memory_limit_is_rejected(tmp_path):
    (tmp_path / "large.png").write_bytes(encode_image(Image.new("RGB", (12_000, 9_000)), "PNG"))
    (tmp_path / "small.png").write_bytes(PNG)
    results = read(source(tmp_path, limits={"max_memory_bytes": 512 << 20}))
    assert reasons(results) == {"large.png": "out of memory"} and results["large.png"].retryable


def test_revision_depends_on_content_and_options(tmp_path):
    (tmp_path / "a.png").write_bytes(PNG)

    def revision(caption: str = "A cat.", wants=("image", "caption"), **options: Any) -> str:
        manifest = write_lines(tmp_path / "rows.jsonl", {"image": "a.png", "caption": caption})
        (item,) = read(source(manifest, wants, **options)).values()
        return item.revision

    first = revision()
    assert first == revision() == revision(images=tmp_path, collection="cats")
    assert first != revision("A dog.")
    assert first != revision(max_pixels=10_000)
    assert first != revision(leave_out_caption=1)
    only = ("caption",)
    assert first != revision(wants=only) == revision(wants=only, max_pixels=10_000)
    before = revision(revision="stat")
    assert before == revision(revision="stat") != first
    (tmp_path / "a.png").write_bytes(JPEG)
    assert revision(revision="stat") != before and revision() != first


# -- archives --------------------------------------------------------------------------------


def test_archive_samples(tmp_path):
    info = {"caption": "A cat. ", "title": "Cats", "licence": 4, "file": "x", "text": "more"}
    write_tar(
        tmp_path / "0.tar",
        a__jpg=JPEG,
        a__txt="Two  horses.\nA beach.\n",
        b__png=PNG,
        b__json=json.dumps(info),
        c__jpg=JPEG,
        c__caption="A bowl.",
        c__json=json.dumps({"url": "u"}),
        d__jpg=JPEG,
        e__jpg=JPEG,
        e__json="{damaged",
        readme__txt="no image",
    )
    results = read(source(tmp_path))
    assert captions(results) == {
        "a": "Two horses.\nA beach.",
        "b": "A cat.",
        "c": "A bowl.",
        "d": None,
    }
    assert reasons(results) == {"e": "corrupted sidecar"}
    assert results["b"].title == "Cats"
    metadata = {"licence": 4, "own_file": "x", "text": "more", "num_captions": 1}
    location = {"file": "0.tar", "bytes": [results["b"].handle["offset"], len(PNG)]}
    assert results["b"].metadata == {**metadata, "width": 30, "height": 20, **location}
    assert results["c"].metadata["url"] == "u"


@pytest.mark.parametrize("form", ["tar", "zip"])
def test_unsorted_archive(tmp_path, form):
    """Captions before and after their images, in folders with equal names, and alone."""
    members = {
        "b/1.jpg": JPEG,
        "a.jpg": JPEG,
        "1.caption": "first",
        "b/1.txt": "second",
        "c.txt": "alone",
        "LICENSE.txt": "free",
        "1.jpg": JPEG,
        "d.json": '{"title": "alone"}',
        "b/1.json": '{"title": "title", "n": 1}',
        "a.txt": "third\nfourth",
        "e.png": PNG,
    }
    if form == "tar":
        write_tar(tmp_path / "0.tar", **members)
    else:
        with zipfile.ZipFile(tmp_path / "0.zip", "w") as archive:
            for name, content in members.items():
                archive.writestr(name, content)
    results = read(source(tmp_path))
    expected = {"b/1": "second", "a": "third\nfourth", "1": "first", "e": None}
    assert captions(results) == expected
    assert [name for name in results if name in expected] == list(expected)
    assert (results["b/1"].title, results["b/1"].metadata["n"]) == ("title", 1)
    assert reasons(results) == {f"0.{form}/c.txt": "no image", f"0.{form}/d.json": "no image"}


def test_corrupted_member_is_rejected(tmp_path):
    path = write_tar(tmp_path / "0.tar", a__jpg=JPEG, b__jpg=JPEG[:200], c__jpg=JPEG, d__jpg=JPEG)
    data = bytearray(path.read_bytes())
    header = data.index(b"c.jpg")
    data[header : header + 512] = b"\xff" * 512
    path.write_bytes(data[: data.index(b"d.jpg") + 700])
    results = read(source(tmp_path))
    assert list(captions(results)) == ["a"]
    assert results["b"].reason == "corrupted image"
    assert sorted(reasons(results).values()) == [
        "corrupted archive",
        "corrupted archive",
        "corrupted image",
    ]
    (tmp_path / "0.tar").write_bytes(b"no archive" * 100)
    assert reasons(read(source(tmp_path))) == {"0.tar": "not a tar archive"}


# -- manifests -------------------------------------------------------------------------------


def test_json_lines_manifest(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub/a.png").write_bytes(PNG)
    (tmp_path / "b.jpg").write_bytes(JPEG)
    (tmp_path / "empty.jpg").write_bytes(b"")
    lines = [
        {"id": 7, "image": "sub/a.png", "caption": "A cat.", "title": "Cats", "split": "test"},
        {"file_name": "./b.jpg", "captions": ["One.", " Two. ", ""], "width": 1},
        {"_id": "p", "path": "b.jpg", "id": "x"},
        b"",
        {"id": "gone", "image": "gone.jpg"},
        {"image": "gone too.jpg"},
        {"id": "folder", "image": "sub"},
        b'{"id": "cut',
        b"[1]",
        b"\xff",
        {"id": "out", "image": "../b.jpg"},
        {"id": "root", "image": "/etc/b.jpg"},
        {"id": "far", "image": "s3://bucket/b.jpg"},
        {"id": "none", "caption": "x"},
        {"id": "number", "image": "b.jpg", "caption": 3},
        {"id": "named", "image": "b.jpg", "title": 3},
        {"id": "", "image": "b.jpg"},
        {"id": "empty", "image": "empty.jpg"},
    ]
    manifest = write_lines(tmp_path / "rows.jsonl", *lines)
    images = source(manifest)
    images.check()
    results = read(images)
    assert captions(results) == {"7": "A cat.", "./b.jpg": "One.\nTwo.", "p": None}
    assert results["7"].title == "Cats"
    size = {"width": 30, "height": 20}
    metadata = {"split": "test", "num_captions": 1}
    assert results["7"].metadata == {**metadata, **size, "file": "sub/a.png"}
    assert results["./b.jpg"].metadata["width"] == 80  # from the file, not from the manifest

    def line(begins: bytes) -> str:
        content = manifest.read_bytes()
        num_before = content[: content.index(begins)].count(b"\n")
        return f"rows.jsonl:{num_before + 1}"

    assert reasons(results) == {
        "gone": "missing file",
        "gone too.jpg": "missing file",
        "folder": "missing file",
        line(b'{"id": "cut'): "not JSON",
        line(b"[1]"): "not a JSON object",
        line(b"\xff"): "not UTF-8",
        "out": "bad path",
        "root": "bad path",
        "far": "bad path",
        "none": "no image",
        "number": "caption is not a string",
        "named": "title is not a string",
        line(b'{"id": "",'): "bad id",
        "empty": "empty file",
    }


def test_manifest_with_images_folder(tmp_path):
    (tmp_path / "files").mkdir()
    (tmp_path / "lists").mkdir()
    (tmp_path / "files/a.png").write_bytes(PNG)
    manifest = write_lines(tmp_path / "lists/rows.jsonl", {"id": "cat", "image": "a.png"})
    images = source(manifest, images=tmp_path / "files")
    images.check()
    item = read(images)["cat"]
    assert item.payload["image"] == PNG
    assert preview(images, item) == PNG
    with pytest.raises(SpecError, match="images must be .*'.*nowhere'.*does not exist"):
        source(manifest, images=tmp_path / "nowhere").check()
    with pytest.raises(SpecError, match="images must be null unless `path` is a manifest"):
        source(tmp_path / "files", images=tmp_path / "files").check()


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.gz"])
def test_long_manifests_are_sharded(tmp_path, monkeypatch, name):
    (tmp_path / "a.png").write_bytes(PNG)
    monkeypatch.setattr(manifests, "LINE_BYTES_PER_SHARD", 100)
    rows = [json.dumps({"id": i, "image": "a.png"}) for i in range(20)]
    with fsspec.open(str(tmp_path / name), "wt", compression="infer") as file:
        file.write("\n".join(rows))
    images = source(tmp_path / name, ("caption",))
    assert len(list(images.shards())) == (1 if name.endswith("gz") else 6)
    assert list(read(images)) == [str(i) for i in range(20)]


def table(path: Path, rows: list[dict[str, Any]], **options: Any) -> Path:
    pq.write_table(pa.Table.from_pylist(rows), path, **options)
    return path


def test_parquet_manifest(tmp_path):
    (tmp_path / "a.png").write_bytes(PNG)
    rows = [
        {"id": 1, "image": {"bytes": JPEG, "path": "x/one.jpg"}, "text": "One.", "raw": b"1"},
        {"id": None, "image": {"bytes": PNG, "path": "x/two.png"}, "text": None, "raw": b"2"},
        {"id": None, "image": {"bytes": JPEG, "path": None}, "text": "Three.", "raw": b"3"},
        {"id": 4, "image": {"bytes": None, "path": "a.png"}, "text": "Four.", "raw": b"4"},
        {"id": 5, "image": {"bytes": None, "path": None}, "text": "Five.", "raw": b"5"},
        {"id": 6, "image": {"bytes": b"", "path": "x"}, "text": "Six.", "raw": b"6"},
        {"id": 7, "image": {"bytes": JPEG[:99], "path": "x"}, "text": "Seven.", "raw": b"6"},
    ]
    images = source(table(tmp_path / "t.parquet", rows, row_group_size=2))
    images.check()
    results = read(images)
    assert captions(results) == {
        "1": "One.",
        "x/two.png": None,
        "t.parquet#row=2": "Three.",
        "4": "Four.",
    }
    assert reasons(results) == {"5": "no image", "6": "empty file", "7": "corrupted image"}
    assert results["x/two.png"].payload["image"] == PNG
    metadata = {"num_captions": 1, "width": 80, "height": 40}
    assert results["1"].metadata == {**metadata, "file": "t.parquet", "row": 0}
    for name in captions(results):
        assert preview(images, results[name]) == results[name].payload["image"]
    folder = read(source(tmp_path))  # also contains the image as a file
    assert list(captions(folder)) == [*captions(results), "a.png"]
    assert [item.revision for i, item in folder.items() if i in captions(results)] == [
        results[i].revision for i in captions(results)
    ]


def test_parquet_column_of_bytes(tmp_path):
    rows = [{"id": f"p{i}", "image": JPEG if i % 2 else PNG, "page": i} for i in range(40)]
    images = source(table(tmp_path / "t.parquet", rows, row_group_size=25), revision="stat")
    results = read(images)
    assert [item.payload["image"] for item in results.values()] == [row["image"] for row in rows]
    assert results["p33"].metadata == {
        "page": 33,
        "width": 80,
        "height": 40,
        "file": "t.parquet",
        "row": 33,
    }
    assert len({item.revision for item in results.values()}) == 40
    (shard,) = images.shards()
    listed = list(enumerate(images.scan(shard)))
    some = [listed[i] for i in (3, 24, 25, 39)]
    assert [item.item_id for item in images.decode(shard, some)] == ["p3", "p24", "p25", "p39"]


def test_tables_are_sharded_by_row_size(tmp_path, monkeypatch):
    monkeypatch.setattr(manifests, "ROWS_PER_SHARD", 256)
    rows = [{"id": i, "image": "a.png"} for i in range(1000)]
    parts = [s["rows"] for s in source(table(tmp_path / "a.parquet", rows)).shards()]
    assert parts == [[0, 256], [256, 512], [512, 768], [768, 1000]]
    rows = [{"id": i, "image": os.urandom(20_000)} for i in range(300)]
    whole = source(table(tmp_path / "b.parquet", rows, row_group_size=260)).shards()
    assert [s["rows"] for s in whole] == [[0, 260], [260, 300]]


COCO = {
    "images": [
        {"id": 9, "file_name": "a.png", "license": 4, "width": 99},
        {"id": 8, "file_name": "b.jpg"},
        {"id": 7, "file_name": "gone.jpg"},
    ],
    "annotations": [
        {"id": 3, "image_id": 9, "caption": "A cat."},
        {"id": 1, "image_id": 8, "caption": "A dog.\n"},
        {"id": 2, "image_id": 9, "caption": "The cat."},
        {"id": 4, "image_id": 1, "caption": "of an image that is not listed"},
        {"id": 5, "image_id": 9, "bbox": [0, 0, 1, 1]},
    ],
}
KARPATHY = {
    "dataset": "coco",
    "images": [
        {"filepath": "val", "filename": "b.jpg", "cocoid": 8, "sentences": [{"raw": "A dog. "}]},
        {"filename": "a.png", "imgid": 1, "sentids": [1], "sentences": [{"raw": "A cat."}]},
        {"filename": "c.png", "sentences": None},
    ],
}


def test_coco_manifest(tmp_path, monkeypatch):
    monkeypatch.setattr(manifests, "ROWS_PER_SHARD", 2)
    (tmp_path / "a.png").write_bytes(PNG)
    (tmp_path / "b.jpg").write_bytes(JPEG)
    (tmp_path / "captions.json").write_text(json.dumps(COCO))
    results = read(source(tmp_path / "captions.json"))
    assert captions(results) == {"9": "A cat.\nThe cat.", "8": "A dog."}
    assert reasons(results) == {"7": "missing file"}
    metadata = {"license": 4, "width": 30, "num_captions": 2, "height": 20, "file": "a.png"}
    assert results["9"].metadata == metadata


def test_karpathy_manifest(tmp_path):
    (tmp_path / "val").mkdir()
    (tmp_path / "a.png").write_bytes(PNG)
    (tmp_path / "val/b.jpg").write_bytes(JPEG)
    (tmp_path / "dataset.json").write_text(json.dumps(KARPATHY))
    results = read(source(tmp_path / "dataset.json"))
    assert captions(results) == {"8": "A dog.", "a": "A cat."}
    assert results["a"].metadata["imgid"] == 1
    assert reasons(results) == {"c": "missing file"}


def test_json_list_manifest(tmp_path):
    (tmp_path / "a.png").write_bytes(PNG)
    rows = [{"image": "a.png", "caption": "A cat."}, {"caption": "nothing"}]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    results = read(source(tmp_path / "rows.json"))
    assert captions(results) == {"a.png": "A cat."}
    assert reasons(results) == {"rows.json#1": "no image"}


@pytest.mark.parametrize("name", ["m.json", "m.parquet"])
@pytest.mark.parametrize("content", [b"{", b'{"photos": 3}', b'{"images": [1]}', b"PAR1"])
def test_unreadable_manifest_is_one_reject(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    images = source(tmp_path / name)
    images.check()
    assert reasons(read(images)) == {name: "corrupted manifest"}


def test_corrupted_row_group_is_rejected(tmp_path):
    rows = [{"id": f"p{i}", "image": os.urandom(5000)} for i in range(4)]
    path = table(tmp_path / "t.parquet", rows, row_group_size=2, compression="zstd")
    data = bytearray(path.read_bytes())
    data[8:1000] = os.urandom(992)
    path.write_bytes(data)
    results = read(source(path, ("caption",)))
    assert reasons(results) == dict.fromkeys(
        ["t.parquet#row=0", "t.parquet#row=1"], "corrupted manifest"
    )
    assert list(captions(results)) == ["p2", "p3"]


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        (
            "nowhere",
            "path must be an existing file or folder, got '.*nowhere', which does not exist",
        ),
        ("a.csv", "path must be .*.jpg, .*.tar, .zip, .parquet, .jsonl, .*.json, got '.*a.csv'"),
        (
            "",
            "path must be a folder with files ending in .jpg, .*.parquet.*, got '.*',"
            " which contains no such files",
        ),
        ("empty.jsonl", "path must be a manifest of at least one row, got '.*', which is empty"),
    ],
)
def test_check_rejects_path_without_items(tmp_path, name, sentence):
    (tmp_path / "a.csv").write_text("x")
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(SpecError, match=sentence):
        source(tmp_path / name).check()


# -- captions, previews, storage -------------------------------------------------------------


@pytest.mark.parametrize(
    ("left_out", "expected"),
    [(None, "a\nb\nc"), (0, "b\nc"), (2, "a\nb"), (3, "a\nb\nc")],
)
def test_leave_out_caption(tmp_path, left_out, expected):
    (tmp_path / "a.png").write_bytes(PNG)
    manifest = write_lines(tmp_path / "rows.jsonl", {"image": "a.png", "captions": list("abc")})
    item = read(source(manifest, leave_out_caption=left_out))["a.png"]
    assert item.caption == expected
    assert item.metadata["num_captions"] == len(expected.split())


def test_preview_of_indexed_item(tmp_path):
    (tmp_path / "a.jpg").write_bytes(encode_image(two_colours(), exif=exif(6)))
    write_tar(tmp_path / "0.tar", x__png=PNG)
    images = source(tmp_path)
    for item in read(images).values():
        assert preview(source(tmp_path, ("caption",)), item) == item.payload["image"]
    (tmp_path / "a.jpg").write_bytes(b"text")
    with pytest.raises(Unreadable, match="not an image"):
        images.preview_image({"parent_id": "a.jpg", "metadata": None})


def test_images_on_other_file_systems(tmp_path):
    fs = fsspec.filesystem("memory")
    fs.pipe("/gallery/files/a.png", PNG)
    fs.pipe("/gallery/0.tar", write_tar(tmp_path / "0.tar", b__jpg=JPEG, b__txt="B").read_bytes())
    rows = [{"id": "c", "image": JPEG}, {"id": "d", "image": JPEG}]
    fs.pipe("/gallery/t.parquet", table(tmp_path / "t.parquet", rows).read_bytes())
    fs.pipe("/gallery/lists/rows.jsonl", b'{"id": "e", "image": "a.png"}\n{"image": "gone"}')
    images = source("memory://gallery")
    images.check()
    assert list(read(images)) == ["b", "c", "d", "files/a.png"]
    listed = source("memory://gallery/lists/rows.jsonl", images="memory://gallery/files")
    listed.check()
    results = read(listed)
    assert reasons(results) == {"gone": "missing file"}
    assert preview(listed, results["e"]) == PNG
    fs.rm("/gallery", recursive=True)


def test_file_removed_after_listing(tmp_path):
    (tmp_path / "a.png").write_bytes(PNG)
    images = source(tmp_path)
    (shard,) = images.shards()
    listed = list(enumerate(images.scan(shard)))
    (tmp_path / "a.png").unlink()
    (reject,) = images.decode(shard, listed)
    assert reject.retryable and reject.reason == "unreadable"


def test_table_removed_after_listing(tmp_path):
    rows = [{"id": f"p{i}", "image": PNG} for i in range(3)]
    images = source(table(tmp_path / "t.parquet", rows))
    (shard,) = images.shards()
    listed = list(enumerate(images.scan(shard)))
    (tmp_path / "t.parquet").unlink()
    rejects = list(images.decode(shard, listed))
    assert [reject.item_id for reject in rejects] == ["p0", "p1", "p2"]
    assert {reject.reason for reject in rejects} == {"unreadable"}
    (reject,) = images.scan(shard)
    assert (reject.item_id, reject.reason) == ("t.parquet", "unreadable")


@pytest.mark.parametrize(
    ("option", "value"),
    [("max_pixels", 1), ("max_input_pixels", 0), ("leave_out_caption", -1)],
)
def test_invalid_options(option, value):
    with pytest.raises(SpecError, match=f"{option}.* must be .*, got "):
        parse(Images.Spec, {"path": "x", option: value})


def test_shipped_photos():
    images = source(PHOTOS / "captions.json", images=PHOTOS / "images", leave_out_caption=4)
    images.check()
    results = read(images)
    assert len(captions(results)) == len(results) == 17
    lines = (PHOTOS / "queries.jsonl").read_text().splitlines()
    queries = {q["_id"]: q["text"] for q in map(json.loads, lines)}
    judged = [line.split("\t") for line in (PHOTOS / "qrels/test.tsv").read_text().splitlines()]
    assert judged[0] == ["query-id", "corpus-id", "score"] and len(judged) == 18
    for query, image, score in judged[1:]:
        held = results[image].caption.split("\n")
        assert len(held) == 4 and queries[query] not in held and score == "1"
    table = pa.Table.from_pylist([item.row() for item in results.values()], ITEM)
    assert table["caption"].null_count == 0
