"""The table of layouts: what is compared, and how it gets into its page."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lab.layout_runs import MODELS, Run
from lab.layouts import BEGIN, END, LAYOUTS, difference, table, write
from ostinato.model.config import parse_config
from ostinato.parallel.layout import Layout

RUN = Run(
    losses=[1.0, -0.5],
    grad_norms=[1.0, 1.0],
    metrics=[],
    tensors={
        "parameters.a": torch.tensor([3.0, 4.0]),
        "parameters.b": torch.tensor([12.0]),
        "optimizer.a.step": torch.tensor(2.0),
    },
    counters={},
    identity={},
    adapters={},
)
RESULT = {
    "steps": 10,
    "rows": [
        {
            "layout": "d2t2",
            "ranks": 4,
            "seconds": 1.0,
            "fp32": {"moe full": {"loss": 2e-7, "tensors": 5e-6, "together": 3e-7}},
            "fp64": {"moe full": {"loss": 1e-15, "tensors": 4e-15, "together": 2e-15}},
        }
    ],
}


def test_the_difference_is_relative_to_the_loss_and_to_the_tensors() -> None:
    other = replace(RUN, losses=[1.0, -0.4], tensors=RUN.tensors | {"parameters.a": torch.tensor([3.0, 4.5])})
    apart = difference(other, RUN)
    assert apart.loss == pytest.approx(0.2)
    assert apart.tensors == pytest.approx(0.1)
    assert apart.together == pytest.approx(0.5 / 13)


def test_runs_of_other_tensors_are_not_compared() -> None:
    with pytest.raises(ValueError, match="compare those of one case"):
        difference(RUN, replace(RUN, tensors={"parameters.a": torch.zeros(2)}))


def test_the_table_goes_between_its_marks(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    write(RESULT, page)
    text = page.read_text()
    assert table(RESULT) in text and "old" not in text
    assert text.startswith("before\n") and text.endswith("after\n")
    assert "| `d2t2` | 4 | 2e-07 / 3e-07 | 1e-15 / 2e-15 |" in text
    page.write_text("no marks")
    with pytest.raises(ValueError, match="lacks the marks"):
        write(RESULT, page)


def test_every_layout_fits_both_models_and_all_sizes_are_there() -> None:
    layouts = [Layout.parse(text) for text in LAYOUTS]
    assert len(layouts) >= 12 and {one.world for one in layouts} == {2, 4, 8}
    for layout in layouts:
        for raw in MODELS.values():
            layout.refuse(parse_config(raw))
