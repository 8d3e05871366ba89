"""``ostinato bench race``: a race to equal score, ours against TRL (lab/studies/2026-11-24-race/page.md)."""
