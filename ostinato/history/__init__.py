"""Past responses as drafts: the store of finished responses, the text sampled at present, and the drafter.

Nothing here imports torch: the drafter also serves inside other engines.
"""
