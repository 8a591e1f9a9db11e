"""Training: learners, objectives, data, and one loop for all, under Ray Train or by itself.

Everything runs without Ray and Lance but `ray`, `states` and `mining`, which are imported where
they are used.
"""
