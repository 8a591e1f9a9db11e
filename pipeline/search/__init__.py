"""Exact MaxSim search over an index, with explanations of the hits."""
