"""Kernels are proven against torch before a run takes them; what is not proven is named and not taken."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from launches import Recorded
from worlds import tiny, tiny_dense

from ostinato.config import Recipe
from ostinato.engine import proof
from ostinato.engine.proof import prove_kernels
from ostinato.launch.engine import choose_sampler_kernels
from ostinato.model.config import parse_config
from ostinato.model.cuda import CUDA_OPS, CudaKernels, policies
from ostinato.model.cuda.graphs import make_graph_factory
from ostinato.model.decoder import Decoder

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DENSE = Decoder(parse_config(tiny_dense(model_type="qwen3", head_dim=8, num_hidden_layers=1))).init_weights(0)


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within a split of attention: the interpreter takes a second for each hundred positions."""
    monkeypatch.setattr(proof, "LENGTHS", (33, 17, 40))


def graphs() -> Callable[[], Any]:
    return make_graph_factory() if DEVICE == "cuda" else Recorded


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dense", "softmax-renormalised", "sigmoid-bias-groups"])
def test_all_kernels_are_proven(kind: str) -> None:
    """Of grouped queries, of a mixture, and of latent attention with groups of experts."""
    decoder = (DENSE if kind == "dense" else tiny(kind)).to(DEVICE)
    kernels = CudaKernels(graph=graphs())
    assert prove_kernels(decoder, kernels) == (kernels, "")


def broken(*_: Any, **__: Any) -> Any:
    raise RuntimeError("PTX of version 9 is not known\nto this driver")


@pytest.mark.parametrize(
    ("name", "kernel", "reason"),
    [
        ("rms_norm", broken, "fails (RuntimeError: PTX of version 9 is not known)"),
        ("rms_norm", lambda x, weight, eps: x * torch.nan, "differs from torch by nan"),
        ("silu_mul", lambda x: 1.1 * CUDA_OPS.silu_mul(x), "differs from torch by 1.0e-01"),
    ],
)
def test_a_kernel_that_is_no_twin_is_named(name: str, kernel: Callable[..., Any], reason: str) -> None:
    found, why = prove_kernels(DENSE.to(DEVICE), CudaKernels(ops=replace(CUDA_OPS, **{name: kernel})))
    assert found is None and why.startswith(f"{name} in Triton {reason}")


class Idle:
    """A graph that replays nothing."""

    def capture(self, work: Callable[[], None]) -> None:
        work()

    def replay(self) -> None:
        pass


@pytest.mark.slow
def test_without_graphs_that_replay_the_kernels_stay() -> None:
    found, why = prove_kernels(DENSE.to(DEVICE), CudaKernels(graph=Idle))
    assert found == CudaKernels() and why.startswith("CUDA graphs are not used: a captured pass differs")


@pytest.mark.slow
def test_without_kernels_for_several_policies_each_has_passes_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(policies, "add_lora", broken)
    found, why = prove_kernels(DENSE.to(DEVICE), CudaKernels(graph=graphs()))
    assert found is not None and found.graph is not None and not found.mixes
    assert why.startswith("add_lora of several policies in Triton fails (RuntimeError: PTX")


def test_kernels_are_not_launched_on_another_card(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Triton launches on the thread's own device, whatever device its arguments are on: with model.device
    "cuda:1" the first card would have been given addresses of the second."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    decoder: Any = SimpleNamespace(device=torch.device("cuda:1"))
    assert choose_sampler_kernels(Recipe(), decoder) is None
    assert "CUDA_VISIBLE_DEVICES" in caplog.text


@pytest.mark.slow
def test_without_a_gpu_triton_is_not_imported() -> None:
    program = (
        "import sys; sys.path.append('tests'); from worlds import tiny_decoder\n"
        "from ostinato.config import Recipe\n"
        "from ostinato.launch.engine import choose_sampler_kernels, choose_training_ops\n"
        "recipe, decoder = Recipe(), tiny_decoder()\n"
        "choose_sampler_kernels(recipe, decoder), choose_training_ops(recipe, decoder)\n"
        "assert not [name for name in sys.modules if name.partition('.')[0] == 'triton']"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
