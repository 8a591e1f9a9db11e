"""Batches of rows: in every epoch as the seed says, the same for one worker as for several."""

from __future__ import annotations

import io
import itertools
import logging

import numpy as np
import pytest
import torch
from PIL import Image

from pipeline.config import JobError, SpecError
from pipeline.train.losses import LOWEST, info_nce
from pipeline.training_data import row_data
from pipeline.training_data.base import NOTHING
from pipeline.training_data.row_data import NO_DOCUMENT
from tests.train.runs import assert_same, logged, run_workers, spec_of, trained, weights_of
from tests.training_data.files import (
    CAPTIONS,
    IMAGES,
    NAMES,
    PHOTOS,
    built,
    every,
    lines,
    pages,
    said,
)


@pytest.fixture
def pairs(tmp_path):
    """Twenty queries about ten texts, each with three hard negatives and a teacher's scores."""
    rows = [
        {
            "query": f"query {row}",
            "document_id": f"d{row % 10}",
            "text": f"text {row % 10}",
            "negatives": [f"d{(row + step) % 10}" for step in (3, 4, 5)],
            "scores": [0.9, 0.3, 0.4, 0.5],
        }
        for row in range(20)
    ]
    return lines(tmp_path / "pairs.jsonl", rows)


def photos(**more):
    return built(name="captions", path=PHOTOS / "captions.json", images=IMAGES, **more)


@pytest.mark.parametrize("form", ["pairs", "captions", "colpali_train"])
def test_an_epoch_depends_on_spec_seed_and_epoch_alone(form, pairs, tmp_path):
    def data(seed=0):
        if form == "pairs":
            return built(3, seed, name=form, path=pairs, num_negatives=1)
        if form == "captions":
            return built(8, seed, name=form, path=PHOTOS / "captions.json", images=IMAGES)
        folder = tmp_path / "pages"
        return built(3, seed, name=form, path=folder if folder.exists() else pages(folder))

    one = data()
    first, second = every(one), every(one, epoch=1)
    assert len(first) == one.num_batches == len(one.rows.rows) // one.batch_size
    assert every(data()) == first and every(data(), epoch=1) == second
    assert first != second and every(data(seed=1)) != first
    # Resumed: what the unbroken epoch would have had.
    assert every(data(), epoch=1, first=2) == second[2:]
    asked = [query for batch in first for query in batch["queries"]]
    assert len(asked) == one.num_batches * one.batch_size
    # No row is in an epoch twice: captions may be said of two photographs.
    own = [row.query for row in one.rows.rows]
    assert all(asked.count(query) <= own.count(query) for query in set(asked))


def test_nothing_is_read_of_the_batches_before_the_first(monkeypatch):
    data, opened = photos(batch_size=17), []
    real = row_data.fsspec.open
    monkeypatch.setattr(row_data.fsspec, "open", lambda *a: opened.append(a) or real(*a))
    (last,) = every(data, first=4)
    assert len(opened) == len(last["keys"])


@pytest.mark.parametrize("num_workers", [2, 3])
def test_workers_together_have_what_one_has(pairs, num_workers):
    data = built(6, name="pairs", path=pairs)
    shares = [every(data, worker=w, of=num_workers) for w in range(num_workers)]
    for whole, *parts in zip(every(data), *shares, strict=True):
        assert len({len(part["keys"]) for part in parts}) == 1  # gathering needs as many of each
        assert len({len(part["query_facts"][0]) for part in parts}) == 1
        for name in ("queries", "query_facts"):
            assert list(itertools.chain(*(part[name] for part in parts))) == whole[name]
        joined = [
            pair
            for part in parts
            for pair in zip(part["keys"], part["document_facts"], strict=True)
        ]
        there = [pair for pair in joined if pair[0] != NO_DOCUMENT]
        assert sorted(there) == sorted(zip(whole["keys"], whole["document_facts"], strict=True))
        assert all(fact == [NOTHING] for key, fact in joined if key == NO_DOCUMENT)


def test_a_document_is_in_a_batch_once_and_relevant_to_all_its_queries():
    data = photos(batch_size=40)
    (first, _) = data.batches(0, 0, 0, 1)
    assert len(set(first.document_keys)) == len(first.document_keys) < 40
    relevant = data.relevant(first.query_facts, first.document_facts)
    document_of = {}
    for row in data.rows.rows:
        document_of.setdefault(row.query, set()).add(data.rows.documents[row.document].key)
    for query, row in zip(first.queries, relevant, strict=True):
        found = {key for key, own in zip(first.document_keys, row.tolist(), strict=True) if own}
        assert found == document_of[query] & set(first.document_keys) and found


