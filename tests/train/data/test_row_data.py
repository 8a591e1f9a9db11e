"""Batches of rows: reproducible, and equal for any number of workers."""

from __future__ import annotations

import io
import itertools
import logging

import numpy as np
import pytest
import torch
from PIL import Image

from pipeline.config import JobError, SpecError
from pipeline.train.data import row_data
from pipeline.train.data.base import NO_LABEL
from pipeline.train.data.row_data import NO_DOCUMENT
from pipeline.train.losses import LOWEST, info_nce
from tests.train.data.files import (
    CAPTIONS,
    IMAGES,
    NAMES,
    PHOTOS,
    batch_values,
    build_data,
    epoch_batches,
    write_lines,
    write_pages,
)
from tests.train.runs import assert_same, logged, run_workers, spec_of, trained, weights_of


@pytest.fixture
def pairs(tmp_path):
    """Twenty queries on ten texts, each with three hard negatives and teacher scores."""
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
    return write_lines(tmp_path / "pairs.jsonl", rows)


def photos(**more):
    return build_data(name="captions", path=PHOTOS / "captions.json", images=IMAGES, **more)


@pytest.mark.parametrize("name", ["pairs", "captions", "colpali_train"])
def test_epoch_depends_on_spec_seed_and_epoch(name, pairs, tmp_path):
    def data(seed=0):
        if name == "pairs":
            return build_data(3, seed, name=name, path=pairs, num_negatives=1)
        if name == "captions":
            return build_data(8, seed, name=name, path=PHOTOS / "captions.json", images=IMAGES)
        folder = tmp_path / "pages"
        return build_data(
            3, seed, name=name, path=folder if folder.exists() else write_pages(folder)
        )

    one = data()
    first, second = epoch_batches(one), epoch_batches(one, epoch=1)
    assert len(first) == one.num_batches == len(one.training.rows) // one.batch_size
    assert epoch_batches(data()) == first and epoch_batches(data(), epoch=1) == second
    assert first != second and epoch_batches(data(seed=1)) != first
    # A resumed epoch equals the rest of an uninterrupted one.
    assert epoch_batches(data(), epoch=1, first=2) == second[2:]
    epoch = [query for batch in first for query in batch["queries"]]
    assert len(epoch) == one.num_batches * one.batch_size
    # Each row occurs once per epoch, but two images may have the same caption.
    queries = [row.query for row in one.training.rows]
    assert all(epoch.count(query) <= queries.count(query) for query in set(epoch))


def test_does_not_read_skipped_batches(monkeypatch):
    data, opened = photos(batch_size=17), []
    real = row_data.open_file
    monkeypatch.setattr(row_data, "open_file", lambda *a: opened.append(a) or real(*a))
    (last,) = epoch_batches(data, first=4)
    assert len(opened) == len(last["keys"])


@pytest.mark.parametrize("num_workers", [2, 3])
def test_workers_share_the_batches_of_one_worker(pairs, num_workers):
    data = build_data(6, name="pairs", path=pairs)
    shares = [epoch_batches(data, worker=w, of=num_workers) for w in range(num_workers)]
    for whole, *parts in zip(epoch_batches(data), *shares, strict=True):
        assert len({len(part["keys"]) for part in parts}) == 1  # gathering needs equal sizes
        assert len({len(part["query_labels"][0]) for part in parts}) == 1
        for name in ("queries", "query_labels"):
            assert list(itertools.chain(*(part[name] for part in parts))) == whole[name]
        documents = [
            pair
            for part in parts
            for pair in zip(part["keys"], part["document_labels"], strict=True)
        ]
        padding = [label for key, label in documents if key == NO_DOCUMENT]
        documents = [pair for pair in documents if pair[0] != NO_DOCUMENT]
        expected = sorted(zip(whole["keys"], whole["document_labels"], strict=True))
        assert sorted(documents) == expected
        assert all(label == [NO_LABEL] for label in padding)


