"""Scenes of coloured shapes with captions, boxes and complete relevance judgments.

The data are a substitute for Flickr30K Entities. Images contain several objects, often of the same
kind. A caption describes one object, or two objects and their spatial relation. Each object that a
caption mentions has a bounding box. All scenes that match a caption are relevant to it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageDraw

SIDE = 112  # width and height of a scene, in pixels
SHAPES = ("circle", "square", "triangle", "star", "cross", "ring")
COLOURS = {
    "red": (214, 39, 40),
    "green": (44, 160, 44),
    "blue": (31, 80, 200),
    "yellow": (240, 220, 40),
    "purple": (148, 60, 189),
    "cyan": (40, 210, 220),
    "black": (16, 16, 16),
    "white": (245, 245, 245),
}
SIZES = ("small", "large")
RELATIONS = ("left of", "right of", "above", "below")
#: Probability that an object has the attributes of an earlier object.
REPEAT_PROBABILITY = 0.3
ANY = -1  # attribute that a phrase does not mention
NO_RELATION = -1


@dataclass(frozen=True)
class Layout:
    """Sizes of scenes and objects.

    Attributes:
        side: Width and height of a scene, in pixels.
        radii: Radius of small and of large objects, in pixels.
        objects: Minimum and maximum number of objects. Objects that do not fit are omitted.
    """

    side: int = SIDE
    radii: tuple[int, int] = (6, 12)
    objects: tuple[int, int] = (4, 7)


DEFAULT_LAYOUT = Layout()


@dataclass(frozen=True)
class Scenes:
    """S scenes of up to T objects.

    Attributes:
        attributes: Indices of size, colour and shape of each object, (S, T, 3) int64, or -1 at
            padding.
        centres: Centres x and y in pixels, (S, T, 2) float64.
        greys: Grey level of the background, (S,) uint8.
    """

    attributes: np.ndarray
    centres: np.ndarray
    greys: np.ndarray
    layout: Layout = DEFAULT_LAYOUT

    def __len__(self) -> int:
        return len(self.greys)

    @property
    def boxes(self) -> np.ndarray:
        """Boxes x0, y0, x1, y1 of the objects relative to the image, (S, T, 4) float64."""
        radii = np.array(self.layout.radii)[self.attributes[..., 0], None]
        corners = [self.centres - radii, self.centres + radii]
        return np.concatenate(corners, axis=2) / self.layout.side

    def take(self, rows: Sequence[int] | slice) -> Scenes:
        """Returns the scenes at `rows`."""
        return Scenes(self.attributes[rows], self.centres[rows], self.greys[rows], self.layout)

    def matching(self, attributes: np.ndarray) -> np.ndarray:
        """Returns the mask (S, T) of the objects with the given attributes, (3,) int64 or `ANY`."""
        is_object_ST = self.attributes[..., 2] >= 0
        return ((attributes == ANY) | (self.attributes == attributes)).all(axis=2) & is_object_ST

    def render(self, row: int) -> Image.Image:
        """Renders a scene as an RGB image."""
        side = self.layout.side
        pixels = np.full((side, side, 3), self.greys[row], dtype=np.float32)
        for (size, colour, shape), centre in zip(
            self.attributes[row], self.centres[row], strict=True
        ):
            if shape < 0:
                continue
            coverage = stamp(SHAPES[shape], self.layout.radii[size])[..., None]
            left, top = (int(coordinate) - len(coverage) // 2 for coordinate in centre)
            region = pixels[top : top + len(coverage), left : left + len(coverage)]
            region += coverage * (np.array(list(COLOURS.values())[colour]) - region)
        return Image.fromarray(pixels.round().astype(np.uint8))


@dataclass(frozen=True)
class Captions:
    """C captions, such as "a small red circle" or "a small red circle left of a blue star".

    Attributes:
        phrases: Attributes of the two objects, (C, 2, 3) int64, as in `Scenes.attributes`. `ANY`
            for attributes that are not mentioned.
        relations: Indices into `RELATIONS`, (C,) int64; `NO_RELATION` for captions of one object.
    """

    phrases: np.ndarray
    relations: np.ndarray

    def __len__(self) -> int:
        return len(self.relations)

    def take(self, rows: slice) -> Captions:
        """Returns the captions at `rows`."""
        return Captions(self.phrases[rows], self.relations[rows])

    @classmethod
    def concatenate(cls, parts: Iterable[Captions]) -> Captions:
        """Concatenates captions."""
        parts = list(parts)
        return cls(
            np.concatenate([part.phrases for part in parts]),
            np.concatenate([part.relations for part in parts]),
        )

    @property
    def texts(self) -> list[str]:
        """Texts of the captions."""
        texts = []
        for (first, second), relation in zip(self.phrases, self.relations, strict=True):
            text = describe(first)
            if relation != NO_RELATION:
                text += f" {RELATIONS[relation]} {describe(second)}"
            texts.append(text)
        return texts

    def match(self, scenes: Scenes) -> np.ndarray:
        """Returns a matrix (C, S) bool of the captions that match each scene."""
        matches_CS = np.empty((len(self), len(scenes)), dtype=bool)
        related_RSTT = object_relations(scenes)
        for row, (phrases, relation) in enumerate(zip(self.phrases, self.relations, strict=True)):
            first_ST = scenes.matching(phrases[0])
            if relation != NO_RELATION:
                second_S1T = scenes.matching(phrases[1])[:, None, :]
                first_ST = first_ST & (related_RSTT[relation] & second_S1T).any(axis=2)
            matches_CS[row] = first_ST.any(axis=1)
        return matches_CS

    def objects(self, row: int, scenes: Scenes, scene: int) -> np.ndarray:
        """Finds the objects in a scene that match the two phrases of a caption, as masks (2, T).

        If the caption has a relation, the objects must also be in this relation.
        """
        single = scenes.take([scene])
        first_T, second_T = (single.matching(attributes)[0] for attributes in self.phrases[row])
        if self.relations[row] == NO_RELATION:
            return np.stack([first_T, np.zeros_like(first_T)])
        related_TT = object_relations(single)[self.relations[row], 0]
        pairs_TT = related_TT & first_T[:, None] & second_T[None, :]
        return np.stack([pairs_TT.any(axis=1), pairs_TT.any(axis=0)])


def describe(attributes: Sequence[int]) -> str:
    """Returns a phrase that describes an object.

    >>> describe([0, 2, 5]), describe([ANY, ANY, 3])
    ('a small blue ring', 'a star')
    """
    size, colour, shape = attributes
    words = [SIZES[size]] if size != ANY else []
    words += [list(COLOURS)[colour]] if colour != ANY else []
    return " ".join(["a", *words, SHAPES[shape] if shape != ANY else "shape"])


def object_relations(scenes: Scenes) -> np.ndarray:
    """Finds the pairs of objects in each relation and returns them as masks (4, S, T, T).

    Two objects are left and right of each other if their distance in x is larger than that in y.
    Otherwise, they are above and below each other.
    """
    offset_STT2 = scenes.centres[:, :, None] - scenes.centres[:, None]
    x_STT, y_STT = offset_STT2[..., 0], offset_STT2[..., 1]
    is_horizontal_STT = np.abs(x_STT) > np.abs(y_STT)
    is_vertical_STT = np.abs(x_STT) < np.abs(y_STT)
    return np.stack(
        [
            is_horizontal_STT & (x_STT < 0),
            is_horizontal_STT & (x_STT > 0),
            is_vertical_STT & (y_STT < 0),
            is_vertical_STT & (y_STT > 0),
        ]
    )


def generate_scenes(series: int, numbers: Sequence[int], layout: Layout = DEFAULT_LAYOUT) -> Scenes:
    """Generates scenes of an infinite series. A scene depends only on the series and its number.

    >>> single, several = generate_scenes(0, [5]), generate_scenes(0, range(10))
    >>> bool((single.centres[0] == several.centres[5]).all())
    True
    """
    count = len(numbers)
    max_objects = layout.objects[1]
    attributes = np.full((count, max_objects, 3), -1, dtype=np.int64)
    centres = np.zeros((count, max_objects, 2))
    greys = np.zeros(count, dtype=np.uint8)
    for row, number in enumerate(numbers):
        random = np.random.default_rng([series, number])
        greys[row] = random.integers(90, 166)
        num_placed = 0
        for kind in _draw_attributes(random, layout):
            placed = attributes[row, :num_placed], centres[row, :num_placed]
            centre = _free_centre(random, kind[0], *placed, layout)
            if centre is not None:
                attributes[row, num_placed], centres[row, num_placed] = kind, centre
                num_placed += 1
    return Scenes(attributes, centres, greys, layout)


def draw_captions(
    scenes: Scenes,
    random: np.random.Generator,
    captions_per_scene: int = 1,
    single_fraction: float = 0.0,
) -> tuple[Captions, np.ndarray]:
    """Draws captions that match the given scenes.

    `single_fraction` of them describe a single object. Returns the captions, grouped by scene, and
    the row (C,) of the scene of each caption.
    """
    count = len(scenes) * captions_per_scene
    phrases = np.full((count, 2, 3), ANY, dtype=np.int64)
    relations = np.full(count, NO_RELATION, dtype=np.int64)
    scene_C = np.repeat(np.arange(len(scenes)), captions_per_scene)
    related_RSTT = object_relations(scenes)
    for row, scene in enumerate(scene_C):
        kinds_T3 = scenes.attributes[scene]
        is_object_T = kinds_T3[:, 2] >= 0
        first = random.choice(np.flatnonzero(is_object_T))
        phrases[row, 0] = kinds_T3[first]
        # "a red star left of a red star" is not informative.
        differs_T = (kinds_T3 != kinds_T3[first]).any(axis=1)
        related_RT = related_RSTT[:, scene, first] & is_object_T & differs_T
        if random.random() >= single_fraction and related_RT.any():
            second = random.choice(np.flatnonzero(related_RT.any(axis=0)))
            relations[row] = np.flatnonzero(related_RT[:, second])[0]
            phrases[row, 1] = kinds_T3[second]
    return Captions(phrases, relations), scene_C


def vocabulary() -> list[str]:
    """Returns all words that occur in captions."""
    words = ["a", "shape", *SIZES, *COLOURS, *SHAPES, *" ".join(RELATIONS).split()]
    return list(dict.fromkeys(words))


def _draw_attributes(random: np.random.Generator, layout: Layout) -> list[np.ndarray]:
    """Draws size, colour and shape of the objects of a scene, large objects first."""
    kinds: list[np.ndarray] = []
    min_objects, max_objects = layout.objects
    for _ in range(random.integers(min_objects, max_objects + 1)):
        if kinds and random.random() < REPEAT_PROBABILITY:
            kinds.append(kinds[random.integers(len(kinds))])
        else:
            kinds.append(random.integers([len(SIZES), len(COLOURS), len(SHAPES)]))
    return sorted(kinds, key=lambda kind: -kind[0])


def _free_centre(
    random: np.random.Generator,
    size: int,
    kinds_T3: np.ndarray,
    centres_T2: np.ndarray,
    layout: Layout,
) -> np.ndarray | None:
    """Draws a centre at which an object touches no other, or None if none is found."""
    radii = np.array(layout.radii)
    radius = radii[size]
    for _ in range(50):
        centre = random.integers(radius + 1, layout.side - radius, 2)
        distance_T = np.abs(centres_T2 - centre).max(axis=1)
        if (distance_T > radius + radii[kinds_T3[:, 0]] + 1).all():
            return centre
    return None


@functools.cache
def stamp(shape: str, radius: int, oversampling: int = 8) -> np.ndarray:
    """Returns the coverage of each pixel by a shape, (2 radius, 2 radius) float32 in [0, 1]."""
    side = 2 * radius * oversampling
    image = Image.new("L", (side, side))
    draw = ImageDraw.Draw(image)
    centre = side / 2

    def polar_points(turns: Sequence[float], radii: Sequence[float]) -> list[tuple[float, float]]:
        return [
            (
                centre * (1 + radius * np.sin(2 * np.pi * turn)),
                centre * (1 - radius * np.cos(2 * np.pi * turn)),
            )
            for turn, radius in zip(turns, radii, strict=True)
        ]

    bounds = (0, 0, side - 1, side - 1)
    if shape == "circle":
        draw.ellipse(bounds, fill=255)
    elif shape == "square":
        inset = side * 0.08
        draw.rectangle((inset, inset, side - 1 - inset, side - 1 - inset), fill=255)
    elif shape == "triangle":
        draw.polygon([(centre, 0), (side, side), (0, side)], fill=255)
    elif shape == "star":
        draw.polygon(polar_points((np.arange(10) / 10).tolist(), [1.0, 0.45] * 5), fill=255)
    elif shape == "cross":
        arm = side * 0.17
        draw.rectangle((centre - arm, 0, centre + arm, side), fill=255)
        draw.rectangle((0, centre - arm, side, centre + arm), fill=255)
    else:
        draw.ellipse(bounds, fill=255)
        hole = side * 0.27
        draw.ellipse((hole, hole, side - 1 - hole, side - 1 - hole), fill=0)
    return np.asarray(image.reduce(oversampling), dtype=np.float32) / 255
