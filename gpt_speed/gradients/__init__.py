"""Anyone's training script: are its first gradients right, compiled, and with dropout?"""
