"""Benchmarks: the figures of docs/benchmarks.md, each by one command."""
