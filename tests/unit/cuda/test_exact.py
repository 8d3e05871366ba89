"""``model.exact`` on the kernels of a card: sampler and trainer agree in every bit, and a request is alone in
any batch. In Triton's interpreter, float32."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from exactness import check_equal, parts_of, passes_of, sampled, samples_of
from launches import Launches, Recorded
from torch import Tensor
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle
from worlds import adapters_of, answers, same, tiny_dense, tiny_moe

from ostinato.engine.local import LocalEngine
from ostinato.model.config import parse_config
from ostinato.model.cuda import CUDA_OPS, EXACT_OPS, CudaKernels, make_exact_training_ops, products
from ostinato.model.cuda.graphs import make_graph_factory
from ostinato.model.decoder import Decoder
from ostinato.model.lora import Adapters
from ostinato.model.ops import TORCH_OPS
from ostinato.types import Request, Sampling

pytestmark = pytest.mark.slow  # the interpreter
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EXACT = CudaKernels(ops=EXACT_OPS, exact=True)
SMALL = {"head_dim": 8, "hidden_size": 16, "intermediate_size": 24, "vocab_size": 29, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "initializer_range": 0.3}
DENSE = tiny_dense(model_type="qwen3", **SMALL, **HEADS)
EXPERTS = tiny_moe(moe_intermediate_size=8, num_experts=3, **{**SMALL, "num_hidden_layers": 1}, **HEADS)
MODELS = {
    "dense": DENSE,
    "biased": tiny_dense(attention_bias=True, mlp_bias=True, **SMALL, **HEADS),
    "shared_outer": EXPERTS,
    "per_expert": {**EXPERTS, "norm_topk_prob": False},
}


def model(name: str) -> tuple[Decoder, Adapters]:
    decoder = Decoder(parse_config(MODELS[name])).init_weights(1).to(DEVICE)
    moe = decoder.config.moe is not None
    options: dict[str, Any] = {"expert_scheme": name} if moe else {}
    targets = ("attn", "mlp", "shared", "experts", "router")[: 5 if moe else 2]
    return decoder, adapters_of(decoder, 2, 0.2, targets=targets, **options)


@pytest.fixture(autouse=True)
def matrix_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every element of a tile's product is summed in the order of inputs, as on a card. BLAS, which the
    interpreter takes, sums a row otherwise in another place of a tile."""

    def create_dot(_: Any, a: Any, b: Any, d: Any, *__: Any) -> TensorHandle:
        total = d.data.copy()
        for k in range(a.data.shape[1]):
            total += a.data[:, k : k + 1] * b.data[k : k + 1]
        return TensorHandle(total, d.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)


