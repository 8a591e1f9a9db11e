"""Training: learners, objectives and one loop for all, alone or under Ray Train.

Only `ray` and `hidden_states` import Ray and Lance. Both are loaded where they are used.
"""
