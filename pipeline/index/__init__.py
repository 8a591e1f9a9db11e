"""The Lance columnar index: a folder that holds one dataset of items and what its jobs recorded.

<index>/items.lance      a row an item, a column a representation
<index>/rejects.lance    what did not become a row, and why
<index>/artefacts/       what compressors learned from a sample, by hash
<index>/jobs/<job>/      resolved spec, listing, progress and summary of each job
"""
