"""From a Plan and a Setup to results/STUDY.jsonl, each run a process of its own."""
