"""Recommendation of a compression method, a budget and a codec for a stored representation."""
