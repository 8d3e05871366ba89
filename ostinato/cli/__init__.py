"""The command line: the only place, with ``recipes/``, where concrete classes meet.

``app`` declares the commands and imports nothing heavy; each command imports what it needs when it runs.

    app -> train, evaluate, generate, export, doctor -> launch -> every other room
"""
