"""Tests of the procedures in the guide to operating a cluster."""

from __future__ import annotations

import re
import shutil

import lance

from pipeline.index.reader import IndexReader
from tests.conftest import ROOT, TEXTS, start_job

PAGE = (ROOT / "docs/tutorials/operations.md").read_text()


def test_a_restored_version_is_complete_and_can_be_written(index_uri, tmp_path):
    uri = str(tmp_path / "index")
    shutil.copytree(index_uri, uri)
    lance.dataset(f"{uri}/items.lance").delete("item_id = 'wing/1'")
    assert IndexReader(uri).dataset.count_rows() == len(TEXTS) - 1

    (code,) = re.findall(r"```python\n(import lance.*?)```", PAGE, re.DOTALL)
    code = code.replace("out/cranfield/index", uri).replace("1398", str(len(TEXTS)))
    exec(code, {"__name__": "page"})
    restored = IndexReader(uri)
    assert restored.dataset.count_rows() == len(TEXTS)
    assert restored.version == lance.dataset(f"{uri}/items.lance").version

    # A job can take the lease.
    job = start_job("jobs.maintain", "delete", uri, "--filter", "item_id = 'wing/1'")
    _, err = job.communicate(timeout=120)
    assert job.returncode == 0, err
    assert IndexReader(uri).dataset.count_rows() == len(TEXTS) - 1
