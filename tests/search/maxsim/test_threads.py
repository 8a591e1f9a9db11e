import threading

import pytest
import torch

from pipeline.search import native
from pipeline.search.packed import FLOATS, PackedVectors, Segment


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
def test_results_have_the_order_of_the_arguments():
    assert native.run(str, range(50)) == [str(number) for number in range(50)]
    assert native.run(str, []) == []


@pytest.mark.usefixtures("two_threads")
def test_a_call_does_not_wait_for_busy_threads():
    is_done = threading.Event()
    waiting = [threading.Thread(target=native.run, args=(is_done.wait, [30] * 2)) for _ in range(2)]
    for thread in waiting:
        thread.start()
    try:
        assert native.run(str, range(9)) == list("012345678")
        assert not is_done.is_set()
    finally:
        is_done.set()
        for thread in waiting:
            thread.join(30)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("wrong", range(4))
def test_an_error_is_raised(wrong):
    def fail(number):
        if number == wrong:
            raise MemoryError(f"failed for {number}")

    with pytest.raises(MemoryError, match=f"failed for {wrong}"):
        native.run(fail, range(4))


@pytest.mark.parametrize(
    "total, num_runs", [(1, 1), (15, 1), (20, 2), (35, 3), (45, 4), (79, 4), (80, 8), (999, 8)]
)
def test_threads_have_equal_numbers_of_runs(total, num_runs):
    packed = PackedVectors.from_values(torch.randn(total, 8), torch.ones(total).long())
    documents = native.Documents.select(packed, None)
    runs = list(documents.runs(max_runs=8, min_tokens=10, num_threads=4))
    assert len(runs) == num_runs
    assert [begin for begin, _ in runs] + [total] == [0] + [end for _, end in runs]


def test_only_the_segments_of_a_run_are_verified():
    verified = []

    def segment(number):
        def verify(starts, lengths):
            verified.append((number, starts.tolist(), lengths.tolist()))
            return number == 1

        return Segment(FLOATS, 2, {"values": torch.ones(6, 2)}, torch.full((3,), 2), verify=verify)

    documents = native.Documents.select(PackedVectors(list(map(segment, range(3)))), None)
    documents.verify(2, 6)
    assert verified == [(0, [4], [2]), (1, [0, 2, 4], [2, 2, 2])]
    documents.verify(5, 8)  # the second segment is intact
    assert verified[2:] == [(2, [0, 2], [2, 2])]
