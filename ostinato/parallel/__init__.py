"""One training step or sampling pass over many ranks, in any layout, with the same result."""
