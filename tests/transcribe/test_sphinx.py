"""PocketSphinx on real speech: words, their times, and what is no speech."""

import numpy as np
import pytest
import soundfile
import soxr

from pipeline.sources.audio import Audio
from pipeline.tokens import AUDIO
from pipeline.transcribe.accuracy import word_errors
from pipeline.transcribe.sound import RATE, samples_of, utterances
from pipeline.transcribe.sphinx import Sphinx
from tests.conftest import ROOT

SAID = (
    "and so my fellow americans ask not what your country can do for you"
    " ask what you can do for your country"
)


@pytest.fixture(scope="module")
def speech() -> tuple[np.ndarray, int]:
    """11 s of 1961, one channel, and its rate."""
    samples, rate = soundfile.read(ROOT / "jobs/data/speech/jfk.flac", dtype="float32")
    return samples.mean(axis=1), rate


@pytest.fixture(scope="module")
def sphinx() -> Sphinx:
    return Sphinx(Sphinx.Spec())


def item(samples: np.ndarray, rate: int = RATE, start: float = 0.0) -> dict:
    data = samples.astype("<f4").tobytes()
    return {"item_id": "a", "audio": {"start": start, "sample_rate": rate, "samples": data}}


@pytest.fixture(scope="module")
def lines(sphinx, speech):
    return sphinx.lines(item(*speech, start=60.0))


def test_words_are_heard_where_they_are_said(lines):
    words = [word for line in lines for word in line.words]
    assert {"fellow", "country", "what", "do", "you"} <= {word.text for word in words}
    country = next(word for word in words if word.text == "country")
    assert 65.6 < country.times[0] < country.times[1] < 66.7  # said at 5.8 to 6.4 s
    starts = [word.times[0] for word in words]
    assert starts == sorted(starts) and all(word.times[0] < word.times[1] for word in words)
    assert all(word.kind == AUDIO and np.isnan(word.box).all() for word in words)
    errors, number = word_errors(SAID, " ".join(word.text for word in words))
    assert number == 22 and errors <= 7  # 5 where this was written


def test_words_have_a_confidence(sphinx, lines):
    sure = {word.text: word.confidence for line in lines for word in line.words}
    assert all(0 < confidence <= 1 for confidence in sure.values())
    assert sure["my"] > 0.5 > sure["lovely"]  # said, and misheard


def test_words_below_the_threshold_are_left_out(speech, lines):
    samples, rate = speech
    start = item(samples[: 3 * rate], rate)
    every, sure = (
        [word for line in Sphinx(Sphinx.Spec(**fields)).lines(start) for word in line.words]
        for fields in ({}, {"min_confidence": 0.5})
    )
    assert sure == [word for word in every if word.confidence >= 0.5] and 0 < len(sure) < len(every)


def test_pauses_end_lines_and_words_are_plain(lines):
    assert len(lines) >= 3
    assert all(word.text.isalpha() for line in lines for word in line.words)


def test_digital_silence_around_speech_changes_no_word(sphinx, speech, lines):
    samples, rate = speech
    silence = np.zeros(3 * rate, np.float32)
    padded = sphinx.lines(item(np.concatenate([silence, samples, silence]), rate, start=57.0))
    assert [line.text for line in padded] == [line.text for line in lines]
    firsts = [[found[0].words[0].times[0] for found in (padded, lines)]]
    np.testing.assert_allclose(*np.array(firsts).T, atol=0.05)


@pytest.mark.parametrize(
    "samples",
    [
        np.zeros(0),
        np.zeros(3 * RATE),
        np.full(RATE, np.nan),
        np.random.default_rng(0).normal(0, 1e-2, 3 * RATE),
        np.eye(1, RATE, 500)[0],
    ],
    ids=["nothing", "silence", "not numbers", "noise", "click"],
)
def test_what_is_no_speech_has_no_word(sphinx, samples):
    assert sphinx.lines(item(samples)) == []


def test_no_sound_has_no_word(sphinx):
    assert sphinx.lines({"item_id": "a", "audio": None}) == []
    assert sphinx.lines({"item_id": "a"}) == []


def test_what_was_heard_before_changes_nothing(sphinx, speech):
    samples = soxr.resample(*speech, RATE)
    first = item(samples[: 2 * RATE])
    alone = Sphinx(Sphinx.Spec()).lines(first)
    sphinx.lines(item(samples[5 * RATE : 7 * RATE]))
    assert sphinx.lines(first) == alone and alone


def test_long_speech_is_cut_where_it_is_quiet():
    samples = np.random.default_rng(0).normal(0, 0.1, 30 * RATE).astype(np.float32)
    samples[14 * RATE : 15 * RATE] *= 0.01
    parts = list(utterances(samples, longest=20))
    assert [start for start, _ in parts] == [0.0, pytest.approx(14.5, abs=0.5)]
    assert sum(len(part) for _, part in parts) == len(samples)
    assert all(len(part) <= 20 * RATE for _, part in parts)


def test_any_rate_is_heard():
    tone = np.sin(np.arange(48000) / 48000 * 2 * np.pi * 440)
    audio = item(tone, 48000)["audio"]
    samples = samples_of(audio)
    assert len(samples) == RATE and samples.dtype == np.float32
    assert np.abs(np.fft.rfft(samples)).argmax() == 440


def test_a_sentence_at_a_border_of_windows_is_recognised_whole(sphinx):
    spec = Audio.Spec(path=str(ROOT / "jobs/data/speech"), window_seconds=9)
    source = Audio(spec, ("audio",))
    (shard,) = source.shards()
    (second,) = source.decode(shard, list(enumerate(source.scan(shard)))[1:])
    words = [word for line in sphinx.lines(second.row()) for word in line.words]
    # "ask what you can do for your country" begins before 9 s.
    assert " ".join(word.text for word in words[1:7]) == "what you can do for your"
    assert second.span[1] == 9 and 8 < words[0].times[0] < words[1].times[0] < 9
