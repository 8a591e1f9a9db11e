import pytest

from tests.eval.evaluations import evaluation_of, six_rows


@pytest.fixture
def results():
    return six_rows()


@pytest.fixture
def evaluation(results):
    return evaluation_of(results)