def test_queries_of_several_rows_share_their_documents(tmp_path):
    rows = [{"query": "both", "text": t} for t in ("one", "two")] + [{"query": "1", "text": "one"}]
    data = built(3, name="pairs", path=lines(tmp_path / "pairs.jsonl", rows))
    (batch,) = data.batches(0, 0, 0, 1)
    relevant = data.relevant(batch.query_facts, batch.document_facts)
    found = {
        (query, batch.documents[place]["text"])
        for query, row in zip(batch.queries, relevant, strict=True)
        for place in row.nonzero().flatten().tolist()
    }
    assert found == {("both", "one"), ("both", "two"), ("1", "one")}


def test_hard_negatives_come_with_their_teachers_scores(pairs):
    data = built(2, name="pairs", path=pairs)
    for batch in data.batches(0, 0, 0, 1):
        place = {document["text"]: row for row, document in enumerate(batch.documents)}
        for row, query in enumerate(batch.queries):
            number = int(query.split()[1])
            texts = [f"text {(number + step) % 10}" for step in (0, 3, 4, 5)]
            scores = batch.teacher[row]
            expected = torch.tensor([0.9, 0.3, 0.4, 0.5])
            torch.testing.assert_close(scores[[place[text] for text in texts]], expected)
            assert scores.isnan().sum() == len(batch.documents) - 4
    drawn = [
        built(2, name="pairs", path=pairs, num_negatives=1)._drawn(5, epoch) for epoch in range(20)
    ]
    assert {row.negatives for row in drawn} == {(8,), (9,), (0,)}
    assert {row.scores[1] for row in drawn} == {0.3, 0.4, 0.5}


def test_hard_negatives_of_a_file(pairs, tmp_path):
    rows = [{"query": "query 0", "negatives": ["d7", "d0", "d3"]}]
    mined = lines(tmp_path / "negatives.jsonl", rows)
    data = built(20, name="pairs", path=pairs, hard_negatives=mined)
    documents = [data.rows.documents[n].id for n in data.rows.rows[0].negatives]
    assert documents == ["d3", "d4", "d5", "d7"]  # d0 is relevant, d3 was there
    assert np.isnan(data.rows.rows[0].scores[4])
    bad = {
        '{"query": "query 0", "negatives": ["d77"]}': (
            "data.hard_negatives must be the id of a document in the data, got 'd77' (line 1 of {})"
        ),
        '{"query": "other", "negatives": ["d7"]}': (
            "data.hard_negatives must be a file with queries of the data, got '{}', which has none"
        ),
        '{"query": "query 0"}': (
            'data.hard_negatives must be a line {"query": "...", "negatives": ["id", ...]}, got'
            " {'query': 'query 0'} (line 1 of {})"
        ),
    }
    for line, message in bad.items():
        lines(mined, [line])
        with pytest.raises(SpecError) as error:
            built(20, name="pairs", path=pairs, hard_negatives=mined)
        assert str(error.value) == message.replace("{}", str(mined))


def test_everything_has_the_rows_that_fill_no_batch(pairs):
    data = built(7, name="pairs", path=pairs)
    for num_workers in (1, 3):
        parts = [b for w in range(num_workers) for b in data.everything(w, num_workers)]
        queries = [query for part in parts for query in part.queries]
        keys = [key for part in parts for key in part.document_keys]
        assert sorted(queries) == sorted(f"query {row}" for row in range(20))
        assert len(keys) == len(set(keys)) == 11 and NO_DOCUMENT in keys


# -- validation ------------------------------------------------------------------------------------


def test_a_validation_share_does_not_depend_on_the_seed(pairs):
    data = built(4, name="pairs", path=pairs, validation=0.2)
    batch = data.validation()
    assert said(batch) == said(built(4, 9, name="pairs", path=pairs, validation=0.2).validation())
    assert len(batch.documents) == 2 and len(batch.queries) == 4
    assert data.relevant(batch.query_facts, batch.document_facts).sum(dim=1).tolist() == [1] * 4
    trained = {d["text"] for b in data.batches(0, 0, 0, 1) for d in b.documents}
    assert len(data.rows.rows) == 16
    assert not trained & {document["text"] for document in batch.documents}


def test_a_file_is_validation_data(pairs, tmp_path):
    other = lines(tmp_path / "other.jsonl", [{"query": "q", "text": "t"}])
    batch = built(4, name="pairs", path=pairs, validation={"path": str(other)}).validation()
    assert batch.queries == ["q"] and [d["text"] for d in batch.documents] == ["t"]
    assert built(4, name="pairs", path=pairs).validation() is None