@pytest.mark.parametrize(("rows", "inputs", "columns"), [(1, 16, 5), (3, 40, 64), (70, 33, 66)])
def test_a_product_is_torchs_and_its_rows_are_alone(rows: int, inputs: int, columns: int) -> None:
    draw = torch.Generator().manual_seed(0)
    x, w, y = (
        torch.randn(shape, generator=draw).to(DEVICE)
        for shape in ((rows, 2 * inputs), (columns, inputs), (rows, columns))
    )
    x, bias = x[:, :inputs], w[:, 0].contiguous()
    cases = {
        "linear": (products.linear(x, w, bias, scale=0.3), 0.3 * TORCH_OPS.linear(x, w, bias)),
        "added": (products.add_nt(y.clone(), x, w), y + x @ w.T),
        "adapted": (
            products.add_lora(y.clone(), x, w[:5], y[:1, :5].expand(columns, 5).contiguous(), 0.5),
            TORCH_OPS.add_lora(y.clone(), x, w[:5], y[:1, :5].expand(columns, 5).contiguous(), 0.5),
        ),
    }
    for name, (ours, twin) in cases.items():
        assert (ours - twin).abs().max() <= 1e-5 * twin.abs().max(), name
    whole = products.linear(x, w)
    some = sorted({0, rows // 2, rows - 1})
    alone = torch.cat([products.linear(x[t : t + 1], w) for t in some])
    assert torch.equal(whole[some], alone)


@pytest.mark.parametrize(
    ("name", "world"),
    [
        ("dense", {"budget": 65, "filters": {"top_k": 5}, "temperature": 0.7, "recompute": True}),
        ("biased", {"budget": 400, "filters": {}, "temperature": 1.0, "recompute": False}),
        ("shared_outer", {"budget": 65, "filters": {}, "temperature": 1.5, "recompute": True}),
        ("per_expert", {"budget": 65, "filters": {"top_p": 0.8}, "temperature": 1.0, "recompute": False}),
    ],
)
def test_every_row_has_the_samplers_log_probability(name: str, world: dict[str, Any]) -> None:
    """k3 = 0: prompts across blocks, siblings, microbatches, with recorded experts where there are some."""
    groups = [(18, [3, 1]), (5, [2])]
    check_equal(
        *model(name),
        {**world, "groups": groups, "seed": 3, "max_batch": 3, "replay": True},
        EXACT,
        make_exact_training_ops(),
    )


@pytest.mark.parametrize("name", ["dense", "shared_outer"])
def test_a_request_is_alone_in_any_batch(name: str) -> None:
    """Tokens, log-probabilities and routes to the bit; in graphs too, that are filled up to powers of two."""
    decoder, adapters = model(name)
    asked = [
        Request(
            tokens=np.random.default_rng(k // 2).integers(4, 30, 3 + 7 * (k // 2)).astype(np.int32),
            sampling=Sampling(max_tokens=2 + k % 2),
            seed=(3, k),
            uid=str(k),
        )
        for k in range(4)
    ]
    graph = make_graph_factory() if DEVICE == "cuda" else Recorded
    together = sampled(decoder, adapters, asked, 4, EXACT)
    engine = LocalEngine(
        decoder, kernels=CudaKernels(ops=EXACT_OPS, exact=True, graph=graph), kv_memory_mb=1, context_limit=64
    )
    engine.publish(adapters, 1)
    for request, one in zip(asked, together, strict=True):
        same(one, answers(engine, [request])[0])


@pytest.mark.parametrize("name", ["dense", "shared_outer", "per_expert"])
def test_gradients_are_those_of_training(name: str) -> None:
    decoder, adapters = model(name)
    prompt = np.arange(4, 23, dtype=np.int32)
    asked = [Request(tokens=prompt, sampling=Sampling(max_tokens=3), seed=(0, k)) for k in range(2)]
    samples = samples_of(asked, sampled(decoder, adapters, asked, 2, EXACT), [0, 0])
    moe = decoder.config.moe is not None
    (part,) = parts_of(samples, 400, moe=moe, replay=True, device=decoder.device)
    found: list[list[Tensor]] = []
    for ops in (CUDA_OPS, make_exact_training_ops()):
        for leaf in adapters.parameters():
            leaf.requires_grad_().grad = None
        passes = passes_of(decoder, adapters, ops)
        hidden, _ = passes.forward(part, adapters)
        logprobs, _ = passes.logprobs(hidden, part, want_entropy=True)
        (logprobs * torch.linspace(-1, 1, len(logprobs), device=DEVICE)).sum().backward()
        found.append([leaf.grad.clone() for leaf in adapters.parameters() if leaf.grad is not None])
    assert len(found[0]) == len(found[1]) > 0
    for one, other in zip(*found, strict=True):
        assert (one - other).abs().max() <= 1e-4 * one.abs().max().clamp_min(1e-4)


@pytest.mark.skipif(DEVICE == "cuda", reason="counted in Triton's interpreter")
@pytest.mark.parametrize(("name", "count"), [("dense", 22), ("shared_outer", 30)])
def test_launches_of_a_layer_of_a_decode_pass(name: str, count: int) -> None:
    """With adapters, and nothing is read back."""
    counts = []
    for layers in (1, 2):
        raw = {**MODELS[name], "num_hidden_layers": layers}
        decoder = Decoder(parse_config(raw)).init_weights(1)
        moe = decoder.config.moe is not None
        adapters = adapters_of(decoder, 2, 0.2, targets=("attn", "experts") if moe else ("attn", "mlp"))
        asked = [Request(tokens=np.arange(4, 9, dtype=np.int32), sampling=Sampling(max_tokens=3), seed=(0,))]
        engine = LocalEngine(decoder, kernels=EXACT, kv_memory_mb=1, context_limit=64)
        engine.publish(adapters, 1)
        seen: list[Launches] = []
        forward = engine._runner.forward

        def counted(*args: Any, forward: Any = forward, seen: list[Launches] = seen, **kwargs: Any) -> Any:
            with Launches() as launches:
                result = forward(*args, **kwargs)
            seen.append(launches)
            return result

        engine._runner.forward = counted  # type: ignore[method-assign]
        answers(engine, asked)
        counts.append(len(seen[-1].names))
        assert not seen[-1].reads
        if layers == 2:
            print(seen[-1].names)
    print(counts)
    assert counts[1] - counts[0] <= count
