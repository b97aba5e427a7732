"""What this machine can do for training, and what is wrong with it."""
