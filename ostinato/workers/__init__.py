"""Supervision of workers: how they are started, called, watched, lost, replaced and blamed.

    remote.py       what a worker is to its caller: a name, and calls with a limit in time
    host.py         the worker's side: builds an object from a factory and serves its methods in order
    ray_cluster.py  the transport over Ray: a cluster started or joined, places, the watch of its head
    suspects.py     which prompts break workers: blame by bisection
    witness.py      the last words of a process that is killed

Only ``ray_cluster`` imports Ray. The links over such workers are in the rooms whose protocol they implement:
``engine/serve.py`` (samplers), ``reward/remote.py`` (graders), ``train/remote.py`` (the trainer).
"""
