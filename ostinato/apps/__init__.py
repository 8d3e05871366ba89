"""Applications: each is an environment, a reward, an observer, or a door in front of engine and trainer."""
