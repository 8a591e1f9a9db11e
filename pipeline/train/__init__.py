"""Training: learners, objectives and one loop for all, alone or under Ray Train.

Ray and Lance are imported only by `ray` and `states`, which are loaded where they are used.
"""
