"""The benchmark MMEB-V2, whose queries have their own candidates."""

from __future__ import annotations

import posixpath
from typing import Any, Literal

from pipeline.config import MissingField, SpecError, Uri, within
from pipeline.eval import Benchmark, JudgedQueries
from pipeline.eval.datasets import DatasetSpec, judged_queries
from pipeline.eval.query_images import ImageFiles
from pipeline.sources.annotations import read_table
from pipeline.sources.mmeb import IMAGE_COLUMNS, IMAGE_TOKEN, VIDEO_COLUMNS, candidates


class Mmeb(Benchmark["Mmeb.Spec"]):
    """Queries of a task of MMEB-V2. The main metric is hit@1, which equals Success@1.

    **Image tasks.** Queries are texts, images, or both, with the candidates of their row as pool.
    The first candidate is relevant. Query ids are the numbers of the rows.

    **Video retrieval tasks.** The queries are the captions, and all videos of the task are ranked.

    **Instructions.** With `instruction: text`, the instruction of the task precedes the text of
    each query, as in MMEB. With `template`, it replaces the instruction in the query template of
    encoders that have one; all rows must have the same. Markers of images are removed, because
    encoders insert their own.

    The documents are indexed with the source `mmeb`.
    """

    class Spec(DatasetSpec):
        """Options of the MMEB benchmark."""

        name: Literal["mmeb"] = "mmeb"
        path: Uri
        """Parquet file of a task, or the folder with its files."""
        images: Uri | None = None
        """Folder of the query images, such as `image-tasks`; null if the queries are texts."""
        instruction: Literal["text", "template", "none"] = "text"
        """Place of the instruction: in the `text` of the query, in the query `template` of the
        encoder, or `none` to ignore it."""
        video_instruction: str = ""
        """Instruction of a video task, whose rows contain none."""

    def load(self) -> JudgedQueries:
        """Loads the queries."""
        with within("benchmark"):
            _, first = next(read_table(self.spec.path, (), "path"), ("", {}))
            return self._videos() if "video_id" in first else self._images()

    def _videos(self) -> JudgedQueries:
        texts, qrels = {}, {}
        for number, (_, row) in enumerate(read_table(self.spec.path, VIDEO_COLUMNS, "path")):
            captions = row["caption"]
            caption = captions[0] if isinstance(captions, list) else captions
            texts[str(number)] = self._text(self.spec.video_instruction, caption)
            qrels[str(number)] = {str(row["video_id"]): 1}
        instruction = self.spec.video_instruction or None
        return self._judged(texts, qrels, instruction)

    def _images(self) -> JudgedQueries:
        texts: dict[str, str] = {}
        qrels: dict[str, dict[str, int]] = {}
        pools: dict[str, tuple[str, ...]] = {}
        uris: dict[str, str] = {}
        instructions: set[str] = set()
        for number, (location, row) in enumerate(read_table(self.spec.path, IMAGE_COLUMNS, "path")):
            query_id = str(number)
            instruction = _clean(row.get("qry_inst"))
            instructions.add(instruction)
            texts[query_id] = self._text(instruction, row["qry_text"])
            if image := row["qry_img_path"]:
                if self.spec.images is None:
                    rule = "the folder of the query images, to which their paths are relative"
                    raise MissingField("images", None, rule)
                uris[query_id] = posixpath.join(self.spec.images, image)
            elif not texts[query_id]:
                rule = "a row with qry_text or qry_img_path"
                raise SpecError("path", self.spec.path, rule, f"has neither in {location}")
            pool = [candidate.id for candidate in candidates(row, "path")]
            pools[query_id] = tuple(dict.fromkeys(pool))
            qrels[query_id] = {pool[0]: 1}
        if self.spec.instruction == "template" and len(instructions) > 1:
            problem = f"has {len(instructions)} different instructions"
            raise SpecError("instruction", "template", "text for this task", problem)
        instruction = next(iter(instructions), "")
        images = ImageFiles(uris) if uris else None
        return self._judged(texts, qrels, instruction or None, pools=pools, images=images)

    def _text(self, instruction: str, text: Any) -> str:
        if self.spec.instruction != "text":
            instruction = ""
        return " ".join(part for part in (instruction, _clean(text)) if part)

    def _judged(
        self,
        texts: dict[str, str],
        qrels: dict[str, dict[str, int]],
        instruction: str | None,
        **fields: Any,
    ) -> JudgedQueries:
        is_template = self.spec.instruction == "template"
        return judged_queries(
            self.spec,
            self.spec.path,
            texts,
            qrels,
            instruction=instruction if is_template else None,
            measure="Success@1",
            **fields,
        )


def _clean(text: str | None) -> str:
    r"""Removes the marker of an image and surrounding white space.

    >>> _clean("<|image_1|>\nFind a similar image: ")
    'Find a similar image:'
    """
    return (text or "").replace(IMAGE_TOKEN, "").strip()
