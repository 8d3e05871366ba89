"""Models of ``transformers`` in the place of our decoder: the trainer's passes, LoRA, routes, a sampler."""
