"""Candidate generators, which find the items that are scored exactly.

A generator describes each item by a small code that is stored as a column of the index. For a
query, it finds the items whose codes match best, the candidates. Only these are scored with the
vectors of the representation. The code of an item depends only on its vectors or text and on the
fit, so that items can be added without another fit.
"""
