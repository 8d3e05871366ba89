"""The mathematics of RL for language models: pure functions of arrays, tensors and floats."""
