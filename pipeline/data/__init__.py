"""Sources: the items of a collection, listed and decoded. `decode` and `recognise` serve them."""
