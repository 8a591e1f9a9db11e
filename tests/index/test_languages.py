"""Languages of texts, and the warnings of jobs about those that the encoder does not support."""

from __future__ import annotations

import ast
import json

import pytest
import yaml

from jobs import evaluate, index, plan, status
from pipeline.encoders.published import model_languages
from pipeline.index.languages import language_shares
from pipeline.index.reader import IndexReader
from tests.conftest import CRANFIELD, ROOT

pytest.importorskip("py3langid")
MINILM = {"name": "minilm", "model": "bundled"}
ENGLISH = [
    "The wing of the aeroplane carries most of its weight while it is in the air.",
    "A boundary layer is the thin layer of air that moves slowly along a surface.",
    "Engines of this kind burn their fuel in a chamber behind the compressor.",
    "The temperature of the wall was measured at several points along the tube.",
]
FRENCH = [
    "L'aile de l'avion porte la plus grande partie de son poids pendant le vol.",
    "La couche limite est la mince couche d'air qui avance lentement le long d'une surface.",
    "Les moteurs de ce type brûlent leur carburant dans une chambre derrière le compresseur.",
    "La température de la paroi a été mesurée en plusieurs points le long du tube.",
]
DANISH = [
    "Flyets vinge bærer det meste af vægten, mens flyet er i luften.",
    "Temperaturen på væggen blev målt flere steder langs med røret.",
]
JAPANESE = ["飛行機の翼は、飛行中にその重さの大部分を支えている。"]


def write_corpus(folder, texts, start=0):
    folder.mkdir(exist_ok=True)
    rows = [{"_id": f"d{start + row}", "text": text} for row, text in enumerate(texts)]
    (folder / "corpus.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return str(folder)


def test_shares_of_languages():
    texts = [*ENGLISH, *FRENCH[:2], *DANISH, *JAPANESE, "", "  ", None, "12 4.5\n7 8.25"]
    shares = language_shares(texts)  # of ten texts with characters
    assert shares == {"en": 0.4, "fr": 0.2, "da": 0.2, "ja": 0.1}
    assert next(iter(shares)) == "en" and language_shares([]) == {}


def test_a_sample_of_many_texts_is_even():
    shares = language_shares([*ENGLISH * 500, *FRENCH * 500])
    assert shares == {"en": 0.5, "fr": 0.5}


def test_english_code_and_tables_have_no_other_language():
    rows = map(json.loads, (CRANFIELD / "corpus.jsonl").read_text().splitlines())
    abstracts = [row["text"] for row in rows][::4]
    sources = [path.read_text() for path in sorted((ROOT / "pipeline/index").glob("*.py"))]
    functions = [
        ast.get_source_segment(source, node)
        for source in sources
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef)
    ]
    table = (ROOT / "docs/results/mteb-tasks.csv").read_text().splitlines()
    tables = ["\n".join(table[row : row + 5]) for row in range(0, len(table), 20)]
    for texts in (abstracts, functions[::4], tables):
        assert len(texts) > 30 and set(language_shares(texts)) <= {"en"}


def test_languages_of_encoders():
    assert model_languages(MINILM) == ("en",)
    assert model_languages({"name": "transcript", "text": MINILM}) == ("en",)
    assert model_languages({**MINILM, "model": "multilingual"}) == ()
    assert model_languages({"model": "colbert-ir/colbertv2.0"}) == ("en",)
    assert model_languages({**MINILM, "adapter": "models/danish"}) == ()
    assert model_languages({"model": "models/mine"}) == model_languages({"name": "vectors"}) == ()


WARNING = (
    "60% of the items are not in the language of the encoder (en): fr 40%, da 20%; they are found"
    " much less often (docs/tutorials/choosing.md, Languages)"
)


@pytest.fixture
def spec(tmp_path) -> dict:
    corpus = write_corpus(tmp_path / "corpus", [*ENGLISH, *FRENCH, *DANISH])
    return {
        "index": str(tmp_path / "index"),
        "source": {"name": "text", "path": corpus, "collection": "texts"},
        "encoder": MINILM,
        "representations": [{"compressor": "none"}],
    }


def run(tmp_path, capsys, command, spec, *options) -> str:
    (tmp_path / "spec.yaml").write_text(yaml.safe_dump(spec))
    command.main([str(tmp_path / "spec.yaml"), *options])
    return capsys.readouterr().out


@pytest.mark.usefixtures("blank_figures")
def test_jobs_warn_once(spec, tmp_path, capsys):
    printed = run(tmp_path, capsys, plan, spec, "--out", str(tmp_path / "plan"))
    assert printed.count("warning: ") == 1
    assert f"warning: {WARNING.replace('items', 'sampled items', 1)}" in printed
    printed = run(tmp_path, capsys, index, spec)
    assert printed.count("warning: ") == 1 and f"warning: {WARNING}" in printed
    status.main([spec["index"]])
    assert capsys.readouterr().out.count(f"warning: {WARNING}") == 1
    status.main([spec["index"], "--json"])
    assert json.loads(capsys.readouterr().out)["warnings"] == [WARNING]
    # Nothing to do: nothing new to warn about. An appended job reads the texts of the whole index.
    assert "warning: " not in run(tmp_path, capsys, index, spec)
    write_corpus(tmp_path / "corpus", [*ENGLISH, *FRENCH, *DANISH, *ENGLISH * 3, *FRENCH[:2]])
    printed = run(tmp_path, capsys, index, spec)
    assert "33% of the items are not in the language of the encoder (en): fr 25%, da 8%" in printed
    assert len(IndexReader(spec["index"])) == 24

    folder = tmp_path / "benchmark"
    (folder / "qrels").mkdir(parents=True)
    queries = [{"_id": f"q{row}", "text": text} for row, text in enumerate(["wing?", *FRENCH])]
    (folder / "queries.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in queries))
    judged = "".join(f"q{row}\td{row}\t1\n" for row in range(5))
    (folder / "qrels/test.tsv").write_text(f"query-id\tcorpus-id\tscore\n{judged}")
    evaluation = {
        "index": spec["index"],
        "benchmark": {"name": "beir", "path": str(folder)},
        "output": str(tmp_path / "evaluation"),
        "bm25": False,
        "diagnostics": False,
    }
    printed = run(tmp_path, capsys, evaluate, evaluation)
    report = (tmp_path / "evaluation/report.html").read_text()
    sentence = "80% of the queries are not in the language of the encoder (en): fr 80%"
    assert printed.count(sentence) == 1 and report.count(sentence) == 1
    assert printed.count("33% of the items") == 1 and report.count("33% of the items") == 1


def test_no_warning_for_english_or_an_unknown_encoder(spec, checkpoint, tmp_path, capsys):
    english = write_corpus(tmp_path / "english", [*ENGLISH * 5, *FRENCH[:1]])  # below 5 %
    fields = {**spec, "source": {"name": "text", "path": english}}
    assert "warning" not in run(tmp_path, capsys, index, fields)
    unknown = {"name": "minilm", "model": checkpoint("gte_modernbert"), "window": 64}
    unknown["overlap_tokens"] = 16
    fields = {**spec, "encoder": unknown, "index": str(tmp_path / "unknown")}
    assert "warning" not in run(tmp_path, capsys, index, fields)
