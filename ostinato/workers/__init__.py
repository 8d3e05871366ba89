"""Supervision of workers: how they are started, called, watched, lost, replaced and blamed.

    remote.py       what a worker is to its caller: a name, and calls with a limit in time
    payload.py      values as bytes between our own processes
    host.py         the worker's side: builds an object from a factory and serves its methods in order
    ray_cluster.py  the transport over Ray: a cluster started or joined, places, the watch of its head
    lost.py         WorkerLost, the one exception: kind, name, cause
    heartbeat.py    seconds without a change; a thread that notices a peer that does not answer
    restarts.py     the budget of restarts, and the pause before the next one
    process.py      child processes: killed as a group, ended with their parent (guard.py for commands)
    suspects.py     which prompts break workers: blame by bisection
    witness.py      the last words of a process that is killed

Only ``ray_cluster`` imports Ray. The links over such workers are in the rooms whose protocol they implement:
``engine/serve.py`` (samplers), ``reward/remote.py`` (graders), ``train/remote.py`` (the trainer).
"""
