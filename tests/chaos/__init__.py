"""Chaos suite: real jobs on a real Ray cluster under random faults.

The suite runs the jobs that write to an index as child processes on a cluster of its own. It kills
and pauses their processes, takes away nodes, disk space and the clock, resumes the jobs with the
same command, and compares the index with that of an undisturbed run.
"""
