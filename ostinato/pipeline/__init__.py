"""The loop that joins rollout and training, and evaluation, which is the loop without training."""
