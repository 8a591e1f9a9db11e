"""The benchmark ImageCoDe: a caption selects one of ten similar images."""

from __future__ import annotations

import json
import posixpath
from typing import Literal

from pipeline import config
from pipeline.atomic import write_atomic
from pipeline.config import SpecError, Uri, within
from pipeline.eval import Benchmark, BenchmarkRow, JudgedQueries
from pipeline.eval.datasets import DatasetSpec, judged_queries
from pipeline.sources.imagecode import SET_SIZE, read_sets


class ImageCode(Benchmark["ImageCode.Spec"]):
    """Captions as queries, each with the ten images of its set as candidate pool.

    `path` is `train_data.json` or `valid_data.json`. Query ids are `<set>/<index>`, which is also
    the id of the relevant image. The metric is the accuracy, which equals R@1. The predictions of
    each row are written to `imagecode/<row>.json` in the output folder, in the format of the
    submission, `{set: {index of the caption: predicted index}}`. Sets of static images
    (`open-images`) and of video frames are query categories. The documents are indexed with the
    source `imagecode`.
    """

    class Spec(DatasetSpec):
        """Options of the ImageCoDe benchmark."""

        name: Literal["imagecode"] = "imagecode"
        path: Uri
        """JSON file of the captions of a labelled split."""

    def load(self) -> JudgedQueries:
        """Loads the captions."""
        with within("benchmark"):
            sets = read_sets(self.spec.path, "path")
        texts: dict[str, str] = {}
        qrels: dict[str, dict[str, int]] = {}
        pools: dict[str, tuple[str, ...]] = {}
        media: dict[str, list[str]] = {}
        for name, captions in sets.items():
            pool = tuple(f"{name}/{index}" for index in range(SET_SIZE))
            for index, caption in captions.items():
                query_id = f"{name}/{index}"
                if query_id not in pool:
                    rule = "a split with labels, such as valid_data.json"
                    raise SpecError("benchmark.path", self.spec.path, rule, "has no labels")
                texts[query_id], pools[query_id] = caption, pool
                qrels[query_id] = {query_id: 1}
                kind = "image" if "open-images" in name else "video"
                media.setdefault(kind, []).append(query_id)
        categories = {"media": media} if len(media) > 1 else {}
        return judged_queries(
            self.spec,
            self.spec.path,
            texts,
            qrels,
            pools=pools,
            categories=categories,
            measure="R@1",
        )

    def write_result(self, folder: str, row: BenchmarkRow) -> str:
        """Writes the predicted images of a row."""
        found: dict[str, dict[str, int]] = {}
        for query_id, scores in row.rankings.items():
            name, _, index = query_id.rpartition("/")
            if scores:
                best = max(scores, key=lambda document: scores[document])
                found.setdefault(name, {})[index] = int(best.rpartition("/")[2])
        path = posixpath.join(config.absolute(folder), "imagecode", f"{row.name}.json")
        write_atomic(path, json.dumps(found, indent=1))
        return path
