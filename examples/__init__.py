"""Examples, and the tables of the papers."""
