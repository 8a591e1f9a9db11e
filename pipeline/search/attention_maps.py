"""Maps of the attention of appended tokens to the tokens of an item (AGC, section 5.1)."""

from __future__ import annotations

import colorsys
import io
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from PIL import Image, ImageDraw, ImageFont

from pipeline import config, extras
from pipeline.compression.agc import AGC, SALIENCY
from pipeline.config import ComponentSpec, SpecError
from pipeline.data.decode import Unreadable
from pipeline.data.texts import decode
from pipeline.encoders import Encoder
from pipeline.encoders.appended import VOCABULARY
from pipeline.encoders.images import open_query_image, png_file
from pipeline.encoders.trained import TrainedCompressor, trained_encoder
from pipeline.registry import COMPRESSORS, ENCODERS
from pipeline.schema import WORD_BOXES, WORD_SPANS
from pipeline.search.explain import strengths
from pipeline.search.map_images import BLACK, COLOUR, Colour, fill_boxes
from pipeline.search.map_sheets import map_sheet
from pipeline.taps import APPENDED_MATRIX, Tap, average_layers, single_layer_taps

#: Suffixes of files that are read as images. Other files than PDF are read as text.
IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp")
#: Page of a PDF file.
PAGE = re.compile(r"(?P<file>.*\.pdf)(#page=(?P<number>\d+))?", re.IGNORECASE)
#: Resolution and maximum size of the image of a page.
PAGE_DPI, MAX_PIXELS = 100, 4_000_000
#: Width and font size of a text that is drawn as an image, in pixels.
TEXT_WIDTH, TEXT_SIZE = 600, 20


class Item(NamedTuple):
    """Item to draw.

    Attributes:
        image: The item as an encoded image. A text is drawn as one.
        inputs: Table of one row with the inputs of the encoder.
        text_boxes: Box of each character of a text, (C, 4) in [0, 1]; None for an image.
    """

    image: bytes
    inputs: pa.Table
    text_boxes: np.ndarray | None


class AttentionMap(NamedTuple):
    """Attention of M appended tokens to the N tokens of an item in the last layer.

    Attributes:
        boxes: Box of each token in the image of the item, (N, 4) in [0, 1]; NaN without location.
        saliency: Saliency of each token (N,), as computed by AGC.
        attention: Attention of each appended token, (N, M), as the mean over the heads.
    """

    boxes: np.ndarray
    saliency: np.ndarray
    attention: np.ndarray
    groups: np.ndarray | None


class AppendedAttention:
    """Computes the maps of one encoder.

    Args:
        spec: Spec of an encoder with appended tokens.
    """

    def __init__(self, spec: Any):
        self.spec = spec
        self.encoder: Encoder[Any] = ENCODERS.build(self.spec)
        self.compressor = None  # a checkpoint with tokens in its vocabulary names none
        if spec.appended_tokens != VOCABULARY:
            described, _ = TrainedCompressor.read(spec.appended_tokens, "model")
            compressor = COMPRESSORS.build(COMPRESSORS.resolve(described.compressor))
            self.compressor = compressor if isinstance(compressor, AGC) else None

    def map(self, item: Item) -> AttentionMap:
        """Computes the map of an item, or raises `SpecError` if no token has a location."""
        attention = type(self.encoder).attention(self.spec)
        assert attention is not None, "encoders with appended tokens record their attention"
        matrix = Tap(APPENDED_MATRIX)
        saliency = self.compressor.needs_taps[0] if self.compressor else SALIENCY["paper"]
        taps = single_layer_taps([saliency, matrix], attention.num_layers)
        ((_, batch),) = self.encoder.encode(item.inputs, taps)
        for tap in (saliency, matrix):
            batch.taps[tap.name] = average_layers(tap, batch.taps, attention.num_layers)
        mask_N = batch.mask[0]
        boxes_N4 = np.full((int(mask_N.sum()), 4), np.nan)
        if item.text_boxes is None and batch.extents is not None:
            boxes_N4 = batch.extents[0, mask_N, :4].cpu().numpy()
        elif item.text_boxes is not None and batch.spans is not None:
            spans = batch.spans[0, mask_N].tolist()
            boxes_N4 = np.array([_hull(item.text_boxes[start:end]) for start, end in spans])
        if not np.isfinite(boxes_N4).any():
            path = item.inputs["item_id"][0].as_py()
            raise SpecError("items", path, "files with tokens that have a location", "has none")
        groups_N = None
        if self.compressor is not None:
            assignment = self.compressor.compress(batch).assignment
            assert assignment is not None, "AGC assigns tokens"
            groups_N = assignment[0, mask_N].cpu().numpy()
        return AttentionMap(
            boxes_N4,
            batch.taps[saliency.name][0, mask_N].float().cpu().numpy(),
            batch.taps[matrix.name][0, mask_N].float().cpu().numpy(),
            groups_N,
        )


