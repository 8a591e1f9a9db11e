"""Tests of the open collection on packages that are made here in the real layout."""

import bz2
import csv
import gzip
import hashlib
import io
import json
import re
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import yaml
from PIL import Image

from examples.collection import clips, documents, media, parts
from examples.collection.__main__ import main
from examples.collection.build import SLICES, Slice, build
from examples.collection.extract import EXTRACTORS, members, passages
from examples.collection.licences import licences
from examples.collection.parts import HALVES, sketch
from examples.collection.table import tables
from examples.papers.downloads.fetch import probe_url
from pipeline.config import SpecError, parse
from pipeline.data.decode.pdf import open_document, read_pages
from pipeline.eval.evaluation import run
from pipeline.eval.spec import EvaluateSpec
from tests.pdfs import Page, pdf

COPYRIGHT = b"Files: *\nLicense: GPL-2+\n text\n"


def make_deb(path: Path, files: dict[str, bytes], suffix: str = "xz") -> None:
    """Writes an `ar` archive with a control and a data archive."""
    data = io.BytesIO()
    mode = {"xz": "w:xz", "gz": "w:gz", "zst": "w"}[suffix]
    with tarfile.open(fileobj=data, mode=mode) as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(f"./{name}")
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    content = data.getvalue()
    if suffix == "zst":
        content = pa.compress(content, codec="zstd", asbytes=True)
    blocks = b""
    for name, block in (
        ("debian-binary", b"2.0"),
        ("control.tar", b"odd"),
        (f"data.tar.{suffix}", content),
    ):
        header = f"{name:<16}{0:<12}{0:<6}{0:<6}{100644:<8}{len(block):<10}`\n".encode()
        blocks += header + block + b"\n" * (len(block) % 2)
    path.write_bytes(b"!<arch>\n" + blocks)


def text_of(number: int, language: str) -> str:
    """Returns a text of its own for each number and language."""
    words = [hash_of(f"{language}{number}{place}".encode())[:7] for place in range(9)]
    return f"{language} {' '.join(words)} end {number}."


