"""Exact MaxSim search over an index, and what made each hit a hit."""