def encoder_spec(model: str) -> Any:
    """Returns the spec of an encoder with appended tokens, of a trained model or a YAML file."""
    if Path(config.absolute(model)).is_dir():
        spec: ComponentSpec = trained_encoder(config.absolute(model), "model")
    else:
        with config.within("model"):
            spec = ENCODERS.resolve(config.read(model, "file"))
    if getattr(spec, "appended_tokens", None) is None:
        rule = "an encoder with the field appended_tokens"
        raise SpecError("model", model, rule, "appends no tokens")
    return spec


def read_item(path: str, spec: ComponentSpec) -> Item:
    """Reads an image, a text file or a page of a PDF file for an encoder, which is not loaded.

    A page is read as an image if the encoder supports images, and otherwise by its text layer.

    Args:
        path: Path of the file. `FILE.pdf#page=N` is a page of a PDF file, by default the first one.
    """
    supported = ENCODERS.load(spec.name).supported_inputs(spec)
    page = PAGE.fullmatch(path)
    if page is not None:
        kind = "image" if "image" in supported else "text"
    else:
        kind = "image" if path.lower().endswith(IMAGE_SUFFIXES) else "text"
    if kind not in supported:
        kinds = [name for name in ("image", "text") if name in supported]
        rule = f"files of the inputs of {spec.name} ({', '.join(kinds) or 'none'})"
        raise SpecError("items", path, rule, f"is read as {kind}")
    if page is not None:
        return _read_page(path, page["file"], int(page["number"] or 1), kind)
    with config.reading("items", path, "an image, a text in UTF-8 or a PDF file", UnicodeError):
        data = Path(config.absolute(path)).read_bytes()
        text = decode(data).strip() if kind == "text" else ""
    if kind == "image":
        try:
            png = png_file(open_query_image(data))
        except SpecError as error:
            raise SpecError("items", path, error.rule, error.problem) from None
        return Item(png, pa.table({"item_id": [path], "image": [png]}), None)
    image, boxes_C4 = draw_text(text)
    return Item(image, pa.table({"item_id": [path], "text": [text]}), boxes_C4)


def _read_page(path: str, file: str, number: int, kind: str) -> Item:
    extras.require("pypdfium2")
    from pipeline.data.decode.pdf import describe, read_pages

    rule, file = "a page of a readable PDF file", config.absolute(file)
    with config.reading("items", path, rule, Unreadable, problem="is unreadable"):
        num_pages = describe(file)["num_pages"]
        if not 1 <= number <= num_pages:
            raise SpecError("items", path, rule, f"has {num_pages} pages")
        settings = {"text": True, "image": True, "dpi": PAGE_DPI, "max_pixels": MAX_PIXELS}
        (page,) = read_pages(file, [number], settings)
        if isinstance(page, Unreadable):
            raise page
    columns: dict[str, Any] = {"item_id": [path], kind: [page[kind]]}
    if kind == "text":
        columns["word_spans"] = pa.array([page["word_spans"].tolist()], WORD_SPANS)
        columns["word_boxes"] = pa.array([page["word_boxes"].tolist()], WORD_BOXES)
    return Item(page["image"], pa.table(columns), None)


