"""``ostinato ablate``: leave-one-out studies of a recipe: arms as child runs, fits, a table with verdicts.

jobs      the runs of the arms, each a child process
kept      runs as lines of JSON, of which all pages are made
answer    the table, the page and the JSON of a study
plots     its plots
commands  the command
"""
