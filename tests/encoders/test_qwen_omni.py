"""The thinker equals transformers' own forward pass on input that its processor's rules make."""

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
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from pipeline.config import SpecError
from pipeline.decoding import Unreadable
from pipeline.encoders.qwen_omni import num_audio_tokens
from pipeline.encoders.qwen_spec import DOCUMENT_PROMPT, QUERY_PROMPT
from pipeline.registry import ENCODERS
from pipeline.schema import AUDIO as SOUND
from pipeline.schema import FRAME, SPAN
from pipeline.taps import Tap
from pipeline.tokens import AUDIO, PROMPT, SPECIAL, TEXT, VISUAL
from tests.encoders.batches import close, of_items, unit
from tests.pictures import noise, pictures, png

RATE = 16_000
TEXTS = ["heat transfer in a cone", "lift", "Überschall 超音速 🙂 at Mach 3"]
SHORT = "<|im_start|>a{content}b<|im_end|>"
PADS = {"<|IMAGE|>": VISUAL, "<|VIDEO|>": VISUAL, "<|AUDIO|>": AUDIO}


def hiss(seconds: float, rate: int = RATE, seed: int = 0) -> np.ndarray:
    """Sound of which every moment is another."""
    generator = np.random.default_rng([seed, rate])
    return (generator.normal(size=round(seconds * rate)) * 0.2).astype(np.float32).clip(-1, 1)


