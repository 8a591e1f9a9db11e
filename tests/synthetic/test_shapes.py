"""What is said of scenes is true of them, and of no others."""

from __future__ import annotations

import numpy as np
import pytest

from pipeline.synthetic.shapes import COLOURS, RELATIONS, SIDE, captions_of, scenes_of


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
