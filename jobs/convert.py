"""Copies a checkpoint whose weights are pickled (*.bin) or of OpenCLIP to one that can be loaded.

    maxray convert microsoft/MiniLM-L12-H384-uncased models/minilm-l12
    maxray convert apple/DFN2B-CLIP-ViT-B-16 models/dfn-b16
    maxray convert ADAPTER_FOLDER OUTPUT_FOLDER

Weights are read in a process without network, with limits of memory and time, which builds tensors
and executes nothing (`weights_only=True` of torch). They are written as safetensors, and all other
files are copied. Of a model on the hub, settings and the weights in one format are downloaded. An
OpenCLIP model becomes a CLIP of transformers for the encoder `dual`. The output is a new folder,
which appears when it is complete.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import jobs


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the command line and converts."""
    parser = jobs.parser(__doc__)
    parser.add_argument("model", help="folder of a model or a LoRA adapter, or its name on the hub")
    parser.add_argument("output", help="folder to write, which must not exist")
    parser.add_argument("--revision", help="branch, tag or commit of the model on the hub")
    args = parser.parse(arguments)

    from pipeline.runtime.conversion import convert

    convert(args.model, args.output, args.revision, _convert_to_clip, jobs.say)


def _convert_to_clip(model: str, folder: Path) -> None:
    from pipeline.encoders.open_clip import convert_to_clip  # transformers takes seconds to import

    convert_to_clip(model, folder)


if __name__ == "__main__":
    jobs.run(main)
