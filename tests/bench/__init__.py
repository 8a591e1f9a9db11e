"""Benchmarks. One command reproduces each of the results in docs/results/benchmarks.md."""
