"""Synthetic benchmarks, which consist of scenes of shapes and of reports, and small models."""
