"""Detection of scenes: slides, fades, motion and noise."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageFont

from tests.conftest import ROOT
from tests.data.decode.test_video import read_window
from tests.media import frame_times, write_video

# A slide is displayed for 4 s, and ten frames per second are stored.
SIZE, SLIDE_FRAMES = (640, 360), 40
FADE = np.linspace(0, 1, 10)[:, None, None, None]


def slide(*lines: str, background="white", colour="black", font_size=28) -> np.ndarray:
    image = Image.new("RGB", SIZE, background)
    font = ImageFont.load_default(size=font_size)
    ImageDraw.Draw(image).multiline_text((40, 60), "\n".join(lines), font=font, fill=colour)
    return np.asarray(image)


TITLES = [slide(title) for title in ("Introduction", "Data and methods", "Results", "Conclusion")]
TEXTS = [
    slide(*([f"{word} of the text on this slide"] * 6)) for word in ("one", "two", "six", "ten")
]
PASTELS = [
    slide("A title", background=colour) for colour in ("#ffe6e6", "#e6ffe6", "#e6e6ff", "#ffffdc")
]
DARK = [
    slide(title, background="#141428", colour="white") for title in ("One", "Two", "Six", "Ten")
]
WORDS = [
    slide("Agenda", word, font_size=20) for word in ("Opening", "Budget", "Elections", "Other")
]


def show(slides: list[np.ndarray]) -> np.ndarray:
    return np.repeat(np.stack(slides), SLIDE_FRAMES, axis=0)


def move(frames: np.ndarray, step: float = 7.0) -> np.ndarray:
    """Draws a moving square into the lower right part of frames."""
    frames = frames.copy()
    for number, frame in enumerate(frames):
        x = 400 + round(80 * np.sin(number * step / 80))
        frame[250:320, x : x + 70] = (180, 120, 90)
    return frames


def add_noise(frames: np.ndarray, deviation: float) -> np.ndarray:
    generator = np.random.default_rng(0)
    noise = (generator.normal(0, deviation, frame.shape) for frame in frames)
    return np.stack(
        [np.clip(f + n, 0, 255).astype(np.uint8) for f, n in zip(frames, noise, strict=True)]
    )


def scenes(path: Path, frames: np.ndarray, **settings: Any) -> list[float]:
    write_video(path, frame_times(len(frames) / 10, 10), size=SIZE, frames=iter(frames))
    settings = {"sampling": "scenes", "scene_detection_fps": 2.0, **settings}
    return [round(float(second), 1) for second in read_window(path, **settings)["seconds"]]


@pytest.mark.parametrize("slides", [TITLES, TEXTS, PASTELS, DARK, WORDS])
@pytest.mark.parametrize("fps", [1.0, 2.0, 5.0])
def test_slides_are_scenes(tmp_path, slides, fps):
    found = scenes(tmp_path / "a.mp4", show(slides), scene_detection_fps=fps)
    assert found == [2.0, 6.0, 10.0, 14.0]


def test_slides_beside_motion_and_noise_are_scenes(tmp_path):
    expected = [2.0, 6.0, 10.0, 14.0]
    assert scenes(tmp_path / "a.mp4", move(show(TITLES))) == expected
    assert scenes(tmp_path / "b.mp4", add_noise(show(TEXTS), 6)) == expected


def test_fade_is_one_change(tmp_path):
    for slides in (TEXTS, PASTELS, [slide(), slide(background="black"), TEXTS[0], DARK[0]]):
        parts = [np.repeat(slides[0][None], SLIDE_FRAMES, axis=0)]
        for before, after in itertools.pairwise(slides):
            parts.append(((1 - FADE) * before + FADE * after).astype(np.uint8))
            parts.append(np.repeat(after[None], SLIDE_FRAMES, axis=0))
        found = scenes(tmp_path / "a.mp4", np.concatenate(parts))
        assert found == pytest.approx([2.5, 7.5, 12.5, 17.0], abs=0.5)


def test_motion_and_noise_are_no_scenes(tmp_path):
    still = np.repeat(TITLES[:1], 80, axis=0)
    assert len(scenes(tmp_path / "a.mp4", still)) == 1
    assert len(scenes(tmp_path / "b.mp4", add_noise(still, 20))) == 1
    assert len(scenes(tmp_path / "c.mp4", move(still))) == 1
    texture = np.random.default_rng(0).integers(80, 180, (45, 80)).astype(np.uint8)
    texture = Image.fromarray(texture).resize((1280, 720), Image.Resampling.BICUBIC)
    texture = np.asarray(texture.convert("RGB"))
    for step in (1, 2, 3):
        views = np.stack([texture[step * n :, step * n :][:360, :640] for n in range(80)])
        assert len(scenes(tmp_path / f"{step}.mp4", views)) == 1
    brighter = np.stack([np.full((360, 640, 3), 60 + 2 * n, np.uint8) for n in range(80)])
    assert len(scenes(tmp_path / "d.mp4", brighter)) == 1


def test_slides_of_shipped_clip():
    window = read_window(ROOT / "jobs/data/clips/talk.mp4", sampling="scenes", audio=False)
    assert len(window["indices"]) == 4
