"""Training: learners, objectives, data, and one loop for all, under Ray Train or by itself.

Everything here but `ray`, `mining`, `corpus` and `states` runs without Ray and Lance.
"""
