"""Parts of Ostinato inside other programs."""
