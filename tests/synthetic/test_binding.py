"""The benchmark of local bindings: what is true of its reports, its measure, and its job."""

from __future__ import annotations

import csv
import itertools
import re
from collections import Counter

import numpy as np
import pytest
import torch

import jobs
from jobs import binding as job
from pipeline import config
from pipeline.config import SpecError, parse
from pipeline.encoders import EncodedQueries, Encoder
from pipeline.encoders.minilm import MiniLM
from pipeline.registry import ENCODERS, TRAINING_DATA
from pipeline.synthetic.binding import (
    GRID,
    MARKER_COLOURS,
    PANELS,
    RADIUS,
    SIDE,
    SMALLEST_SIDE,
    Report,
    derangement,
    pair_of,
)
from pipeline.synthetic.binding_accuracy import (
    accuracy_of,
    check_form,
    measure,
    pair_scores,
    scores_of,
)
from pipeline.synthetic.binding_data import Binding, batch_of, evaluation_pairs
from pipeline.synthetic.binding_table import TableSpec
from pipeline.synthetic.shapes import COLOURS
from pipeline.synthetic.shapes_data import HELD_OUT
from pipeline.tokens import TokenBatch, normalise, pad
from pipeline.train.study import StudySpec, runs_of
from tests.conftest import ROOT

SENTENCE = re.compile(r"Code (\w+) labels the (\w+ \w+) marker\.")
QUERY = re.compile(r"Find the report where code ([A-Z]\d[A-Z]) labels the (\w+ \w+) marker\.")
SPECS = ROOT / "jobs/specs/training"
SEEDS = np.random.default_rng(17).integers(0, 1 << 31, (30, 2)).tolist()


# -- reports ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("series", "number"), [*SEEDS, (0, 0), (HELD_OUT, 0)])
def test_a_pair_has_one_inventory_and_no_binding_in_common(series, number):
    pair = pair_of(series, number)
    here, there = (SENTENCE.findall(report.text) for report in (pair.positive, pair.negative))
    assert len(here) == len(set(here)) == PANELS
    codes, markers = zip(*here, strict=True)
    assert len(set(codes)) == len(set(markers)) == PANELS
    assert [marker for _, marker in there] == list(markers)  # the same place in the layout
    assert sorted(code for code, _ in there) == sorted(codes)
    assert not set(here) & set(there)
    # A query names the binding of one panel; the hard negative has its parts, apart.
    asked = [QUERY.fullmatch(text).groups() for text in pair.positive.queries]
    assert asked == here


def test_reports_depend_on_series_and_number_alone():
    one, again = pair_of(3, 8), pair_of(3, 8)
    assert one.positive.text == again.positive.text
    assert one.negative.text == again.negative.text
    assert one.negative.picture().tobytes() == again.negative.picture().tobytes()
    # A series beyond 32 bits is not the next number of a short one.
    places = [(0, 0), (0, 1), (1, 0), (1, 1), (HELD_OUT, 0), (HELD_OUT, 1), (HELD_OUT + 1, 0)]
    assert len({pair_of(*place).positive.text for place in places}) == len(places)


def test_derangements_are_uniform():
    random, count = np.random.default_rng(0), 18_000
    drawn = Counter(tuple(derangement(random, 4).tolist()) for _ in range(count))
    legal = {p for p in itertools.permutations(range(4)) if all(a != b for a, b in enumerate(p))}
    assert set(drawn) == legal and len(legal) == 9
    squares = sum((drawn[each] - count / 9) ** 2 for each in legal) / (count / 9)
    assert squares < 26.1  # chi-square of 8 degrees of freedom, p = 0.001


@pytest.mark.parametrize("size", [0, 2, 3, 25])
def test_derangements_have_no_fixed_point(size):
    for seed in range(200):
        drawn = derangement(np.random.default_rng(seed), size)
        assert sorted(drawn) == list(range(size)) and (drawn != np.arange(size)).all()


@pytest.mark.parametrize("side", [SMALLEST_SIDE, 333, SIDE])
@pytest.mark.parametrize(("series", "number"), SEEDS[:6])
def test_pictures_differ_in_every_code_and_nowhere_else(series, number, side):
    pair = pair_of(series, number)
    here, there = (
        np.asarray(report.picture(side)).astype(int) for report in (pair.positive, pair.negative)
    )
    assert here.shape == there.shape == (side, side, 3)
    differs = (here != there).any(axis=2)
    boxes = pair.positive.code_boxes(side)
    assert (boxes == pair.negative.code_boxes(side)).all()
    for panel, (x0, y0, x1, y1) in enumerate(boxes):
        row, column = divmod(panel, GRID)
        width = side // GRID
        assert column * width < x0 < x1 < (column + 1) * width
        assert row * width < y0 < y1 < (row + 1) * width
        assert differs[y0:y1, x0:x1].any()
        differs[y0:y1, x0:x1] = False
    assert not differs.any()


