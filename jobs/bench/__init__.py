"""Benchmarks: the figures of docs/results/benchmarks.md, each by one command."""
