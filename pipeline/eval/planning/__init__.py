"""Estimates of the time, storage and cost of an index job before it runs."""
