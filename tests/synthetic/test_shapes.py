"""What is said of scenes is true of them, and of no others."""

from __future__ import annotations

import numpy as np
import pytest

from jobs import maps, shapes
from pipeline.config import SpecError, parse
from pipeline.synthetic.shapes import COLOURS, RELATIONS, SIDE, captions_of, scenes_of
from pipeline.synthetic.shapes_data import Shapes, held_out, phrases_of


def by_hand(text: str, scene, row: int) -> bool:
    """Whether a caption is true, from its words and the numbers of the scene."""
    from pipeline.synthetic.shapes import SHAPES, SIZES

    relation = next((name for name in RELATIONS if f" {name} " in text), None)
    said = text.split(f" {relation} ") if relation else [text]
    things = [
        (SIZES[a[0]], list(COLOURS)[a[1]], SHAPES[a[2]], *centre)
        for a, centre in zip(scene.attributes[row], scene.centres[row], strict=True)
        if a[2] >= 0
    ]
    fits = [[t for t in things if set(words.split()[1:]) <= set(t[:3])] for words in said]
    if relation is None:
        return bool(fits[0])
    for _, _, _, x, y in fits[0]:
        for _, _, _, u, v in fits[1]:
            beside, over = abs(x - u) > abs(y - v), abs(x - u) < abs(y - v)
            true = {
                "left of": beside and x < u,
                "right of": beside and x > u,
                "above": over and y < v,
                "below": over and y > v,
            }
            if true[relation]:
                return True
    return False


@pytest.mark.parametrize("seed", range(3))
def test_captions_hold_where_their_words_say(seed):
    scenes = scenes_of(seed, range(30))
    captions, scene_C = captions_of(scenes, np.random.default_rng(seed), 3, 0.4)
    held = captions.hold(scenes)
    assert held[np.arange(len(captions)), scene_C].all()
    for row, text in enumerate(captions.texts):
        assert held[row].tolist() == [by_hand(text, scenes, scene) for scene in range(30)]


def test_objects_lie_apart_in_the_picture_and_in_their_boxes():
    scenes = scenes_of(1, range(50))
    for row in range(50):
        there = scenes.attributes[row, :, 2] >= 0
        boxes = scenes.boxes[row][there] * SIDE
        assert boxes.min() >= 0 and boxes.max() <= SIDE
        pixels = np.asarray(scenes.picture(row)).astype(int)
        is_drawn = (abs(pixels - int(scenes.greys[row])) > 0).any(axis=2)
        inside = np.zeros_like(is_drawn)
        for x0, y0, x1, y1 in boxes.round().astype(int):
            assert is_drawn[y0:y1, x0:x1].any()
            assert not inside[y0:y1, x0:x1].any()
            inside[y0:y1, x0:x1] = True
        assert not is_drawn[~inside].any()


def test_phrases_have_the_boxes_of_all_that_they_fit():
    scenes, captions, scene_C = held_out(40)
    phrases = phrases_of(scenes, captions, scene_C)
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
def test_batches_are_the_same_again_for_any_number_of_workers(fresh):
    spec = Shapes.Spec(num_scenes=32, fresh=fresh, captions=2, held_out=4)
    data = Shapes(spec, batch_size=8, seed=3)
    whole = list(data.batches(1, 0, 0, 1))
    assert len(whole) == data.num_batches == 4
    later = list(data.batches(1, 2, 0, 1))
    assert [b.queries for b in later] == [b.queries for b in whole[2:]]
    halves = [list(data.batches(1, 0, worker, 2)) for worker in range(2)]
    for batch, one, other in zip(whole, *halves, strict=True):
        assert [*one.queries, *other.queries] == list(batch.queries)
        assert [*one.documents, *other.documents] == list(batch.documents)
        assert [*one.document_keys, *other.document_keys] == list(batch.document_keys)
    first, second = (
        {key for b in data.batches(epoch, 0, 0, 1) for key in b.document_keys} for epoch in (0, 1)
    )
    assert first == second if data.repeats else not first & second
    said = [{q for b in data.batches(e, 0, 0, 1) for q in b.queries} for e in (0, 1)]
    assert (said[0] == said[1]) == (not fresh)


def test_what_is_held_out_is_never_trained_on():
    spec = Shapes.Spec(num_scenes=64, held_out=64)
    data = Shapes(spec, batch_size=32, seed=0)
    trained = {item["image"] for batch in data.batches(0, 0, 0, 1) for item in batch.documents}
    assert not trained & {item["image"] for item in data.held_out().documents}


def test_relevance_of_a_batch_is_what_holds():
    scenes, captions, _ = held_out(30)
    batch = Shapes(Shapes.Spec(held_out=30), batch_size=2, seed=0).held_out()
    assert batch.queries == captions.texts
    relevant = Shapes.relevant(batch.query_facts, batch.document_facts)
    assert (relevant.numpy() == captions.hold(scenes)).all()


def test_a_layout_sets_the_sizes_of_scenes_and_objects():
    spec = Shapes.Spec(held_out=30, side=256, radii=(41, 50), objects=(2, 4))
    scenes, _, _ = held_out(30, layout=spec.layout)
    is_there_ST = scenes.attributes[..., 2] >= 0
    assert is_there_ST.sum(axis=1).min() >= 1 and is_there_ST.shape[1] == 4
    sizes_ST2 = scenes.boxes[..., 2:] - scenes.boxes[..., :2]
    assert (sizes_ST2.prod(axis=2)[is_there_ST] >= 0.1).all()
    boxes = scenes.boxes[is_there_ST]
    assert scenes.picture(0).size == (256, 256) and boxes.min() >= 0 and boxes.max() <= 1
    usual, large = (
        Shapes(own, batch_size=2, seed=0).held_out().document_keys
        for own in (Shapes.Spec(held_out=30), spec)
    )
    assert not set(usual) & set(large)  # cached states of one are not those of the other


def test_layouts_that_are_not_valid():
    for fields, sentence in (
        ({"radii": [12, 6]}, "radii: "),
        ({"radii": [6, 60]}, "radii: "),
        ({"objects": [5, 4]}, "objects: "),
    ):
        with pytest.raises(SpecError, match=sentence):
            parse(Shapes.Spec, fields)


def test_each_series_has_scenes_of_its_own(tmp_path):
    for series in ("0", "1"):
        shapes.main([str(tmp_path / series), "--count", "2", "--series", series])
    for name in ("images/scene-00000.png", "queries.jsonl", "phrases.jsonl"):
        assert (tmp_path / "0" / name).read_bytes() != (tmp_path / "1" / name).read_bytes()
    with pytest.raises(SpecError, match="^series: -1"):  # those are trained on
        shapes.main([str(tmp_path / "2"), "--series", "-1"])
    phrases = str(tmp_path / "0" / "phrases.jsonl")
    picture = str(tmp_path / "a.png")
    with pytest.raises(SpecError, match="^index: 'none'"):
        maps.main([phrases, picture, "--index", "none"])
    with pytest.raises(SpecError, match="^items: "):  # before the index is opened
        maps.main([phrases, picture, "--index", "memory://none", "--items", "other.png"])
