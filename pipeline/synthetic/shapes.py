"""Shapes: scenes of coloured shapes with captions and boxes, of which all that is true is known.

A stand-in for Flickr30K-Entities where no such data are at hand: several objects a picture, often
some of one kind, captions of one object or of two and where they lie, and a box for each object
that a caption names. A caption may hold in several scenes; all of them are relevant to it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageDraw

SIDE = 112  # pixels of a scene
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
#: How often an object is of the kind of an earlier one.
REPEATS = 0.3
ANY = -1  # of an attribute that a phrase does not name
NO_RELATION = -1


@dataclass(frozen=True)
class Layout:
    """Sizes of scenes and of what is on them.

    Attributes:
        side: Width and height of a scene, in pixels.
        radii: Radius of small and of large objects, in pixels.
        objects: Smallest and largest number of objects. The last ones are left out where there is
            no space.
    """

    side: int = SIDE
    radii: tuple[int, int] = (6, 12)
    objects: tuple[int, int] = (4, 7)


DEFAULT_LAYOUT = Layout()


@dataclass(frozen=True)
class Scenes:
    """S scenes of up to T objects.

    Attributes:
        attributes: (S, T, 3) int64, numbers of size, colour and shape; -1 where there is no object.
        centres: (S, T, 2) float64, x and y in pixels.
        greys: (S,) uint8, the background.
        layout: Sizes of all scenes.
    """

    attributes: np.ndarray
    centres: np.ndarray
    greys: np.ndarray
    layout: Layout = DEFAULT_LAYOUT

    def __len__(self) -> int:
        return len(self.greys)

    @property
    def boxes(self) -> np.ndarray:
        """(S, T, 4) x0 y0 x1 y1 of the objects as shares of the picture."""
        radii = np.array(self.layout.radii)[self.attributes[..., 0], None]
        corners = [self.centres - radii, self.centres + radii]
        return np.concatenate(corners, axis=2) / self.layout.side

    def take(self, rows: Sequence[int] | slice) -> Scenes:
        """Some of the scenes."""
        return Scenes(self.attributes[rows], self.centres[rows], self.greys[rows], self.layout)

    def matching(self, said: np.ndarray) -> np.ndarray:
        """(S, T) bool: the objects of which a phrase is true."""
        is_there_ST = self.attributes[..., 2] >= 0
        return ((said == ANY) | (self.attributes == said)).all(axis=2) & is_there_ST

    def picture(self, row: int) -> Image.Image:
        """A scene in RGB."""
        side = self.layout.side
        pixels = np.full((side, side, 3), self.greys[row], dtype=np.float32)
        for (size, colour, shape), centre in zip(
            self.attributes[row], self.centres[row], strict=True
        ):
            if shape < 0:
                continue
            shade = stamp(SHAPES[shape], self.layout.radii[size])[..., None]
            left, top = (int(place) - len(shade) // 2 for place in centre)
            part = pixels[top : top + len(shade), left : left + len(shade)]
            part += shade * (np.array(list(COLOURS.values())[colour]) - part)
        return Image.fromarray(pixels.round().astype(np.uint8))


@dataclass(frozen=True)
class Captions:
    """C captions: "a small red circle", or "a small red circle left of a blue star".

    Attributes:
        phrases: (C, 2, 3) int64, what is said of the one and of the other object, as in
            `Scenes.attributes`; `ANY` where nothing is.
        relations: (C,) int64 into `RELATIONS`; `NO_RELATION`: the caption is of one object.
    """

    phrases: np.ndarray
    relations: np.ndarray

    def __len__(self) -> int:
        return len(self.relations)

    def take(self, rows: slice) -> Captions:
        """Some of the captions."""
        return Captions(self.phrases[rows], self.relations[rows])

    @classmethod
    def of(cls, parts: Iterable[Captions]) -> Captions:
        """Captions one behind the other."""
        parts = list(parts)
        return cls(
            np.concatenate([part.phrases for part in parts]),
            np.concatenate([part.relations for part in parts]),
        )

    @property
    def texts(self) -> list[str]:
        """The captions in words."""
        texts = []
        for (one, other), relation in zip(self.phrases, self.relations, strict=True):
            text = phrase(one)
            if relation != NO_RELATION:
                text += f" {RELATIONS[relation]} {phrase(other)}"
            texts.append(text)
        return texts

    def hold(self, scenes: Scenes) -> np.ndarray:
        """(C, S) bool: which captions are true of which scenes."""
        held = np.empty((len(self), len(scenes)), dtype=bool)
        relates_RSTT = relates(scenes)
        for row, (phrases, relation) in enumerate(zip(self.phrases, self.relations, strict=True)):
            one_ST = scenes.matching(phrases[0])
            if relation != NO_RELATION:
                other_S1T = scenes.matching(phrases[1])[:, None, :]
                one_ST = one_ST & (relates_RSTT[relation] & other_S1T).any(axis=2)
            held[row] = one_ST.any(axis=1)
        return held

    def objects(self, row: int, scenes: Scenes, scene: int) -> np.ndarray:
        """(2, T) bool: the objects of a scene that a caption's two phrases mean.

        Of a caption with a relation those that stand in it.
        """
        own = scenes.take([scene])
        one_T, other_T = (own.matching(said)[0] for said in self.phrases[row])
        if self.relations[row] == NO_RELATION:
            return np.stack([one_T, np.zeros_like(one_T)])
        pairs_TT = relates(own)[self.relations[row], 0] & one_T[:, None] & other_T[None, :]
        return np.stack([pairs_TT.any(axis=1), pairs_TT.any(axis=0)])


def phrase(said: Sequence[int]) -> str:
    """What is said of an object, in words.

    >>> phrase([0, 2, 5]), phrase([ANY, ANY, 3])
    ('a small blue ring', 'a star')
    """
    size, colour, shape = said
    words = [SIZES[size]] if size != ANY else []
    words += [list(COLOURS)[colour]] if colour != ANY else []
    return " ".join(["a", *words, SHAPES[shape] if shape != ANY else "shape"])


def relates(scenes: Scenes) -> np.ndarray:
    """(4, S, T, T) bool: by relation, the one and the other object that stand in it.

    Where two objects lie apart more in x than in y they are left or right of each other, and else
    above or below.
    """
    apart_STT2 = scenes.centres[:, :, None] - scenes.centres[:, None]
    x_STT, y_STT = apart_STT2[..., 0], apart_STT2[..., 1]
    is_beside_STT = np.abs(x_STT) > np.abs(y_STT)
    is_over_STT = np.abs(x_STT) < np.abs(y_STT)
    return np.stack(
        [
            is_beside_STT & (x_STT < 0),
            is_beside_STT & (x_STT > 0),
            is_over_STT & (y_STT < 0),
            is_over_STT & (y_STT > 0),
        ]
    )


def scenes_of(series: int, numbers: Sequence[int], layout: Layout = DEFAULT_LAYOUT) -> Scenes:
    """The scenes of these numbers of an endless series, each for itself.

    >>> one, many = scenes_of(0, [5]), scenes_of(0, range(10))
    >>> bool((one.centres[0] == many.centres[5]).all())
    True
    """
    count = len(numbers)
    most = layout.objects[1]
    attributes = np.full((count, most, 3), -1, dtype=np.int64)
    centres = np.zeros((count, most, 2))
    greys = np.zeros(count, dtype=np.uint8)
    for row, number in enumerate(numbers):
        random = np.random.default_rng([series, number])
        greys[row] = random.integers(90, 166)
        placed = 0
        for kind in _kinds(random, layout):
            # A place may not be found for the last of them.
            placed_objects = attributes[row, :placed], centres[row, :placed]
            centre = _free_place(random, kind[0], *placed_objects, layout)
            if centre is not None:
                attributes[row, placed], centres[row, placed] = kind, centre
                placed += 1
    return Scenes(attributes, centres, greys, layout)


def captions_of(
    scenes: Scenes, random: np.random.Generator, each: int = 1, share_of_single: float = 0.0
) -> tuple[Captions, np.ndarray]:
    """Draws captions that are true of the scenes.

    Args:
        scenes: Scenes to describe.
        random: Source of random numbers.
        each: Number of captions per scene.
        share_of_single: Share of captions that describe only one object, in [0, 1].

    Returns:
        The captions, grouped by scene, and the row (C,) of the scene of each caption.
    """
    count = len(scenes) * each
    phrases = np.full((count, 2, 3), ANY, dtype=np.int64)
    relations = np.full(count, NO_RELATION, dtype=np.int64)
    scene_C = np.repeat(np.arange(len(scenes)), each)
    relates_RSTT = relates(scenes)
    for row, scene in enumerate(scene_C):
        kinds_T3 = scenes.attributes[scene]
        there_T = kinds_T3[:, 2] >= 0
        one = random.choice(np.flatnonzero(there_T))
        phrases[row, 0] = kinds_T3[one]
        # "A red star left of a red star" says little.
        differs_T = (kinds_T3 != kinds_T3[one]).any(axis=1)
        related_RT = relates_RSTT[:, scene, one] & there_T & differs_T
        if random.random() >= share_of_single and related_RT.any():
            other = random.choice(np.flatnonzero(related_RT.any(axis=0)))
            relations[row] = np.flatnonzero(related_RT[:, other])[0]
            phrases[row, 1] = kinds_T3[other]
    return Captions(phrases, relations), scene_C


def words() -> list[str]:
    """Every word that captions have."""
    said = ["a", "shape", *SIZES, *COLOURS, *SHAPES, *" ".join(RELATIONS).split()]
    return list(dict.fromkeys(said))


def _kinds(random: np.random.Generator, layout: Layout) -> list[np.ndarray]:
    """Size, colour and shape of each object of a scene, the large ones first."""
    kinds: list[np.ndarray] = []
    fewest, most = layout.objects
    for _ in range(random.integers(fewest, most + 1)):
        if kinds and random.random() < REPEATS:
            kinds.append(kinds[random.integers(len(kinds))])
        else:
            kinds.append(random.integers([len(SIZES), len(COLOURS), len(SHAPES)]))
    return sorted(kinds, key=lambda kind: -kind[0])


def _free_place(
    random: np.random.Generator,
    size: int,
    kinds_T3: np.ndarray,
    centres_T2: np.ndarray,
    layout: Layout,
) -> np.ndarray | None:
    """Returns a free centre in whole pixels at which an object touches no other, or None."""
    radii = np.array(layout.radii)
    radius = radii[size]
    for _ in range(50):
        centre = random.integers(radius + 1, layout.side - radius, 2)
        apart_T = np.abs(centres_T2 - centre).max(axis=1)
        if (apart_T > radius + radii[kinds_T3[:, 0]] + 1).all():
            return centre
    return None


@functools.cache
def stamp(shape: str, radius: int, finer: int = 8) -> np.ndarray:
    """(2 radius, 2 radius) float32: how much of each pixel the shape covers."""
    side = 2 * radius * finer
    picture = Image.new("L", (side, side))
    draw = ImageDraw.Draw(picture)
    middle = side / 2

    def around(turns: Sequence[float], radii: Sequence[float]) -> list[tuple[float, float]]:
        return [
            (
                middle * (1 + radius * np.sin(2 * np.pi * turn)),
                middle * (1 - radius * np.cos(2 * np.pi * turn)),
            )
            for turn, radius in zip(turns, radii, strict=True)
        ]

    whole = (0, 0, side - 1, side - 1)
    if shape == "circle":
        draw.ellipse(whole, fill=255)
    elif shape == "square":
        inset = side * 0.08
        draw.rectangle((inset, inset, side - 1 - inset, side - 1 - inset), fill=255)
    elif shape == "triangle":
        draw.polygon([(middle, 0), (side, side), (0, side)], fill=255)
    elif shape == "star":
        draw.polygon(around((np.arange(10) / 10).tolist(), [1.0, 0.45] * 5), fill=255)
    elif shape == "cross":
        arm = side * 0.17
        draw.rectangle((middle - arm, 0, middle + arm, side), fill=255)
        draw.rectangle((0, middle - arm, side, middle + arm), fill=255)
    else:
        draw.ellipse(whole, fill=255)
        hole = side * 0.27
        draw.ellipse((hole, hole, side - 1 - hole, side - 1 - hole), fill=0)
    return np.asarray(picture.reduce(finer), dtype=np.float32) / 255