def hash_of(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@pytest.fixture
def recipe(tmp_path) -> Path:
    """Recipe of packages of all readers, which are downloaded already, and one that is gone."""
    downloads = tmp_path / "data" / "downloads"
    downloads.mkdir(parents=True)
    for language in ("de", "fr"):
        blocks = [
            f"Package: p{n}\nDescription-md5: 0\n"
            f"Description-{language}: a tool {language} for {n}\n p{n} {text_of(n, language)}\n"
            for n in range(40)
        ]
        blocks += [block.replace("end", "at the end") for block in blocks[:5]]  # another version
        (downloads / f"t-{language}.bz2").write_bytes(bz2.compress("\n".join(blocks).encode()))
    lines = [f"0000000{n} 03 n 01 big_cat{n} 0 000 | {text_of(n, 'w')}\n" for n in range(10)]
    make_deb(downloads / "w.deb", {"usr/share/wordnet/data.noun": "".join(lines).encode()}, "gz")
    entries = "".join(
        f'big cat{n} \\Big"\\, n. [L. felis]\n   1. {text_of(n, "g")}\n      [1913 Webster]\n\n'
        for n in range(10)
    )
    make_deb(
        downloads / "d.deb", {"usr/share/dictd/gcide.dict.dz": gzip.compress(entries.encode())}
    )
    pages = {
        f"usr/share/man/{folder}man1/m{n}.1.gz": gzip.compress(
            f".SH NAME\nm{n} \\- shows {folder[:2]} thing {n}\n.SH SYNOPSIS\nm{n} a long synopsis "
            f"of it\n.SH {title}\n{text_of(n, folder[:2] or 'en')}\n".encode()
        )
        for folder, title in (("", "DESCRIPTION"), ("de/", "BESCHREIBUNG"))
        for n in range(10)
    }
    pages["usr/share/doc/m.deb/copyright"] = COPYRIGHT
    make_deb(downloads / "m.deb", pages, "zst")
    html = {
        f"usr/share/h/{n}.html": (
            f"<h1>{'How to use part' if n < 10 else 'Part'} {n}</h1><p>{text_of(n, 'h')}</p>"
            "<a href=x>Menu of links here</a>"
        ).encode()
        for n in range(40)
    }
    make_deb(downloads / "h.deb", html)
    (downloads / "broken.deb").write_bytes(b"!<arch>\n")
    files = [
        ("t-de.bz2", "descriptions", "de"),
        ("t-fr.bz2", "descriptions", "fr"),
        ("w.deb", "wordnet", "en"),
        ("d.deb", "gcide", "en"),
        ("m.deb", "manuals", ""),
        ("h.deb", "pages", "en"),
        ("broken.deb", "pages", "en"),
        ("gone.deb", "pages", "en"),
        ("changed.deb", "pages", "en"),
    ]
    rows = [
        {"package": name, "path": name, "bytes": 1, "reader": reader, "language": language}
        | {"sha256": hash_of(path.read_bytes() if (path := downloads / name).exists() else b"")}
        for name, reader, language in files
    ]
    (downloads / "changed.deb").write_bytes(b"another version")
    path = tmp_path / "recipe.yaml"
    path.write_text(json.dumps({"mirrors": ["http://127.0.0.1:9"], "files": rows}))
    return path


def read_lines(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def read_qrels(folder: Path) -> dict[str, dict[str, set[str]]]:
    qrels: dict[str, dict[str, set[str]]] = {half: {} for half in HALVES}
    for half, answers in qrels.items():
        for line in (folder / "qrels" / f"{half}.tsv").read_text().splitlines()[1:]:
            query, item, _ = line.split("\t")
            answers.setdefault(query, set()).add(item)
    return qrels


def test_collection_has_queries_of_all_kinds_with_answers(tmp_path, recipe, capsys):
    missing = build(tmp_path / "data", ["1m"], recipe)
    names = [sentence.partition(":")[0] for sentence in missing]
    assert names == ["broken.deb", "gone.deb", "changed.deb"]
    assert "broken.deb has no data.tar" in missing[0]
    assert "missing package gone.deb" in capsys.readouterr().out
    folder = tmp_path / "data" / "1m"
    rows = read_lines(folder / "corpus.jsonl")
    corpus = {row["_id"]: row for row in rows}
    assert len(corpus) == len(rows)
    queries = {row["_id"]: row for row in read_lines(folder / "queries.jsonl")}
    kinds = {"definition", "paraphrase", "heading", "synopsis", "description", "translation"}
    assert {query["kind"] for query in queries.values()} == kinds
    qrels = read_qrels(folder)
    assert not qrels["choose"].keys() & qrels["prove"].keys()
    assert qrels["choose"].keys() | qrels["prove"].keys() == queries.keys()
    for half in HALVES:
        for query, items in qrels[half].items():
            row = queries[query]
            (item,) = items
            number = row["text"].rstrip(".").split()[-1].removeprefix("cat")
            assert corpus[item]["text"].split("end ")[1].startswith(f"{number}.")
            is_other = corpus[item]["language"] != row["language"]
            assert is_other == (row["kind"] == "translation")
    # Of a described package with a query, only the answer is in the collection.
    numbers = [
        row["text"].split("end ")[1] for row in corpus.values() if row["package"][:2] == "t-"
    ]
    assert len(numbers) == len(set(numbers)) == 40
    assert json.loads((folder / "summary.json").read_text())["missing"] == missing
    assert not [path for path in corpus if path.startswith("h.deb") and "Menu" in corpus[path]]
    names = ("corpus.jsonl", "queries.jsonl", "qrels/choose.tsv", "qrels/prove.tsv")
    before = [(folder / name).read_bytes() for name in names]
    (tmp_path / "data" / ".1m.part").mkdir()  # of an interrupted run
    build(tmp_path / "data", ["1m"], recipe)
    assert [(folder / name).read_bytes() for name in names] == before


def test_slices_contain_the_smaller_ones(tmp_path, recipe, monkeypatch):
    monkeypatch.setitem(SLICES, "1k", Slice(20, 1))
    monkeypatch.setitem(SLICES, "10k", Slice(45, 4))
    rows: dict[str, list[str]] = {}
    answers: dict[str, set[str]] = {}
    build(tmp_path / "data", ["1k", "10k"], recipe)
    for name in ("1k", "10k"):
        folder = tmp_path / "data" / name
        rows[name] = [row["_id"] for row in read_lines(folder / "corpus.jsonl")]
        found = [ids for half in read_qrels(folder).values() for ids in half.values()]
        answers[name] = set().union(*found)
        assert set(rows[name][: len(answers[name])]) == answers[name]  # the answers are first
    assert [len(set(found)) for found in rows.values()] == [20, 45]
    assert set(rows["1k"]) < set(rows["10k"])
    few, many = len(answers["1k"]), len(answers["10k"])
    assert rows["10k"][:few] == rows["1k"][:few]
    assert rows["10k"][many : many + 20 - few] == rows["1k"][few:]


def bookmarks(*entries: tuple[str, int]) -> str:
    """Returns the entry of the catalogue for an outline of titles and numbers of pages from 0."""
    item = ""
    for title, number in reversed(entries):
        following = f"/Next {item}" if item else ""
        item = f"<< /Title ({title}) /Dest [{5 + 2 * number} 0 R /Fit] {following} >>"
    return f"/Outlines << /First {item} >>"


def page_of(number: int, *lines: str) -> Page:
    """Returns a page of 40 lines of its own below the given lines."""
    body = [text_of(place * 1000 + number, "en") for place in range(10)]
    words = [(20, 800 - 15 * place, line) for place, line in enumerate([*lines, *body])]
    return Page(words, (900, 850))


@pytest.fixture
def pages_recipe(tmp_path) -> Path:
    """Recipe of a package of TeX Live with free and other documents."""
    downloads = tmp_path / "data" / "downloads"
    downloads.mkdir(parents=True)
    licences = "pgf: lppl1.3\ntexmf-dist/doc/pgf/*\nodd: other-free\ntexmf-dist/doc/odd/*\n"
    files = {"usr/share/doc/texlive-x/Licenses.gz": gzip.compress(licences.encode())}
    for number in range(12):
        heading, caption = f"2.1 How plot {number} is drawn", f"Figure 3: Plot of case {number}x"
        pages = [
            page_of(number, f"{heading} . . . . 2"),
            page_of(100 + number, heading),
            page_of(200 + number, heading, caption),
            page_of(300 + number, "A heading that is shared"),
        ]
        outline = bookmarks((heading, 1), ("A heading that is shared", 3))
        name = "odd" if number == 11 else "pgf/sub"
        files[f"usr/share/doc/texlive-doc/{name}/m {number}.pdf"] = pdf(*pages, root=outline)
    files["usr/share/doc/texlive-doc/pgf/copy.pdf"] = files[
        "usr/share/doc/texlive-doc/pgf/sub/m 0.pdf"
    ]
    files["usr/share/doc/texlive-doc/pgf/broken.pdf"] = b"%PDF-1.7"
    make_deb(downloads / "texlive-x.deb", files)
    content = (downloads / "texlive-x.deb").read_bytes()
    row = {"package": "texlive-x", "path": "texlive-x.deb", "bytes": 1, "reader": "documents"}
    path = tmp_path / "recipe.yaml"
    path.write_text(json.dumps({"mirrors": [], "files": [row | {"sha256": hash_of(content)}]}))
    return path


def read_texts(path: Path) -> list[str]:
    """Returns the text layers of a document as the source `pages` reads them."""
    numbers = list(range(1, len(open_document(str(path))) + 1))
    read = read_pages(str(path), numbers, {"text": True, "image": False})
    return [" ".join(page["text"].split()) for page in read]


def test_lines_of_queries_are_removed_from_their_documents(tmp_path, pages_recipe, monkeypatch):
    monkeypatch.setitem(SLICES, "pages-1k", Slice(20, family="pages"))
    monkeypatch.setitem(SLICES, "pages-10k", Slice(1000, family="pages"))
    monkeypatch.setattr(documents, "SCAN_INTERVAL", 4)
    monkeypatch.setattr(documents, "PAGES_PER_QUERY", 2)
    monkeypatch.setattr(media, "MAX_SHARE", 1)
    monkeypatch.setattr(media, "MAX_DOCUMENTS", 12)
    assert build(tmp_path / "data", ["pages-10k", "pages-1k"], pages_recipe) == []
    folder = tmp_path / "data" / "pages-10k"
    queries = {row["_id"]: row for row in read_lines(folder / "queries.jsonl")}
    texts = {}
    for path in sorted((folder / "documents").rglob("*.pdf")):
        name = path.relative_to(folder / "documents").as_posix()
        texts |= {f"{name}#page={n}": text for n, text in enumerate(read_texts(path), start=1)}
    assert len(texts) == 11 * 4  # neither the copy, nor the one with another licence
    assert not any(name in path for path in texts for name in ("odd", "broken", " "))
    scans = {path for path, text in texts.items() if not text}
    assert 0 < len(scans) < len(texts)
    assert {query["kind"] for query in queries.values()} == {"section", "caption", "scan"}
    kinds = {"section": 2, "caption": 1}
    for half, answers in read_qrels(folder).items():
        assert answers, half
        for query, pages in answers.items():
            row = queries[query]
            assert "shared" not in row["text"]
            (document,) = {page.partition("#")[0] for page in pages}
            assert f"m_{re.findall('[0-9]+', row['text'])[-1]}.pdf" in document
            is_scan = pages <= scans
            assert is_scan == (row["kind"] == "scan")
            if not is_scan:
                assert len(pages) == kinds[row["kind"]]
                assert row["bm25"] == "not found"  # its words are in no other line
            for page, text in texts.items():
                assert row["text"] not in text or page.partition("#")[0] != document
    small = tmp_path / "data" / "pages-1k"
    summary = json.loads((small / "summary.json").read_text())
    assert summary["items"] == 20
    assert summary["package"] == {"texlive-x": 20}
    for path in (small / "documents").rglob("*.pdf"):
        assert path.read_bytes() == (folder / path.relative_to(small)).read_bytes()


def image_of(colour: str) -> bytes:
    output = io.BytesIO()
    Image.new("RGB", (20, 20), colour).save(output, "PNG")
    return output.getvalue()


def test_titles_and_their_translations_find_images(tmp_path):
    downloads = tmp_path / "data" / "downloads"
    downloads.mkdir(parents=True)
    colours = ["red", "green", "blue", "white", "black", "red"]
    names = ["red fox", "green frog", "blue whale", "icon theme", "big dog", "dog"]
    png = {f"usr/share/openclipart/png/a/{n}.png": image_of(c) for n, c in enumerate(colours)}
    svg = {
        f"usr/share/openclipart/svg/a/{n}.svg": f"<dc:title>{name} 01</dc:title>".encode()
        for n, name in enumerate(names)
    }
    stamps = {
        f"usr/share/tuxpaint/stamps/{n}.{suffix}": content
        for n in range(20)
        for suffix, content in (
            ("png", image_of(f"#{n:02x}{12 * n:02x}80")),
            ("txt", f"A stamp{n}x here.\nde.utf8=Die Marke{n}x.\nde_AT.utf8=\n".encode()),
        )
    }
    rows = []
    for name, reader, files in (
        ("png", "clipart", png),
        ("svg", "titles", svg),
        ("stamps", "stamps", stamps),
    ):
        make_deb(downloads / name, files)
        sha256 = hash_of((downloads / name).read_bytes())
        row = {"package": name, "path": name, "bytes": 1, "reader": reader, "sha256": sha256}
        rows.append(row)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(json.dumps({"mirrors": [], "files": rows}))
    build(tmp_path / "data", ["images"], recipe)
    folder = tmp_path / "data" / "images"
    answers = {query: ids for half in read_qrels(folder).values() for query, ids in half.items()}
    queries = {row["_id"]: row for row in read_lines(folder / "queries.jsonl")}
    by_text = {queries[name]["text"]: ids for name, ids in answers.items()}
    assert by_text["red fox"] == {"png/a/0.png", "png/a/5.png"}  # equal images
    assert by_text["green frog"] == {"png/a/1.png"}
    assert not {"icon theme", "dog"} & by_text.keys()  # no subject, and a part of another title
    german = {text for text in by_text if text.startswith("Die")}
    assert german == {q["text"] for q in queries.values() if q["kind"] == "title translation"}
    assert len(german) + len([text for text in by_text if "stamp" in text]) == 20
    assert 0 < len(german) < 20
    for text, ids in by_text.items():
        assert all((folder / "images" / name).exists() for name in ids), text


def test_near_duplicates_share_hashes():
    text = text_of(1, "en")
    shared = [len(set(sketch(text)) & set(sketch(other))) for other in (text + " x", text[::-1])]
    assert shared[0] >= parts.MIN_SHARED > 2 > shared[1]


def test_readers_remove_what_a_query_names(tmp_path):
    gloss = b'00001740 03 n 02 big_cat 0 lion 0 000 | a feline; "big cats, lions and a lioness"\n'
    make_deb(tmp_path / "w.deb", {"usr/share/wordnet/data.noun": gloss})
    assert dict(members(tmp_path / "w.deb")) == {"usr/share/wordnet/data.noun": gloss}
    (section,) = EXTRACTORS["wordnet"](tmp_path / "w.deb", "en")
    (row,) = passages(section, "w")
    assert row["text"] == 'a feline; "~, ~ and a lioness"'
    assert (row["query"], row["alternative"]) == ("big cat", "a feline")


def test_clips_need_programs_and_speak_passages(tmp_path, recipe, monkeypatch):
    monkeypatch.setitem(SLICES, "10k", Slice(45, 4))
    monkeypatch.setattr(clips, "MAX_PER_LANGUAGE", 1)
    with monkeypatch.context() as context:
        context.setenv("PATH", "")
        sentence = build(tmp_path / "data", ["clips"], recipe)[-1]
    assert sentence.endswith("must be installed, on Debian by `apt-get install espeak-ng ffmpeg`")
    if shutil.which("espeak-ng") is None or shutil.which("ffmpeg") is None:
        pytest.skip("needs espeak-ng and ffmpeg")
    build(tmp_path / "data", ["clips"], recipe)
    folder = tmp_path / "data" / "clips"
    queries = {row["_id"]: row for row in read_lines(folder / "queries.jsonl")}
    answers = {query: ids for half in read_qrels(folder).values() for query, ids in half.items()}
    assert answers.keys() == queries.keys()
    items = {path.name for path in (folder / "items").iterdir()}
    assert set().union(*answers.values()) == items
    videos = [Path(name).stem for name in items if name.endswith(".mp4")]
    assert videos == [Path(name).stem for name in items if int(Path(name).stem, 16) % 3 == 0]
    assert len(items) == sum(json.loads((folder / "summary.json").read_text())["language"].values())


@pytest.mark.heavy
def test_the_smallest_packages_of_the_recipe_make_slices(tmp_path):
    spec = yaml.safe_load(parts.RECIPE.read_text())
    smallest: dict[str, dict[str, str]] = {}
    for file in sorted(spec["files"], key=lambda file: file["bytes"]):
        if file["bytes"] < 20e6:
            smallest.setdefault(file["reader"], file)
    assert len(smallest) == 8
    try:
        probe_url(f"{spec['mirrors'][0]}/{smallest['manuals']['path']}")
    except SpecError as error:
        pytest.skip(f"needs a mirror of Debian: {error}")
    spec["files"] = list(smallest.values())
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(spec))
    names = ["1k", "pages-1k", "images"]
    assert build(tmp_path / "data", names, tmp_path / "recipe.yaml") == []
    for name in names:
        summary = json.loads((tmp_path / "data" / name / "summary.json").read_text())
        assert summary["items"] >= 50, name
        assert sum(summary["queries"].values()) >= 3, name


def test_licences_are_those_of_the_copyright_files(tmp_path, recipe):
    spec = json.loads(recipe.read_text())
    spec["files"] = spec["files"][:1] + spec["files"][4:5]
    recipe.write_text(json.dumps(spec))
    table = list(licences(tmp_path / "data", recipe))[2:]
    assert table == [
        "| t-de.bz2 | 12.15 | those of the described packages |",
        "| m.deb | 12.15 | GPL-2+ |",
    ]


def test_a_full_disk_is_named_before_the_download(tmp_path, recipe):
    spec = json.loads(recipe.read_text())
    spec["files"][-2]["bytes"] = 10**15
    recipe.write_text(json.dumps(spec))
    with pytest.raises(SpecError, match=r"DATA must be on a disk with 6000000.0 GB of free space"):
        build(tmp_path / "data", ["1k"], recipe)


def test_slices_without_packages_are_left_out(tmp_path, recipe):
    spec = json.loads(recipe.read_text())
    spec["files"].append({**spec["files"][-2], "reader": "documents"})  # gone.deb
    recipe.write_text(json.dumps(spec))
    missing = build(tmp_path / "data", ["pages-1k"], recipe)
    assert [sentence.partition(":")[0] for sentence in missing] == ["gone.deb"]
    assert not (tmp_path / "data" / "pages-1k").exists()


def test_tables_compare_with_uncompressed_vectors(tmp_path):
    queries = [
        {"_id": str(n), "kind": "heading", "language": "en" if n < 30 else "fr"}
        | {"bm25": "found" if n % 2 else "not found"}
        for n in range(40)
    ]
    lines = "".join(json.dumps(query) + "\n" for query in queries)
    (tmp_path / "queries.jsonl").write_text(lines)
    (tmp_path / "spec.yaml").write_text(json.dumps({"benchmark": {"path": str(tmp_path)}}))
    runs = {"full.maxsim": 1, "hpool_1.maxsim": 0.5}
    rows = [f"{run},{n},{score * (n % 2)}" for run, score in runs.items() for n in range(40)]
    (tmp_path / "per_query.csv").write_text("\n".join(["run,query_id,nDCG@10", *rows]))
    lines = list(tables(tmp_path))
    assert lines[0] == "| bm25 | all (40) | found (20) | not found (20) |"
    assert lines[2] == "| full | 0.500 | 1.000 | 0.000 |"
    found = "0.500 (-0.500 to -0.500)"
    assert lines[3].endswith(f"| {found} | 0.000 (+0.000 to +0.000) |")
    assert lines[8] == "| hpool_1 | 0.250 |"
    assert "| language | en (30) | others (10) |" in lines
    with pytest.raises(SpecError, match="has no per_query.csv"):
        list(tables(tmp_path / "none"))


def test_study_equals_an_evaluation(index_uri, tmp_path, capsys):
    folder = tmp_path / "benchmark"
    (folder / "qrels").mkdir(parents=True)
    queries = {"a": "the lift of a wing", "b": "how to bake bread", "c": "buckling of shells"}
    lines = [json.dumps({"_id": name, "text": text}) for name, text in queries.items()]
    (folder / "queries.jsonl").write_text("\n".join(lines))
    head = "query-id\tcorpus-id\tscore\n"
    (folder / "qrels" / "choose.tsv").write_text(head + "a\twing/2\t1\nc\theat/1\t1\n")
    (folder / "qrels" / "prove.tsv").write_text(head + "b\tbread/2\t1\nb\tflow\t1\n")
    benchmark = {"name": "beir", "path": str(folder)}
    spec = {
        "output": str(tmp_path / "out"),
        "collections": {"few": {"index": index_uri, "benchmark": benchmark, "halves": True}},
        "fusions": {"fused": {"weights": {"bm25": 0.2}}},
        "grids": [{"methods": ["none", "hpool"], "budgets": [4], "codecs": ["float16"]}],
    }
    (tmp_path / "study.yaml").write_text(json.dumps(spec))
    main(["study", str(tmp_path / "study.yaml")])
    table = tmp_path / "table.csv"
    main(["defaults", str(tmp_path / "study.yaml"), "--table", str(table)])
    assert "| few | 1 |" in capsys.readouterr().out
    with table.open() as file:
        rows = {row["row"]: row for row in csv.DictReader(file)}
    assert set(rows) >= {"full.maxsim", "full.fused", "hpool_4.hybrid", "bm25", "single_vector"}
    for half in HALVES:
        fields = {
            "index": index_uri,
            "benchmark": {**benchmark, "split": half},
            "representations": ["full", "hpool_4"],
            "scores": ["maxsim", "hybrid", "single_vector"],
            "judged": "item",
            "diagnostics": False,
            "output": str(tmp_path / "evaluation"),
        }
        evaluation = run(parse(EvaluateSpec, fields), print)
        for result in evaluation.results:
            mean = np.mean([values["nDCG@10"] for values in result.values.values()])
            if result.score in ("maxsim", "hybrid"):
                row = f"{result.representation}.{result.score}"
            else:
                row = result.score
            assert float(rows[row][half]) == pytest.approx(mean, abs=1e-4)
