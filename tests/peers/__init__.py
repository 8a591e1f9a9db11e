"""Tiny checkpoints and vectors of the libraries that checkpoints come from."""
