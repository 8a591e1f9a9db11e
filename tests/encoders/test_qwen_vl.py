"""Qwen-VL models, compared with the forward pass of transformers on single inputs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import (
    AutoTokenizer,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLForConditionalGeneration,
    Qwen3VLForConditionalGeneration,
)
from transformers.image_utils import SizeDict
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from pipeline.config import SpecError
from pipeline.data.decode import Unreadable
from pipeline.encoders.qwen_spec import CHAT, DOCUMENT_PROMPT, QUERY_PROMPT
from pipeline.encoders.qwen_vl import QwenVL
from pipeline.encoders.templates import fill_template
from pipeline.registry import ENCODERS
from pipeline.schema import FRAME, SPAN
from pipeline.taps import Tap
from pipeline.tokens import PROMPT, SPECIAL, TEXT, VISUAL
from tests.encoders.batches import assert_close, encode_items, unit
from tests.images import make_images, noise, png

CLASSES = {
    "qwen2_vl": Qwen2VLForConditionalGeneration,
    "qwen2_5_vl": Qwen2_5_VLForConditionalGeneration,
    "qwen3_vl": Qwen3VLForConditionalGeneration,
}
SIZES = [(50, 60), (100, 20), (8, 8), (33, 12)]
TEXTS = ["heat transfer in a cone", "lift", "Überschall 超音速 🙂 at Mach 3"]
START, END = "<|vision_start|>", "<|vision_end|>"


class Reference:
    """The transformers model, applied to one sequence at a time without padding."""

    def __init__(self, family: str, folder: str):
        self.family = family
        self.model = CLASSES[family].from_pretrained(folder, attn_implementation="eager").eval()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.images = Qwen2VLImageProcessorPil.from_pretrained(folder)

    @torch.no_grad()
    def __call__(self, text: str, **media):
        ids = self.tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
        types = torch.zeros_like(ids)
        types[ids == self.model.config.image_token_id] = 1
        types[ids == self.model.config.video_token_id] = 2
        output = self.model(
            input_ids=ids,
            mm_token_type_ids=types,
            output_hidden_states=True,
            output_attentions=True,
            **media,
        )
        return ids[0], output

    def image(self, *images, prompt: str = DOCUMENT_PROMPT, text: str = ""):
        inputs = self.images(list(images), return_tensors="pt")
        pads = [int(grid.prod()) // 4 for grid in inputs["image_grid_thw"]]
        vision = "".join(f"{START}{'<|image_pad|>' * number}{END}" for number in pads)
        return self(prompt.replace("{content}", vision + text), **inputs)

    def gme(self, text: str, image=None, size=None):
        """Returns the pooled vector as the forward pass of GME's own class computes it."""
        ids = self.tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
        model = self.model.model
        with torch.no_grad():
            embedded = model.get_input_embeddings()(ids)
            if image is not None:
                inputs = self.images([image], return_tensors="pt", **size or {})
                output = model.get_image_features(**inputs)
                embedded[ids == self.model.config.image_token_id] = torch.cat(output.pooler_output)
            states = model.language_model(inputs_embeds=embedded).last_hidden_state
        return unit(states[0])

    def video(self, frames, seconds, prompt: str = DOCUMENT_PROMPT, size=None):
        """Runs the model on a video; the processors of transformers need torchvision."""
        processor, frames = self.images, [*frames, *[frames[-1]] * (len(frames) % 2)]
        size = SizeDict(**size) if size else processor.size
        seconds = [*seconds, *[seconds[-1]] * (len(seconds) % 2)]
        pixels = []
        for frame in frames:
            array = np.asarray(frame, dtype=np.float32).transpose(2, 0, 1)
            array = processor.resize(array, size, processor.resample, factor=8)
            array = processor.rescale(array, processor.rescale_factor)
            pixels.append(processor.normalize(array, processor.image_mean, processor.image_std))
        video = torch.tensor(np.stack(pixels))
        pairs, (rows, columns) = len(frames) // 2, (side // 4 for side in video.shape[2:])
        patches = video.view(pairs, 2, 3, rows // 2, 2, 4, columns // 2, 2, 4)
        patches = patches.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(pairs * rows * columns, -1)
        media = {
            "pixel_values_videos": patches,
            "video_grid_thw": torch.tensor([[pairs, rows, columns]]),
        }
        pads = "<|video_pad|>" * (rows * columns // 4)
        vision = f"{START}{pads * pairs}{END}"
        if self.family == "qwen2_5_vl":
            media["second_per_grid_ts"] = torch.tensor([2 * (seconds[1] - seconds[0])])
        if self.family == "qwen3_vl":
            times = [
                (a + b) / 2 - seconds[0] for a, b in zip(seconds[::2], seconds[1::2], strict=True)
            ]
            vision = "".join(f"<{m:.1f} seconds>{START}{pads}{END}" for m in times)
        return self(prompt.replace("{content}", vision), **media)


def clip(frames, seconds, end: float, **more) -> pa.Table:
    """Returns a table with one video item."""
    rows = [
        {"index": i, "seconds": s, "height": f.height, "width": f.width, "pixels": f.tobytes()}
        for i, (f, s) in enumerate(zip(frames, seconds, strict=True))
    ]
    span = {"unit": "seconds", "start": seconds[0], "end": end}
    given = {name: [value] for name, value in more.items()}
    columns = {"frames": pa.array([rows], pa.list_(FRAME)), "span": pa.array([span], SPAN)}
    return pa.table({"item_id": ["clip"], **columns, **given})


@pytest.fixture(scope="module")
def build(checkpoint):
    def build(family="qwen3_vl", **fields):
        given = {"name": "qwen_vl", "model": checkpoint(family), "dtype": "float32"}
        return ENCODERS.build(ENCODERS.resolve({**given, **fields}))

    return build


@pytest.fixture(scope="module", params=CLASSES)
def family(request):
    return request.param


@pytest.fixture(scope="module")
def reference(checkpoint, family):
    return Reference(family, checkpoint(family))


@pytest.fixture(scope="module")
def encoder(build, family):
    return build(family)


@pytest.fixture(scope="module")
def mixed():
    """Images and texts of different sizes, and the items that contain them."""
    images, _ = make_images(*SIZES)
    values = [png(image) for image in images] + [None] * len(TEXTS)
    names = [f"item-{i}" for i in range(len(values))]
    texts = [None] * len(images) + TEXTS
    return images, pa.table({"item_id": names, "image": pa.array(values), "text": texts})


def test_states_match_transformers(encoder, build, family, reference, mixed):
    images, items = mixed
    for layer in (-1, 0, 2):
        current = encoder if layer == -1 else build(family, layer=layer, output_tokens="paper")
        found = encode_items(current, items)
        for row, image in enumerate([*images, *TEXTS]):
            if isinstance(image, str):
                ids, expected = reference(DOCUMENT_PROMPT.replace("{content}", image))
            else:
                ids, expected = reference.image(image)
            states = unit(expected.hidden_states[layer][0])
            special = torch.tensor(sorted(encoder._reader.special))
            keep = (
                ~torch.isin(ids, special) if layer == -1 else torch.arange(len(ids)) < len(ids) - 1
            )
            assert_close(found[row].vectors[0][found[row].mask[0]], states[keep])
            assert_close(found[row].pooled[0], unit(expected.hidden_states[-1][0, -1]))


@pytest.mark.parametrize(("layer", "pooled_layer"), [(-1, 1), (2, 2), (1, -1)])
def test_pooled_vector_of_a_layer(build, family, reference, mixed, layer, pooled_layer):
    """SMART, table 4: the pooled vector and the token vectors of any layers."""
    images, items = mixed
    encoder = build(family, layer=layer, pooled_layer=pooled_layer, output_tokens="paper")
    found = encode_items(encoder, items)
    for row, image in enumerate(images):
        ids, expected = reference.image(image)
        states = unit(expected.hidden_states[layer][0])[torch.arange(len(ids)) < len(ids) - 1]
        assert_close(found[row].vectors[0][found[row].mask[0]], states)
        assert_close(found[row].pooled[0], unit(expected.hidden_states[pooled_layer][0, -1]))
    default = build(family, layer=layer, output_tokens="paper")
    assert (encoder.fingerprint == default.fingerprint) == (pooled_layer == -1)


def test_padding_does_not_change_vectors(build, family, mixed):
    _, items = mixed
    encoder = build(family)
    alone = encode_items(build(family, max_batch_tokens=1), items)  # one item per batch
    texts = encoder.encode_queries(TEXTS).tokens
    for side in ("left", "right"):
        encoder.padding_side = side
        found = encode_items(encoder, items)
        for row, expected in alone.items():
            assert_close(found[row].pooled, expected.pooled)
            vectors = found[row].vectors[found[row].mask]
            assert_close(vectors, expected.vectors[expected.mask])
        again = encoder.encode_queries(TEXTS).tokens
        assert_close(again.vectors[again.mask], texts.vectors[texts.mask])


@pytest.mark.parametrize("heads", ["mean", "max"])
def test_attention_matches_eager_attention(encoder, reference, heads):
    images, items = make_images(*SIZES[:2])
    statistics = ("column_sums", "eos_row", "pooled_row")
    taps = [Tap(name, heads, str(layer)) for name in statistics for layer in range(3)]
    for row, batch in encode_items(encoder, items, taps).items():
        ids, expected = reference.image(images[row])
        is_visual = ids == reference.model.config.image_token_id
        keep = ~torch.isin(ids, torch.tensor(sorted(encoder._reader.special)))
        for tap in taps:
            attention_HNN = expected.attentions[int(tap.layers)][0]
            rows = is_visual if tap.statistic == "column_sums" else ids.new_tensor([-1])
            head_values = attention_HNN[:, rows].sum(dim=1)
            head_values = head_values.mean(dim=0) if heads == "mean" else head_values.amax(dim=0)
            assert_close(batch.taps[tap.name][batch.mask], head_values[keep])


@pytest.mark.parametrize("number", [4, 5, 1])
def test_videos_match_transformers(build, family, reference, number):
    encoder = build(family, preprocessing="transformers")
    frames = [noise(24, 16, seed) for seed in range(number)]
    seconds = [10.0 + 0.5 * i for i in range(number)]
    found = encode_items(encoder, clip(frames, seconds, 13.0))[0]
    times = seconds if number > 1 else [10.0, 10.0]
    ids, expected = reference.video(frames, times)
    keep = ~torch.isin(ids, torch.tensor(sorted(encoder._reader.special)))
    assert_close(found.vectors[0], unit(expected.hidden_states[-1][0, keep]))
    assert_close(found.pooled[0], unit(expected.hidden_states[-1][0, -1]))
    boxes = found.extents[0][found.kind[0] == VISUAL]
    assert len(boxes) == 6 * -(-number // 2)
    assert boxes[7 % len(boxes), :4].tolist() == pytest.approx([1 / 3, 0, 2 / 3, 0.5])
    ends = [*seconds[2::2], 13.0]
    assert boxes[::6, 4:].tolist() == [list(both) for both in zip(seconds[::2], ends, strict=True)]


def test_video_frames_as_images(build, family, reference):
    frames = [noise(24, 16, seed) for seed in range(3)]
    encoder = build(family, frames="images", output_tokens="visual")
    found = encode_items(encoder, clip(frames, [0.0, 1.0, 2.0], 4.0))[0]
    ids, expected = reference.image(*frames)
    keep = ids == reference.model.config.image_token_id
    assert_close(found.vectors[0], unit(expected.hidden_states[-1][0, keep]))
    assert found.extents[0, ::6, 4:].tolist() == [[0, 1], [1, 2], [2, 4]]


def test_mixed_batches(encoder, mixed):
    _, items = mixed
    frames = [noise(24, 16, seed) for seed in range(4)]
    video = clip(frames, [0.0, 1.0, 2.0, 3.0], 4.0)
    both = pa.concat_tables([items, video], promote_options="default")
    found, alone = encode_items(encoder, both), encode_items(encoder, video)[0]
    assert_close(found[len(items)].vectors[found[len(items)].mask], alone.vectors[0])
    expected = encode_items(encoder, items)
    for row in expected:
        assert_close(found[row].pooled, expected[row].pooled)


def test_subsamples_long_videos(build):
    frames = [noise(24, 16, seed) for seed in range(9)]
    items = clip(frames, [float(i) for i in range(9)], 9.0)
    prompt = "{content}<|im_end|>"
    whole = build("qwen2_vl", document_prompt=prompt, output_tokens="visual")
    assert encode_items(whole, items)[0].lengths.tolist() == [6 * 5]
    for given in ({"max_item_tokens": 6 * 3 + 3}, {"max_frames": 6}):
        encoder = build("qwen2_vl", document_prompt=prompt, output_tokens="visual", **given)
        found = encode_items(encoder, items)[0]
        # The six frames nearest to 0, 1.6, 3.2, 4.8, 6.4 and 8 s.
        assert found.extents[0, ::6, 4:].tolist() == [[0, 3], [3, 6], [6, 9]]
    single = build("qwen2_vl", document_prompt=prompt, output_tokens="visual", max_frames=2)
    assert encode_items(single, items)[0].extents[0, ::6, 4:].tolist() == [[0, 9]]
    separate = build("qwen2_vl", output_tokens="visual", max_frames=2, frames="images")
    assert encode_items(separate, items)[0].extents[0, ::6, 4:].tolist() == [[0, 8], [8, 9]]
    few = build("qwen2_vl", max_item_tokens=40, document_prompt="{content}", max_frames=1)
    assert (encode_items(few, items)[0].kind == VISUAL).sum() == 6
    with pytest.raises(Unreadable, match="too many tokens: 9 tokens, at most 8"):
        reader = build("qwen2_vl", document_prompt="{content}<|im_end|>", max_item_tokens=8)
        encode_items(reader, items)
    sizes = clip([noise(24, 16), noise(16, 24)], [0.0, 1.0], 2.0)
    with pytest.raises(Unreadable, match="several sizes"):
        encode_items(whole, sizes)


def test_records_frames_read_in_metadata(build):
    frames, seconds = [noise(24, 16, seed) for seed in range(9)], [float(i) for i in range(9)]
    before = '{"frames": "ü"}'
    for given, number in (
        ({}, None),
        ({"max_frames": 6}, 6),
        ({"max_frames": 7}, 7),
        ({"max_item_tokens": 6 * 3 + 3}, 6),
        ({"max_frames": 2, "frames": "images"}, 2),
        ({"frames": "images"}, None),
        ({"max_frames": 2, "documents": "text"}, None),
    ):
        encoder = build("qwen2_vl", document_prompt="{content}<|im_end|>", **given)
        items = clip(frames, seconds, 9.0, metadata=before)
        texts = pa.table({"item_id": ["text"], "text": ["lift"], "metadata": ["{}"]})
        both = pa.concat_tables([items, texts], promote_options="default")
        prepared = encoder.preprocessor(encoder.spec)(both)
        metadata, other = prepared["metadata"].to_pylist()
        assert other == "{}" and (metadata == before) == (number is None)
        assert json.loads(metadata) == {"frames": "ü"} | ({"frames_read": number} if number else {})
        without = encoder.preprocessor(encoder.spec)(both.drop_columns(["metadata"]))
        assert "metadata" not in without.column_names


def test_keep(build):
    images, items = make_images((16, 16))
    prompt = "<|im_start|>a{content}b<|im_end|>"
    kinds = {}
    for keep in ("paper", "code", "visual"):
        encoder = build(output_tokens=keep, document_prompt=prompt, query_prompt=prompt)
        batch = encode_items(encoder, items)[0]
        kinds[keep] = batch.kind[0].tolist()
        text = encoder.encode_queries(["<|im_end|>"])
        # Special tokens in texts are plain text; without an image "visual" equals "code".
        start = ["<|im_start|>"] if keep == "paper" else []
        assert "".join(text.token_texts[0]) == "".join([*start, "a<|im_end|>b"])
        assert (text.tokens.kind[0] == TEXT).sum() > 1
        assert VISUAL in encoder.encode_media([{"image": png(images[0])}]).tokens.kind
    v, s, p = VISUAL, SPECIAL, PROMPT
    assert kinds["paper"] == [s, p, s, v, v, v, v, s, p]
    assert kinds["code"] == [p, v, v, v, v, p]
    assert kinds["visual"] == [v] * 4


def test_pooled_vector_is_the_only_token_if_none_is_kept(build, reference):
    encoder = build(reference.family, output_tokens="paper", query_prompt="{content}", layer=1)
    found = encoder.encode_queries(["a", "lift"]).tokens
    assert found.kind[0, 0] == SPECIAL and found.lengths.tolist()[0] == 1
    assert_close(found.vectors[0, 0], found.pooled[0])
    _, expected = reference("lift")
    assert_close(found.vectors[1][found.mask[1]], unit(expected.hidden_states[1][0, :-1]))


def test_documents(build):
    image = png(noise(16, 16))
    items = pa.table(
        {
            "item_id": ["both", "text", "blank", "nothing"],
            "image": [image, None, None, None],
            "text": ["heat transfer", "lift", " ", None],
        }
    )
    lengths = {}
    for documents in ("images", "text", "both"):
        encoder = build(documents=documents, document_prompt="{content}<|im_end|>")
        assert encoder.supported_inputs(encoder.spec)[0] == "text"
        found = encode_items(encoder, items)
        lengths[documents] = [int(found[row].lengths[0]) for row in range(4)]
        if documents == "both":
            kind, spans = found[0].kind[0], found[0].spans[0]
            assert kind[:4].tolist() == [VISUAL] * 4 and (kind[4:] == TEXT).all()
            pieces = ["heat transfer"[a:b] for a, b in spans[4:].tolist()]
            assert "".join(pieces) == "heat transfer" and (spans[:4] == -1).all()
            assert found[0].extents[0, 1, :4].tolist() == [0.5, 0, 1, 0.5]
            assert found[0].extents[0, 4:].isnan().all()
    text, lift = lengths["text"][:2]
    assert lengths["images"] == [4, lift, 0, 0] and lengths["text"] == [text, lift, 0, 0]
    assert lengths["both"] == [4 + text, lift, 0, 0]


def test_composed_queries(build, reference):
    image, text = noise(20, 30), "but in red"
    ids, expected = reference.image(image, prompt=QUERY_PROMPT, text=text)
    states = unit(expected.hidden_states[-1][0])
    encoder = build(reference.family)
    is_text = ~torch.isin(ids, torch.tensor(sorted(encoder._reader.special)))
    masked = is_text & (ids != reference.model.config.image_token_id)
    for mask_composed, keep in ((True, masked), (False, is_text)):
        encoder = build(reference.family, mask_composed=mask_composed)
        query = {"text": text, "image": png(image)}
        found = encoder.encode_media([query, {"text": "x", "image": png(noise(8, 8))}])
        assert_close(found.tokens.vectors[0][found.tokens.mask[0]], states[keep])
        assert_close(found.tokens.pooled[0], states[-1])
        assert len(found.token_texts[0]) == keep.sum()
    visual = build(reference.family, output_tokens="visual").encode_media([query])
    assert_close(visual.tokens.vectors[0], states[masked])


def test_bidirectional(build, reference):
    encoder = build(reference.family, bidirectional=True, output_tokens="paper")
    image = noise(16, 16)
    ids, _ = reference.image(image, prompt=QUERY_PROMPT)
    # An explicit mask that allows attention between all positions.
    inputs = reference.images([image], return_tensors="pt")
    types = (ids == reference.model.config.image_token_id).long()[None]
    positions, _ = reference.model.model.get_rope_index(
        ids[None], mm_token_type_ids=types, image_grid_thw=inputs["image_grid_thw"]
    )
    with torch.no_grad():
        expected = reference.model.model(
            input_ids=ids[None],
            attention_mask=torch.zeros(1, 1, len(ids), len(ids)),
            position_ids=positions,
            mm_token_type_ids=types,
            **inputs,
        ).last_hidden_state[0]
    found = encoder.encode_media([{"image": png(image)}]).tokens
    assert_close(found.vectors[0], unit(expected[:-1]))
    first, second = (encoder.encode_queries([text]).tokens.vectors[0, 0] for text in TEXTS[:2])
    assert not torch.allclose(first, second)  # the first token attends to later ones
    causal = build(reference.family, output_tokens="paper")
    first, second = (causal.encode_queries([text]).tokens.vectors[0, 0] for text in TEXTS[:2])
    assert_close(first, second)


def test_loads_older_and_bare_weights(build, checkpoint, reference, tmp_path):
    folder = checkpoint(reference.family)
    reference.model.model.save_pretrained(tmp_path / "bare")
    shutil.copytree(folder, tmp_path / "new")
    whole = reference.model.state_dict()
    save_file(whole, tmp_path / "new" / "model.safetensors", {"format": "pt"})
    for name in ("tokenizer.json", "tokenizer_config.json", "preprocessor_config.json"):
        shutil.copy(f"{folder}/{name}", tmp_path / "bare")
    expected = build(reference.family).encode_queries(TEXTS).tokens
    for form in ("bare", "new"):
        found = build(model=str(tmp_path / form)).encode_queries(TEXTS).tokens
        assert_close(found.vectors, expected.vectors)
    weights = load_file(f"{folder}/model.safetensors")
    incomplete = {name: tensor for name, tensor in weights.items() if "layers.1.mlp" not in name}
    save_file(incomplete, tmp_path / "new" / "model.safetensors", {"format": "pt"})
    with pytest.raises(SpecError, match=r"has no weights .*layers.1.mlp"):
        build(model=str(tmp_path / "new"))


def test_device_map_returns_output_on_the_input_device(build):
    distributed = QwenVL(build().spec, device_map="auto")
    assert distributed.model._hf_hook.io_same_device
    expected = build().encode_queries(TEXTS).tokens.vectors
    assert_close(distributed.encode_queries(TEXTS).tokens.vectors, expected)


def test_custom_prompts(build, reference):
    prompt = "Find it: {content}\n"
    encoder = build(reference.family, query_prompt=prompt)
    found = encoder.encode_queries([" lift"])
    _, expected = reference(prompt.replace("{content}", " lift"))
    assert_close(found.tokens.vectors[0], unit(expected.hidden_states[-1][0]))
    assert "".join(found.token_texts[0]).endswith(" lift\n")
    assert_close(found.tokens.pooled[0], unit(expected.hidden_states[-1][0, -1]))
    for wrong in ("no place", "{content}{content}"):
        with pytest.raises(SpecError, match="query_prompt"):
            build(query_prompt=wrong)


def test_instruction_replaces_that_of_the_prompt(build, reference):
    instructed = build(reference.family).with_instruction("Find a page.")
    _, expected = reference(fill_template(CHAT, "Find a page.").replace("{content}", "lift"))
    found = instructed.encode_queries(["lift"]).tokens
    assert_close(found.pooled[0], unit(expected.hidden_states[-1][0, -1]))
    image, text = noise(20, 30), "but in red"
    prompt = "Do this: {instruction}\n{content}\n"
    slotted = build(reference.family, query_prompt=prompt).with_instruction("Find a page.")
    custom = build(reference.family, query_prompt="Do this: Find a page.\n{content}\n")
    for more in ({}, {"text": text}):
        query = {"image": png(image), **more}
        both = [encoder.encode_media([query]).tokens.pooled for encoder in (slotted, custom)]
        assert torch.equal(*both)
    assert build(reference.family).fingerprint == instructed.fingerprint


def test_tokens_appended_by_the_tokenizer(build, checkpoint, tmp_path):
    shutil.copytree(checkpoint("qwen3_vl"), tmp_path / "ending")
    file = tmp_path / "ending" / "tokenizer.json"
    fast_tokenizer = Tokenizer.from_file(str(file))
    token = ("<|endoftext|>", fast_tokenizer.token_to_id("<|endoftext|>"))
    fast_tokenizer.post_processor = TemplateProcessing(
        single="$A <|endoftext|>", special_tokens=[token]
    )
    fast_tokenizer.save(str(file))
    for prompt in (QUERY_PROMPT, QUERY_PROMPT + "<|endoftext|>"):
        found = build(model=str(tmp_path / "ending"), query_prompt=prompt).encode_queries(TEXTS)
        same = build(query_prompt=QUERY_PROMPT + "<|endoftext|>").encode_queries(TEXTS)
        assert_close(found.tokens.pooled, same.tokens.pooled)
        assert found.token_texts == same.token_texts


GME = (
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n{content}"
    "<|im_end|>\n<|im_start|>assistant\n<|endoftext|>"
)


@pytest.fixture
def edited(checkpoint, tmp_path):
    """Copies a checkpoint and changes its JSON files."""

    def edited(family, **files):
        folder = shutil.copytree(checkpoint(family), tmp_path / family, dirs_exist_ok=True)
        for name, values in files.items():
            path = folder / f"{name}.json"
            before = json.loads(path.read_text()) if path.exists() else {}
            path.write_text(json.dumps({**before, **values}))
        return str(folder)

    return edited


def test_gme(build, checkpoint, edited):
    """One-dimensional positions and two sizes, as in gme_inference.py of the checkpoint."""
    reference = Reference("qwen2_vl", checkpoint("qwen2_vl"))
    prompts = {"document_prompt": GME, "query_prompt": GME}
    # 4 to 16,384 tokens of 8 x 8 pixels, then the limits of the model.
    limits = {"min_pixels": 9 * 64, "max_pixels": 20 * 64}
    encoder = build("qwen2_vl", preprocessing="gme", output_tokens="paper", **prompts, **limits)
    size = {"size": {"shortest_edge": 9 * 64, "longest_edge": 20 * 64}}
    for image, first, pads in (
        (noise(51, 62), (48, 64), 3 * 5),  # widths and heights
        (noise(6, 20), (16, 32), 3 * 5),  # enlarged to 4 tokens, then to 9
        (noise(31, 28), (32, 32), 4 * 4),
    ):
        vision = f"{START}{'<|image_pad|>' * pads}{END}"
        text = GME.replace("{content}", vision)
        states = reference.gme(text, image.resize(first), size)
        found = encode_items(encoder, pa.table({"item_id": ["a"], "image": [png(image)]}))[0]
        assert_close(found.pooled[0], states[-1])
        assert_close(found.vectors[0], states[:-1])
    whole = build("qwen2_vl", preprocessing="gme", **prompts)
    assert whole._reader.images.size == {"shortest_edge": 256 * 64, "longest_edge": 1280 * 64}
    # The class of GME in config.json selects its preprocessing.
    folder = edited("qwen2_vl", config={"architectures": ["GmeQwen2VL"]})
    named = build(model=folder, output_tokens="paper", **prompts, **limits)
    query = {"image": png(image)}
    assert_close(named.encode_media([query]).tokens.pooled[0], states[-1])
    plain = build("qwen2_vl", output_tokens="paper", **prompts, **limits)
    assert (plain.encode_media([query]).tokens.pooled[0] - states[-1]).abs().max() > 1e-3
    assert plain.fingerprint != encoder.fingerprint


@pytest.mark.parametrize("positions", ["1d", "3d"])
def test_positions(build, reference, positions):
    """Positions in one dimension are those of a model without position ids."""
    prompt, image = "{content} drag<|im_end|>", noise(24, 16)
    encoder = build(
        reference.family, positions=positions, query_prompt=prompt, preprocessing="transformers"
    )
    queries = [{"image": png(each)} for each in (noise(40, 40), image)]
    found = encoder.encode_media(queries).tokens.pooled[1]
    inputs = reference.images([image], return_tensors="pt")
    vision = f"{START}{'<|image_pad|>' * 6}{END}"
    ids, expected = reference.image(image, prompt=prompt)
    if positions == "1d":
        types = (ids == reference.model.config.image_token_id).long()[None]
        with torch.no_grad():
            expected = reference.model.model(
                input_ids=ids[None],
                position_ids=torch.arange(len(ids)).expand(3, 1, -1),
                mm_token_type_ids=types,
                **inputs,
            )
        assert_close(found, unit(expected.last_hidden_state[0, -1]))
        if reference.family == "qwen2_vl":
            states = reference.gme(prompt.replace("{content}", vision), image)
            assert_close(found, states[-1])
    else:
        assert_close(found, unit(expected.hidden_states[-1][0, -1]))
    default = build(reference.family, query_prompt=prompt, preprocessing="transformers")
    assert (encoder.fingerprint == default.fingerprint) == (positions == "3d")


def test_vlm2vec(build, checkpoint):
    """A bare placeholder, and images smaller than a token in two by two tokens."""
    reference = Reference("qwen2_vl", checkpoint("qwen2_vl"))
    prompt = "{content} Understand the content of the provided document image."
    encoder = build("qwen2_vl", preprocessing="vlm2vec", document_prompt=prompt)
    for image, resized, pads in (
        (noise(24, 16), noise(24, 16), 6),
        (noise(6, 60), noise(6, 60).resize((16, 16)), 4),
    ):
        text = prompt.replace("{content}", "<|image_pad|>" * pads)
        states = reference.gme(text, resized)
        found = encode_items(encoder, pa.table({"item_id": ["a"], "image": [png(image)]}))[0]
        assert_close(found.vectors[0], states)
        assert_close(found.pooled[0], states[-1])
    two = clip([noise(24, 16), noise(24, 16, 1)], [0.0, 1.0], 2.0)
    bare = build("qwen2_vl", preprocessing="vlm2vec", document_prompt="{content}")
    assert encode_items(bare, two)[0].lengths.tolist() == [6]
    rule = "positions must be 1d for separate images without boundaries, got '3d'"
    given = {"preprocessing": "vlm2vec", "positions": "3d", "frames": "images"}
    with pytest.raises(SpecError, match=rule):
        check(model=checkpoint("qwen2_vl"), **given)


def test_qwen3_vl_embedding(build, checkpoint):
    """The full stop of instructions, and "NULL" for an empty text."""
    reference = Reference("qwen3_vl", checkpoint("qwen3_vl"))
    encoder = build()
    for instruction, expected in (
        ("Find a page", "Find a page."),
        (" Find a page? ", "Find a page?"),
        ("找到一页。", "找到一页。"),
        ("Find <it>", "Find <it>."),  # a mathematical symbol
    ):
        found = encoder.with_instruction(instruction).encode_queries(["lift"]).tokens.pooled[0]
        _, output = reference(fill_template(CHAT, expected).replace("{content}", "lift"))
        assert_close(found, unit(output.hidden_states[-1][0, -1]))
    found = encode_items(encoder, pa.table({"item_id": ["a", "b"], "text": ["", None]}))
    _, output = reference(DOCUMENT_PROMPT.replace("{content}", "NULL"))
    assert_close(found[0].pooled[0], unit(output.hidden_states[-1][0, -1]))
    assert found[1].lengths.tolist() == [0]
    plain = build(preprocessing="transformers")
    assert plain.fingerprint != encoder.fingerprint
    assert encode_items(plain, pa.table({"item_id": ["a"], "text": [""]}))[0].lengths[0] == 0


@pytest.mark.parametrize(
    ("size", "number", "first", "tokens"),
    [  # widths and heights
        ((40, 28), 4, (32, 32), (12, 12)),  # enlarged to 128 tokens
        ((40, 28), 3, (32, 32), (12, 12)),
        ((270, 190), 4, (272, 192), (32, 23)),  # reduced to 768 tokens
        ((250, 190), 40, (256, 192), (22, 16)),  # to 7,680 tokens per video
        ((250, 190), 64, (256, 192), (17, 13)),
    ],
)
def test_video_budget_of_qwen3_vl_embedding(edited, build, size, number, first, tokens):
    """Frames are rounded to two tokens, then scaled to the budget, as by its published code."""
    folder = edited("qwen3_vl")
    config = json.loads(Path(folder, "config.json").read_text())
    config["text_config"]["max_position_embeddings"] = 16384
    edited("qwen3_vl", config=config)
    prompt, frames = "{content}<|im_end|>", [noise(*size, seed) for seed in range(number)]
    encoder = build(model=folder, output_tokens="visual", document_prompt=prompt)
    seconds = [0.5 * i for i in range(number)]
    found = encode_items(encoder, clip(frames, seconds, 0.5 * number))[0]
    columns, rows = tokens  # by smart_resize of qwen-vl-utils 0.0.14
    assert found.lengths.tolist() == [rows * columns * -(-number // 2)]
    if number > 4:
        return
    resized = [frame.resize(first).resize((8 * columns, 8 * rows)) for frame in frames]
    area = {"shortest_edge": 1, "longest_edge": 10**9}
    ids, output = Reference("qwen3_vl", folder).video(resized, seconds, prompt, area)
    keep = ids == encoder._reader.settings.video_token_id
    assert_close(found.vectors[0], unit(output.hidden_states[-1][0, keep]))
    limited = build(model=folder, output_tokens="visual", max_pixels=16 * 64)
    assert encode_items(limited, clip(frames, seconds, 2.0))[0].lengths[0] <= 16 * 2


def test_settings_of_the_video_processor(build, edited, reference):
    """Size and rate of frames of the checkpoint, in each file where transformers saves them."""
    frames, seconds = [noise(40, 24, seed) for seed in range(8)], [0.5 * i for i in range(8)]
    items = clip(frames, seconds, 4.0)
    share = 8 if reference.family == "qwen3_vl" else 1  # limits of the whole video
    size = {"shortest_edge": 64 * share, "longest_edge": 6 * 64 * share}
    given = {"preprocessing": "transformers", "model": edited(reference.family)}
    plain = build(**given)
    for name, values in (
        ("video_preprocessor_config", {"size": size}),
        ("processor_config", {"video_processor": {"size": size}}),
    ):
        edited(reference.family, **{name: values})
        encoder = build(**given)
        limits = {"shortest_edge": 64, "longest_edge": 6 * 64}
        _, expected = reference.video(frames, seconds, size=limits)
        found = encode_items(encoder, items)[0]
        assert_close(found.pooled[0], unit(expected.hidden_states[-1][0, -1]))
        assert_close(
            encoder.encode_media([{"image": png(frames[0])}]).tokens.pooled,
            plain.encode_media([{"image": png(frames[0])}]).tokens.pooled,
        )
        assert encoder.fingerprint != plain.fingerprint
    larger = build(**given, min_pixels=12 * 64, max_pixels=12 * 64, output_tokens="visual")
    assert encode_items(larger, items)[0].lengths[0] > 4 * 6
    samples = {"size": size, "do_sample_frames": True, "fps": 1, "min_frames": 2, "max_frames": 6}
    for changes, number in (({}, 4), ({"min_frames": 6}, 6), ({"fps": 2}, 6)):
        edited(reference.family, processor_config={"video_processor": {**samples, **changes}})
        encoder = build(**given)
        (inputs,) = encoder._reader.read_item(items.to_pylist()[0])
        assert int(inputs.media["video_grid_thw"][0, 0]) * 2 == number
        assert encoder._reader.read_note(items.to_pylist()[0], [inputs]) == {"frames_read": number}
    for invalid in ([], {"video_processor": {"size": {"shortest_edge": "a", "longest_edge": 4}}}):
        path = Path(given["model"], "processor_config.json")
        path.write_text(json.dumps(invalid or ["a"]))
        with pytest.raises(SpecError, match="^model must be a checkpoint with a"):
            check(**given)


def test_pixel_limits(build):
    images, items = make_images((64, 64))
    whole, small = build(output_tokens="visual"), build(output_tokens="visual", max_pixels=16 * 16)
    assert encode_items(whole, items)[0].lengths.tolist() == [16]
    assert encode_items(small, items)[0].lengths.tolist() == [4]
    large = build(output_tokens="visual", min_pixels=48 * 48, max_pixels=64 * 64)
    assert large.encode_media([{"image": png(images[0])}]).tokens.lengths.tolist() == [64]


def check(**fields):
    spec = ENCODERS.resolve({"name": "qwen_vl", **fields})
    ENCODERS.load("qwen_vl").check(spec)


def test_rejects_unreadable_inputs(build, checkpoint):
    encoder = build()
    narrow, items = make_images((1, 10_000))
    with pytest.raises(Unreadable, match="image not supported by the model"):
        encode_items(encoder, items)
    with pytest.raises(SpecError, match="aspect ratio"):
        encoder.encode_media([{"image": png(narrow[0])}])
    with pytest.raises(SpecError, match="aspect ratio"):
        encoder.encode_media([{"text": "a", "image": png(narrow[0])}])
    long = "drag " * 600  # exceeds the 512 positions of the model
    with pytest.raises(Unreadable, match="too many tokens: .* at most 512"):
        encode_items(encoder, pa.table({"item_id": ["long"], "text": [long]}))
    with pytest.raises(SpecError, match="at most 512"):
        encoder.encode_queries([long])
    with pytest.raises(Unreadable, match="too many tokens"):
        encode_items(build(max_item_tokens=30), make_images((32, 32))[1])


def test_check_rejects_invalid_checkpoints(checkpoint, tmp_path):
    check(model=checkpoint("qwen3_vl"), layer=-4)
    for layer in (4, -5):
        with pytest.raises(SpecError, match=r"-4 to 3 \(the model has 3 layers\)"):
            check(model=checkpoint("qwen3_vl"), layer=layer)
    with pytest.raises(SpecError, match="is a colpali") as error:
        check(model=checkpoint("colpali"))
    assert "\n" not in str(error.value)
    incomplete = {
        "preprocessor_config.json": "Qwen2VLImageProcessorPil",
        "tokenizer.json": "tokenizer|token",
        "model.safetensors": "safetensors",
    }
    for name, message in incomplete.items():
        folder = tmp_path / name.partition(".")[0]
        shutil.copytree(checkpoint("qwen3_vl"), folder)
        (folder / name).unlink()
        with pytest.raises(SpecError, match=message) as error:
            check(model=str(folder))
        assert error.value.field == "model" and "\n" not in str(error.value)


def test_fingerprint(build):
    encoder = build()
    for change in ({"max_batch_tokens": 64}, {"documents": "both"}, {"max_frames": 3}):
        assert build(**change).fingerprint == encoder.fingerprint
    for change in ({"layer": 2}, {"output_tokens": "paper"}, {"query_prompt": "{content}"}):
        assert build(**change).fingerprint != encoder.fingerprint
