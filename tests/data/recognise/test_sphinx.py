"""PocketSphinx on recorded speech, silence and noise."""

import numpy as np
import pytest
import soundfile
import soxr

from pipeline.data.audio import Audio
from pipeline.data.recognise.accuracy import word_errors
from pipeline.data.recognise.audio import SAMPLE_RATE, decode_samples, split_utterances
from pipeline.data.recognise.sphinx import Sphinx
from pipeline.tokens import AUDIO
from tests.conftest import ROOT

TRANSCRIPT = (
    "and so my fellow americans ask not what your country can do for you"
    " ask what you can do for your country"
)


@pytest.fixture(scope="module")
def speech() -> tuple[np.ndarray, int]:
    """11 s of a speech of 1961, one channel, and the sample rate."""
    samples, rate = soundfile.read(ROOT / "jobs/data/speech/jfk.flac", dtype="float32")
    return samples.mean(axis=1), rate


@pytest.fixture(scope="module")
def sphinx() -> Sphinx:
    return Sphinx(Sphinx.Spec())


def item(samples: np.ndarray, rate: int = SAMPLE_RATE, start: float = 0.0) -> dict:
    data = samples.astype("<f4").tobytes()
    return {"item_id": "a", "audio": {"start": start, "sample_rate": rate, "samples": data}}


@pytest.fixture(scope="module")
def lines(sphinx, speech):
    return sphinx.lines(item(*speech, start=60.0))


def test_words_and_times(lines):
    words = [word for line in lines for word in line.words]
    assert {"fellow", "country", "what", "do", "you"} <= {word.text for word in words}
    country = next(word for word in words if word.text == "country")
    assert 65.6 < country.times[0] < country.times[1] < 66.7  # spoken from 5.8 to 6.4 s
    starts = [word.times[0] for word in words]
    assert starts == sorted(starts) and all(word.times[0] < word.times[1] for word in words)
    assert all(word.kind == AUDIO and np.isnan(word.box).all() for word in words)
    errors, number = word_errors(TRANSCRIPT, " ".join(word.text for word in words))
    assert number == 22 and errors <= 7  # 5 errors are typical


def test_confidence(sphinx, lines):
    confidences = {word.text: word.confidence for line in lines for word in line.words}
    assert all(0 < confidence <= 1 for confidence in confidences.values())
    assert confidences["my"] > 0.5 > confidences["lovely"]  # correct, and incorrect


def test_min_confidence(sphinx, speech):
    samples, rate = speech
    start = item(samples[: 3 * rate], rate)
    words, filtered = (
        [word for line in recogniser.lines(start) for word in line.words]
        for recogniser in (sphinx, Sphinx(Sphinx.Spec(min_confidence=0.5)))
    )
    assert filtered == [word for word in words if word.confidence >= 0.5]
    assert 0 < len(filtered) < len(words)


def test_lines_are_divided_at_pauses(lines):
    assert len(lines) >= 3
    assert all(word.text.isalpha() for line in lines for word in line.words)


def test_surrounding_silence_does_not_change_words(sphinx, speech, lines):
    samples, rate = speech
    silence = np.zeros(3 * rate, np.float32)
    padded = sphinx.lines(item(np.concatenate([silence, samples, silence]), rate, start=57.0))
    assert [line.text for line in padded] == [line.text for line in lines]
    firsts = [[results[0].words[0].times[0] for results in (padded, lines)]]
    np.testing.assert_allclose(*np.array(firsts).T, atol=0.05)


@pytest.mark.parametrize(
    "samples",
    [
        np.zeros(0),
        np.zeros(3 * SAMPLE_RATE),
        np.full(SAMPLE_RATE, np.nan),
        np.random.default_rng(0).normal(0, 1e-2, 3 * SAMPLE_RATE),
        np.eye(1, SAMPLE_RATE, 500)[0],
    ],
    ids=["nothing", "silence", "not numbers", "noise", "click"],
)
def test_no_words_without_speech(sphinx, samples):
    assert sphinx.lines(item(samples)) == []


def test_no_words_without_audio(sphinx):
    assert sphinx.lines({"item_id": "a", "audio": None}) == []
    assert sphinx.lines({"item_id": "a"}) == []


def test_result_is_independent_of_previous_audio(sphinx, speech):
    samples = soxr.resample(*speech, SAMPLE_RATE)
    first = item(samples[: 2 * SAMPLE_RATE])
    alone = Sphinx(Sphinx.Spec()).lines(first)
    sphinx.lines(item(samples[5 * SAMPLE_RATE : 7 * SAMPLE_RATE]))
    assert sphinx.lines(first) == alone and alone


def test_long_utterances_are_divided_at_quietest_time():
    samples = np.random.default_rng(0).normal(0, 0.1, 30 * SAMPLE_RATE).astype(np.float32)
    samples[14 * SAMPLE_RATE : 15 * SAMPLE_RATE] *= 0.01
    parts = list(split_utterances(samples, max_seconds=20))
    assert [start for start, _ in parts] == [0.0, pytest.approx(14.5, abs=0.5)]
    assert sum(len(part) for _, part in parts) == len(samples)
    assert all(len(part) <= 20 * SAMPLE_RATE for _, part in parts)


def test_audio_is_resampled():
    tone = np.sin(np.arange(48000) / 48000 * 2 * np.pi * 440)
    audio = item(tone, 48000)["audio"]
    samples = decode_samples(audio)
    assert len(samples) == SAMPLE_RATE and samples.dtype == np.float32
    assert np.abs(np.fft.rfft(samples)).argmax() == 440


def test_sentence_at_window_border_is_complete(sphinx):
    spec = Audio.Spec(path=str(ROOT / "jobs/data/speech"), window_seconds=9)
    source = Audio(spec, ("audio",))
    (shard,) = source.shards()
    (second,) = source.decode(shard, list(enumerate(source.scan(shard)))[1:])
    words = [word for line in sphinx.lines(second.row()) for word in line.words]
    # "ask what you can do for your country" begins before 9 s.
    assert " ".join(word.text for word in words[1:7]) == "what you can do for your"
    assert second.span[1] == 9 and 8 < words[0].times[0] < words[1].times[0] < 9
