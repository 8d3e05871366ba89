"""Workers elsewhere: how they are started, called and lost. Only a sampler is replaced (``engine.pool``); any
other loss ends the run by name.

    remote.py       the caller's side of a worker: values as bytes, calls with a time limit; WorkerLost
    host.py         the worker's side: builds an object from a factory and serves its methods in order
    ray_cluster.py  the transport over Ray: a cluster started or joined, places, the watch of its head
    process.py      child processes: killed as a group, ended with their parent (guard.py for commands)

Only ``ray_cluster`` imports Ray. The clients of these workers are in the packages whose protocol they have:
``engine/serve.py`` (samplers), ``reward/remote.py`` (graders), ``train/remote.py`` (the trainer).
"""
