"""Training data: batches of queries and documents from tables, captions and videos.

Only `mining`, which is imported on demand, needs Ray and Lance.
"""
