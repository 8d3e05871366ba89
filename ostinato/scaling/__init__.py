"""Fit and forecast: where a run will end, how well that is known, and whether to go on (arXiv 2510.13786).

    series    evaluations over compute, from arrays, CSV or a run folder, checked
    curve     the sigmoid and its laws            noise      autocorrelated noise of evaluations
    fit       least squares: variable projection  forms      other laws, chosen by rolling-origin error
    posterior what is known of A, B, C_mid
    gates     what may be said of a curve         drift      alarms after the fit
    cut       where a fit begins                  decide     go on, stop, undecided
    compare   two recipes, by seeds of each       ablation   leave-one-out
    plan      how long a pilot has to be

Plain arrays in, dataclasses out; numpy is all that is needed.
"""
