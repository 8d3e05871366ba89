"""Training: the policy trainer, its optimizer, and checkpoints."""
