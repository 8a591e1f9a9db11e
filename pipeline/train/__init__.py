"""Training of encoders, adapters and rerankers, with or without Ray Train.

All learners use the same loop. Only the modules `ray` and `hidden_states` import Ray and Lance.
They are loaded when they are needed.
"""