@pytest.mark.parametrize("share", [0, 1, 1.5, True, "some"])
def test_a_share_is_between_0_and_1(share, pairs):
    with pytest.raises(SpecError, match=f"^validation must be a fraction .*, got {share!r}"):
        built(name="pairs", path=pairs, validation=share)


def test_a_share_without_a_query_of_its_own(tmp_path):
    rows = [{"query": "the same", "text": f"text {row}"} for row in range(9)]
    path = lines(tmp_path / "pairs.jsonl", rows)
    with pytest.raises(SpecError) as error:
        built(name="pairs", path=path, validation=0.1)
    assert str(error.value) == (
        "data.validation must be another fraction or {path: ...}, got 0.1, which holds out no query"
    )


# -- what is not there, or damaged -----------------------------------------------------------------


def test_fewer_rows_than_a_batch(pairs):
    with pytest.raises(SpecError) as error:
        built(21, name="pairs", path=pairs)
    assert str(error.value) == (
        f"data.path must be data of at least one batch (21 rows), got '{pairs}', which has 20"
        " training rows"
    )


def links(folder, names=NAMES[:6]):
    """Photographs in a folder, with a row each."""
    for name in names:
        (folder / name).symlink_to(IMAGES / name)
    rows = [{"query": f"query {n}", "image": name} for n, name in enumerate(names)]
    return lines(folder / "pairs.jsonl", rows)


def test_a_picture_that_is_not_there_is_left_out_and_said(tmp_path, caplog):
    path = links(tmp_path)
    (tmp_path / NAMES[2]).unlink()
    data = built(5, name="pairs", path=path)
    assert [row.query for row in data.rows.rows] == [f"query {n}" for n in (0, 1, 3, 4, 5)]
    assert caplog.messages == [
        "1 of 6 rows and 1 of 6 documents are left out:"
        f" there is no picture {tmp_path / NAMES[2]} (line 3 of {path})"
    ]
    with pytest.raises(SpecError) as error:
        built(5, name="pairs", path=path, root=tmp_path / "nowhere")
    assert str(error.value) == (
        f"data.path must be data with existing picture files, got '{tmp_path}/nowhere/{NAMES[0]}',"
        f" which has none (line 1 of {path})"
    )


def test_a_corrupt_picture_does_not_end_a_run(tmp_path, caplog):
    path = links(tmp_path)
    whole = every(built(6, name="pairs", path=path), of=1)[0]
    (tmp_path / NAMES[2]).unlink()
    (tmp_path / NAMES[2]).write_bytes((IMAGES / NAMES[2]).read_bytes()[:3000])
    data = built(6, name="pairs", path=path)
    assert data.num_batches == 1
    with caplog.at_level(logging.WARNING):
        batch = next(data.batches(0, 0, 0, 1))
    lost = whole["queries"].index("query 2")
    assert said(batch)["queries"] == whole["queries"]
    assert batch.documents[lost] == {"text": None, "image": None}
    assert batch.document_keys[lost] == NO_DOCUMENT
    relevant = data.relevant(batch.query_facts, batch.document_facts)
    assert relevant.sum(dim=1).tolist() == [int(row != lost) for row in range(6)]
    (message,) = caplog.messages
    assert message.startswith(f"the picture of {NAMES[2]} (line 3 of {path}) cannot be read: damag")
    # The workers still have equally many.
    parts = [next(data.batches(0, 0, w, 2)) for w in range(2)]
    assert [len(part.documents) for part in parts] == [3, 3]


def test_a_batch_of_which_no_picture_can_be_read_ends_the_run(tmp_path):
    path = links(tmp_path)
    data = built(6, name="pairs", path=path)
    for name in NAMES[:6]:
        (tmp_path / name).unlink()
    with pytest.raises(JobError, match="^none of 6 pictures of a batch can be read: line "):
        next(data.batches(0, 0, 0, 1))


def test_large_pictures_are_made_smaller(tmp_path):
    path = links(tmp_path)
    data = built(6, name="pairs", path=path, max_pixels=10_000)
    for document in next(data.batches(0, 0, 0, 1)).documents:
        width, height = Image.open(io.BytesIO(document["image"])).size
        assert width * height <= 10_000


