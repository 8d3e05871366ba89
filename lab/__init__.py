"""Benches and studies, in a clone and not in the wheel: ``ostinato bench``."""
