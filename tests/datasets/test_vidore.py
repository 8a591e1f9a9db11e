"""ViDoRe on a miniature."""

from __future__ import annotations

import numpy as np
import pytest

from pipeline.config import SpecError
from tests import datasets
from tests.datasets.loading import benchmark, load


def test_vidore_boxes_are_phrases(tmp_path):
    folder = datasets.vidore(tmp_path)
    german = benchmark("vidore", path=str(folder), language="german")
    judged = german.load()
    assert judged.queries == {"8": "Welche Dosis?"} and judged.qrels == {"8": {"0": 2, "1": 1}}
    (phrase,) = german.phrases()
    assert (phrase.item_id, phrase.text) == ("0", "Welche Dosis?")
    np.testing.assert_allclose(phrase.boxes, [[0.1, 0.1, 0.5, 0.5]])
    scaled = benchmark("vidore", path=str(folder), language="german", box_size=[1000, 1000])
    np.testing.assert_allclose(scaled.phrases()[0].boxes, [[0.02, 0.01, 0.1, 0.05]])
    with pytest.raises(SpecError, match=r"language must be one of english, german"):
        load("vidore", path=str(folder), language="klingon")


def test_a_box_outside_its_page_is_named(tmp_path):
    box = {"annotator": 0, "x1": 20, "x2": 900, "y1": 10, "y2": 50}
    path = str(datasets.vidore(tmp_path, box))
    with pytest.raises(SpecError, match=r"box_size must be a box within .*200 x 100.*page 0"):
        benchmark("vidore", path=path).phrases()
