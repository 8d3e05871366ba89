"""Which parallel layout fits and which is fastest, per phase, before any machine is rented. No torch here."""
