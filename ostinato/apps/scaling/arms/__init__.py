"""``ostinato ablate``: leave-one-out studies of a recipe: arms as child runs, fits, a table with verdicts.

jobs      the runs of the arms, each a child process
kept      runs as lines of JSON, of which all tables are made
answer    the tables and the JSON of a study
commands  the command
"""
