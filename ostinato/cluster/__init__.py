"""Workers in processes of their own: Ray's actors behind the protocols of the house.

    remote.py    what a worker is to its caller: a name, calls with a bound, the ways in which it can be lost
    host.py      the worker's side: builds an object from a factory and serves its methods, in order
    samplers.py  graders.py  trainer.py     Sampler, Grader and Trainer over such workers
    witness.py   last words of a process that is killed
    actors.py    Ray: a cluster started or joined, places, pinning, the watch of its head

Only ``actors`` imports Ray, so everything else is tested without it.
"""
