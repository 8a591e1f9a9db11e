"""Metrics of a run, as lines and as TensorBoard events."""

from __future__ import annotations

import pytest

from tests.train.runs import logged, spec_of, trained


def test_metrics_are_written_as_lines_and_events(model, tmp_path):
    from tensorboardX.proto.event_pb2 import Event

    trained(spec_of(tmp_path, model, eval_every=3))
    events = []
    for path in (tmp_path / "tensorboard").iterdir():
        data = path.read_bytes()
        while data:  # the length in 8 bytes, its checksum in 4, the event, its checksum in 4
            length = int.from_bytes(data[:8], "little")
            events.append(Event.FromString(data[12 : 12 + length]))
            data = data[16 + length :]
    shown = {(e.step, v.tag): v.simple_value for e in events for v in e.summary.value}
    for name in ("loss", "learning_rate", "R@1"):
        tensorboard_name = name.replace("@", "_")  # as TensorBoard wants it
        of_name = [value for (_, tag), value in sorted(shown.items()) if tag == tensorboard_name]
        assert of_name and of_name == pytest.approx(logged(tmp_path, name))
