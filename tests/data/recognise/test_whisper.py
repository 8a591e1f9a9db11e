"""Whisper with a tiny random checkpoint: loading, times and confidences."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import AddedToken
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
    WhisperProcessor,
    WhisperTokenizer,
)

from pipeline.config import SpecError
from pipeline.data.recognise import make_line
from pipeline.data.recognise.audio import SAMPLE_RATE
from pipeline.data.recognise.whisper import Whisper, _TokenRecorder
from pipeline.tokens import AUDIO

LANGUAGES = ("en", "de", "ko")


def write_checkpoint(folder: Path, by_word: bool = False, is_multilingual: bool = True) -> Path:
    """Writes a random Whisper checkpoint with two decoder layers, whose tokens are single bytes."""
    vocab = {character: i for i, character in enumerate(sorted(ByteLevel.alphabet()))}
    tokenizer = WhisperTokenizer(vocab=vocab, merges=[])
    names = ["<|endoftext|>", "<|startoftranscript|>", *(f"<|{code}|>" for code in LANGUAGES)]
    names += ["<|translate|>", "<|transcribe|>", "<|startoflm|>", "<|startofprev|>"]
    names += ["<|nospeech|>", "<|notimestamps|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": names})
    times = [AddedToken(f"<|{i * 0.02:.2f}|>", special=False) for i in range(1501)]
    tokenizer.add_tokens(times)
    ids = {name: tokenizer.convert_tokens_to_ids(name) for name in names}
    ends = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), ids["<|endoftext|>"])
    torch.manual_seed(0)
    model = WhisperForConditionalGeneration(
        WhisperConfig(
            vocab_size=len(tokenizer),
            d_model=32,
            encoder_layers=1,
            decoder_layers=2,
            encoder_attention_heads=2,
            decoder_attention_heads=2,
            encoder_ffn_dim=32,
            decoder_ffn_dim=32,
            num_mel_bins=8,
            max_target_positions=64,
            decoder_start_token_id=ids["<|startoftranscript|>"],
            suppress_tokens=None,
            begin_suppress_tokens=None,
            **ends,
        )
    )
    settings = {
        **ends,
        "decoder_start_token_id": ids["<|startoftranscript|>"],
        "no_timestamps_token_id": ids["<|notimestamps|>"],
        "prev_sot_token_id": ids["<|startofprev|>"],
        "is_multilingual": is_multilingual,
        "max_length": 40,
        "suppress_tokens": list(range(128, 256)),  # incomplete UTF-8 characters
        "_from_model_config": False,
    }
    if is_multilingual:
        settings["lang_to_id"] = {f"<|{code}|>": ids[f"<|{code}|>"] for code in LANGUAGES}
        settings["task_to_id"] = {task: ids[f"<|{task}|>"] for task in ("transcribe", "translate")}
    if by_word:
        settings["alignment_heads"] = [[1, 0], [1, 1]]
    for name, value in settings.items():
        setattr(model.generation_config, name, value)
    model.save_pretrained(folder)
    WhisperProcessor(WhisperFeatureExtractor(feature_size=8), tokenizer).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=["by segment", "by word", "English only"])
def whisper(request, tmp_path_factory) -> Whisper:
    folder = write_checkpoint(
        tmp_path_factory.mktemp("whisper"),
        by_word=request.param == "by word",
        is_multilingual=request.param != "English only",
    )
    return Whisper(Whisper.Spec(model=str(folder)))


def item(seconds: float, start: float = 0.0, rate: int = SAMPLE_RATE) -> dict:
    samples = np.random.default_rng(0).normal(0, 0.1, round(seconds * rate)).astype("<f4")
    audio = {"start": start, "sample_rate": rate, "samples": samples.tobytes()}
    return {"item_id": "a", "audio": audio}


def test_word_times_are_within_audio(whisper):
    lines = whisper.lines(item(3, start=50.0))
    words = [word for line in lines for word in line.words]
    assert words and all(word.text and word.kind == AUDIO for word in words)
    times = np.array([word.times for word in words])
    assert (times >= 50).all() and (times <= 53 + 1e-6).all() and (times[:, 0] <= times[:, 1]).all()


def test_min_confidence(whisper):
    samples = item(2)
    words = [word for line in whisper.lines(samples) for word in line.words]
    assert words and all(0 < word.confidence < 1 for word in words)
    threshold = sorted(word.confidence for word in words)[len(words) // 2]
    spec = whisper.spec.model_copy(update={"min_confidence": threshold})
    remaining = [word for line in Whisper(spec).lines(samples) for word in line.words]
    assert remaining == [word for word in words if word.confidence >= threshold]


def test_confidence_is_mean_token_probability(tmp_path):
    whisper = Whisper(Whisper.Spec(model=str(write_checkpoint(tmp_path / "whisper"))))
    generated = [(104, 0.5), (105, 0.9), (106, 0.7)]
    text = whisper._recognise.tokenizer.decode([104, 105, 106])
    (line,) = whisper._with_confidence([make_line(text, (0.0, 1.0), kind=AUDIO)], generated)
    assert np.mean([w.confidence for w in line.words]) == pytest.approx(0.7)
    (line,) = whisper._with_confidence([make_line("something else", kind=AUDIO)], generated)
    assert np.isnan([word.confidence for word in line.words]).all()


@pytest.mark.parametrize(
    ("generated", "counted"),
    [
        ([90, 1, 2, 91], [1, 2]),  # ends with a single timestamp
        ([90, 1, 91, 91, 2], [1]),  # the next window starts at the pair
        ([90, 1, 91, 91, 2, 92], [1, 2]),
        ([1, 2], [1, 2]),
    ],
)
def test_text_after_last_timestamp_pair_is_dropped(generated, counted):
    recorder, scores = _TokenRecorder(first_timestamp=90), torch.zeros(1, 100)
    for _window in range(2):
        for length in range(len(generated) + 1):
            recorder(torch.tensor([[0, *generated[:length]]]), scores)
    assert recorder.tokens == [(token, pytest.approx(0.01)) for token in counted * 2]


def test_long_audio_is_divided(whisper):
    lines = whisper.lines(item(40))
    starts = [line.words[0].times[0] for line in lines]
    assert starts == sorted(starts) and starts[-1] >= 15


def test_result_is_deterministic(whisper):
    assert whisper.lines(item(2, rate=8000)) == whisper.lines(item(2, rate=8000))


def test_no_words_in_silence(whisper):
    silence = {"start": 0.0, "sample_rate": SAMPLE_RATE, "samples": bytes(4 * SAMPLE_RATE)}
    assert whisper.lines({"item_id": "a", "audio": silence}) == []
    assert whisper.lines({"item_id": "a", "audio": None}) == []


def test_check_rejects_unsuitable_checkpoints(tmp_path):
    folder = write_checkpoint(tmp_path / "whisper")
    Whisper.check(Whisper.Spec(model=str(folder), language="ko"))
    with pytest.raises(SpecError, match="^language must be one of de, en, ko.*, got 'xx'"):
        Whisper.check(Whisper.Spec(model=str(folder), language="xx"))
    with pytest.raises(SpecError, match="^model must be .*is not a folder"):
        Whisper.check(Whisper.Spec(model=str(tmp_path / "elsewhere")))
    (folder / "generation_config.json").write_text("{}")
    with pytest.raises(SpecError, match="which lacks one of them .*no_timestamps_token_id"):
        Whisper.check(Whisper.Spec(model=str(folder)))
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(SpecError, match="has no safetensors file"):
        Whisper.check(Whisper.Spec(model=str(folder)))
    (folder / "config.json").write_text(json.dumps({"model_type": "bert"}))
    with pytest.raises(SpecError, match="is a bert"):
        Whisper.check(Whisper.Spec(model=str(folder)))