def test_every_code_is_drawn_whole():
    """The widest codes have their ink inside their boxes."""
    pair = pair_of(0, 0)
    for code in ("W8W", "M0Q", "J4J"):
        written = Report((code,) * PANELS, pair.positive.markers, (0, 0))
        blank = Report((" ",) * PANELS, pair.positive.markers, (0, 0))
        for side in (SMALLEST_SIDE, SIDE):
            a, b = (np.asarray(report.picture(side)) for report in (written, blank))
            ink = (a != b).any(axis=2)
            for x0, y0, x1, y1 in written.code_boxes(side):
                assert ink[y0:y1, x0:x1].any()
                ink[y0:y1, x0:x1] = False
            assert not ink.any()


def test_markers_are_seen_in_their_colours():
    report = pair_of(0, 0).positive
    pixels = np.asarray(report.picture())
    radius = round(RADIUS * (SIDE // GRID))
    for (colour, _), (x0, y0, _, y1) in zip(report.markers, report.code_boxes(), strict=True):
        around = pixels[(y0 + y1) // 2 - radius : (y0 + y1) // 2 + radius, x0 - 2 * radius - 3 : x0]
        seen = (around == COLOURS[MARKER_COLOURS[colour]]).all(axis=2)
        assert seen.sum() > radius**2 / 2


# -- accuracy --------------------------------------------------------------------------------------


def random_tokens(seed: int, count: int, length: int, dim: int = 8) -> TokenBatch:
    """Ragged tokens that are not of unit length, with pooled vectors."""
    made = torch.Generator().manual_seed(seed)
    mask = torch.rand(count, length, generator=made) < 0.7
    mask[:, 0] = True
    vectors = torch.randn(count, length, dim, generator=made) * 3
    pooled = normalise(torch.randn(count, dim, generator=made))
    return TokenBatch(vectors, mask, normalised=False, pooled=pooled)


def slow_scores(queries: TokenBatch, documents: TokenBatch) -> dict[str, np.ndarray]:
    """SMART's equations 2, 4 and 5, one number after the other."""
    shape = (len(queries), len(documents))
    single, late = np.zeros(shape), np.zeros(shape)
    for q, d in np.ndindex(shape):
        single[q, d] = float(queries.pooled[q].double() @ documents.pooled[d].double())
        best = []
        for q_i in queries.vectors[q][queries.mask[q]].double():
            cosines = [
                float(q_i @ d_j / q_i.norm() / d_j.norm())
                for d_j in documents.vectors[d][documents.mask[d]].double()
            ]
            best.append(max(cosines))
        late[q, d] = sum(best) / len(best)
    return {"single": single, "late": late, "hybrid": single + late}


def test_scores_and_accuracy_equal_a_slow_loop():
    parts, slow = {}, {}
    for pair in range(5):
        queries, documents = random_tokens(pair, 25, 6), random_tokens(100 + pair, 2, 9)
        for name, scores in scores_of(queries, documents).items():
            parts.setdefault(name, []).append(scores)
        for name, scores in slow_scores(queries, documents).items():
            slow.setdefault(name, []).append(scores)
    for name in ("single", "late", "hybrid"):
        fast = torch.stack(parts[name])
        np.testing.assert_allclose(fast, np.stack(slow[name]), atol=1e-6)
        right = sum(p > n for scores in slow[name] for p, n in scores)
        row = accuracy_of(fast, "text", name)
        assert row.accuracy == pytest.approx(right / 125)
        assert row.low <= row.accuracy <= row.high
        assert (row.num_pairs, row.num_queries, row.ties) == (5, 125, 0.0)


def test_ties_are_wrong():
    scores = torch.tensor([[[1.0, 1.0], [2.0, 1.0]], [[0.0, 0.0], [0.0, 1.0]]])
    row = accuracy_of(scores, "text", "late")
    assert (row.accuracy, row.ties) == (0.25, 0.5)
    assert (row.low, row.high) == (0.0, 0.5)  # by pair: 0.5 and 0


def test_what_has_no_vectors_has_no_score():
    queries, documents = random_tokens(0, 3, 4), random_tokens(1, 2, 4)
    without = TokenBatch(documents.vectors, documents.mask, normalised=False)
    assert list(scores_of(queries, without)) == ["late"]
    empty = TokenBatch(
        queries.vectors, torch.zeros_like(queries.mask), False, pooled=queries.pooled
    )
    assert list(scores_of(empty, documents)) == ["single"]


class Told(Encoder):
    """One number a word of the vocabulary; or, if it sees bindings, one a code and marker."""

    def __init__(self, sees_bindings: bool):
        self.spec = ENCODERS.resolve("minilm")
        self._sees_bindings, self._numbers = sees_bindings, {}

    @classmethod
    def check(cls, spec):
        pass

    @classmethod
    def wants(cls, spec):
        return ("text",)

    def _batch(self, texts) -> TokenBatch:
        pattern = r"\w+ labels the \w+ \w+" if self._sees_bindings else r"\w+"
        said = [re.findall(pattern, text) for text in texts]
        ids = [[self._numbers.setdefault(w, len(self._numbers)) for w in own] for own in said]
        lengths = np.array([len(own) for own in ids])
        vectors, mask = pad(torch.eye(2000)[[i for own in ids for i in own]], lengths)
        return TokenBatch(vectors, mask, True, pooled=normalise(vectors.sum(dim=1)))

    def encode(self, items, taps=()):
        yield np.arange(items.num_rows), self._batch(items["text"].to_pylist())

    def encode_queries(self, texts):
        return EncodedQueries(self._batch(texts), [])


def test_who_knows_words_alone_cannot_tell_them_apart_and_who_knows_bindings_can():
    pairs = evaluation_pairs(6)
    for row in measure(Told(sees_bindings=False), pairs, "text"):
        assert (row.ties, row.accuracy, row.low, row.high) == (1.0, 0.0, 0.0, 0.0)
    for row in measure(Told(sees_bindings=True), pairs, "text"):
        assert (row.ties, row.accuracy, row.low, row.high) == (0.0, 1.0, 1.0, 1.0)


def test_pairs_are_scored_each_for_itself(checkpoint):
    """A pair's scores do not depend on which others are measured, in whatever form."""
    from pipeline.encoders.colpali import ColPali

    encoders = {
        "text": MiniLM(MiniLM.Spec()),
        "rendered": ColPali(ColPali.Spec(model=checkpoint("colpali"), dtype="float32")),
    }
    pairs = evaluation_pairs(5)
    for form, encoder in encoders.items():
        every = pair_scores(encoder, pairs, form, SMALLEST_SIDE)
        last = pair_scores(encoder, pairs[4:], form, SMALLEST_SIDE)
        assert list(every) == (["single", "late", "hybrid"] if form == "text" else ["late"])
        for name, scores in every.items():
            assert scores.shape == (5, PANELS, 2)
            torch.testing.assert_close(scores[4:], last[name], atol=1e-5, rtol=0)


# -- training data ---------------------------------------------------------------------------------


def data_of(batch_size: int = 8, seed: int = 0, **fields) -> Binding:
    spec = parse(Binding.Spec, {"side": SMALLEST_SIDE, **fields})
    return TRAINING_DATA.build(spec, batch_size=batch_size, seed=seed)


@pytest.mark.parametrize("form", ["text", "rendered"])
def test_a_batch_has_reports_and_their_hard_negatives(form):
    data = data_of(num_pairs=8, queries=3, form=form)
    assert data.num_batches == 2
    batch = next(data.batches(0, 0, 0, 1))
    assert len(batch.documents) == len(set(batch.document_keys)) == 8
    assert len(batch.queries) == 4 * 3
    positive = data.relevant(batch.query_facts, batch.document_facts)
    assert positive.sum(dim=1).tolist() == [1] * 12
    assert positive.sum(dim=0).tolist() == [3, 0] * 4
    for document in batch.documents:
        assert list(document) == (["text"] if form == "text" else ["image"])
    if form == "text":
        for query, relevant in zip(batch.queries, positive, strict=True):
            asked = QUERY.fullmatch(query).groups()
            holds = [asked in SENTENCE.findall(each["text"]) for each in batch.documents]
            assert holds == relevant.tolist()


def test_nothing_that_is_measured_on_is_trained_on():
    held_out = data_of(held_out=40).held_out()
    assert len(held_out.queries) == 1000 and len(held_out.documents) == 80
    texts = {document["text"] for document in held_out.documents}
    for seed in (0, 1):
        data = data_of(batch_size=16, seed=seed, num_pairs=48)
        for batch in itertools.chain(data.batches(0, 0, 0, 1), data.batches(1, 0, 0, 1)):
            assert not texts & {document["text"] for document in batch.documents}
            assert not set(held_out.document_keys) & set(batch.document_keys)


@pytest.mark.parametrize("fresh", [True, False])
def test_workers_share_the_batches_of_one(fresh):
    data = data_of(num_pairs=16, fresh=fresh)
    alone = list(data.batches(1, 1, 0, 1))
    shared = [list(data.batches(1, 1, worker, 2)) for worker in range(2)]
    assert len(alone) == 3
    for batch, *parts in zip(alone, *shared, strict=True):
        for name in ("queries", "documents", "document_keys"):
            assert getattr(batch, name) == [one for part in parts for one in getattr(part, name)]
        facts = torch.cat([part.document_facts for part in parts])
        assert torch.equal(batch.document_facts, facts)


@pytest.mark.parametrize("fresh", [True, False])
def test_epochs(fresh):
    data = data_of(num_pairs=16, fresh=fresh)
    first, second = (
        {query for batch in data.batches(epoch, 0, 0, 1) for query in batch.queries}
        for epoch in (0, 1)
    )
    assert data.repeats != fresh
    assert first.isdisjoint(second) if fresh else first == second


@pytest.mark.parametrize("count", [{"name": "binding", "num_pairs": 9}, {"num_scenes": 18}])
def test_what_fills_no_batch_is_left_out_of_all_epochs(count):
    """Else kept states, which are those of the first epoch, would lack what others have."""
    given = {"name": "shapes", "fresh": False} | count
    data = TRAINING_DATA.build(TRAINING_DATA.resolve(given), batch_size=4, seed=0)
    first, second, every = (
        {key for batch in batches for key in batch.document_keys}
        for batches in (data.batches(0, 0, 0, 1), data.batches(1, 0, 0, 1), data.everything(0, 1))
    )
    assert len(first) == 16 and first == second == every


def test_quality_compares_within_pairs_alone():
    data = data_of()
    pairs = evaluation_pairs(4)
    held_out = batch_of(pairs, [range(5)] * 4, "text")
    scores = torch.randn(20, 8, generator=torch.Generator().manual_seed(0))
    right = [scores[q, 2 * (q // 5)] > scores[q, 2 * (q // 5) + 1] for q in range(20)]
    found = data.quality(scores, held_out)
    assert list(found) == ["pairwise_accuracy"]
    assert found["pairwise_accuracy"].tolist() == list(map(int, right))
    # The order of documents is nothing that it depends on.
    order = torch.randperm(8, generator=torch.Generator().manual_seed(1))
    facts = held_out.document_facts[order]
    moved = type(held_out)(
        held_out.queries, held_out.documents, held_out.document_keys, held_out.query_facts, facts
    )
    assert (data.quality(scores[:, order], moved)["pairwise_accuracy"] == right).all()


# -- the job ---------------------------------------------------------------------------------------


def test_the_job_on_minilm(tmp_path, capsys):
    job.main(["--pairs", "3", "--output", str(tmp_path / "out"), "layer=3"])
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].split()[:3] == ["form", "score", "accuracy"]
    with (tmp_path / "out/binding.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["score"] for row in rows] == ["single", "late", "hybrid"]
    scores = pair_scores(MiniLM(MiniLM.Spec(layer=3)), evaluation_pairs(3), "text")
    for row, line in zip(rows, printed[1:], strict=False):
        assert line.split() == list(row.values())
        assert (row["form"], row["pairs"], row["queries"]) == ("text", "3", "75")
        right = (scores[row["score"]][..., 0] > scores[row["score"]][..., 1]).double().mean()
        assert float(row["accuracy"]) == pytest.approx(right.item(), abs=1e-4)
        assert 0 <= float(row["low"]) <= float(row["accuracy"]) <= float(row["high"]) <= 1
    assert (tmp_path / "out/binding.png").read_bytes().startswith(b"\x89PNG")


def test_the_job_reads_encoders_from_files(tmp_path, capsys, checkpoint):
    encoder = f"{{name: colpali, model: {checkpoint('colpali')}, dtype: float32}}"
    printed = []
    for content in (encoder, f"index: nowhere\nencoder: {encoder}"):
        path = tmp_path / "encoder.yaml"
        path.write_text(content, encoding="utf-8")
        arguments = ["--encoder", str(path), "--form", "rendered", "--side", "240", "--pairs", "2"]
        job.main(arguments)
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1]
    assert [line.split()[:2] for line in printed[0].splitlines()[1:]] == [["rendered", "late"]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--form", "rendered"], "--form: 'rendered' is not read by the encoder minilm"),
        (["--side", "100"], "--side: 100 is not legal; legal: an integer >= 200"),
        (["--seed", "-1"], "--seed: -1 is not legal"),
        (["--encoder", "nowhere.yaml"], "--encoder: 'nowhere.yaml' does not exist"),
        (["layer=9"], "encoder.layer: 9 is not legal; legal: -7 to 6"),
        (["laier=1"], "encoder.laier: 1 stands under an unknown key"),
        (["name=nothing"], "encoder.name: 'nothing' is not one of the encoders"),
        (["--pairs", "0"], "argument --pairs: '0' is not legal"),
        (["--form", "spoken"], "argument --form: invalid choice: 'spoken'"),
    ],
)
def test_bad_input_is_one_sentence(arguments, message, capsys):
    with pytest.raises(SystemExit) as ended:
        jobs.run(job.main, arguments)
    assert ended.value.code == jobs.BAD_INPUT
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1


TABLE = """
title: layers
rows:
  two: [{name: minilm, layer: 3}, {name: minilm, layer: 6}]
  one: [{name: minilm, layer: 0, pooling: none}]
"""


def test_the_job_makes_a_table_of_encoders(tmp_path, capsys):
    """A row's figures are those of its encoders' scores, the mean over them pair by pair."""
    (tmp_path / "table.yaml").write_text(TABLE, "utf-8")
    arguments = ["--table", str(tmp_path / "table.yaml"), "--pairs", "3"]
    job.main([*arguments, "--output", str(tmp_path / "out")])
    printed = capsys.readouterr().out
    assert re.search(r"^encoder +seeds +single +late +hybrid$", printed, re.MULTILINE)
    assert re.search(r"^one +1 +- +0\.\d{3} \[0\.\d{3}, 0\.\d{3}\] +-$", printed, re.MULTILINE)
    with (tmp_path / "out/binding.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["encoder"], row["score"]) for row in rows] == [
        *(("two", score) for score in ("single", "late", "hybrid")),
        ("one", "late"),
    ]
    pairs = evaluation_pairs(3)
    scores = [pair_scores(MiniLM(MiniLM.Spec(layer=n)), pairs, "text")["late"] for n in (3, 6)]
    right = torch.stack(scores).diff(dim=3).squeeze(3).lt(0).double()  # seeds, pairs, queries
    late = rows[1]
    assert (late["seeds"], rows[3]["seeds"], rows[3]["sd"]) == ("2", "1", "")
    assert float(late["accuracy"]) == pytest.approx(right.mean().item(), abs=1e-4)
    assert float(late["sd"]) == pytest.approx(right.mean(dim=(1, 2)).std().item(), abs=1e-4)
    of_pairs = right.mean(dim=(0, 2))
    assert of_pairs.min() - 1e-4 <= float(late["low"]) <= float(late["accuracy"])
    assert float(late["accuracy"]) <= float(late["high"]) <= of_pairs.max() + 1e-4
    assert (tmp_path / "out/binding.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--form", "text"], "--form: 'text' is not legal; legal: left out"),
        (["rows.two.1.layer=9"], "rows.two.1.layer: 9 is not legal; legal: -7 to 6"),
        (["rows.one.0.adapter=./nowhere"], "rows.one.0.adapter: './nowhere' is not a folder"),
        (["rows.one=[]"], "rows.one: [] is not legal"),
        (["form=rendered"], "form: 'rendered' is not read by the encoder minilm"),
        (["side=1"], "side: 1 is not legal"),
    ],
)
def test_what_is_wrong_with_a_table_is_one_sentence(tmp_path, capsys, given, message):
    (tmp_path / "table.yaml").write_text(TABLE, "utf-8")
    with pytest.raises(SystemExit) as ended:
        jobs.run(job.main, ["--table", str(tmp_path / "table.yaml"), *given])
    assert ended.value.code == jobs.BAD_INPUT
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1


@pytest.mark.parametrize("path", sorted(SPECS.glob("*/binding*.yaml")), ids=lambda path: path.stem)
def test_the_specs_that_come_with_it_are_legal(path):
    """Of a table's encoders the trained weights may not be there yet."""
    if path.parent.name == "tables":
        assert config.load(TableSpec, str(path), []).rows
    else:
        assert runs_of(config.load(StudySpec, str(path), []))


def test_an_encoder_that_reads_neither_form():
    with pytest.raises(SpecError, match="^--form: 'text' .* sleeping; legal: no form with this"):
        check_form(ENCODERS.resolve("sleeping"), "text")
