"""The thinker of Qwen2.5-Omni, compared with the forward pass of transformers."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pyarrow as pa
import pytest
import soxr
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoTokenizer,
    Qwen2_5OmniThinkerForConditionalGeneration,
    WhisperFeatureExtractor,
)
from transformers.image_utils import SizeDict
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from pipeline.config import SpecError
from pipeline.data.decode import Unreadable
from pipeline.encoders.qwen_omni import num_audio_tokens
from pipeline.encoders.qwen_spec import DOCUMENT_PROMPT, QUERY_PROMPT
from pipeline.registry import ENCODERS
from pipeline.schema import AUDIO as AUDIO_TYPE
from pipeline.schema import FRAME, SPAN
from pipeline.taps import Tap
from pipeline.tokens import AUDIO, PROMPT, SPECIAL, TEXT, VISUAL
from tests.encoders.batches import assert_close, encode_items, unit
from tests.images import make_images, noise, png

RATE = 16_000
TEXTS = ["heat transfer in a cone", "lift", "Überschall 超音速 🙂 at Mach 3"]
SHORT = "<|im_start|>a{content}b<|im_end|>"
PADS = {"<|IMAGE|>": VISUAL, "<|VIDEO|>": VISUAL, "<|AUDIO|>": AUDIO}


def noise_audio(seconds: float, rate: int = RATE, seed: int = 0) -> np.ndarray:
    """Returns white noise, so that no two moments are equal."""
    generator = np.random.default_rng([seed, rate])
    return (generator.normal(size=round(seconds * rate)) * 0.2).astype(np.float32).clip(-1, 1)


class Reference:
    """The transformers model, applied to one sequence at a time without padding."""

    def __init__(self, folder: str):
        load = Qwen2_5OmniThinkerForConditionalGeneration.from_pretrained
        self.model = load(folder, attn_implementation="eager").eval()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.images = Qwen2VLImageProcessorPil.from_pretrained(folder)
        self.feature_extractor = WhisperFeatureExtractor.from_pretrained(folder)

    @torch.no_grad()
    def __call__(self, content: str, prompt: str = DOCUMENT_PROMPT, **media):
        text = prompt.replace("{content}", content)
        ids = self.tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
        output = self.model(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            output_hidden_states=True,
            output_attentions=True,
            **media,
        )
        return ids[0], output

    def audio_inputs(self, samples: np.ndarray) -> tuple[int, dict[str, torch.Tensor]]:
        """Returns the number of audio tokens and the inputs of the audio tower."""
        output = self.feature_extractor(
            [samples], sampling_rate=RATE, padding="max_length", return_tensors="pt",
            return_attention_mask=True,
        )  # fmt: skip
        mask = output["attention_mask"]
        length = (int(mask.sum()) - 1) // 2 + 1
        number = (length - 2) // 2 + 1
        return number, {
            "input_features": output["input_features"],
            "feature_attention_mask": mask,
        }

    def video_inputs(self, frames, size=None) -> tuple[int, dict[str, torch.Tensor]]:
        """Returns the number of tokens per pair of frames and the inputs of the vision tower."""
        frames = [*frames, *[frames[-1]] * (len(frames) % 2)]
        processor, pixels = self.images, []
        size = size or processor.size
        for frame in frames:
            array = np.asarray(frame, dtype=np.float32).transpose(2, 0, 1)
            array = processor.resize(array, size, processor.resample, factor=8)
            array = processor.rescale(array, processor.rescale_factor)
            pixels.append(processor.normalize(array, processor.image_mean, processor.image_std))
        video = torch.tensor(np.stack(pixels))
        pairs, (rows, columns) = len(frames) // 2, (side // 4 for side in video.shape[2:])
        patches = video.view(pairs, 2, 3, rows // 2, 2, 4, columns // 2, 2, 4)
        patches = patches.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(pairs * rows * columns, -1)
        return rows * columns // 4, {
            "pixel_values_videos": patches,
            "video_grid_thw": torch.tensor([[pairs, rows, columns]]),
        }

    def image(self, image, **more):
        inputs = self.images([image], return_tensors="pt")
        pads = "<|IMAGE|>" * (int(inputs["image_grid_thw"].prod()) // 4)
        return self(f"<|vision_bos|>{pads}<|vision_eos|>", **more, **inputs)

    def audio(self, samples, **more):
        number, media = self.audio_inputs(samples)
        return self(f"<|audio_bos|>{'<|AUDIO|>' * number}<|audio_eos|>", **more, **media)

    def video(self, frames, interval: float, size=None, **more):
        pads, media = self.video_inputs(frames, size)
        pads *= int(media["video_grid_thw"][0, 0])
        media["video_second_per_grid"] = torch.tensor([2 * interval])
        return self(f"<|vision_bos|>{'<|VIDEO|>' * pads}<|vision_eos|>", **more, **media)

    def both(self, frames, interval: float, samples, layout, **more):
        """Runs the model on a video with audio.

        Args:
            layout: Alternating numbers of pairs of frames and of audio tokens.
        """
        pads, video_media = self.video_inputs(frames)
        number, audio_media = self.audio_inputs(samples)
        assert (
            sum(layout[1::2]) == number and sum(layout[::2]) == video_media["video_grid_thw"][0, 0]
        )
        content = "".join(
            "<|AUDIO|>" * count if turn % 2 else "<|VIDEO|>" * (count * pads)
            for turn, count in enumerate(layout)
        )
        return self(
            f"<|vision_bos|><|audio_bos|>{content}<|audio_eos|><|vision_eos|>",
            use_audio_in_video=True,
            video_second_per_grid=torch.tensor([2 * interval]),
            **more,
            **video_media,
            **audio_media,
        )


def clip(frames=(), seconds=(), samples=None, start=None, rate=RATE, span=None, **more):
    """Returns a table with one item of frames and audio."""
    rows = [
        {"index": i, "seconds": s, "height": f.height, "width": f.width, "pixels": f.tobytes()}
        for i, (f, s) in enumerate(zip(frames, seconds, strict=True))
    ]
    audio = None
    if samples is not None:
        begin = start if start is not None else (seconds[0] if len(seconds) else 0.0)
        audio = {"start": begin, "sample_rate": rate, "samples": samples.tobytes()}
    span_row = span and {"unit": "seconds", "start": span[0], "end": span[1]}
    columns = {
        "frames": pa.array([rows or None], pa.list_(FRAME)),
        "audio": pa.array([audio], AUDIO_TYPE),
        "span": pa.array([span_row], SPAN),
    }
    given = {name: [value] for name, value in more.items()}
    return pa.table({"item_id": ["clip"], **columns, **given})


@pytest.fixture(scope="module")
def build(checkpoint):
    def build(**fields):
        given = {"name": "qwen_omni", "model": checkpoint("qwen2_5_omni"), "dtype": "float32"}
        return ENCODERS.build(ENCODERS.resolve({**given, **fields}))

    return build


@pytest.fixture(scope="module")
def reference(checkpoint):
    return Reference(checkpoint("qwen2_5_omni"))


@pytest.fixture(scope="module")
def encoder(build):
    return build()


#: Two frames per second and 5.2 s of audio, in chunks of 2 s.
FRAMES = [noise(24, 16, seed) for seed in range(10)]
LAYOUT = [2, 50, 2, 50, 1, 30]


@pytest.fixture(scope="module")
def cases(reference):
    """Items, and the token ids and outputs of transformers for them."""
    image, samples, long = noise(50, 60), noise_audio(1.234, seed=1), noise_audio(5.2, seed=2)
    items = [
        clip(samples=samples),
        clip(FRAMES[:6], np.arange(6) * 0.4 + 7),
        clip(FRAMES, np.arange(10) * 0.5, long),
        clip(FRAMES[:3], [3.0, 4.0, 5.0], noise_audio(0.5)),
        clip(FRAMES[:2], [0.0, 1.0], noise_audio(0.05)),  # ends before the frame
        pa.table({"item_id": ["image"], "image": [png(image)]}),
        pa.table({"item_id": ["text"], "text": TEXTS[:1]}),
    ]
    expected = [
        reference.audio(samples),
        reference.video(FRAMES[:6], 0.4),
        reference.both(FRAMES, 0.5, long, LAYOUT),
        reference.both(FRAMES[:3], 1.0, noise_audio(0.5), [1, 12, 1]),
        reference.both(FRAMES[:2], 1.0, noise_audio(0.05), [1, 1]),
        reference.image(image),
        reference(TEXTS[0]),
    ]
    return items, expected


def is_kept(encoder, ids):
    return ~torch.isin(ids, torch.tensor(sorted(encoder._reader.special)))


def media_kinds(reference, ids):
    """Returns the kinds of media placeholders; -1 for all other tokens."""
    numbers = {reference.tokenizer.convert_tokens_to_ids(name): kind for name, kind in PADS.items()}
    return torch.tensor([numbers.get(number, -1) for number in ids.tolist()])


def test_states_match_transformers(encoder, build, cases):
    for layer in (-1, 0, 2):
        current = encoder if layer == -1 else build(layer=layer, output_tokens="paper")
        for item, (ids, output) in zip(*cases, strict=True):
            found = encode_items(current, item)[0]
            states = unit(output.hidden_states[layer][0])
            rows = is_kept(encoder, ids) if layer == -1 else torch.arange(len(ids)) < len(ids) - 1
            assert_close(found.vectors[0], states[rows])
            assert_close(found.pooled[0], unit(output.hidden_states[-1][0, -1]))


def test_mixed_batches(build, cases, reference):
    items = pa.concat_tables(cases[0], promote_options="default")
    encoder = build(max_batch_tokens=100_000)
    for side in ("left", "right"):
        encoder.padding_side = side
        ((rows, batch),) = encoder.encode(items)
        for i, row in enumerate(rows):
            ids, output = cases[1][row]
            vectors = batch.vectors[i][batch.mask[i]]
            assert_close(vectors, unit(output.hidden_states[-1][0, is_kept(encoder, ids)]))
            kinds = media_kinds(reference, ids)[is_kept(encoder, ids)]
            is_media = kinds >= 0
            assert torch.equal(batch.kind[i][batch.mask[i]][is_media].long(), kinds[is_media])


def test_positions_match_transformers(encoder, cases, reference):
    for item, (ids, _) in zip(*cases, strict=True):
        row = item.to_pylist()[0]
        (inputs,) = encoder._reader.read_item(row)
        assert torch.equal(inputs.sequence["input_ids"], ids)
        frames = row.get("frames") or []
        times = {}
        if frames:
            interval = frames[1]["seconds"] - frames[0]["seconds"]
            _, media = reference.video_inputs(FRAMES[: len(frames)])
            times = {
                "video_grid_thw": media["video_grid_thw"],
                "second_per_grids": torch.tensor([2 * interval]),
            }
        if row.get("image"):
            times["image_grid_thw"] = inputs.media["image_grid_thw"]
        if row.get("audio"):
            times["audio_seqlens"] = inputs.media["num_columns"]
        positions, _ = reference.model.get_rope_index(
            ids[None],
            attention_mask=torch.ones_like(ids[None]),
            use_audio_in_video=bool(frames and row.get("audio")),
            **times,
        )
        assert torch.equal(inputs.sequence["position_ids"].T, positions[:, 0])


@pytest.mark.parametrize("interval", [0.1, 0.28, 1.0, 2.0, 5.0])
def test_chunks_of_sparse_and_dense_frames(build, reference, interval):
    """Chunk boundaries follow the model if a grid spans several chunks."""
    samples = noise_audio(5.0)
    seconds = 30 + interval * np.arange(6)
    encoder = build(output_tokens="paper")
    (inputs,) = encoder._reader.read_item(clip(FRAMES[:6], seconds, samples).to_pylist()[0])
    pads, video_media = reference.video_inputs(FRAMES[:6])
    ids = inputs.sequence["input_ids"]
    positions, _ = reference.model.get_rope_index(
        ids[None],
        attention_mask=torch.ones_like(ids[None]),
        video_grid_thw=video_media["video_grid_thw"],
        use_audio_in_video=True,
        audio_seqlens=torch.tensor([500]),
        second_per_grids=torch.tensor([2 * interval]),
    )
    assert torch.equal(inputs.sequence["position_ids"].T, positions[:, 0])
    # Expected layout, as computed by the processor's `replace_video_with_audio_token`.
    video = np.repeat(np.arange(3), pads) * round(2 * interval * 25, 6)
    chunk, runs = 1, [[], []]
    for lengths, positions in zip(runs, (video, np.arange(125)), strict=True):
        start, chunk = 0, 1
        for i, number in enumerate(positions):
            if number >= chunk * 50:
                lengths.append(i - start)
                start, chunk = i, chunk + 1
        lengths.append(len(positions) - start)
    layout = []
    for j in range(max(map(len, runs))):
        for lengths, kind in zip(runs, (VISUAL, AUDIO), strict=True):
            layout += [kind] * (lengths[j] if j < len(lengths) else 0)
    kinds = media_kinds(reference, ids)
    assert kinds[kinds >= 0].tolist() == layout


def test_audio_after_the_frames(build, reference):
    samples = noise_audio(1.0)
    encoder = build(interleave=False)
    found = encode_items(encoder, clip(FRAMES[:4], [0.0, 1.0, 2.0, 3.0], samples))[0]
    pads, video_media = reference.video_inputs(FRAMES[:4])
    number, audio_media = reference.audio_inputs(samples)
    ids, output = reference(
        f"<|vision_bos|>{'<|VIDEO|>' * 2 * pads}<|vision_eos|>"
        f"<|audio_bos|>{'<|AUDIO|>' * number}<|audio_eos|>",
        video_second_per_grid=torch.tensor([2.0]),
        **video_media,
        **audio_media,
    )
    assert_close(found.vectors[0], unit(output.hidden_states[-1][0, is_kept(encoder, ids)]))
    kinds = found.kind[0][found.kind[0] < TEXT].tolist()
    assert kinds == [VISUAL] * 2 * pads + [AUDIO] * number


def test_extents(build):
    encoder = build(output_tokens="media")
    samples = noise_audio(1.235)  # 124 frames: 31 tokens; the last one ends with the audio
    found = encode_items(encoder, clip(samples=samples, start=12.5))[0]
    extents = found.extents[0]
    assert len(extents) == 31 and extents[:, :4].isnan().all()
    assert extents[0, 4:].tolist() == pytest.approx([12.5, 12.54])
    assert extents[10, 4:].tolist() == pytest.approx([12.9, 12.94])
    assert extents[-1, 4:].tolist() == pytest.approx([13.7, 13.735])
    items = clip(FRAMES[:4], [10.0, 11.0, 12.0, 13.0], noise_audio(4.0), span=(10.0, 14.0))
    found = encode_items(encoder, items)[0]
    is_visual = found.kind[0] == VISUAL
    visual, audio = found.extents[0][is_visual], found.extents[0][~is_visual]
    assert (found.kind[0][~is_visual] == AUDIO).all() and len(audio) == 100 and len(visual) == 12
    assert visual[1, :4].tolist() == pytest.approx([1 / 3, 0, 2 / 3, 0.5])
    assert visual[::6, 4:].tolist() == [[10, 12], [12, 14]]
    # Chunks of two seconds alternate, and times increase within each kind.
    assert found.kind[0].tolist() == ([VISUAL] * 6 + [AUDIO] * 50) * 2
    assert_close(audio[:, 4], 10 + 0.04 * torch.arange(100), 1e-4)


def test_audio_rate_of_the_agc_paper(build, reference):
    """Samples at 4 kHz that the feature extractor takes for 16 kHz have a quarter of the tokens."""
    encoder = build(output_tokens="media", audio_rate=4000)
    samples = noise_audio(4.0)
    found = encode_items(encoder, clip(samples=samples, start=12.5))[0]
    resampled = soxr.resample(samples, RATE, 4000).clip(-1, 1)
    ids, output = reference.audio(resampled)
    expected = output.hidden_states[-1][0, media_kinds(reference, ids) == AUDIO]
    assert_close(found.vectors[0], unit(expected), 1e-4)
    extents = found.extents[0]
    assert len(extents) == 25 and extents[0, 4:].tolist() == pytest.approx([12.5, 12.66])
    assert extents[-1, 4:].tolist() == pytest.approx([16.34, 16.5])


def test_positions_follow_timestamps(build):
    """Irregular frames, audio that starts later, and a frame displayed before the window."""
    reader = build(document_prompt="{content}")._reader
    samples = noise_audio(2.0)

    def times(*item, **more):
        (inputs,) = reader.read_item(clip(*item, **more).to_pylist()[0])
        ids, position = inputs.sequence["input_ids"], inputs.sequence["position_ids"][:, 0]
        pads = [reader.settings.video_token_id, reader.settings.audio_token_id]
        return [(position[ids == pad] - 1).tolist() for pad in pads]

    video, audio = times(FRAMES[:6], [1.0, 1.5, 1.6, 2.0, 4.0, 5.0], samples, start=1.4)
    assert video[::6] == [0, 15, 75] and audio == list(range(10, 60))
    video, audio = times(FRAMES[:2], [25.0, 31.0], samples, start=30.0, span=(30.0, 32.0))
    assert video[::6] == [0] and audio == list(range(50))
    video, _ = times(FRAMES[:4], [0.9, 2.7, 4.5, 6.3])
    assert video[::6] == [0, 90]


@pytest.mark.parametrize("length", [479, 480, 481, 640, 1281, 16_000, 31_999, 32_161])
def test_number_of_audio_tokens(encoder, reference, length):
    samples = noise_audio(length / RATE)
    expected, media = reference.audio_inputs(samples)
    audio = encoder._reader.read_audio({"audio": audio_row(samples)})
    columns = int(media["feature_attention_mask"].sum())
    assert num_audio_tokens(columns) == expected
    assert audio is None if not expected else len(audio.columns) == columns
    if audio:  # the encoder pads less than the processor
        mask = media["feature_attention_mask"][0].bool()
        assert_close(audio.columns, media["input_features"][0].T[mask], 1e-6)


def audio_row(samples, rate=RATE):
    return {"start": 0.0, "sample_rate": rate, "samples": samples.tobytes()}


def test_sample_rates_and_lengths(build, reference):
    encoder = build(output_tokens="media")
    high = noise_audio(1.0, 44_100)
    found = encode_items(encoder, clip(samples=high, rate=44_100))[0]
    same = encode_items(encoder, clip(samples=soxr.resample(high, 44_100, RATE).clip(-1, 1)))[0]
    assert_close(found.vectors, same.vectors)
    long = noise_audio(8.0)  # the window of the checkpoint is 6 s
    found = encode_items(encoder, clip(samples=long))[0]
    ids, output = reference.audio(long)
    rows = media_kinds(reference, ids) == AUDIO
    assert_close(found.vectors[0], unit(output.hidden_states[-1][0, rows]))
    assert found.extents[0, -1, 5] == pytest.approx(6.0)
    truncated = encode_items(build(output_tokens="media", max_audio_seconds=2), clip(samples=long))[
        0
    ]
    assert truncated.lengths.tolist() == [50]
    for short in (noise_audio(0.0), noise_audio(0.01)):
        assert encode_items(encoder, clip(samples=short))[0].lengths.tolist() == [0]


@pytest.mark.parametrize("heads", ["mean", "max"])
def test_attention_matches_eager_attention(encoder, cases, reference, heads):
    statistics = ("column_sums", "eos_row", "pooled_row")
    taps = [Tap(name, heads, str(layer)) for name in statistics for layer in range(3)]
    for number in (0, 3, 5):  # audio, video with audio, image
        item, (ids, output) = cases[0][number], cases[1][number]
        batch = encode_items(encoder, item, taps)[0]
        for tap in taps:
            attention_HNN = output.attentions[int(tap.layers)][0]
            is_media = media_kinds(reference, ids) >= 0
            rows = is_media if tap.statistic == "column_sums" else torch.tensor([-1])
            head_values = attention_HNN[:, rows].sum(dim=1)
            head_values = head_values.mean(dim=0) if heads == "mean" else head_values.amax(dim=0)
            assert_close(batch.taps[tap.name][batch.mask], head_values[is_kept(encoder, ids)])


def test_keep(build):
    item = clip(FRAMES[:2], [0.0, 1.0], noise_audio(0.1))
    kinds = {}
    for keep in ("paper", "code", "media"):
        encoder = build(output_tokens=keep, document_prompt=SHORT, query_prompt=SHORT)
        kinds[keep] = encode_items(encoder, item)[0].kind[0].tolist()
        text = encoder.encode_queries(["lift"])
        assert TEXT in text.tokens.kind[0] and PROMPT in text.tokens.kind[0]
    media = [VISUAL] * 6 + [AUDIO] * 2
    s, p = SPECIAL, PROMPT
    assert kinds["paper"] == [s, p, s, s, *media, s, s, p]
    assert kinds["code"] == [p, *media, p]
    assert kinds["media"] == media


def test_bfloat16_and_bidirectional(build, cases):
    """Smoke test; `test_qwen_vl` verifies the numbers."""
    items = pa.concat_tables(cases[0], promote_options="default")
    whole = encode_items(build(), items)
    for row, batch in encode_items(build(dtype="bfloat16"), items).items():
        assert (batch.pooled * whole[row].pooled).sum() > 0.99
    found = encode_items(build(bidirectional=True), items)
    assert not torch.allclose(found[0].pooled, whole[0].pooled, atol=1e-3)


def test_documents(build):
    audio, image = audio_row(noise_audio(0.2)), png(noise(16, 16))
    items = pa.table(
        {
            "item_id": ["sound", "both", "text", "blank", "nothing"],
            "image": [None, image, None, None, None],
            "audio": pa.array([audio, audio, None, None, None], AUDIO_TYPE),
            "text": ["heat transfer", "lift", "lift", " ", None],
        }
    )
    lengths = {}
    for documents in ("media", "text", "both"):
        encoder = build(documents=documents, document_prompt="{content}<|im_end|>")
        found = encode_items(encoder, items)
        lengths[documents] = [int(found[row].lengths[0]) for row in range(5)]
        if documents == "both":
            mask = found[0].mask[0]
            kind, spans = found[0].kind[0][mask], found[0].spans[0][mask]
            assert kind[:5].tolist() == [AUDIO] * 5 and (kind[5:] == TEXT).all()
            pieces = ["heat transfer"[a:b] for a, b in spans[5:].tolist()]
            assert "".join(pieces) == "heat transfer"
            assert found[0].extents[0][mask][5:].isnan().all()
    heat, lift = lengths["text"][:2]
    assert lengths["text"] == [heat, lift, lift, 0, 0]
    assert lengths["media"] == [5, 4 + 5, lift, 0, 0]
    assert lengths["both"] == [5 + heat, 4 + 5 + lift, lift, 0, 0]
    assert build(documents="text").supported_inputs(build(documents="text").spec) == ("text",)
    assert set(encoder.supported_inputs(encoder.spec)) == {"text", "image", "frames", "audio"}


def test_queries_match_transformers(encoder, reference):
    found = encoder.encode_queries(TEXTS)
    for row, text in enumerate(TEXTS):
        ids, output = reference(text, prompt=QUERY_PROMPT)
        states = unit(output.hidden_states[-1][0])
        assert_close(
            found.tokens.vectors[row][found.tokens.mask[row]], states[is_kept(encoder, ids)]
        )
        assert_close(found.tokens.pooled[row], states[-1])
        assert len(found.token_texts[row]) == is_kept(encoder, ids).sum()
    images, _ = make_images((20, 30), (8, 8))
    found = encoder.encode_media([{"image": png(image)} for image in images])
    for row, image in enumerate(images):
        ids, output = reference.image(image, prompt=QUERY_PROMPT)
        states = unit(output.hidden_states[-1][0])
        assert_close(
            found.tokens.vectors[row][found.tokens.mask[row]], states[is_kept(encoder, ids)]
        )
    query = {"text": "but in red", "image": png(images[0])}
    composed = encoder.encode_media([query]).tokens
    assert VISUAL not in composed.kind and TEXT in composed.kind


def test_queries_of_audio_and_videos_are_encoded_like_items(build):
    """With the prompt of items, a query of the same content has the same vectors."""
    encoder = build(query_prompt=DOCUMENT_PROMPT)
    frames = [noise(24, 16, seed) for seed in range(4)]
    audio = noise_audio(1.0)
    for items in (clip(samples=audio), clip(frames, range(4)), clip(frames, range(4), audio)):
        (query,) = items.to_pylist()
        found = encode_items(encoder, items)[0]
        queries = encoder.encode_media([query])
        assert_close(queries.tokens.vectors, found.vectors)
        assert_close(queries.tokens.pooled, found.pooled)
        assert len(queries.token_texts[0]) == found.lengths[0]
    named = encoder.encode_media([clip(samples=audio).to_pylist()[0]]).token_texts[0]
    assert "[0.04 s]" in named
    composed = encoder.encode_media([{"text": "but louder", **query}]).tokens
    assert TEXT in composed.kind and AUDIO not in composed.kind and VISUAL not in composed.kind
    with pytest.raises(SpecError, match="query must be a readable input, .* which is too short"):
        encoder.encode_media(clip(samples=noise_audio(0.01)).to_pylist())


def test_subsamples_long_videos(build):
    prompt = "{content}<|im_end|>"
    items = clip(
        [noise(24, 16, seed) for seed in range(9)], np.arange(9.0), noise_audio(2.0), span=(0, 9)
    )
    whole = encode_items(build(output_tokens="media", document_prompt=prompt), items)[0]
    assert whole.lengths.tolist() == [6 * 5 + 50]
    for given in ({"max_item_tokens": 6 * 3 + 50 + 5}, {"max_frames": 6}):
        found = encode_items(build(output_tokens="media", document_prompt=prompt, **given), items)[
            0
        ]
        visual = found.extents[0][found.kind[0] == VISUAL]
        # The six frames nearest to 0, 1.6, 3.2, 4.8, 6.4 and 8 s, and the whole audio.
        assert visual[::6, 4:].tolist() == [[0, 3], [3, 6], [6, 9]]
        assert (found.kind[0] == AUDIO).sum() == 50
    with pytest.raises(Unreadable, match="too many tokens: 61 tokens, at most 60"):
        encode_items(build(document_prompt=prompt, max_item_tokens=60), items)
    with pytest.raises(Unreadable, match="too many tokens: 53 tokens, at most 52"):
        encode_items(
            build(document_prompt=prompt, max_item_tokens=52), clip(samples=noise_audio(2.0))
        )
    sizes = clip([noise(24, 16), noise(16, 24)], [0.0, 1.0], noise_audio(1.0))
    with pytest.raises(Unreadable, match="several sizes"):
        encode_items(build(), sizes)


def test_settings_of_the_video_processor(build, checkpoint, reference, tmp_path):
    """The size of videos in a checkpoint that differs from that of images."""
    folder = shutil.copytree(checkpoint("qwen2_5_omni"), tmp_path / "model")
    size = {"shortest_edge": 64, "longest_edge": 6 * 64}
    (folder / "video_preprocessor_config.json").write_text(json.dumps({"size": size}))
    frames = [noise(40, 30, seed) for seed in range(4)]
    ids, expected = reference.video(frames, 0.5, SizeDict(**size))
    found, plain = build(model=str(folder)), build()
    batch = encode_items(found, clip(frames, np.arange(4) * 0.5))[0]
    assert_close(batch.vectors[0], unit(expected.hidden_states[-1][0, is_kept(found, ids)]))
    assert_close(batch.pooled[0], unit(expected.hidden_states[-1][0, -1]))
    assert encode_items(plain, clip(frames, np.arange(4) * 0.5))[0].lengths > batch.lengths
    image = [{"image": png(frames[0])}]
    assert_close(found.encode_media(image).tokens.pooled, plain.encode_media(image).tokens.pooled)
    assert found.fingerprint != plain.fingerprint


def test_loads_published_and_bare_checkpoints(build, checkpoint, reference, tmp_path):
    """The full published model with its talker, the bare thinker, and a single processor file."""
    folder = checkpoint("qwen2_5_omni")
    expected = build().encode_queries(TEXTS).tokens
    item = clip(FRAMES[:2], [0.0, 1.0], noise_audio(1.0))
    expected_item = encode_items(build(), item)[0]
    whole, bare = tmp_path / "whole", tmp_path / "bare"
    shutil.copytree(folder, whole)
    weights = load_file(f"{folder}/model.safetensors")
    named = {f"thinker.{name}": tensor for name, tensor in weights.items()}
    named["talker.model.norm.weight"] = torch.ones(4)
    save_file(named, whole / "model.safetensors", {"format": "pt"})
    thinker = json.loads((whole / "config.json").read_text())
    settings = {"model_type": "qwen2_5_omni", "thinker_config": thinker}
    (whole / "config.json").write_text(json.dumps(settings))
    shutil.copytree(folder, bare)
    reference.model.model.save_pretrained(bare)
    files = json.loads((bare / "preprocessor_config.json").read_text())
    (bare / "preprocessor_config.json").unlink()
    nested = {"image_processor": files, "feature_extractor": files}
    (bare / "processor_config.json").write_text(json.dumps(nested))
    for form in (whole, bare):
        encoder = build(model=str(form))
        type(encoder).check(encoder.spec)
        assert_close(encoder.encode_queries(TEXTS).tokens.vectors, expected.vectors)
        assert_close(encode_items(encoder, item)[0].vectors, expected_item.vectors)
        assert not any("talker" in name for name, _ in encoder.model.named_parameters())
    incomplete = {name: tensor for name, tensor in named.items() if "layers.1.mlp" not in name}
    save_file(incomplete, whole / "model.safetensors", {"format": "pt"})
    with pytest.raises(SpecError, match=r"has no weights .*layers.1.mlp"):
        build(model=str(whole))


def check(**fields):
    ENCODERS.load("qwen_omni").check(ENCODERS.resolve({"name": "qwen_omni", **fields}))


def test_check_rejects_invalid_checkpoints(checkpoint, tmp_path):
    folder = checkpoint("qwen2_5_omni")
    check(model=folder, layer=-4)
    with pytest.raises(SpecError, match=r"-4 to 3 \(the model has 3 layers\)"):
        check(model=folder, layer=4)
    with pytest.raises(SpecError, match="is a qwen2_5_vl"):
        check(model=checkpoint("qwen2_5_vl"))
    with pytest.raises(SpecError, match="max_audio_seconds"):
        check(model=folder, max_audio_seconds=0)
    shutil.copytree(folder, tmp_path / "words")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(f"{checkpoint('qwen2_5_vl')}/{name}", tmp_path / "words")
    with pytest.raises(SpecError, match=r"has no token <\|vision_bos\|>"):
        check(model=str(tmp_path / "words"))
    for name, message in {
        "preprocessor_config.json": "Qwen2VLImageProcessorPil",
        "model.safetensors": "safetensors",
    }.items():
        copy = tmp_path / name.partition(".")[0]
        shutil.copytree(folder, copy)
        (copy / name).unlink()
        with pytest.raises(SpecError, match=message) as error:
            check(model=str(copy))
        assert error.value.field == "model" and "\n" not in str(error.value)


def test_fingerprint(build):
    encoder = build()
    for change in (
        {"max_batch_tokens": 64},
        {"documents": "both"},
        {"interleave": False},
        {"max_audio_seconds": 3},
        {"max_frames": 3},
    ):
        assert build(**change).fingerprint == encoder.fingerprint
    for change in ({"layer": 2}, {"output_tokens": "paper"}, {"query_prompt": "{content}"}):
        assert build(**change).fingerprint != encoder.fingerprint
