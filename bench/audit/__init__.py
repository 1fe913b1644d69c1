"""Anyone's training script: one of its steps watched, timed, and compared with the techniques."""
