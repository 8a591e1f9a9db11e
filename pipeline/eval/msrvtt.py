"""The benchmark MSR-VTT, text-to-video retrieval."""

from __future__ import annotations

from typing import Literal

from pipeline.config import Uri, within
from pipeline.eval import Benchmark, JudgedQueries
from pipeline.eval.datasets import DatasetSpec, check_texts, judged_queries
from pipeline.sources.annotations import read_csv
from pipeline.sources.msrvtt import read_msrvtt


class Msrvtt(Benchmark["Msrvtt.Spec"]):
    """Sentences as queries and their videos as relevant documents, with the main metric R@1.

    `path` is `MSRVTT_JSFUSION_test.csv` (1k-A: `key`, `video_id`, `sentence`), or
    `MSRVTT_data.json` with all sentences of the videos in `video_ids`. Query ids are the `key`, or
    the number of the sentence in the JSON file, from 0. Each query has one relevant video. The
    documents are indexed with the source `msrvtt`.
    """

    class Spec(DatasetSpec):
        """Options of the MSR-VTT benchmark."""

        name: Literal["msrvtt"] = "msrvtt"
        path: Uri
        """CSV file with `key`, `video_id` and `sentence`, or `MSRVTT_data.json`."""
        video_ids: Uri | None = None
        """CSV file with the videos of the split as `video_id`, for a JSON file; null for all."""

    def load(self) -> JudgedQueries:
        """Loads the sentences."""
        with within("benchmark"):
            queries = self._csv() if self.spec.path.lower().endswith(".csv") else self._json()
        texts = {query_id: text.strip() for query_id, (_, text) in queries.items()}
        check_texts(texts, texts, self.spec.path)
        qrels = {query_id: {video: 1} for query_id, (video, _) in queries.items()}
        return judged_queries(self.spec, self.spec.path, texts, qrels, measure="R@1")

    def _csv(self) -> dict[str, tuple[str, str]]:
        columns = ("key", "video_id", "sentence")
        rows = read_csv(self.spec.path, columns, "path")
        return {row["key"]: (row["video_id"], row["sentence"]) for _, row in rows}

    def _json(self) -> dict[str, tuple[str, str]]:
        _, sentences = read_msrvtt(self.spec.path)
        wanted = None
        if self.spec.video_ids is not None:
            wanted = {
                row["video_id"]
                for _, row in read_csv(self.spec.video_ids, ("video_id",), "video_ids")
            }
        return {
            str(number): (video, str(text or ""))
            for number, (_, video, text) in enumerate(sentences)
            if wanted is None or video in wanted
        }
