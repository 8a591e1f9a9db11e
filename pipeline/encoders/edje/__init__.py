"""EDJE: reranking with a small joint encoder over a text and an item's cached vision tokens."""