def attention_sheet(models: Sequence[str], paths: Sequence[str], num_tokens: int) -> bytes:
    """Draws a row per item and model.

    The columns are the item, the saliency, the groups of AGC, and the attention of the first
    appended tokens. Tokens are highlighted from the median to the maximum of a map.

    Args:
        num_tokens: Maximum number of appended tokens to draw individually.
    """
    specs = [encoder_spec(model) for model in models]
    items = [[read_item(path, spec) for spec in specs] for path in paths]
    encoders = [AppendedAttention(spec) for spec in specs]
    rows = []
    for path, versions in zip(paths, items, strict=True):
        for model, encoder, item in zip(models, encoders, versions, strict=True):
            title = f"{Path(path).name}, {model}" if len(models) > 1 else Path(path).name
            rows.append((title, draw_map(item.image, encoder.map(item), num_tokens)))
    return map_sheet(rows)


def draw_map(image: bytes, map: AttentionMap, num_tokens: int) -> list[tuple[str, Image.Image]]:
    """Draws the cells of a row of `attention_sheet`, each with its title."""
    num_tokens = min(num_tokens, map.attention.shape[1])
    cells = [("item", fill_boxes(image, (), (), BLACK))]
    with Image.open(io.BytesIO(image)) as colours:
        grey = png_file(colours.convert("L"))  # colours of the item would hide those of the map
    cells.append(("mean attention", _draw_values(grey, map.boxes, map.saliency)))
    if map.groups is not None:
        cells.append((f"{map.groups.max() + 1} groups", _draw_groups(grey, map)))
    for token in range(num_tokens):
        drawing = _draw_values(grey, map.boxes, map.attention[:, token])
        cells.append((f"appended token {token + 1}", drawing))
    return cells


def _draw_values(image: bytes, boxes_N4: np.ndarray, values_N: np.ndarray) -> Image.Image:
    located_N = np.isfinite(boxes_N4).all(axis=1)
    opacities = strengths(values_N[located_N])
    fills = [(box, COLOUR, x) for box, x in zip(boxes_N4[located_N], opacities, strict=True)]
    return fill_boxes(image, fills, (), BLACK)


def _draw_groups(image: bytes, map: AttentionMap) -> Image.Image:
    """Colours each group and outlines its most salient token, which is the centroid."""
    assert map.groups is not None
    fills, centroids = [], []
    for group in range(map.groups.max() + 1):
        members = np.flatnonzero((map.groups == group) & np.isfinite(map.boxes).all(axis=1))
        fills += [(map.boxes[token], group_colour(group), 1.0) for token in members]
        if len(members):
            centroids.append(map.boxes[members[map.saliency[members].argmax()]])
    return fill_boxes(image, fills, centroids, BLACK)


def group_colour(group: int) -> Colour:
    """Returns the colour of a group; hues of successive groups are far apart."""
    red, green, blue = colorsys.hsv_to_rgb(group * 0.618 % 1, 1.0, 0.9)
    return round(255 * red), round(255 * green), round(255 * blue)


def draw_text(text: str) -> tuple[bytes, np.ndarray]:
    """Draws a text as a PNG, with the box of each character in [0, 1], or NaN for white space."""
    font, margin, line = ImageFont.load_default(TEXT_SIZE), 10, TEXT_SIZE * 3 // 2
    boxes_C4, x, y = np.full((len(text), 4), np.nan), float(margin), margin
    words = list(re.finditer(r"\S+", text))
    positions = []
    for word in words:
        width = font.getlength(word[0])
        if x > margin and x + width > TEXT_WIDTH - margin:
            x, y = float(margin), y + line
        positions.append((x, y))
        for offset in range(len(word[0])):
            left, right = (x + font.getlength(word[0][:end]) for end in (offset, offset + 1))
            boxes_C4[word.start() + offset] = (left, y, right, y + TEXT_SIZE)
        x += width + font.getlength(" ")
    image = Image.new("RGB", (TEXT_WIDTH, y + line + margin), "white")
    pen = ImageDraw.Draw(image)
    for word, position in zip(words, positions, strict=True):
        pen.text(position, word[0], BLACK, font)
    return png_file(image), boxes_C4 / [*image.size, *image.size]


def _hull(boxes_C4: np.ndarray) -> np.ndarray:
    """Returns the bounding box of characters, or NaN if none of them is visible."""
    boxes_C4 = boxes_C4[np.isfinite(boxes_C4).all(axis=1)]
    if not len(boxes_C4):
        return np.full(4, np.nan)
    return np.concatenate([boxes_C4[:, :2].min(axis=0), boxes_C4[:, 2:].max(axis=0)])
