"""Generates the videos of `jobs/data/clips` from the shipped pages and the shipped speech.

    python examples/papers/data/make_clips.py

`talk.mp4` shows four slides, cut out of PDF pages, with speech from second 5 to 16. `tables.mp4`
shows two others and has no audio track. `clips.json` lists the slides and the speech with their
times. The text of a slide is that of the page's text layer. The files are reproducible bit by bit
with the same versions of PyAV, Pillow and PDFium.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import av
import numpy as np
import pypdfium2 as pdfium
import soundfile
from PIL import Image

FOLDER = Path(__file__).parents[3] / "jobs/data"
FPS, WIDTH, HEIGHT = 25, 1280, 720
SOUND_RATE = 44_100  # of the recording
SPEECH_STARTS = 5.0


@dataclass(frozen=True)
class Slide:
    """Section of a page, in points from its upper left corner. The rest of the frame is white."""

    file: str
    page: int
    left: float
    top: float
    width: float
    bottom: float

    def draw(self) -> tuple[np.ndarray, str]:
        """Returns (HEIGHT, WIDTH, 3) pixels, and the text in them."""
        page = pdfium.PdfDocument(FOLDER / "pages/pdf" / self.file)[self.page - 1]
        width, height = page.get_size()
        left, right = self.left, self.left + self.width
        bottom, top = height - self.bottom, height - self.top
        scale = 2 * WIDTH / self.width  # rendered at twice the size and averaged
        image = page.render(scale=scale, crop=(left, bottom, width - right, height - top)).to_pil()
        size = WIDTH, min(HEIGHT, round(image.height / image.width * WIDTH))
        frame = Image.new("RGB", (WIDTH, HEIGHT), "white")
        frame.paste(image.convert("RGB").resize(size, Image.Resampling.BOX))
        text = page.get_textpage().get_text_bounded(left, bottom, right, top)
        return np.asarray(frame), " ".join(text.split())


TALK = [
    Slide("us-013.pdf", 1, 60, 62, 490, 287),
    Slide("us-019.pdf", 2, 24, 32, 564, 325),
    Slide("us-031a.pdf", 2, 60, 64, 492, 314),
    Slide("us-039.pdf", 2, 100, 104, 412, 318),
]
TABLES = [
    Slide("us-035a.pdf", 2, 56, 58, 440, 289),
    Slide("us-021.pdf", 2, 24, 72, 536, 256),
]


def make(
    name: str, slides: list[Slide], seconds_each: float, speech: Path | None
) -> dict[str, Any]:
    """Writes a video and returns a description of what it contains."""
    total = len(slides) * seconds_each
    shown = []
    spoken = None
    with av.open(str(FOLDER / "clips" / name), "w", options={"fflags": "+bitexact"}) as container:
        options = {"crf": "27", "preset": "slow", "tune": "stillimage", "threads": "1"}
        video = container.add_stream("libx264", rate=FPS, options=options)
        video.width, video.height, video.pix_fmt = WIDTH, HEIGHT, "yuv420p"
        video.codec_context.flags |= av.codec.context.Flags.bitexact
        if speech:
            sound = container.add_stream("aac", rate=SOUND_RATE, layout="mono")
            sound.bit_rate = 64_000
            sound.codec_context.flags |= av.codec.context.Flags.bitexact
            samples, spoken = soundtrack(speech, total)
        for number, slide in enumerate(slides):
            pixels, text = slide.draw()
            start = number * seconds_each
            page = f"{slide.file}#page={slide.page}"
            span = {"start": start, "end": start + seconds_each}
            shown.append({**span, "page": page, "text": text})
            for _ in range(round(seconds_each * FPS)):
                frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
                container.mux(video.encode(frame))
        container.mux(video.encode())
        if speech:
            for first in range(0, samples.shape[1], 1024):
                part = np.ascontiguousarray(samples[:, first : first + 1024])
                block = av.AudioFrame.from_ndarray(part, format="fltp", layout="mono")
                block.sample_rate, block.pts = SOUND_RATE, first
                container.mux(sound.encode(block))
            container.mux(sound.encode())
    return {"file": name, "seconds": total, "fps": FPS, "slides": shown, "speech": spoken}


def soundtrack(speech: Path, total: float) -> tuple[np.ndarray, dict[str, Any]]:
    """Returns samples (1, N) of the speech surrounded by silence, with its times and its text."""
    recording, rate = soundfile.read(speech, dtype="float32", always_2d=True)
    assert rate == SOUND_RATE
    samples = np.zeros((1, round(total * rate)), np.float32)
    first = round(SPEECH_STARTS * rate)
    samples[0, first : first + len(recording)] = recording.mean(axis=1)
    text = speech.with_suffix(".txt").read_text(encoding="utf-8").strip()
    return samples, {
        "start": SPEECH_STARTS,
        "end": SPEECH_STARTS + len(recording) / rate,
        "text": text,
    }


def main() -> None:
    """Writes the videos and clips.json."""
    (FOLDER / "clips").mkdir(exist_ok=True)
    speech = FOLDER / "speech/jfk.flac"
    clips = [make("talk.mp4", TALK, 5.0, speech), make("tables.mp4", TABLES, 4.0, None)]
    text = json.dumps({"size": [WIDTH, HEIGHT], "clips": clips}, indent=1, ensure_ascii=False)
    (FOLDER / "clips/clips.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
