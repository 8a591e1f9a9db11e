"""Tiny models with the files of published ones, and an encoder that sleeps."""

#: Import path of the encoder that sleeps.
SLEEPING = "tests.tiny.sleeping:Sleeping"
