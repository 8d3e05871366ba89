"""Samplers, graders and a trainer as discrete events: 4,096 workers on one core (docs/histopipe.md)."""
