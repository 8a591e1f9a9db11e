"""EDJE: a small joint encoder reads a text with an item's cached vision tokens and reranks."""
