"""Fit and forecast: where a run will end, how well that is known, and whether to go on (arXiv 2510.13786).

    series    evaluations over compute, from arrays, CSV or a run folder, checked
    curve     the sigmoid and its laws, autocorrelated noise of evaluations
    fit       least squares: variable projection
    posterior the posterior of A, B, C_mid
    gates     whether it is identified            decide     go on, stop, undecided
    ablation  several recipes, by seeds of each
    reading, answers, commands                    ``ostinato scale``

Plain arrays in, dataclasses out; the library needs numpy and scipy alone.
"""
