"""The command that converts checkpoints."""

from __future__ import annotations

import pytest
import torch

from jobs import convert
from pipeline.config import SpecError


def test_converts_and_rejects(tmp_path, capsys):
    folder, output = tmp_path / "adapter", tmp_path / "new"
    folder.mkdir()
    (folder / "adapter_config.json").write_text("{}")
    torch.save({"a": torch.ones(2)}, folder / "adapter_model.bin")
    convert.main([str(folder), str(output)])
    converted = "converted adapter_model.bin to adapter_model.safetensors: 1 tensors"
    assert converted in capsys.readouterr().out
    assert (output / "adapter_config.json").is_file()
    with pytest.raises(SpecError) as caught:
        convert.main([str(folder), str(output)])
    assert str(caught.value) == (
        f"output must be the path of a new folder, got '{output}', which exists"
    )
    with pytest.raises(SpecError, match="^model must be") as caught:
        convert.main(["no/such", str(tmp_path / "other")])
    assert "\n" not in str(caught.value)