def test_documents_are_unique_and_relevant_to_all_their_queries():
    data = photos(batch_size=40)
    (first, _) = data.batches(0, 0, 0, 1)
    assert len(set(first.document_keys)) == len(first.document_keys) < 40
    relevant = data.relevant(first.query_labels, first.document_labels)
    expected = {}
    for row in data.training.rows:
        expected.setdefault(row.query, set()).add(data.training.documents[row.document].key)
    for query, row in zip(first.queries, relevant, strict=True):
        flags = zip(first.document_keys, row.tolist(), strict=True)
        found = {key for key, is_relevant in flags if is_relevant}
        assert found == expected[query] & set(first.document_keys) and found


def test_rows_of_one_query_share_documents(tmp_path):
    rows = [{"query": "both", "text": t} for t in ("one", "two")] + [{"query": "1", "text": "one"}]
    data = build_data(3, name="pairs", path=write_lines(tmp_path / "pairs.jsonl", rows))
    (batch,) = data.batches(0, 0, 0, 1)
    relevant = data.relevant(batch.query_labels, batch.document_labels)
    found = {
        (query, batch.documents[column]["text"])
        for query, row in zip(batch.queries, relevant, strict=True)
        for column in row.nonzero().flatten().tolist()
    }
    assert found == {("both", "one"), ("both", "two"), ("1", "one")}


def test_hard_negatives_have_teacher_scores(pairs):
    data = build_data(2, name="pairs", path=pairs)
    for batch in data.batches(0, 0, 0, 1):
        columns = {document["text"]: row for row, document in enumerate(batch.documents)}
        for row, query in enumerate(batch.queries):
            number = int(query.split()[1])
            texts = [f"text {(number + step) % 10}" for step in (0, 3, 4, 5)]
            scores = batch.teacher[row]
            expected = torch.tensor([0.9, 0.3, 0.4, 0.5])
            torch.testing.assert_close(scores[[columns[text] for text in texts]], expected)
            assert scores.isnan().sum() == len(batch.documents) - 4
    samples = [
        build_data(2, name="pairs", path=pairs, num_negatives=1)._sample_negatives(5, epoch)
        for epoch in range(20)
    ]
    assert {row.negatives for row in samples} == {(8,), (9,), (0,)}
    assert {row.scores[1] for row in samples} == {0.3, 0.4, 0.5}


@pytest.mark.parametrize("copy", ["the same", " the\tsame\n"])
@pytest.mark.parametrize("num_workers", [1, 2])
def test_copies_of_relevant_documents_are_relevant(tmp_path, copy, num_workers):
    """Some copies are positives of other queries of the batch."""
    rows = [
        {"query": "a", "document_id": "1", "text": "the same"},
        {"query": "a", "document_id": "2", "text": "another answer"},
        {"query": "b", "document_id": "3", "text": copy, "negatives": ["1", "4"]},
        {"query": "c", "document_id": "4", "text": "something else", "negatives": ["2"]},
    ]
    data = build_data(4, name="pairs", path=write_lines(tmp_path / "pairs.jsonl", rows))
    assert [row.negatives for row in data.training.rows] == [(), (), (3,), (1,)]
    parts = [next(data.batches(0, 0, w, num_workers)) for w in range(num_workers)]
    document_labels = torch.cat([part.document_labels for part in parts])
    texts = [document["text"] for part in parts for document in part.documents]
    relevant = {"a": {"the same", "another answer", copy}, "b": {"the same", copy}}
    for part in parts:
        rows = data.relevant(part.query_labels, document_labels)
        for query, is_relevant in zip(part.queries, rows.tolist(), strict=True):
            found = {text for text, flag in zip(texts, is_relevant, strict=True) if flag}
            assert found == relevant.get(query, {"something else"})


def test_copies_of_positives_outside_the_batch_are_relevant(tmp_path):
    rows = [
        {"query": "a", "document_id": "1", "text": "the same"},
        {"query": "a", "document_id": "2", "text": "another answer"},
        {"query": "b", "document_id": "3", "text": "the same"},
    ]
    data = build_data(2, name="pairs", path=write_lines(tmp_path / "pairs.jsonl", rows))
    batches = [batch for epoch in range(20) for batch in data.batches(epoch, 0, 0, 1)]
    batch = next(
        b
        for b in batches
        if {d["text"] for d in b.documents} == {"the same", "another answer"} and "b" in b.queries
    )
    assert data.relevant(batch.query_labels, batch.document_labels)[batch.queries.index("a")].all()


