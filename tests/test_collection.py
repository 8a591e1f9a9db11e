"""Tests of the open collection on a miniature mirror."""

import bz2
import hashlib
import io
import json
import tarfile
from pathlib import Path

from examples.collection.build import build
from examples.collection.extract import members


def make_deb(path: Path, files: dict[str, bytes]) -> None:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:xz") as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(f"./{name}")
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    blocks = b""
    for name, content in (("debian-binary", b"2.0"), ("data.tar.xz", data.getvalue())):
        header = f"{name:<16}{0:<12}{0:<6}{0:<6}{100644:<8}{len(content):<10}`\n".encode()
        blocks += header + content + b"\n" * (len(content) % 2)
    path.write_bytes(b"!<arch>\n" + blocks)


GLOSS = b"00001740 03 n 02 big_cat 0 lion 1 000 | a large animal \n  1 licence\n"
DESCRIPTION = "Package: a\nDescription-md5: 0\nDescription-de: Kurz\n Lang\n .\n Ende\n\n"


def test_collection_builds_the_same_bytes_and_names_missing_packages(tmp_path, capsys):
    downloads = tmp_path / "data" / "downloads"
    downloads.mkdir(parents=True)
    make_deb(downloads / "w.deb", {"usr/share/wordnet/data.noun": GLOSS})
    (downloads / "t.bz2").write_bytes(bz2.compress(DESCRIPTION.encode()))
    assert dict(members(downloads / "w.deb")) == {"usr/share/wordnet/data.noun": GLOSS}
    files = [
        {"package": name, "path": name, "language": language, "kind": kind, "sha256": hash_}
        for name, language, kind, hash_ in (
            ("w.deb", "en", "gloss", hashlib.sha256((downloads / "w.deb").read_bytes())),
            ("t.bz2", "de", "description", hashlib.sha256((downloads / "t.bz2").read_bytes())),
            ("gone.deb", "en", "gloss", hashlib.sha256(b"")),
        )
        for hash_ in (hash_.hexdigest(),)
    ]
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(json.dumps({"mirror": "http://127.0.0.1:9", "files": files}))
    assert build(tmp_path / "data", "1k", recipe) == ["gone.deb"]
    assert "gone.deb is missing" in capsys.readouterr().out
    corpus = tmp_path / "data" / "1k" / "corpus.jsonl"
    first = corpus.read_bytes()
    texts = {json.loads(line)["text"] for line in first.splitlines()}
    assert texts == {"a large animal", "Lang Ende"}
    assert build(tmp_path / "data", "1k", recipe) == ["gone.deb"]
    assert corpus.read_bytes() == first