def test_rows_of_tables_are_shuffled_among_some_groups(tmp_path):
    folder = pages(tmp_path / "pages", rows=24, group=2)
    data = built(4, name="colpali_train", path=folder, mixed_groups=2)
    for epoch in range(3):
        order = data.order(epoch)
        groups = data._group_R[order]
        assert sorted(order.tolist()) == list(range(24))
        for start in range(0, 24, 4):  # two groups of two rows
            assert len(set(groups[start : start + 4].tolist())) <= 2
    assert (data.order(0) != data.order(1)).any()


# -- in training -----------------------------------------------------------------------------------


def test_the_loss_of_two_workers_rows_is_that_of_one(pairs, tmp_path):
    """Documents that fill up a batch, and unreadable ones, change nothing."""
    data = built(6, name="pairs", path=pairs)
    whole = next(data.batches(0, 0, 0, 1))
    parts = [next(data.batches(0, 0, w, 2)) for w in range(2)]
    score = {key: torch.randn(6) for key in whole.document_keys} | {NO_DOCUMENT: torch.zeros(6)}

    def loss(queries, documents, rows):
        facts = torch.cat([batch.document_facts for batch in documents])
        keys = [key for batch in documents for key in batch.document_keys]
        scores = torch.stack([score[key] for key in keys], dim=1)[rows]
        scores = scores.masked_fill((facts == NOTHING).all(dim=1), LOWEST)
        return info_nce(scores, data.relevant(queries.query_facts, facts), 0.1)

    alone = loss(whole, [whole], slice(None))
    both = [loss(part, parts, slice(w * 3, w * 3 + 3)) for w, part in enumerate(parts)]
    torch.testing.assert_close(sum(both) / 2, alone)


@pytest.mark.heavy
def test_two_workers_learn_what_one_does(checkpoint, tmp_path):
    """With hard negatives, documents of several captions, and one that cannot be read."""
    photos = {image["id"]: image["file_name"] for image in CAPTIONS["images"]}
    for name in photos.values():
        (tmp_path / name).symlink_to(IMAGES / name)
    (tmp_path / NAMES[2]).unlink()
    (tmp_path / NAMES[2]).write_bytes(b"no picture")
    ids = list(map(str, photos))
    mined = [
        {"query": said["caption"].strip(), "negatives": [ids[n % 17], ids[(3 * n + 1) % 17]]}
        for n, said in enumerate(CAPTIONS["annotations"])
    ]
    negatives = lines(tmp_path / "negatives.jsonl", mined)
    data = {"name": "captions", "path": str(PHOTOS / "captions.json"), "images": str(tmp_path)}
    data |= {"hard_negatives": str(negatives), "num_negatives": 1}
    learner = {"trainable": "projection", "symmetric": True}
    model = checkpoint("colpali")
    one, two = (
        spec_of(tmp_path / name, model, learner, data=data, batch_size=6, max_steps=4)
        for name in ("one", "two")
    )
    weights = trained(one)
    run_workers(two, tmp_path, 2)
    losses = [logged(tmp_path / name, "loss") for name in ("one", "two")]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)
    assert_same(weights, weights_of(tmp_path / "two" / "model"), atol=1e-4)


@pytest.mark.parametrize("batch_size", [4, 6])
def test_a_model_trains_on_them_with_a_corrupt_picture(
    checkpoint, tmp_path, batch_size, monkeypatch
):
    """Also with cached hidden states, of all rows; images are then read once."""
    read, honest = [], row_data.decode
    monkeypatch.setattr(row_data, "decode", lambda *given: read.append(1) or honest(*given))
    path = links(tmp_path)
    (tmp_path / NAMES[2]).unlink()
    (tmp_path / NAMES[2]).write_bytes(b"no picture")
    data = {"name": "pairs", "path": str(path), "validation": {"path": str(path)}}
    more = {"data": data, "batch_size": batch_size, "epochs": 4, "eval_every": 2}
    found = []
    for name in ("read", "kept", "again"):
        read.clear()
        states = None if name == "read" else str(tmp_path / "states")
        learner = {"trainable": "projection", "hidden_states_cache": states}
        trained(spec_of(tmp_path / name, checkpoint("colpali"), learner, **more))
        assert len(logged(tmp_path / name, "R@1")) == 3  # also before training
        found.append(logged(tmp_path / name, "loss"))
        # The corrupt one is tried again, in training data as in what is held out.
        most = {"read": np.inf, "kept": len(NAMES) + 1, "again": 2}[name]
        assert 0 < len(read) <= most
    assert len(found[0]) == 4 and np.isfinite(found).all()
    np.testing.assert_allclose(found[0], found[1], atol=1e-2)  # states are kept as float16
    assert found[1] == found[2]
