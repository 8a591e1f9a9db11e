"""Tests that captions match exactly the scenes that they describe."""

from __future__ import annotations

import numpy as np
import pytest

from examples.papers.synthetic.shapes import (
    COLOURS,
    RELATIONS,
    SIDE,
    draw_captions,
    generate_scenes,
)


def matches(text: str, scene, row: int) -> bool:
    """Evaluates a caption from its words and the attributes of the scene."""
    from examples.papers.synthetic.shapes import SHAPES, SIZES

    relation = next((name for name in RELATIONS if f" {name} " in text), None)
    phrases = text.split(f" {relation} ") if relation else [text]
    objects = [
        (SIZES[a[0]], list(COLOURS)[a[1]], SHAPES[a[2]], *centre)
        for a, centre in zip(scene.attributes[row], scene.centres[row], strict=True)
        if a[2] >= 0
    ]
    found = [[o for o in objects if set(words.split()[1:]) <= set(o[:3])] for words in phrases]
    if relation is None:
        return bool(found[0])
    for _, _, _, x, y in found[0]:
        for _, _, _, u, v in found[1]:
            horizontal, vertical = abs(x - u) > abs(y - v), abs(x - u) < abs(y - v)
            holds = {
                "left of": horizontal and x < u,
                "right of": horizontal and x > u,
                "above": vertical and y < v,
                "below": vertical and y > v,
            }
            if holds[relation]:
                return True
    return False


@pytest.mark.parametrize("seed", range(3))
def test_captions_match_described_scenes(seed):
    scenes = generate_scenes(seed, range(30))
    captions, scene_C = draw_captions(scenes, np.random.default_rng(seed), 3, 0.4)
    matrix = captions.match(scenes)
    assert matrix[np.arange(len(captions)), scene_C].all()
    for row, text in enumerate(captions.texts):
        assert matrix[row].tolist() == [matches(text, scenes, scene) for scene in range(30)]


def test_objects_are_separate_and_inside_their_boxes():
    scenes = generate_scenes(1, range(50))
    for row in range(50):
        is_object = scenes.attributes[row, :, 2] >= 0
        boxes = scenes.boxes[row][is_object] * SIDE
        assert boxes.min() >= 0 and boxes.max() <= SIDE
        pixels = np.asarray(scenes.render(row)).astype(int)
        is_drawn = (abs(pixels - int(scenes.greys[row])) > 0).any(axis=2)
        inside = np.zeros_like(is_drawn)
        for x0, y0, x1, y1 in boxes.round().astype(int):
            assert is_drawn[y0:y1, x0:x1].any()
            assert not inside[y0:y1, x0:x1].any()
            inside[y0:y1, x0:x1] = True
        assert not is_drawn[~inside].any()
