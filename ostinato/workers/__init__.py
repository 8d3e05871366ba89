"""Supervision of workers: how they are started, called, watched, lost, replaced and blamed.

    remote.py       the caller's side of a worker: values as bytes, calls with a time limit
    host.py         the worker's side: builds an object from a factory and serves its methods in order
    ray_cluster.py  the transport over Ray: a cluster started or joined, places, the watch of its head
    lost.py         WorkerLost, the one exception; Restarts, the budget and the pause before the next one
    heartbeat.py    seconds without a change; a thread that notices a peer that does not answer
    process.py      child processes: killed as a group, ended with their parent (guard.py for commands)
    suspects.py     which prompts break workers: blame by bisection

Only ``ray_cluster`` imports Ray. The clients of these workers are in the packages whose protocol they have:
``engine/serve.py`` (samplers), ``reward/remote.py`` (graders), ``train/remote.py`` (the trainer).
"""
