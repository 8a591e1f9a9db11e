"""Benchmark of video and audio: the source stage, memory on long files, OCR and ASR.

    python -m tests.bench media
    python -m tests.bench media --only video --repeats 1 --out figures.json

Videos pan over the shipped pages at 1280 x 720 and 25 frames per second. Audio is the shipped
speech, repeated, in stereo at 44.1 kHz.
"""

from __future__ import annotations

import itertools
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import av
import numpy as np
import pyarrow as pa
import pypdfium2 as pdfium
import soundfile

import jobs
from pipeline.config import SpecError
from pipeline.data.pages import Pages
from pipeline.data.recognise.accuracy import word_errors
from pipeline.registry import OCR, SPEECH
from pipeline.schema import AUDIO, Item
from tests.bench.harness import Bench, Repeats, run_apart, table
from tests.bench.reading import decoded_items, listed_items

DATA = Path(jobs.__file__).parent / "data"
SPEECH_FILE = DATA / "speech/jfk.flac"
FRAME_RATE = 25


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the command line and runs the benchmark."""
    parser = jobs.parser(__doc__)
    parser.add_argument("--only", nargs="+", choices=FIGURES, help="parts to run (default: all)")
    parser.add_argument(
        "--copies", type=jobs.positive, default=32, help="copies of the video and the audio file"
    )
    parser.add_argument("--seconds", type=jobs.positive, default=60, help="length of a video")
    parser.add_argument(
        "--minutes", type=jobs.positive, default=30, help="length of the long video"
    )
    parser.add_argument("--pages", type=jobs.positive, default=6, help="pages for OCR")
    parser.add_argument(
        "--processes",
        type=jobs.positive,
        nargs="+",
        default=[1, 2],
        help="reading processes per side",
    )
    parser.add_argument("--repeats", type=jobs.positive, default=3, help="repeats per comparison")
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    arguments = list(arguments or [])
    args = parser.parse_args(arguments)
    bench = Bench("media", arguments, args.out)
    with tempfile.TemporaryDirectory(prefix="maxray-bench-") as folder:
        for name, figure in FIGURES.items():
            if not args.only or name in args.only:
                figure(bench, Path(folder), args)


def video(bench: Bench, folder: Path, args: Any) -> None:
    """Compares frames per second when sampling 720p video at 1 frame per second."""
    files = folder / "video"
    files.mkdir()
    write_video(files / "00.mp4", args.seconds, (1280, 720))
    for copy in range(1, args.copies):
        shutil.copy(files / "00.mp4", files / f"{copy:02}.mp4")
    title = (
        f"frames at 1 per second of {args.copies} videos of {args.seconds} s, 1280 x 720 at"
        f" {FRAME_RATE} frames/s"
    )
    _compare(
        bench,
        "video",
        files,
        args,
        title,
        ["plain decord loops, frames/s", "source stage, frames/s"],
    )


def audio(bench: Bench, folder: Path, args: Any) -> None:
    """Compares seconds of audio per second when converting to mono at 16 kHz."""
    files = folder / "audio"
    files.mkdir()
    samples, rate = soundfile.read(SPEECH_FILE, dtype="float32", always_2d=True)
    minutes = 10
    many = np.tile(samples, (-(-minutes * 60 * rate // len(samples)), 1))[: minutes * 60 * rate]
    for copy in range(args.copies):
        soundfile.write(files / f"{copy:02}.flac", many, rate)
    title = (
        f"audio of {args.copies} FLAC files of {minutes} minutes, stereo at {rate:,} Hz, to mono at"
        " 16 kHz"
    )
    _compare(
        bench, "audio", files, args, title, ["plain soundfile loops, s/s", "source stage, s/s"]
    )


def _compare(bench: Bench, kind: str, files: Path, args: Any, title: str, names: list[str]) -> None:
    """Runs both sides in turn and reverses the order in each round."""
    rows, figures = [], {}
    for processes in args.processes:
        taken: dict[str, list[float]] = {"ray": [], "bare": []}
        for repeat in range(args.repeats):
            for side in ("ray", "bare") if repeat % 2 == 0 else ("bare", "ray"):
                module = "tests.bench.media_run"
                run = run_apart(module, side, kind, str(files), str(processes))
                if not run["seconds"]:  # from the end of the first unit to that of the last
                    raise SpecError("--copies", args.copies, "enough files for two units")
                taken[side].append(run["amount"] / run["seconds"])
        rates = {side: Repeats(tuple(values)) for side, values in taken.items()}
        ratio = rates["ray"].over(rates["bare"])
        rows.append([processes, rates["bare"], rates["ray"], f"**{ratio}**"])
        figures[processes] = {**rates, "ratio": ratio}
    bench.add(kind, title, {"processes": figures}, table(["processes", *names, "ratio"], rows))


def memory(bench: Bench, folder: Path, args: Any) -> None:
    """Compares the memory that a worker needs for a long video and for a short one."""
    rows, figures = [], {}
    for minutes in (1, args.minutes):
        path = folder / f"{minutes}.mp4"
        write_video(path, 60 * minutes, (320, 180))
        run = run_apart("tests.bench.media_run", "held", "video", str(path), "1")
        figures[minutes] = {name: run[name] / 2**20 for name in ("worker", "decoder")}
        rows.append([minutes, f"{run['amount']:,.0f}", *figures[minutes].values()])
    short, long = (sum(figures[minutes].values()) for minutes in (1, args.minutes))
    text = table(["minutes", "frames", "worker, MiB", "its decoding process, MiB"], rows)
    text += f"\n\nratio of the sums: {long / short:.2f}"
    title = "peak memory while a video of 320 x 180 is read in windows"
    bench.add("memory", title, {"MiB": figures, "ratio": long / short}, text)


def recognition(bench: Bench, folder: Path, args: Any) -> None:
    """Compares OCR and ASR with direct calls of their libraries and measures their accuracy."""
    rows = []
    figures: dict[str, Any] = {}
    for name, items, bare, truth in (_pages(args.pages), _speech()):
        recogniser = _recogniser(name)
        recogniser.lines(items[0])  # warm-up
        taken: dict[str, list[float]] = {"ours": [], "bare": []}
        for repeat in range(args.repeats):
            sides = {"ours": recogniser.lines, "bare": bare}
            for side in sides if repeat % 2 == 0 else reversed(sides):
                start = time.perf_counter()
                results = [sides[side](item) for item in items]
                taken[side].append(len(items) / (time.perf_counter() - start))
                if side == "ours":
                    texts = ["\n".join(line.text for line in lines) for lines in results]
        errors = [word_errors(*pair) for pair in zip(truth, texts, strict=True)]
        wrong, words = (sum(column) for column in zip(*errors, strict=True))
        rates = {side: Repeats(tuple(values)) for side, values in taken.items()}
        ratio = rates["ours"].over(rates["bare"])
        accuracy = 1 - wrong / words
        rows.append([name, rates["bare"], rates["ours"], f"**{ratio}**", words, accuracy])
        figures[name] = {**rates, "ratio": ratio, "words": words, "accuracy": accuracy}
    header = ["", "library, items/s", "recogniser, items/s", "ratio", "words", "word accuracy"]
    title = (
        f"{args.pages} shipped pages at 144 dpi against their text layer, and the shipped speech"
        " against its words; accuracy is 1 - (substituted + missing + added) / words"
    )
    bench.add("recognition", title, figures, table(header, rows))


def _recogniser(name: str) -> Any:
    registry = OCR if name in OCR.names() and name != "precomputed" else SPEECH
    return registry.build(registry.resolve(name))


def _pages(number: int) -> tuple[str, list[dict[str, Any]], Any, list[str]]:
    import io

    import torch
    from PIL import Image
    from rapidocr import RapidOCR

    source = Pages(Pages.Spec(path=str(DATA / "pages/pdf")), ("text", "image"))
    pages = itertools.islice(_decoded(source), number)
    items, truth = [], []
    for page in pages:
        items.append({"item_id": page.item_id, "scan": page.payload["image"], "frames": None})
        truth.append(page.text or "")
    settings = {
        "Global.use_cls": False,
        "EngineConfig.onnxruntime.intra_op_num_threads": torch.get_num_threads(),
    }
    engine = RapidOCR(params={"Global.log_level": "error", **settings})

    def bare(item: dict[str, Any]) -> Any:
        image = np.asarray(Image.open(io.BytesIO(item["scan"])).convert("RGB"))
        return engine(image[:, :, ::-1], return_word_box=True)

    return "rapidocr", items, bare, truth


def _decoded(source: Pages) -> Iterator[Item]:
    for shard in source.shards():
        listed = listed_items(source, shard)
        firsts = [entry for entry in listed if entry[1].item_id.endswith("#page=1")]
        yield from decoded_items(source, shard, firsts)


def _speech() -> tuple[str, list[dict[str, Any]], Any, list[str]]:
    import soxr
    from pocketsphinx import Decoder

    samples, rate = soundfile.read(SPEECH_FILE, dtype="float32", always_2d=True)
    mono = soxr.resample(samples.mean(axis=1), rate, 16_000).astype("<f4")
    audio = {"start": 0.0, "sample_rate": 16_000, "samples": mono.tobytes()}
    item = {"item_id": "jfk", "audio": pa.scalar(audio, AUDIO).as_py()}
    decoder = Decoder(samprate=16_000, loglevel="FATAL")

    def bare(item: dict[str, Any]) -> Any:
        samples = np.frombuffer(item["audio"]["samples"], "<f4")
        decoder.start_utt()
        decoder.process_raw((samples * 32_767).astype("<i2").tobytes(), full_utt=True)
        decoder.end_utt()
        return [segment.word for segment in decoder.seg()]

    return "pocketsphinx", [item], bare, [(DATA / "speech/jfk.txt").read_text()]


def write_video(path: Path, seconds: int, size: tuple[int, int]) -> None:
    """Writes a silent H.264 video that pans over the shipped pages."""
    width, height = size
    pages = itertools.cycle(sorted((DATA / "pages/pdf").glob("*.pdf")))
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=FRAME_RATE, options={"preset": "veryfast"})
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for second in range(seconds):
            if second % 6 == 0:
                page = pdfium.PdfDocument(next(pages))[0]
                scale = 1.1 * width / page.get_width()
                image = np.asarray(page.render(scale=scale).to_pil().convert("RGB"))
                margins = image.shape[0] - height, image.shape[1] - width
            for number in range(FRAME_RATE):
                share = (second % 6 + number / FRAME_RATE) / 6
                top, left = (int(share * margin) for margin in margins)
                shown = np.ascontiguousarray(image[top : top + height, left : left + width])
                for packet in stream.encode(av.VideoFrame.from_ndarray(shown, "rgb24")):
                    container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)


FIGURES = {"video": video, "audio": audio, "memory": memory, "recognition": recognition}
