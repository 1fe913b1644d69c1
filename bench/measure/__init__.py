"""From a plan to a journal: each run a process of its own.

In: a Plan, which names the runs of bench/catalogue.py, and a Setup, which says where they run.
Out: results/STUDY.jsonl, and a Measured read back from it, with each run's record.
"""
