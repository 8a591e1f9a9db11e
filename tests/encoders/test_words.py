"""Extents, kinds and confidences of tokens, derived from the words of an item."""

import numpy as np
import pyarrow as pa
import torch

from pipeline.encoders.words import Words
from pipeline.schema import WORD_BOXES, WORD_CONFIDENCES, WORD_KINDS, WORD_SPANS, WORD_TIMES
from pipeline.tokens import AUDIO, SPECIAL, TEXT, TokenBatch

SPANS = pa.array([[[0, 3], [4, 8]], None, [[0, 5]]], WORD_SPANS)
BOXES = pa.array([[[0, 0, 0.5, 1], [0.5, 0, 1, 1]], None, None], WORD_BOXES)
TIMES = pa.array([None, None, [[2.0, 3.0]]], WORD_TIMES)
KINDS = pa.array([[TEXT, TEXT], None, [AUDIO]], WORD_KINDS)
#: Character offsets of the tokens; the last token is not part of the text.
TOKENS = torch.tensor([[[0, 2], [2, 3], [3, 4], [6, 8], [-1, -1]]])
TOKEN_KINDS = torch.tensor([[TEXT, TEXT, TEXT, TEXT, SPECIAL]], dtype=torch.int8)


def locate(items: pa.Table, row: int) -> tuple[np.ndarray, list[int]]:
    batch = annotate(items, row)
    assert batch.extents.dtype == torch.float32 and batch.kind.dtype == torch.int8
    return batch.extents[0].numpy(), batch.kind[0].tolist()


def annotate(items: pa.Table, row: int) -> TokenBatch:
    mask = torch.ones(1, 5, dtype=torch.bool)
    batch = TokenBatch(torch.ones(1, 5, 2), mask, True, spans=TOKENS, kind=TOKEN_KINDS)
    return Words.from_items(items).annotate(np.array([row]), batch)


def test_tokens_have_the_extents_of_their_word():
    names = ["word_spans", "word_boxes", "word_times", "word_kinds"]
    items = pa.table([SPANS, BOXES, TIMES, KINDS], names)
    extents, kinds = locate(items, 0)
    np.testing.assert_array_equal(extents[:2, :4], [[0, 0, 0.5, 1]] * 2)
    np.testing.assert_array_equal(extents[3, :4], [0.5, 0, 1, 1])
    assert np.isnan(extents[[2, 4]]).all() and np.isnan(extents[:, 4:]).all()
    assert kinds == TOKEN_KINDS[0].tolist()

    extents, kinds = locate(items, 2)
    np.testing.assert_array_equal(extents[:3, 4:], [[2, 3]] * 3)
    assert np.isnan(extents[:, :4]).all() and np.isnan(extents[3:]).all()
    assert kinds == [AUDIO, AUDIO, AUDIO, TEXT, SPECIAL]

    extents, kinds = locate(items, 1)
    assert np.isnan(extents).all() and kinds == TOKEN_KINDS[0].tolist()


def test_optional_columns_may_be_missing():
    extents, kinds = locate(pa.table([SPANS], ["word_spans"]), 0)
    assert np.isnan(extents).all() and kinds == TOKEN_KINDS[0].tolist()
    extents, _ = locate(pa.table([SPANS, BOXES], ["word_spans", "word_boxes"]).slice(0, 1), 0)
    np.testing.assert_array_equal(extents[0, :4], [0, 0, 0.5, 1])


def test_tokens_have_the_confidence_of_their_word():
    confidences = pa.array([[0.5, float("nan")], None, None], WORD_CONFIDENCES)
    items = pa.table([SPANS, confidences], ["word_spans", "word_confidences"])
    confidence = annotate(items, 0).confidence[0].tolist()
    assert confidence[:2] == [0.5, 0.5] and np.isnan(confidence[2:]).all()
    assert annotate(items, 2).confidence.isnan().all()
    assert annotate(pa.table([SPANS], ["word_spans"]), 0).confidence.isnan().all()
