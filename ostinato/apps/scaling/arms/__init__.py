"""``ostinato compare``: arms x seeds as child runs: under one budget, or a recipe less one choice each.

jobs      the runs of the arms, each a child process
compare   arms of a file: a sweep of learning rates, then the race under one budget
kept      runs as lines of JSON, from which all tables are made
answer    the tables and the JSON of a recipe's arms; compared: those of a race
commands  the command
"""
