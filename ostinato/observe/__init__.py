"""What a run did, cost and looks like: written by every process, read by people.

timeline, ledger, stability, bets     leaves that the core writes with: spans, cost, signs of a collapse
rows, stats                           a run folder as rows; intervals
figures, concerns, gap, costs         what it has come to, as data for terminal and page
samples, page                         recorded answers; the one page that draws, embedded or served
"""
