"""Maxray: fixed-budget multi-vector indexes for text, pages, images, video and audio."""

__version__ = "0.1.0"

__all__ = ["Composed", "open_index"]


def __getattr__(name: str):
    # Lazy, so that `import pipeline` needs neither Ray nor Lance (the core runs without them).
    if name == "open_index":
        from pipeline.search.searcher import open_index

        return open_index
    if name == "Composed":
        from pipeline.schema import Composed

        return Composed
    raise AttributeError(f"module 'pipeline' has no attribute {name!r}")
