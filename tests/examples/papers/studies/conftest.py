import pytest


@pytest.fixture(scope="module")
def model(checkpoint) -> str:
    return checkpoint("colpali")
