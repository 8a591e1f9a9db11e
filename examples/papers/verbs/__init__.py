"""Commands of `python -m examples.papers`, one per file."""
