"""Tests of the training data of shapes."""

from __future__ import annotations

import pytest

from examples.papers.synthetic.shapes import COLOURS
from examples.papers.synthetic.shapes_data import Shapes, first_phrases, validation_scenes
from pipeline.config import SpecError, parse


def test_phrases_have_boxes_of_all_matching_objects():
    scenes, captions, scene_C = validation_scenes(40)
    phrases = first_phrases(scenes, captions, scene_C)
    for text, row, boxes in zip(phrases.texts, phrases.documents, phrases.boxes, strict=True):
        assert len(boxes) == sum(
            set(text.split()[1:]) <= set(kind)
            for kind in (
                {
                    list(COLOURS)[a[1]],
                    ("small", "large")[a[0]],
                    ("circle", "square", "triangle", "star", "cross", "ring")[a[2]],
                }
                for a in scenes.attributes[row]
                if a[2] >= 0
            )
        )


@pytest.mark.parametrize("fresh", [True, False])
def test_batches_are_independent_of_number_of_workers(fresh):
    spec = Shapes.Spec(num_scenes=32, fresh=fresh, captions=2, validation=4)
    data = Shapes(spec, batch_size=8, seed=3)
    whole = list(data.batches(1, 0, 0, 1))
    assert len(whole) == data.num_batches == 4
    later = list(data.batches(1, 2, 0, 1))
    assert [b.queries for b in later] == [b.queries for b in whole[2:]]
    halves = [list(data.batches(1, 0, worker, 2)) for worker in range(2)]
    for batch, first, second in zip(whole, *halves, strict=True):
        assert [*first.queries, *second.queries] == list(batch.queries)
        assert [*first.documents, *second.documents] == list(batch.documents)
        assert [*first.document_keys, *second.document_keys] == list(batch.document_keys)
    first, second = (
        {key for b in data.batches(epoch, 0, 0, 1) for key in b.document_keys} for epoch in (0, 1)
    )
    assert first == second if data.repeats else not first & second
    queries = [{q for b in data.batches(e, 0, 0, 1) for q in b.queries} for e in (0, 1)]
    assert (queries[0] == queries[1]) == (not fresh)


def test_validation_scenes_are_not_in_training_data():
    spec = Shapes.Spec(num_scenes=64, validation=64)
    data = Shapes(spec, batch_size=32, seed=0)
    trained = {item["image"] for batch in data.batches(0, 0, 0, 1) for item in batch.documents}
    assert not trained & {item["image"] for item in data.validation().documents}


def test_relevance_equals_matching_captions():
    scenes, captions, _ = validation_scenes(30)
    batch = Shapes(Shapes.Spec(validation=30), batch_size=2, seed=0).validation()
    assert batch.queries == captions.texts
    relevant = Shapes.relevant(batch.query_labels, batch.document_labels)
    assert (relevant.numpy() == captions.match(scenes)).all()


def test_layout_sets_sizes_of_scenes_and_objects():
    spec = Shapes.Spec(validation=30, side=256, radii=(41, 50), objects=(2, 4))
    scenes, _, _ = validation_scenes(30, layout=spec.layout)
    is_object_ST = scenes.attributes[..., 2] >= 0
    assert is_object_ST.sum(axis=1).min() >= 1 and is_object_ST.shape[1] == 4
    sizes_ST2 = scenes.boxes[..., 2:] - scenes.boxes[..., :2]
    assert (sizes_ST2.prod(axis=2)[is_object_ST] >= 0.1).all()
    boxes = scenes.boxes[is_object_ST]
    assert scenes.render(0).size == (256, 256) and boxes.min() >= 0 and boxes.max() <= 1
    default, large = (
        Shapes(options, batch_size=2, seed=0).validation().document_keys
        for options in (Shapes.Spec(validation=30), spec)
    )
    assert not set(default) & set(large)  # cached states of different layouts


def test_rejects_invalid_layouts():
    for fields, message in (
        ({"radii": [12, 6]}, "radii must be "),
        ({"radii": [6, 60]}, "radii must be "),
        ({"objects": [5, 4]}, "objects must be "),
    ):
        with pytest.raises(SpecError, match=message):
            parse(Shapes.Spec, fields)
