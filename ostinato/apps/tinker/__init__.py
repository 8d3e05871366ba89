"""A server for the Tinker SDK: the client writes the training loop, we sample and train (docs/tinker.md)."""
