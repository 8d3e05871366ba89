"""A product as the environment: feedback in, rewards and pairs out, a judge, detectors, the continual loop.

    Exchange (what a server answered) + Event (what its user did) -> store -> rewards, pairs -> judge -> RL

Everything but ``store`` is pure; nothing here imports torch.
"""
