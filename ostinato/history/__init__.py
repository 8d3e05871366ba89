"""Past responses as drafts: the store of closed responses, what is being written now, and the drafter.

Nothing here imports torch: the drafter also serves inside other engines.
"""
