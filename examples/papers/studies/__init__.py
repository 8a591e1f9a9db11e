"""Sweeps of training runs: their tables and figures."""
