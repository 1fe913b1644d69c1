"""Anyone's training script: one step watched, timed, and compared with the techniques."""
