"""Training data: batches of queries and documents, read from tables, captions and videos.

Ray and Lance are imported only by `mining`, which is loaded where it is used.
"""
