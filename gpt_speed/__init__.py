"""What works for anyone's training script: its audit, and how long a step takes on other GPUs."""