def test_copies_of_media_and_of_mined_negatives(tmp_path):
    rows = [
        {"query": f"q{n}", "document_id": f"d{n}", "image": NAMES[n], "text": "caption"}
        for n in range(2)
    ]
    rows.append({"query": "q2", "document_id": "copy", "image": NAMES[0], "text": "caption"})
    path = write_lines(tmp_path / "pairs.jsonl", rows)
    mined = [{"query": "q0", "negatives": ["copy", "d1"]}, {"query": "q1", "negatives": ["d0"]}]
    negatives = write_lines(tmp_path / "negatives.jsonl", mined)
    data = build_data(3, name="pairs", path=path, root=IMAGES, hard_negatives=negatives)
    assert [row.negatives for row in data.training.rows] == [(1,), (0,), ()]


def test_copies_of_held_out_documents_are_held_out(tmp_path):
    rows = [{"query": f"q{n}", "document_id": f"d{n}", "text": f"text {n % 5}"} for n in range(20)]
    path = write_lines(tmp_path / "pairs.jsonl", rows)
    data = build_data(2, name="pairs", path=path, validation=0.1)
    texts = {d["text"] for d in data.validation().documents}
    trained = {data.training.documents[row.document].text for row in data.training.rows}
    assert texts and trained and not texts & trained


def test_hard_negatives_from_file(pairs, tmp_path):
    rows = [{"query": "query 0", "negatives": ["d7", "d0", "d3"]}]
    mined = write_lines(tmp_path / "negatives.jsonl", rows)
    data = build_data(20, name="pairs", path=pairs, hard_negatives=mined)
    documents = [data.training.documents[n].id for n in data.training.rows[0].negatives]
    assert documents == ["d3", "d4", "d5", "d7"]  # d0 is relevant, and d3 is a duplicate
    assert np.isnan(data.training.rows[0].scores[4])
    bad = {
        '{"query": "query 0", "negatives": ["d77"]}': (
            "data.hard_negatives must be the id of a document in the data, got 'd77' (line 1 of {})"
        ),
        '{"query": "other", "negatives": ["d7"]}': (
            "data.hard_negatives must be a file with queries of the data, got '{}', which"
            " contains no query of the data"
        ),
        '{"query": "query 0"}': (
            'data.hard_negatives must be a line {"query": "...", "negatives": ["id", ...]}, got'
            " {'query': 'query 0'} (line 1 of {})"
        ),
        '{"query": "query 0", "negatives": ["d7", ""]}': (
            'data.hard_negatives must be a line {"query": "...", "negatives": ["id", ...]}, got'
            " {'query': 'query 0', 'negatives': ['d7', '']} (line 1 of {})"
        ),
    }
    for line, message in bad.items():
        write_lines(mined, [line])
        with pytest.raises(SpecError) as error:
            build_data(20, name="pairs", path=pairs, hard_negatives=mined)
        assert str(error.value) == message.replace("{}", str(mined))


def test_full_pass_includes_incomplete_batch(pairs):
    data = build_data(7, name="pairs", path=pairs)
    for num_workers in (1, 3):
        parts = [b for w in range(num_workers) for b in data.full_pass(w, num_workers)]
        queries = [query for part in parts for query in part.queries]
        keys = [key for part in parts for key in part.document_keys]
        assert sorted(queries) == sorted(f"query {row}" for row in range(20))
        assert len(keys) == len(set(keys)) == 11 and NO_DOCUMENT in keys


# -- validation ------------------------------------------------------------------------------------


def test_validation_fraction_does_not_depend_on_seed(pairs):
    data = build_data(4, name="pairs", path=pairs, validation=0.2)
    batch = data.validation()
    assert batch_values(batch) == batch_values(
        build_data(4, 9, name="pairs", path=pairs, validation=0.2).validation()
    )
    assert len(batch.documents) == 2 and len(batch.queries) == 4
    assert data.relevant(batch.query_labels, batch.document_labels).sum(dim=1).tolist() == [1] * 4
    trained = {d["text"] for b in data.batches(0, 0, 0, 1) for d in b.documents}
    assert len(data.training.rows) == 16
    assert not trained & {document["text"] for document in batch.documents}


