"""Reproduction of the tables of papers: specs, steps, and results beside those of the paper."""
