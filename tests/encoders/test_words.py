"""Places of tokens by the words in which they lie."""

import numpy as np
import pyarrow as pa
import torch

from pipeline.encoders.words import Words
from pipeline.schema import WORD_BOXES, WORD_KINDS, WORD_SPANS, WORD_TIMES
from pipeline.tokens import AUDIO, SPECIAL, TEXT

SPANS = pa.array([[[0, 3], [4, 8]], None, [[0, 5]]], WORD_SPANS)
BOXES = pa.array([[[0, 0, 0.5, 1], [0.5, 0, 1, 1]], None, None], WORD_BOXES)
TIMES = pa.array([None, None, [[2.0, 3.0]]], WORD_TIMES)
KINDS = pa.array([[TEXT, TEXT], None, [AUDIO]], WORD_KINDS)
#: Characters of tokens; the last one is none of the text's.
TOKENS = torch.tensor([[[0, 2], [2, 3], [3, 4], [6, 8], [-1, -1]]])
TOKEN_KINDS = torch.tensor([[TEXT, TEXT, TEXT, TEXT, SPECIAL]], dtype=torch.int8)


def places(items: pa.Table, row: int) -> tuple[np.ndarray, list[int]]:
    extents, kinds = Words.of(items).places_of(np.array([row]), TOKENS, TOKEN_KINDS)
    assert extents.dtype == torch.float32 and kinds.dtype == torch.int8
    return extents[0].numpy(), kinds[0].tolist()


def test_each_token_has_the_place_of_its_word():
    names = ["word_spans", "word_boxes", "word_times", "word_kinds"]
    items = pa.table([SPANS, BOXES, TIMES, KINDS], names)
    extents, kinds = places(items, 0)
    np.testing.assert_array_equal(extents[:2, :4], [[0, 0, 0.5, 1]] * 2)
    np.testing.assert_array_equal(extents[3, :4], [0.5, 0, 1, 1])
    assert np.isnan(extents[[2, 4]]).all() and np.isnan(extents[:, 4:]).all()
    assert kinds == TOKEN_KINDS[0].tolist()

    extents, kinds = places(items, 2)
    np.testing.assert_array_equal(extents[:3, 4:], [[2, 3]] * 3)
    assert np.isnan(extents[:, :4]).all() and np.isnan(extents[3:]).all()
    assert kinds == [AUDIO, AUDIO, AUDIO, TEXT, SPECIAL]

    extents, kinds = places(items, 1)
    assert np.isnan(extents).all() and kinds == TOKEN_KINDS[0].tolist()


def test_a_table_may_lack_what_its_words_do_not_have():
    extents, kinds = places(pa.table([SPANS], ["word_spans"]), 0)
    assert np.isnan(extents).all() and kinds == TOKEN_KINDS[0].tolist()
    extents, _ = places(pa.table([SPANS, BOXES], ["word_spans", "word_boxes"]).slice(0, 1), 0)
    np.testing.assert_array_equal(extents[0, :4], [0, 0, 0.5, 1])