def test_validation_file(pairs, tmp_path):
    other = write_lines(tmp_path / "other.jsonl", [{"query": "q", "text": "t"}])
    batch = build_data(4, name="pairs", path=pairs, validation={"path": str(other)}).validation()
    assert batch.queries == ["q"] and [d["text"] for d in batch.documents] == ["t"]
    assert build_data(4, name="pairs", path=pairs).validation() is None


@pytest.mark.parametrize("fraction", [0, 1, 1.5, True, "some"])
def test_invalid_validation_fractions(fraction, pairs):
    with pytest.raises(SpecError, match=f"^validation must be a fraction .*, got {fraction!r}"):
        build_data(name="pairs", path=pairs, validation=fraction)


def test_validation_fraction_without_queries(tmp_path):
    rows = [{"query": "the same", "text": f"text {row}"} for row in range(9)]
    path = write_lines(tmp_path / "pairs.jsonl", rows)
    with pytest.raises(SpecError) as error:
        build_data(name="pairs", path=path, validation=0.1)
    assert str(error.value) == (
        "data.validation must be another fraction or {path: ...}, got 0.1, which leaves no"
        " validation query"
    )


# -- missing and corrupted files -------------------------------------------------------------------


def test_fewer_rows_than_one_batch(pairs):
    with pytest.raises(SpecError) as error:
        build_data(21, name="pairs", path=pairs)
    assert str(error.value) == (
        f"data.path must be data of at least one batch (21 rows), got '{pairs}', which has 20"
        " training rows"
    )


def link_photos(folder, names=NAMES[:6]):
    """Links photos in a folder and writes one row per photo."""
    for name in names:
        (folder / name).symlink_to(IMAGES / name)
    rows = [{"query": f"query {n}", "image": name} for n, name in enumerate(names)]
    return write_lines(folder / "pairs.jsonl", rows)


def test_missing_images_are_left_out_with_a_warning(tmp_path, caplog):
    path = link_photos(tmp_path)
    (tmp_path / NAMES[2]).unlink()
    data = build_data(5, name="pairs", path=path)
    assert [row.query for row in data.training.rows] == [f"query {n}" for n in (0, 1, 3, 4, 5)]
    assert caplog.messages == [
        "1 of 6 rows and 1 of 6 documents are left out:"
        f" missing files, such as image {tmp_path / NAMES[2]} (line 3 of {path})"
    ]
    with pytest.raises(SpecError) as error:
        build_data(5, name="pairs", path=path, root=tmp_path / "nowhere")
    assert str(error.value) == (
        f"data.path must be data with existing image files, got '{tmp_path}/nowhere/{NAMES[0]}',"
        f" which does not exist (line 1 of {path})"
    )


def test_corrupted_image_is_padding(tmp_path, caplog):
    path = link_photos(tmp_path)
    whole = epoch_batches(build_data(6, name="pairs", path=path), of=1)[0]
    (tmp_path / NAMES[2]).unlink()
    (tmp_path / NAMES[2]).write_bytes((IMAGES / NAMES[2]).read_bytes()[:3000])
    data = build_data(6, name="pairs", path=path)
    assert data.num_batches == 1
    with caplog.at_level(logging.WARNING):
        batch = next(data.batches(0, 0, 0, 1))
    lost = whole["queries"].index("query 2")
    assert batch_values(batch)["queries"] == whole["queries"]
    assert batch.documents[lost] == {"text": None, "image": None}
    assert batch.document_keys[lost] == NO_DOCUMENT
    relevant = data.relevant(batch.query_labels, batch.document_labels)
    assert relevant.sum(dim=1).tolist() == [int(row != lost) for row in range(6)]
    (message,) = caplog.messages
    assert message.startswith(f"the image of {NAMES[2]} (line 3 of {path}) cannot be read: corrupt")
    # Workers still have equal numbers of documents.
    parts = [next(data.batches(0, 0, w, 2)) for w in range(2)]
    assert [len(part.documents) for part in parts] == [3, 3]


def test_batch_without_readable_images_raises(tmp_path):
    path = link_photos(tmp_path)
    data = build_data(6, name="pairs", path=path)
    for name in NAMES[:6]:
        (tmp_path / name).unlink()
    with pytest.raises(JobError, match="^none of the 6 files of a batch can be read, .* image in "):
        next(data.batches(0, 0, 0, 1))


