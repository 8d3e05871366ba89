"""From what is known of a curve to what is shown of it.

Intervals of a curve that is not identified have no median, and of one that refutes the model there are none
(``Assessment.shown``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ostinato.apps.scaling.gates import REPORTED, Assessment, assess
from ostinato.apps.scaling.posterior import Interval, Posterior, posterior
from ostinato.apps.scaling.reading import Window
from ostinato.observe.report.facts import NONE, Table, compute_text
from ostinato.observe.report.ledger import torn
from ostinato.run import RunFolder

TORN = "The last line of its ledger was torn by a kill and is not counted."


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """For people (sentences, then tables) and for machines."""

    result: Mapping[str, Any]  # the JSON object; NaN and infinity become null
    lead: Sequence[str] = ()
    tables: Sequence[Table] = ()
    exit_code: int = 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Known:
    """A window, its posterior, and what may be reported of it."""

    window: Window
    posterior: Posterior
    assessment: Assessment

    @classmethod
    def of(cls, window: Window) -> Known:
        """Raises ValueError for fewer than 3 evaluations."""
        found = posterior(window.fitted)
        return cls(window=window, posterior=found, assessment=assess(found))

    @property
    def ranked(self) -> bool:
        """Is there a point estimate?"""
        return self.assessment.standing in REPORTED

    @property
    def name(self) -> str:
        return self.window.whole.name

    def parameters(self) -> dict[str, Interval | None]:
        """As far as they may be reported: no median of B and C_mid where they are the prior's."""
        draws = {"A": self.posterior.A, "B": self.posterior.B, "C_mid": self.posterior.C_mid}
        found = {name: self.assessment.shown(each) for name, each in draws.items()}
        if not self.assessment.steep:
            found |= {name: one and one.ends() for name, one in found.items() if name != "A"}
        return found


def span(found: Interval | None, form: str = "{:.3f}") -> str:
    """ "[0.597, 0.622]"; ``form`` of "" is for compute."""
    if found is None:
        return NONE
    return f"[{_text(found.low, form)}, {_text(found.high, form)}]"


def middle(found: Interval | None, form: str = "{:.3f}") -> str:
    """The median, or a dash without one."""
    if found is None or math.isnan(found.median):
        return NONE
    return _text(found.median, form)


def both(found: Interval | None, form: str = "{:.3f}") -> str:
    """The median and its interval."""
    return NONE if found is None else f"{middle(found, form)} {span(found, form)}"


def _text(value: float, form: str) -> str:
    return form.format(value) if form and math.isfinite(value) else compute_text(value)


def standing_sentences(known: Known) -> list[str]:
    """Whether the curve is identified and why, what was fitted, and what else is odd about it."""
    found, series, window = known.assessment, known.posterior.series, known.window
    left_out = len(window.whole) - len(series)
    ends = f"{compute_text(series.compute[0])} to {compute_text(series.compute[-1])} {window.unit}"
    parts = [f"{left_out} outside of --cut and --until left out"] * bool(left_out)
    parts += [f"{series.unmeasured} without a score left out"] * bool(series.unmeasured)
    sentences = [
        f"{known.name} is {found.standing}: {found.reason}.",
        f"Fitted: {', '.join([f'{len(series)} evaluations from {ends}', *parts])}.",
    ]
    if window.run is not None and torn(RunFolder.open(window.run)):
        sentences.append(TORN)
    if found.flags:
        sentences.append(f"Flags: {', '.join(found.flags)}.")
    return sentences
