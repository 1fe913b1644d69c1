"""The studies, one file each: see bench.study."""
