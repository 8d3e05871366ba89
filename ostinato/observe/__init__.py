"""What a run did, cost and looks like: written by every process, read by people.

timeline, ledger, stability     leaves that the core writes with: spans, cost, signs of a collapse
report, board                   pages over run folders, which only `cli` imports
"""