def test_large_images_are_downscaled(tmp_path):
    path = link_photos(tmp_path)
    data = build_data(6, name="pairs", path=path, max_pixels=10_000)
    for document in next(data.batches(0, 0, 0, 1)).documents:
        width, height = Image.open(io.BytesIO(document["image"])).size
        assert width * height <= 10_000


def test_shuffles_within_row_groups(tmp_path):
    folder = write_pages(tmp_path / "pages", rows=24, group=2)
    data = build_data(4, name="colpali_train", path=folder, mixed_groups=2)
    for epoch in range(3):
        order = data.order(epoch)
        groups = data._group_R[order]
        assert sorted(order.tolist()) == list(range(24))
        for start in range(0, 24, 4):  # two groups of two rows
            assert len(set(groups[start : start + 4].tolist())) <= 2
    assert (data.order(0) != data.order(1)).any()


# -- training --------------------------------------------------------------------------------------


def test_loss_is_independent_of_number_of_workers(pairs, tmp_path):
    """Padding and unreadable documents do not change the loss."""
    data = build_data(6, name="pairs", path=pairs)
    whole = next(data.batches(0, 0, 0, 1))
    parts = [next(data.batches(0, 0, w, 2)) for w in range(2)]
    score = {key: torch.randn(6) for key in whole.document_keys} | {NO_DOCUMENT: torch.zeros(6)}

    def loss(queries, documents, rows):
        labels = torch.cat([batch.document_labels for batch in documents])
        keys = [key for batch in documents for key in batch.document_keys]
        scores = torch.stack([score[key] for key in keys], dim=1)[rows]
        scores = scores.masked_fill((labels == NO_LABEL).all(dim=1), LOWEST)
        return info_nce(scores, data.relevant(queries.query_labels, labels), 0.1).mean()

    single = loss(whole, [whole], slice(None))
    both = [loss(part, parts, slice(w * 3, w * 3 + 3)) for w, part in enumerate(parts)]
    torch.testing.assert_close(sum(both) / 2, single)


@pytest.mark.heavy
def test_training_is_independent_of_number_of_workers(checkpoint, tmp_path):
    """Data with hard negatives, several captions per document and an unreadable image."""
    photos = {image["id"]: image["file_name"] for image in CAPTIONS["images"]}
    for name in photos.values():
        (tmp_path / name).symlink_to(IMAGES / name)
    (tmp_path / NAMES[2]).unlink()
    (tmp_path / NAMES[2]).write_bytes(b"not an image")
    ids = list(map(str, photos))
    mined = [
        {"query": annotation["caption"].strip(), "negatives": [ids[n % 17], ids[(3 * n + 1) % 17]]}
        for n, annotation in enumerate(CAPTIONS["annotations"])
    ]
    negatives = write_lines(tmp_path / "negatives.jsonl", mined)
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
def test_training_with_corrupted_image(checkpoint, tmp_path, batch_size, monkeypatch):
    """With cached hidden states, which include incomplete batches, images are read once."""
    read, decode = [], row_data.decode
    monkeypatch.setattr(row_data, "decode", lambda *given: read.append(1) or decode(*given))
    path = link_photos(tmp_path)
    (tmp_path / NAMES[2]).unlink()
    (tmp_path / NAMES[2]).write_bytes(b"not an image")
    data = {"name": "pairs", "path": str(path), "validation": {"path": str(path)}}
    more = {"data": data, "batch_size": batch_size, "epochs": 4, "eval_every": 2}
    found = []
    for name in ("read", "cached", "again"):
        read.clear()
        states = None if name == "read" else str(tmp_path / "states")
        learner = {"trainable": "projection", "hidden_states_cache": states}
        trained(spec_of(tmp_path / name, checkpoint("colpali"), learner, **more))
        assert len(logged(tmp_path / name, "R@1")) == 3  # including before training
        found.append(logged(tmp_path / name, "loss"))
        # The corrupted image is retried, both in training and in validation.
        max_reads = {"read": np.inf, "cached": len(NAMES) + 1, "again": 2}[name]
        assert 0 < len(read) <= max_reads
    assert len(found[0]) == 4 and np.isfinite(found).all()
    np.testing.assert_allclose(found[0], found[1], atol=1e-2)  # states are cached as float16
    assert found[1] == found[2]
