"""Synthetic benchmarks: scenes of shapes and SMART's binding reports, with small models."""
