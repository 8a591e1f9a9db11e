"""Captioned images in WebDataset archives."""

from __future__ import annotations

import io
import json
import tarfile

import pytest

from pipeline.config import SpecError
from tests.train.data.files import IMAGES, NAMES, build_data


def write_archive(path, members):
    """Writes a tar archive of members (name, content)."""
    with tarfile.open(path, "w") as archive:
        for name, content in members:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))


def image(number):
    return (IMAGES / NAMES[number]).read_bytes()


@pytest.fixture
def archives(tmp_path):
    """Two archives; one sample has no caption, one no image, and one has no words."""
    write_archive(
        tmp_path / "000.tar",
        [
            ("a/0.jpg", image(0)), ("a/0.txt", b" a photo \n"), ("a/0.json", b'{"text": "other"}'),
            ("a/1.json", b'{"text": null}'), ("a/1.jpg", image(1)),
            ("2.txt", b"no image"),
            ("3.txt", b" "), ("3.jpg", image(2)),
        ],
    )  # fmt: skip
    write_archive(tmp_path / "001.tar", [("0.txt", b"a photo"), ("0.JPG", image(3))])
    return tmp_path


def test_samples(archives):
    data = build_data(2, name="webdataset", path=archives)
    documents = {document.id: document for document in data.training.documents}
    assert list(documents) == ["000.tar/a/0", "001.tar/0"]
    assert [row.query for row in data.training.rows] == ["a photo", "a photo"]
    (batch,) = data.batches(0, 0, 0, 1)
    read = {
        key: document["image"]
        for key, document in zip(batch.document_keys, batch.documents, strict=True)
    }
    expected = {f"document: {archives}/{name}#512 ": image(n) for name, n in (("000.tar", 0),)}
    assert expected.items() <= read.items() and set(read.values()) == {image(0), image(3)}


def test_unsorted_archive(tmp_path, caplog):
    members = [
        ("0.txt", b"a photo"), ("b/0.jpg", image(1)), ("1.jpg", image(2)), ("2.txt", b"alone"),
        ("0.jpg", image(0)), ("b/0.txt", b"another"),
    ]  # fmt: skip
    write_archive(tmp_path / "0.tar", members)
    training = build_data(2, name="webdataset", path=tmp_path).training
    assert [document.id for document in training.documents] == ["0.tar/0", "0.tar/b/0"]
    assert [row.query for row in training.rows] == ["a photo", "another"]
    assert [document.image.read() for document in training.documents] == [image(0), image(1)]
    assert "2 samples are left out, such as: sample 1 of " in caplog.text


def test_field_of_json(archives):
    with pytest.raises(SpecError, match="data of at least one batch"):
        build_data(2, name="webdataset", path=archives, caption="json.text")
    data = build_data(
        2, name="webdataset", path=[str(archives)][0], validation={"path": str(archives)}
    )
    assert len(data.validation().documents) == 2


def test_errors(tmp_path):
    with pytest.raises(SpecError, match=r"path must be a file, folder or glob of .tar files"):
        build_data(name="webdataset", path=tmp_path)
    (tmp_path / "0.tar").write_bytes(b"no archive" * 100)
    with pytest.raises(SpecError, match=r"path must be an uncompressed .tar archive"):
        build_data(name="webdataset", path=tmp_path)
    for content in (b"[]", b'{"text": "a", "m": ' + b"[" * 100_000, b'{"text": NaN}'):
        write_archive(tmp_path / "0.tar", [("0.jpg", image(0)), ("0.json", content)])
        with pytest.raises(SpecError, match="caption must be a JSON object with the field text"):
            build_data(name="webdataset", path=tmp_path, caption="json.text")
    write_archive(
        tmp_path / "0.tar", [("0.jpg", image(0)), ("0.json", json.dumps({"text": 1}).encode())]
    )
    with pytest.raises(
        SpecError, match="caption must be a JSON object with the field text, got .*, which has 1"
    ):
        build_data(name="webdataset", path=tmp_path, caption="json.text")
    write_archive(tmp_path / "0.tar", [("0.jpg", image(0))])
    with pytest.raises(SpecError, match="archives with samples of an image and a member .txt"):
        build_data(name="webdataset", path=tmp_path)


def test_truncated_archive_is_a_document_without_tokens(archives):
    data = build_data(2, name="webdataset", path=archives)
    path = archives / "001.tar"
    path.write_bytes(path.read_bytes()[:2000])
    (batch,) = data.batches(0, 0, 0, 1)
    assert sorted(
        document is None or document.get("image") is None for document in batch.documents
    ) == [False, True]
