"""The bench of publications."""

from __future__ import annotations

import json
import sys
from io import StringIO
from pathlib import Path

import pytest
import torch
from rich.console import Console

from lab import publish
from lab.harness import measured
from ostinato.model.config import parse_config
from ostinato.model.decoder import Decoder
from ostinato.model.hf import save_model

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.fixture
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """64 MB of bf16 weights, so that pages and not rounding are counted."""
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8, "vocab_size": 1024}
    config = parse_config({**publish.LARGER, **sizes, "num_attention_heads": 4, "num_key_value_heads": 2})
    folder = tmp_path_factory.mktemp("model")
    save_model(Decoder(config, dtype=torch.bfloat16).init_weights(0), folder)
    return folder


def test_more_samplers_take_no_more_of_the_base(source: Path) -> None:
    """The whole command: what is served is what was sent, and two samplers hold the weights once."""
    plan = publish.Publish(model=str(source), layers=0, rounds=1, workers=2, tokens=4, rank=4)
    result = measured(plan, lambda line: None)
    (model,) = result["models"]
    one, two = model["memory"]["one"], model["memory"]["several"]
    assert one["copied"] == two["copied"] == 0 and one["base"] == two["base"] >= model["bytes"]
    assert abs(two["total"] - one["base"] - 2 * two["own"]) <= 2
    assert model["publish"]["bytes_ratio"] > 10
    json.dumps(result, allow_nan=False)
    console = Console(file=StringIO(), width=160)
    console.print(publish.Publish.table(result))
    assert isinstance(console.file, StringIO) and "merged" in console.file.getvalue()
