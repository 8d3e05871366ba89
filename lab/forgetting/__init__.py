"""A memory that forgets, put to the test: a procedural world, a reader, baselines, a trained policy,
public data."""
