"""Scripts that make the shipped data and models, and training data of the studies."""
