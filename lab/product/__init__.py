"""A simulated product, in which the truth is known: docs/product-world.md.

answers   texts in planted manners, and their features again       users    what a population does with them
corpora   rows for a policy and for a judge to begin with
"""
