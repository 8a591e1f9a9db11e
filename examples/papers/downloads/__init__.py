"""Downloads of the data sets and checkpoints that tables need."""
