"""jina-embeddings-v4, compared with adapters applied in forward hooks."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pyarrow as pa
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, Qwen2_5_VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from pipeline.config import SpecError
from pipeline.data.decode import Unreadable
from pipeline.registry import ENCODERS
from pipeline.schema import FRAME
from pipeline.taps import Tap
from pipeline.tokens import PROMPT, SPECIAL, TEXT, VISUAL
from tests.images import make_images, noise, png
from tests.tiny.checkpoints import JINA_RANK, JINA_TASKS

SIZES = [(50, 60), (100, 20), (8, 8)]
TEXTS = ["heat transfer in a cone", "lift"]
SCALE = 4 / JINA_RANK


class Reference:
    """The transformers model; hooks add the product of the adapter's matrices to layer outputs."""

    def __init__(self, folder: str, task: str | None):
        self.model = Qwen2_5_VLForConditionalGeneration.from_pretrained(
            folder, attn_implementation="eager"
        ).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.images = Qwen2VLImageProcessorPil.from_pretrained(folder)
        weights = load_file(f"{folder}/model.safetensors")
        self.model.multi_vector_projector = torch.nn.Linear(32, 16)
        self.model.multi_vector_projector.weight.data = weights["multi_vector_projector.weight"]
        self.model.multi_vector_projector.bias.data = weights["multi_vector_projector.bias"]
        if task is None:
            return
        adapters = load_file(f"{folder}/adapters/adapter_model.safetensors")
        names = {name.removeprefix("base_model.model.").partition(".lora_")[0] for name in adapters}
        for name in names:
            down, up = (
                adapters[f"base_model.model.{name}.lora_{matrix}.{task}.weight"] for matrix in "AB"
            )
            self.model.get_submodule(name).register_forward_hook(self.make_hook(down, up))

    @staticmethod
    def make_hook(down, up):
        return lambda module, args, output: output + SCALE * (args[0] @ down.T @ up.T)

    @torch.no_grad()
    def __call__(self, text: str, **media):
        ids = self.tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
        types = (ids == self.model.config.image_token_id).long()
        output = self.model(
            input_ids=ids,
            mm_token_type_ids=types,
            output_hidden_states=True,
            output_attentions=True,
            **media,
        )
        states = output.hidden_states[-1]
        projected = self.model.multi_vector_projector(states)[0]
        return ids[0], states[0], torch.nn.functional.normalize(projected, dim=-1), output

    def image(self, image):
        inputs = self.images([image], return_tensors="pt")
        pads = "<|image_pad|>" * (int(inputs["image_grid_thw"].prod()) // 4)
        vision = f"<|vision_start|>{pads}<|vision_end|>"
        return self(f"<|im_start|>user\n{vision}Describe the image.<|im_end|>\n", **inputs)


def assert_close(found: torch.Tensor, expected: torch.Tensor, atol: float = 1e-5) -> None:
    torch.testing.assert_close(found, expected, atol=atol, rtol=0)


def mean(states: torch.Tensor, dim: int = 32) -> torch.Tensor:
    return torch.nn.functional.normalize(states.mean(dim=0)[:dim], dim=0)


def encode_items(encoder, items, taps=()):
    return {
        int(row): batch.take(slice(i, i + 1))
        for rows, batch in encoder.encode(items, taps)
        for i, row in enumerate(rows)
    }


@pytest.fixture(scope="module")
def build(checkpoint):
    def build(**fields):
        given = {"name": "jina_v4", "model": checkpoint("jina_v4"), "dtype": "float32"}
        return ENCODERS.build(ENCODERS.resolve({**given, **fields}))

    return build


@pytest.fixture(scope="module")
def encoder(build):
    return build()


@pytest.fixture(scope="module")
def reference(checkpoint):
    return Reference(checkpoint("jina_v4"), "retrieval")


def test_items_match_transformers(encoder, reference):
    images, items = make_images(*SIZES)
    texts = pa.table({"item_id": ["a", "b", "c"], "text": [*TEXTS, " "]})
    items = pa.concat_tables([items, texts], promote_options="default")
    found = encode_items(encoder, items)
    assert found[len(items) - 1].lengths.tolist() == [0]
    for row, image in enumerate(images):
        ids, states, expected, _ = reference.image(image)
        assert_close(found[row].vectors[found[row].mask], expected)
        first, last = (
            int((ids == reference.tokenizer.convert_tokens_to_ids(name)).nonzero())
            for name in ("<|vision_start|>", "<|vision_end|>")
        )
        assert_close(found[row].pooled[0], mean(states[first : last + 1]))
    for row, text in enumerate(TEXTS, len(images)):
        _, states, expected, _ = reference(f"Passage: {text}")
        assert_close(found[row].vectors[found[row].mask], expected)
        assert_close(found[row].pooled[0], mean(states))
        kind, spans = found[row].kind[0], found[row].spans[0]
        strings = [text[a:b] for a, b in spans[found[row].mask[0] & (kind == TEXT)].tolist()]
        assert "".join(strings) == text and kind[0] == PROMPT


def test_queries_match_transformers(encoder, build, reference):
    found = encoder.encode_queries(TEXTS)
    for i, text in enumerate(TEXTS):
        _, states, expected, _ = reference(f"Query: {text}")
        assert_close(found.tokens.vectors[i][found.tokens.mask[i]], expected)
        assert_close(found.tokens.pooled[i], mean(states))
        assert len(found.token_texts[i]) == len(expected)
    image = noise(20, 30)
    _, _, expected, _ = reference.image(image)
    assert_close(encoder.encode_media([{"image": png(image)}]).tokens.vectors[0], expected)
    short = build(truncate_dim=8)
    assert short.pooled_dim == 8 and short.dim == 16
    _, states, _, _ = reference("Query: lift")
    assert_close(short.encode_queries(["lift"]).tokens.pooled[0], mean(states, 8))


@pytest.mark.parametrize("task", [*JINA_TASKS, None])
def test_selects_the_adapter_of_the_task(build, checkpoint, tmp_path, task):
    folder = checkpoint("jina_v4")
    reference = Reference(folder, task)
    if task is None:  # weights with a merged adapter
        shutil.copytree(folder, tmp_path / "merged", ignore=shutil.ignore_patterns("adapters"))
        encoder = build(model=str(tmp_path / "merged"))
    else:
        encoder = build(task=task)
    _, _, expected, _ = reference("Query: lift")
    assert_close(encoder.encode_queries(["lift"]).tokens.vectors[0], expected)
    prefix = "Query" if task == "text-matching" else "Passage"
    _, _, expected, _ = reference(f"{prefix}: lift")
    found = encode_items(encoder, pa.table({"item_id": ["a"], "text": ["lift"]}))[0]
    assert_close(found.vectors[0], expected)


def test_adapter_folder_and_older_names(build, checkpoint, encoder, tmp_path):
    folder = Path(checkpoint("jina_v4"))
    shutil.copytree(folder, tmp_path / "bare", ignore=shutil.ignore_patterns("adapters"))
    shutil.copytree(folder / "adapters", tmp_path / "own")
    adapters = load_file(tmp_path / "own" / "adapter_model.safetensors")
    older = {name.replace("language_model.", ""): tensor for name, tensor in adapters.items()}
    save_file(older, tmp_path / "own" / "adapter_model.safetensors")
    given = {"model": str(tmp_path / "bare"), "adapter": str(tmp_path / "own")}
    expected = encoder.encode_queries(TEXTS).tokens
    assert_close(build(**given).encode_queries(TEXTS).tokens.vectors, expected.vectors)

    config_path = tmp_path / "own" / "adapter_config.json"
    settings = json.loads(config_path.read_text())
    config_path.write_text(json.dumps({**settings, "lora_alpha": 4 / 2**0.5, "use_rslora": True}))
    assert_close(build(**given).encode_queries(TEXTS).tokens.vectors, expected.vectors)
    for wrong, message in (
        ({"use_dora": True}, "has the unsupported setting use_dora"),
        ({"r": None}, "has no r"),
    ):
        config_path.write_text(json.dumps({**settings, **wrong}))
        with pytest.raises(SpecError, match=message):
            build(**given)
    config_path.write_text(json.dumps(settings))

    file = tmp_path / "own" / "adapter_model.safetensors"
    for change, message in (
        (lambda name: name.replace("lora_", "ia3_"), "has no tensors"),
        (
            lambda name: name.replace("retrieval", "other"),
            "task must be one of code, other, text-matching, got ",
        ),
        (
            lambda name: name.replace("lora_B.retrieval", "lora_B.other"),
            "has only one of two matrices",
        ),
        (lambda name: name.replace("layers.2", "layers.7"), "has another shape for "),
        (lambda name: name.replace("q_proj", "v_proj"), "has another shape for "),
    ):
        save_file({change(name): tensor for name, tensor in adapters.items()}, file)
        with pytest.raises(SpecError, match=message) as error:
            build(**given)
        assert "\n" not in str(error.value)


def test_keep(build, encoder):
    _, items = make_images((16, 16))
    found = encode_items(encoder, items)[0]
    visual = encode_items(build(output_tokens="visual"), items)[0]
    kind = found.kind[0].tolist()
    start = kind.index(VISUAL)
    assert kind[start - 1 : start + 5] == [SPECIAL, *[VISUAL] * 4, SPECIAL]
    assert kind[0] == SPECIAL and PROMPT in kind
    assert_close(visual.vectors[0], found.vectors[0, start : start + 4])
    assert_close(visual.pooled, found.pooled)
    assert visual.extents[0, 1, :4].tolist() == [0.5, 0, 1, 0.5]


@pytest.mark.parametrize("heads", ["mean", "max"])
def test_attention_matches_eager_attention(encoder, reference, heads):
    images, items = make_images(*SIZES[:2])
    taps = [
        Tap(name, heads, str(layer)) for name in ("column_sums", "eos_row") for layer in range(3)
    ]
    for row, batch in encode_items(encoder, items, taps).items():
        ids, _, _, expected = reference.image(images[row])
        is_visual = ids == reference.model.config.image_token_id
        for tap in taps:
            rows = is_visual if tap.statistic == "column_sums" else ids.new_tensor([-1])
            head_values = expected.attentions[int(tap.layers)][0][:, rows].sum(dim=1)
            head_values = head_values.mean(dim=0) if heads == "mean" else head_values.amax(dim=0)
            assert_close(batch.taps[tap.name][batch.mask], head_values)


def test_encodes_frames_separately(encoder):
    images = [noise(16, 16, seed) for seed in range(2)]
    frames = [
        {"index": i, "seconds": float(i), "height": 16, "width": 16, "pixels": image.tobytes()}
        for i, image in enumerate(images)
    ]
    items = pa.table({"item_id": ["clip"], "frames": pa.array([frames], pa.list_(FRAME))})
    found = encode_items(encoder, items)[0]
    alone = encoder.encode_media([{"image": png(image)} for image in images]).tokens
    assert_close(found.vectors[0], alone.vectors.flatten(0, 1))
    expected = torch.nn.functional.normalize(alone.pooled.sum(dim=0), dim=0)
    assert_close(found.pooled[0], expected)


def test_invalid_specs(build, checkpoint, encoder, tmp_path):
    check, resolve = ENCODERS.load("jina_v4").check, ENCODERS.resolve
    check(encoder.spec)
    with pytest.raises(SpecError, match="at most 32"):
        check(encoder.spec.model_copy(update={"truncate_dim": 64}))
    for family, message in (
        ("qwen3_vl", "is a qwen3_vl"),
        ("qwen2_5_vl", "multi_vector_projector.weight .*has no pro"),
    ):
        with pytest.raises(SpecError, match=message) as error:
            check(resolve({"name": "jina_v4", "model": checkpoint(family)}))
        assert "\n" not in str(error.value)
    with pytest.raises(SpecError, match="is an empty folder"):
        build(adapter=str(tmp_path))
    _, narrow = make_images((1, 10_000))
    with pytest.raises(Unreadable, match="image not supported by the model"):
        encode_items(encoder, narrow)
    with pytest.raises(SpecError, match="at most 512"):
        encoder.encode_queries(["drag " * 600])


def test_fingerprints(build, encoder, checkpoint, tmp_path):
    for change in ({"max_batch_tokens": 64}, {"documents": "text"}):
        assert build(**change).fingerprint == encoder.fingerprint
    for change in ({"task": "code"}, {"output_tokens": "visual"}, {"truncate_dim": 8}):
        assert build(**change).fingerprint != encoder.fingerprint
    folder = tmp_path / "changed"
    shutil.copytree(checkpoint("jina_v4"), folder)
    assert build(model=str(folder)).fingerprint == encoder.fingerprint
    config_path = folder / "adapters" / "adapter_config.json"
    config_path.write_text(config_path.read_text().replace('"lora_alpha": 4', '"lora_alpha": 5'))
    assert build(model=str(folder)).fingerprint != encoder.fingerprint


@pytest.mark.parametrize(
    ("file", "content", "field"),
    [
        ("model.safetensors", None, "model"),
        ("adapters/adapter_model.safetensors", None, "adapter"),
        ("adapters/adapter_config.json", b'{"r": 2', "adapter"),
        ("adapters/adapter_config.json", b"[]", "adapter"),
    ],
)
def test_check_rejects_corrupted_files(checkpoint, tmp_path, file, content, field):
    shutil.copytree(checkpoint("jina_v4"), tmp_path / "model")
    path = tmp_path / "model" / file
    path.write_bytes(path.read_bytes()[:100] if content is None else content)
    spec = ENCODERS.resolve({"name": "jina_v4", "model": str(tmp_path / "model")})
    with pytest.raises(SpecError) as caught:
        ENCODERS.load("jina_v4").check(spec)
    assert caught.value.field == field
