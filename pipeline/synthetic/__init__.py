"""Synthetic benchmarks: scenes of shapes, binding reports of SMART, and small models."""
