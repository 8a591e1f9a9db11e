"""Golden outputs: columns, metrics, HTTP responses, losses, tables and public names.

    python -m tests.goldens write [PART...]
    python -m tests.goldens check [PART...]

Each part is a JSON file in this folder. `check` computes the values again and prints one line per
difference: removed values first, then added and changed ones. Digests and numbers must be equal if
the CPU and the version of PyTorch are those of the file. Otherwise, digests are ignored and numbers
are compared with a relative tolerance of `files.TOLERANCE`.
"""
