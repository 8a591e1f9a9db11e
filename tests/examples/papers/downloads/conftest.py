"""Local servers of published data sets and checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import hub
from tests.examples.papers.downloads import published


@pytest.fixture(scope="session")
def layout(tmp_path_factory) -> Path:
    """Folder of all data sets in the layout that tables read."""
    return published.layout(tmp_path_factory.mktemp("layout"))


@pytest.fixture
def server(tmp_path) -> Iterator[hub.Hub]:
    """Hub to which the client is connected, with an empty cache."""
    (tmp_path / "hub").mkdir()
    with hub.serve(tmp_path / "hub") as server, hub.connected(server, tmp_path / "cache"):
        yield server
