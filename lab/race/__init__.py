"""``ostinato bench race``: a race to equal score, ours against TRL (docs/race.md)."""
