"""Rewards: functions with TRL's signature (``verify``), run in killable processes (``workers``)."""