class Reference:
    """The model of the library as it is, on one sequence at a time, without padding."""

    def __init__(self, folder: str):
        load = Qwen2_5OmniThinkerForConditionalGeneration.from_pretrained
        self.model = load(folder, attn_implementation="eager").eval()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.images = Qwen2VLImageProcessorPil.from_pretrained(folder)
        self.sounds = WhisperFeatureExtractor.from_pretrained(folder)

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

    def hear(self, samples: np.ndarray) -> tuple[int, dict[str, torch.Tensor]]:
        """What the processor makes of sound: tokens, and what the audio tower reads."""
        read = self.sounds(
            [samples], sampling_rate=RATE, padding="max_length", return_tensors="pt",
            return_attention_mask=True,
        )  # fmt: skip
        mask = read["attention_mask"]
        length = (int(mask.sum()) - 1) // 2 + 1
        number = (length - 2) // 2 + 1
        return number, {
            "input_features": read["input_features"],
            "feature_attention_mask": mask,
        }

    def see(self, frames) -> tuple[int, dict[str, torch.Tensor]]:
        """What the processor makes of a video: tokens of a pair, and what the tower reads."""
        frames = [*frames, *[frames[-1]] * (len(frames) % 2)]
        own, pixels = self.images, []
        for frame in frames:
            array = np.asarray(frame, dtype=np.float32).transpose(2, 0, 1)
            array = own.resize(array, own.size, own.resample, factor=8)
            array = own.rescale(array, own.rescale_factor)
            pixels.append(own.normalize(array, own.image_mean, own.image_std))
        video = torch.tensor(np.stack(pixels))
        pairs, (rows, columns) = len(frames) // 2, (side // 4 for side in video.shape[2:])
        patches = video.view(pairs, 2, 3, rows // 2, 2, 4, columns // 2, 2, 4)
        patches = patches.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(pairs * rows * columns, -1)
        return rows * columns // 4, {
            "pixel_values_videos": patches,
            "video_grid_thw": torch.tensor([[pairs, rows, columns]]),
        }

    def picture(self, image, **more):
        read = self.images([image], return_tensors="pt")
        pads = "<|IMAGE|>" * (int(read["image_grid_thw"].prod()) // 4)
        return self(f"<|vision_bos|>{pads}<|vision_eos|>", **more, **read)

    def sound(self, samples, **more):
        number, media = self.hear(samples)
        return self(f"<|audio_bos|>{'<|AUDIO|>' * number}<|audio_eos|>", **more, **media)

    def video(self, frames, apart: float, **more):
        pads, media = self.see(frames)
        pads *= int(media["video_grid_thw"][0, 0])
        media["video_second_per_grid"] = torch.tensor([2 * apart])
        return self(f"<|vision_bos|>{'<|VIDEO|>' * pads}<|vision_eos|>", **more, **media)

    def both(self, frames, apart: float, samples, layout, **more):
        """A video with its sound; `layout`: in turn, pairs of frames and tokens of sound."""
        pads, seen = self.see(frames)
        number, heard = self.hear(samples)
        assert sum(layout[1::2]) == number and sum(layout[::2]) == seen["video_grid_thw"][0, 0]
        content = "".join(
            "<|AUDIO|>" * many if turn % 2 else "<|VIDEO|>" * (many * pads)
            for turn, many in enumerate(layout)
        )
        return self(
            f"<|vision_bos|><|audio_bos|>{content}<|audio_eos|><|vision_eos|>",
            use_audio_in_video=True,
            video_second_per_grid=torch.tensor([2 * apart]),
            **more,
            **seen,
            **heard,
        )


def clip(frames=(), seconds=(), samples=None, start=None, rate=RATE, span=None, **more):
    """An item of frames and sound."""
    rows = [
        {"index": i, "seconds": s, "height": f.height, "width": f.width, "pixels": f.tobytes()}
        for i, (f, s) in enumerate(zip(frames, seconds, strict=True))
    ]
    heard = None
    if samples is not None:
        begin = start if start is not None else (seconds[0] if len(seconds) else 0.0)
        heard = {"start": begin, "sample_rate": rate, "samples": samples.tobytes()}
    place = span and {"unit": "seconds", "start": span[0], "end": span[1]}
    columns = {
        "frames": pa.array([rows or None], pa.list_(FRAME)),
        "audio": pa.array([heard], SOUND),
        "span": pa.array([place], SPAN),
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


#: Two frames a second and a bit more than five seconds of sound: 2 s, 2 s and the rest.
FRAMES = [noise(24, 16, seed) for seed in range(10)]
LAYOUT = [2, 50, 2, 50, 1, 30]


@pytest.fixture(scope="module")
def cases(reference):
    """Items, and what the library makes of each: ids and output."""
    image, samples, long = noise(50, 60), hiss(1.234, seed=1), hiss(5.2, seed=2)
    items = [
        clip(samples=samples),
        clip(FRAMES[:6], np.arange(6) * 0.4 + 7),
        clip(FRAMES, np.arange(10) * 0.5, long),
        clip(FRAMES[:3], [3.0, 4.0, 5.0], hiss(0.5)),
        clip(FRAMES[:2], [0.0, 1.0], hiss(0.05)),  # less far than the frame's columns
        pa.table({"item_id": ["image"], "image": [png(image)]}),
        pa.table({"item_id": ["text"], "text": TEXTS[:1]}),
    ]
    expected = [
        reference.sound(samples),
        reference.video(FRAMES[:6], 0.4),
        reference.both(FRAMES, 0.5, long, LAYOUT),
        reference.both(FRAMES[:3], 1.0, hiss(0.5), [1, 12, 1]),
        reference.both(FRAMES[:2], 1.0, hiss(0.05), [1, 1]),
        reference.picture(image),
        reference(TEXTS[0]),
    ]
    return items, expected


def kept(encoder, ids):
    return ~torch.isin(ids, torch.tensor(sorted(encoder._read_by.special)))


def kinds_of(reference, ids):
    """The kinds of media by their pads; 0 for all else is not asked for."""
    numbers = {reference.tokenizer.convert_tokens_to_ids(name): kind for name, kind in PADS.items()}
    return torch.tensor([numbers.get(number, -1) for number in ids.tolist()])


def test_states_are_those_of_the_model(encoder, build, cases):
    for layer in (-1, 0, 2):
        own = encoder if layer == -1 else build(layer=layer, keep="paper")
        for item, (ids, output) in zip(*cases, strict=True):
            found = of_items(own, item)[0]
            states = unit(output.hidden_states[layer][0])
            rows = kept(encoder, ids) if layer == -1 else torch.arange(len(ids)) < len(ids) - 1
            close(found.vectors[0], states[rows])
            close(found.pooled[0], unit(output.hidden_states[-1][0, -1]))


def test_mixed_batches_are_padded(build, cases, reference):
    items = pa.concat_tables(cases[0], promote_options="default")
    encoder = build(max_batch_tokens=100_000)
    for side in ("left", "right"):
        encoder.padding_side = side
        ((rows, batch),) = encoder.encode(items)
        for i, row in enumerate(rows):
            ids, output = cases[1][row]
            own = batch.vectors[i][batch.mask[i]]
            close(own, unit(output.hidden_states[-1][0, kept(encoder, ids)]))
            kinds = kinds_of(reference, ids)[kept(encoder, ids)]
            is_media = kinds >= 0
            assert torch.equal(batch.kind[i][batch.mask[i]][is_media].long(), kinds[is_media])


def test_positions_are_those_of_the_model(encoder, cases, reference):
    for item, (ids, _) in zip(*cases, strict=True):
        row = item.to_pylist()[0]
        (read,) = encoder._read_by.item(row)
        assert torch.equal(read.sequence["input_ids"], ids)
        frames = row.get("frames") or []
        times = {}
        if frames:
            apart = frames[1]["seconds"] - frames[0]["seconds"]
            _, media = reference.see(FRAMES[: len(frames)])
            times = {
                "video_grid_thw": media["video_grid_thw"],
                "second_per_grids": torch.tensor([2 * apart]),
            }
        if row.get("image"):
            times["image_grid_thw"] = read.media["image_grid_thw"]
        if row.get("audio"):
            times["audio_seqlens"] = read.media["num_columns"]
        positions, _ = reference.model.get_rope_index(
            ids[None],
            attention_mask=torch.ones_like(ids[None]),
            use_audio_in_video=bool(frames and row.get("audio")),
            **times,
        )
        assert torch.equal(read.sequence["position_ids"].T, positions[:, 0])


@pytest.mark.parametrize("apart", [0.1, 0.28, 1.0, 2.0, 5.0])
def test_frames_far_apart_and_close_together(build, reference, apart):
    """Of chunks between which there is more than one token of a grid: the model's own rule."""
    samples = hiss(5.0)
    seconds = 30 + apart * np.arange(6)
    encoder = build(keep="paper")
    (read,) = encoder._read_by.item(clip(FRAMES[:6], seconds, samples).to_pylist()[0])
    pads, seen = reference.see(FRAMES[:6])
    ids = read.sequence["input_ids"]
    positions, _ = reference.model.get_rope_index(
        ids[None],
        attention_mask=torch.ones_like(ids[None]),
        video_grid_thw=seen["video_grid_thw"],
        use_audio_in_video=True,
        audio_seqlens=torch.tensor([500]),
        second_per_grids=torch.tensor([2 * apart]),
    )
    assert torch.equal(read.sequence["position_ids"].T, positions[:, 0])
    # What the processor writes: by the numbers of its `replace_video_with_audio_token`.
    video = np.repeat(np.arange(3), pads) * round(2 * apart * 25, 6)
    chunk, runs = 1, [[], []]
    for own, numbers in zip(runs, (video, np.arange(125)), strict=True):
        start, chunk = 0, 1
        for i, number in enumerate(numbers):
            if number >= chunk * 50:
                own.append(i - start)
                start, chunk = i, chunk + 1
        own.append(len(numbers) - start)
    layout = []
    for j in range(max(map(len, runs))):
        for own, kind in zip(runs, (VISUAL, AUDIO), strict=True):
            layout += [kind] * (own[j] if j < len(own) else 0)
    kinds = kinds_of(reference, ids)
    assert kinds[kinds >= 0].tolist() == layout


def test_sound_behind_the_frames(build, reference):
    samples = hiss(1.0)
    encoder = build(interleave=False)
    found = of_items(encoder, clip(FRAMES[:4], [0.0, 1.0, 2.0, 3.0], samples))[0]
    pads, seen = reference.see(FRAMES[:4])
    number, heard = reference.hear(samples)
    ids, output = reference(
        f"<|vision_bos|>{'<|VIDEO|>' * 2 * pads}<|vision_eos|>"
        f"<|audio_bos|>{'<|AUDIO|>' * number}<|audio_eos|>",
        video_second_per_grid=torch.tensor([2.0]),
        **seen,
        **heard,
    )
    close(found.vectors[0], unit(output.hidden_states[-1][0, kept(encoder, ids)]))
    kinds = found.kind[0][found.kind[0] < TEXT].tolist()
    assert kinds == [VISUAL] * 2 * pads + [AUDIO] * number


def test_times_and_boxes(build):
    encoder = build(keep="media")
    samples = hiss(1.235)  # 124 columns: 31 tokens, the last of which ends with the sound
    found = of_items(encoder, clip(samples=samples, start=12.5))[0]
    extents = found.extents[0]
    assert len(extents) == 31 and extents[:, :4].isnan().all()
    assert extents[0, 4:].tolist() == pytest.approx([12.5, 12.54])
    assert extents[10, 4:].tolist() == pytest.approx([12.9, 12.94])
    assert extents[-1, 4:].tolist() == pytest.approx([13.7, 13.735])
    items = clip(FRAMES[:4], [10.0, 11.0, 12.0, 13.0], hiss(4.0), span=(10.0, 14.0))
    found = of_items(encoder, items)[0]
    is_seen = found.kind[0] == VISUAL
    seen, heard = found.extents[0][is_seen], found.extents[0][~is_seen]
    assert (found.kind[0][~is_seen] == AUDIO).all() and len(heard) == 100 and len(seen) == 12
    assert seen[1, :4].tolist() == pytest.approx([1 / 3, 0, 2 / 3, 0.5])
    assert seen[::6, 4:].tolist() == [[10, 12], [12, 14]]
    # Two seconds of each in turn, and time goes on within each.
    assert found.kind[0].tolist() == ([VISUAL] * 6 + [AUDIO] * 50) * 2
    close(heard[:, 4], 10 + 0.04 * torch.arange(100), 1e-4)


def test_positions_are_those_of_real_times(build):
    """Frames at uneven times, sound that begins later, a frame shown since before the window."""
    reader = build(document_prompt="{content}")._read_by
    samples = hiss(2.0)

    def times(*item, **more):
        (read,) = reader.item(clip(*item, **more).to_pylist()[0])
        ids, position = read.sequence["input_ids"], read.sequence["position_ids"][:, 0]
        pads = [reader.settings.video_token_id, reader.settings.audio_token_id]
        return [(position[ids == pad] - 1).tolist() for pad in pads]

    seen, heard = times(FRAMES[:6], [1.0, 1.5, 1.6, 2.0, 4.0, 5.0], samples, start=1.4)
    assert seen[::6] == [0, 15, 75] and heard == list(range(10, 60))
    seen, heard = times(FRAMES[:2], [25.0, 31.0], samples, start=30.0, span=(30.0, 32.0))
    assert seen[::6] == [0] and heard == list(range(50))
    seen, _ = times(FRAMES[:4], [0.9, 2.7, 4.5, 6.3])
    assert seen[::6] == [0, 90]


@pytest.mark.parametrize("length", [479, 480, 481, 640, 1281, 16_000, 31_999, 32_161])
def test_number_of_audio_tokens(encoder, reference, length):
    samples = hiss(length / RATE)
    expected, media = reference.hear(samples)
    sound = encoder._read_by.sound_of({"audio": row_of(samples)})
    columns = int(media["feature_attention_mask"].sum())
    assert num_audio_tokens(columns) == expected
    assert sound is None if not expected else len(sound.columns) == columns
    if sound:  # of a shorter padding than the processor's
        mask = media["feature_attention_mask"][0].bool()
        close(sound.columns, media["input_features"][0].T[mask], 1e-6)


def row_of(samples, rate=RATE):
    return {"start": 0.0, "sample_rate": rate, "samples": samples.tobytes()}


def test_rates_and_lengths_of_sound(build, reference):
    encoder = build(keep="media")
    high = hiss(1.0, 44_100)
    found = of_items(encoder, clip(samples=high, rate=44_100))[0]
    same = of_items(encoder, clip(samples=soxr.resample(high, 44_100, RATE).clip(-1, 1)))[0]
    close(found.vectors, same.vectors)
    long = hiss(8.0)  # the checkpoint hears 6 s
    found = of_items(encoder, clip(samples=long))[0]
    ids, output = reference.sound(long)
    rows = kinds_of(reference, ids) == AUDIO
    close(found.vectors[0], unit(output.hidden_states[-1][0, rows]))
    assert found.extents[0, -1, 5] == pytest.approx(6.0)
    short = of_items(build(keep="media", max_audio_seconds=2), clip(samples=long))[0]
    assert short.lengths.tolist() == [50]
    for nothing in (hiss(0.0), hiss(0.01)):
        assert of_items(encoder, clip(samples=nothing))[0].lengths.tolist() == [0]


@pytest.mark.parametrize("heads", ["mean", "max"])
def test_attention_is_that_of_eager_layers(encoder, cases, reference, heads):
    statistics = ("column_sums", "eos_row", "pooled_row")
    taps = [Tap(name, heads, str(layer)) for name in statistics for layer in range(3)]
    for number in (0, 3, 5):  # sound, both, a picture
        item, (ids, output) = cases[0][number], cases[1][number]
        batch = of_items(encoder, item, taps)[0]
        for tap in taps:
            attention_HNN = output.attentions[int(tap.layers)][0]
            is_media = kinds_of(reference, ids) >= 0
            rows = is_media if tap.statistic == "column_sums" else torch.tensor([-1])
            of_heads = attention_HNN[:, rows].sum(dim=1)
            of_heads = of_heads.mean(dim=0) if heads == "mean" else of_heads.amax(dim=0)
            close(batch.taps[tap.name][batch.mask], of_heads[kept(encoder, ids)])


def test_what_is_kept(build):
    item = clip(FRAMES[:2], [0.0, 1.0], hiss(0.1))
    kinds = {}
    for keep in ("paper", "code", "media"):
        encoder = build(keep=keep, document_prompt=SHORT, query_prompt=SHORT)
        kinds[keep] = of_items(encoder, item)[0].kind[0].tolist()
        text = encoder.encode_queries(["lift"])
        assert TEXT in text.tokens.kind[0] and PROMPT in text.tokens.kind[0]
    media = [VISUAL] * 6 + [AUDIO] * 2
    s, p = SPECIAL, PROMPT
    assert kinds["paper"] == [s, p, s, s, *media, s, s, p]
    assert kinds["code"] == [p, *media, p]
    assert kinds["media"] == media


def test_half_precision_and_open_attention(build, cases):
    """Of what other settings change, that they run: the numbers are those of `QwenVL`'s tests."""
    items = pa.concat_tables(cases[0], promote_options="default")
    whole = of_items(build(), items)
    for row, batch in of_items(build(dtype="bfloat16"), items).items():
        assert (batch.pooled * whole[row].pooled).sum() > 0.99
    found = of_items(build(bidirectional=True), items)
    assert not torch.allclose(found[0].pooled, whole[0].pooled, atol=1e-3)


def test_documents(build):
    sound, image = row_of(hiss(0.2)), png(noise(16, 16))
    items = pa.table(
        {
            "item_id": ["sound", "both", "text", "blank", "nothing"],
            "image": [None, image, None, None, None],
            "audio": pa.array([sound, sound, None, None, None], SOUND),
            "text": ["heat transfer", "lift", "lift", " ", None],
        }
    )
    lengths = {}
    for documents in ("media", "text", "both"):
        encoder = build(documents=documents, document_prompt="{content}<|im_end|>")
        found = of_items(encoder, items)
        lengths[documents] = [int(found[row].lengths[0]) for row in range(5)]
        if documents == "both":
            own = found[0].mask[0]
            kind, spans = found[0].kind[0][own], found[0].spans[0][own]
            assert kind[:5].tolist() == [AUDIO] * 5 and (kind[5:] == TEXT).all()
            pieces = ["heat transfer"[a:b] for a, b in spans[5:].tolist()]
            assert "".join(pieces) == "heat transfer"
            assert found[0].extents[0][own][5:].isnan().all()
    heat, lift = lengths["text"][:2]
    assert lengths["text"] == [heat, lift, lift, 0, 0]
    assert lengths["media"] == [5, 4 + 5, lift, 0, 0]
    assert lengths["both"] == [5 + heat, 4 + 5 + lift, lift, 0, 0]
    assert build(documents="text").wants(build(documents="text").spec) == ("text",)
    assert set(encoder.wants(encoder.spec)) == {"text", "image", "frames", "audio"}


def test_queries(encoder, reference):
    found = encoder.encode_queries(TEXTS)
    for row, text in enumerate(TEXTS):
        ids, output = reference(text, prompt=QUERY_PROMPT)
        states = unit(output.hidden_states[-1][0])
        close(found.tokens.vectors[row][found.tokens.mask[row]], states[kept(encoder, ids)])
        close(found.tokens.pooled[row], states[-1])
        assert len(found.token_texts[row]) == kept(encoder, ids).sum()
    images, _ = pictures((20, 30), (8, 8))
    found = encoder.encode_pictures([png(image) for image in images])
    for row, image in enumerate(images):
        ids, output = reference.picture(image, prompt=QUERY_PROMPT)
        states = unit(output.hidden_states[-1][0])
        close(found.tokens.vectors[row][found.tokens.mask[row]], states[kept(encoder, ids)])
    composed = encoder.encode_composed(["but in red"], [png(images[0])]).tokens
    assert VISUAL not in composed.kind and TEXT in composed.kind


def test_long_videos_are_thinned(build):
    prompt = "{content}<|im_end|>"
    items = clip([noise(24, 16, seed) for seed in range(9)], np.arange(9.0), hiss(2.0), span=(0, 9))
    whole = of_items(build(keep="media", document_prompt=prompt), items)[0]
    assert whole.lengths.tolist() == [6 * 5 + 50]
    for given in ({"max_item_tokens": 6 * 3 + 50 + 5}, {"max_frames": 6}):
        found = of_items(build(keep="media", document_prompt=prompt, **given), items)[0]
        seen = found.extents[0][found.kind[0] == VISUAL]
        # Of nine frames the six nearest to 0, 1.6, 3.2, 4.8, 6.4 and 8; all of the sound.
        assert seen[::6, 4:].tolist() == [[0, 3], [3, 6], [6, 9]]
        assert (found.kind[0] == AUDIO).sum() == 50
    with pytest.raises(Unreadable, match="too many tokens: 61 tokens, at most 60"):
        of_items(build(document_prompt=prompt, max_item_tokens=60), items)
    with pytest.raises(Unreadable, match="too many tokens: 53 tokens, at most 52"):
        of_items(build(document_prompt=prompt, max_item_tokens=52), clip(samples=hiss(2.0)))
    sizes = clip([noise(24, 16), noise(16, 24)], [0.0, 1.0], hiss(1.0))
    with pytest.raises(Unreadable, match="several sizes"):
        of_items(build(), sizes)


def test_other_forms_of_the_weights(build, checkpoint, reference, tmp_path):
    """As published, with the part that speaks; the bare thinker; files of one processor."""
    folder = checkpoint("qwen2_5_omni")
    expected = build().encode_queries(TEXTS).tokens
    item = clip(FRAMES[:2], [0.0, 1.0], hiss(1.0))
    of_item = of_items(build(), item)[0]
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
        close(encoder.encode_queries(TEXTS).tokens.vectors, expected.vectors)
        close(of_items(encoder, item)[0].vectors, of_item.vectors)
        assert not any("talker" in name for name, _ in encoder.model.named_parameters())
    lacking = {name: tensor for name, tensor in named.items() if "layers.1.mlp" not in name}
    save_file(lacking, whole / "model.safetensors", {"format": "pt"})
    with pytest.raises(SpecError, match=r"has no weights .*layers.1.mlp"):
        build(model=str(whole))


def check(**fields):
    ENCODERS.load("qwen_omni").check(ENCODERS.resolve({"name": "qwen_omni", **fields}))


def test_checkpoints_that_are_none(checkpoint, tmp_path):
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


def test_fingerprints(build):
    encoder = build()
    for change in (
        {"max_batch_tokens": 64},
        {"documents": "both"},
        {"interleave": False},
        {"max_audio_seconds": 3},
        {"max_frames": 3},
    ):
        assert build(**change).fingerprint == encoder.fingerprint
    for change in ({"layer": 2}, {"keep": "paper"}, {"query_prompt": "{content}"}):
        assert build(**change).fingerprint != encoder.fingerprint
