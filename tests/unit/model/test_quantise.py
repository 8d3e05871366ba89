"""Quantised weights: what the codes mean, kernels against the torch twin, an engine that samples from them, a
trainer over them. Where the processor multiplies bf16, products of codes sum exactly as those of bf16 do;
elsewhere those of int8 are sums of whole numbers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference.plain_layers import experts_loop
from torch import Tensor, nn
from worlds import KERNELS, VOCAB, adapters_of, answers, tiny_decoder, tiny_moe

from ostinato.config import Recipe
from ostinato.engine.local import LocalEngine
from ostinato.model.attention import CausalAttention
from ostinato.model.config import parse_config
from ostinato.model.decoder import Decoder
from ostinato.model.hf import load_model, save_model
from ostinato.model.lora import Adapters
from ostinato.model.moe import ExpertLora
from ostinato.model.native import Kernels
from ostinato.model.ops import TORCH_OPS, Ops
from ostinato.model.peft_io import compute_base_fingerprint
from ostinato.model.quantise import Weights, count_own_bytes, encode_weight, quantise
from ostinato.model.shapes import ExpertScheme
from ostinato.model.shared import load_shared_model
from ostinato.model.weights import Moe, Quantised
from ostinato.train.passes import choose_head_products
from ostinato.types import Completion, Request, Sampling

CODED = [Weights.INT8, Weights.FP8]


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def values(coded: Quantised) -> Tensor:
    return coded.codes.float() * coded.scale.unsqueeze(-1)


def tiny(dtype: torch.dtype = torch.float32, *, moe: bool = True) -> Decoder:
    return tiny_decoder(dtype, num_hidden_layers=3, mlp_only_layers=[0] if moe else [0, 1, 2])


# ---- what the codes mean


@settings(max_examples=40, deadline=None)
@given(
    shape=st.sampled_from([(1, 1), (5, 7), (3, 4, 33)]),
    size=st.sampled_from([1e-30, 1e-3, 1.0, 1e4]),
    seed=st.integers(0, 99),
)
def test_rounding_is_to_the_nearest_code(shape: tuple[int, ...], size: float, seed: int) -> None:
    weight = size * draw(*shape, seed=seed)
    int8 = encode_weight(weight, Weights.INT8)
    assert ((values(int8) - weight).abs() <= 0.5001 * int8.scale.unsqueeze(-1)).all()
    assert (int8.codes.abs().amax(-1) == 127).all()
    fp8 = encode_weight(weight, Weights.FP8)  # 3 bits of mantissa, or half a step of the subnormals
    step = torch.maximum(weight.abs() / 16, 2**-10 * fp8.scale.unsqueeze(-1))
    assert ((values(fp8) - weight).abs() <= 1.0001 * step).all()


@pytest.mark.parametrize("kind", CODED)
def test_rows_of_zeros_and_of_the_smallest_numbers_stay_finite(kind: Weights) -> None:
    weight = torch.tensor([[0.0, 0.0], [1e-45, 0.0], [3e38, -3e38]])
    assert torch.isfinite(values(encode_weight(weight, kind))).all()
    assert (values(encode_weight(weight, kind))[0] == 0).all()


def test_every_code_means_what_torch_says(kernels: Kernels) -> None:
    every = torch.arange(256, dtype=torch.int16).to(torch.uint8)
    for dtype in (torch.int8, torch.float8_e4m3fn):
        values = every.view(dtype).float()
        known = torch.isfinite(values) & (values != -128)  # symmetric: -128 is no code
        one = Quantised.of(
            every.view(dtype)[known].unsqueeze(1).expand(-1, 2).contiguous(), torch.ones(int(known.sum()))
        )
        product = kernels.ops.linear(torch.tensor([[1.0, 0.0]], dtype=torch.bfloat16), one)
        assert torch.equal(product[0].float(), values[known])
    nan = Quantised.of(
        torch.tensor([[0x7F, 0], [0xFF, 0]], dtype=torch.uint8).view(torch.float8_e4m3fn), torch.ones(2)
    )
    assert kernels.ops.linear(torch.ones(1, 2, dtype=torch.bfloat16), nan).isnan().all()


# ---- products


def test_the_least_code_is_a_value_too(kernels: Kernels) -> None:
    """-128 was widened to 0 where bytes are permuted (AVX-512 VBMI). ``quantise`` makes no such code."""
    every = torch.arange(-128, 128).repeat(2).view(16, 32).to(torch.int8)
    w = Quantised.of(every, torch.ones(16))
    assert torch.equal(kernels.ops.linear(torch.eye(32, dtype=torch.bfloat16), w), every.T.to(torch.bfloat16))


@pytest.mark.parametrize("kind", CODED)
@pytest.mark.parametrize(
    ("depth", "columns"), [(2, 1), (6, 17), (33, 5), (64, 48), (66, 33), (70, 16), (130, 65), (576, 100)]
)
def test_a_product_of_codes_is_the_bf16_product_of_their_values(
    kernels: Kernels, kind: Weights, depth: int, columns: int
) -> None:
    """Bit for bit, with the scale applied to the fp32 sum, where they are not products of whole numbers; and
    a row is the same among any number of rows."""
    w = encode_weight(draw(columns, depth), kind)
    x, bias = draw(70, depth, seed=1, dtype=torch.bfloat16), draw(columns, seed=2, dtype=torch.bfloat16)
    ours = kernels.ops.linear(x, w, bias)
    if kernels.fast_codes or kind is Weights.FP8:
        sums = kernels.ops.linear(x, w.codes.to(torch.bfloat16), None, torch.float32)
        scaled = sums.double() * w.scale.double() + bias.double()
        assert torch.equal(ours, scaled.float().bfloat16())
    twin = TORCH_OPS.linear(x, w, bias)
    assert (ours.float() - twin.float()).abs().max() <= 8e-3 * twin.float().abs().max()
    for rows in (1, 2, 3, 4, 5, 8, 9, 16, 17, 33, 48, 49, 64, 69):
        assert torch.equal(kernels.ops.linear(x[:rows], w, bias), ours[:rows])


@pytest.mark.parametrize(("depth", "columns"), [(2, 1), (33, 5), (256, 17), (259, 48), (1030, 100)])
@pytest.mark.parametrize("size", [1e-6, 1.0, 1e6])
def test_products_of_int8_under_fp32(kernels: Kernels, depth: int, columns: int, size: float) -> None:
    """Of a row of inputs, a part of 32767 of the largest in every 256 is lost; the backward loses nothing."""
    w, x, bias = (
        encode_weight(draw(columns, depth), Weights.INT8),
        size * draw(70, depth, seed=1),
        draw(columns, seed=2),
    )
    x[3, depth // 2] *= 1e4  # an outlier is felt among its 256
    wide, ours = values(w).double(), kernels.ops.linear(x, w, bias)
    exact = x.double() @ wide.T + bias
    steps = (
        torch.stack([one.abs().amax(-1) for one in x.split(256, -1)], -1).repeat_interleave(256, -1) / 32767
    )
    lost = (steps[:, :depth].double() / 2) @ wide.abs().T
    rounding = (depth / 256 + 8) * 2**-23 * (x.double().abs() @ wide.abs().T + bias.abs())
    assert ((ours - exact).abs() <= 1.01 * lost + rounding).all()
    for rows in (1, 2, 3, 4, 5, 6, 7, 8, 33):
        assert torch.equal(kernels.ops.linear(x[:rows], w, bias), ours[:rows])
    slopes = draw(70, columns, seed=3)
    back, of_twin = kernels.training.gemm.nn(slopes, w), TORCH_OPS.gemm.nn(slopes, w)
    for found in (back, of_twin):
        assert (
            (found - slopes.double() @ wide).abs() <= columns * 2**-22 * (slopes.abs().double() @ wide.abs())
        ).all()
    x[0, -1], x[1, 0] = torch.nan, torch.inf
    assert not kernels.ops.linear(x, w)[:2].isfinite().any() and kernels.ops.linear(x, w)[2:].isfinite().all()


@pytest.mark.parametrize("kind", CODED)
@pytest.mark.parametrize("scheme", [None, *ExpertScheme])
def test_experts(kernels: Kernels, kind: Weights, scheme: ExpertScheme | None) -> None:
    T, E, K, D, width = 40, 5, 2, 32, 24
    x = draw(T, D, dtype=torch.bfloat16)
    weights, ids = draw(T, E, seed=1).softmax(-1).topk(K)
    gate_up, down = (
        encode_weight(draw(E, 2 * width, D, seed=2) / 6, kind),
        encode_weight(draw(E, D, width, seed=3) / 5, kind),
    )
    lora = None if scheme is None else expert_lora(scheme, E, D, width)
    ours = kernels.ops.experts(x, ids, weights, gate_up, down, lora)
    twin = TORCH_OPS.experts(x, ids, weights, gate_up, down, lora)
    wide = lora and ExpertLora(*(factor.float() for factor in lora[:4]), scale=lora.scale)
    loop = experts_loop(x.float(), ids, weights, values(gate_up), values(down), wide)
    for found in (ours, twin):
        assert (found.float() - loop).abs().max() <= 0.03 * loop.abs().max()
    for rows in (1, 3, 17):
        assert torch.equal(
            kernels.ops.experts(x[:rows], ids[:rows], weights[:rows], gate_up, down, lora), ours[:rows]
        )


def expert_lora(scheme: ExpertScheme, E: int, D: int, width: int) -> ExpertLora:
    r = 4
    shared = scheme is ExpertScheme.SHARED_OUTER
    shapes = (2 * r, D), (E, 2 * width, 2 * r), (E, r, width), (D, r)
    if not shared:
        shapes = (E, 2 * r, D), shapes[1], shapes[2], (E, D, r)
    factors = (draw(*shape, seed=9 + i, dtype=torch.bfloat16) / 8 for i, shape in enumerate(shapes))
    return ExpertLora(*factors, scale=0.5)


# ---- decoders


@pytest.mark.parametrize("kind", CODED)
def test_a_quantised_decoder_is_the_decoder_of_its_values(kind: Weights) -> None:
    decoder, tokens = tiny(), torch.arange(20)
    coded = quantise(decoder, kind).quantised
    stored = {
        name: nn.Parameter(values(coded[name]), requires_grad=False) if name in coded else weight
        for name, weight in decoder.named_parameters()
    }
    exact, _ = Decoder(decoder.config, stored=stored)(tokens, torch.arange(20), CausalAttention())
    ours, _ = quantise(decoder, kind)(tokens, torch.arange(20), CausalAttention())
    plain, _ = quantise(decoder, Weights.BF16)(tokens, torch.arange(20), CausalAttention())
    native, _ = decoder(tokens, torch.arange(20), CausalAttention())
    error = (ours.float() - exact).norm() / exact.norm()
    assert error < 3 * (plain.float() - native).norm() / native.norm()  # the error of bf16 activations
    assert (exact - native).norm() / native.norm() > 1e-3  # and the values are others


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [Weights.BF16, *CODED])
def test_what_a_sampler_holds(dtype: torch.dtype, kind: Weights) -> None:
    """8 bits and a scale for the linear maps and no bf16 copy of them; what is bf16 already is shared."""
    decoder = tiny(dtype)
    sampler = quantise(decoder, kind)
    if kind is Weights.BF16:
        assert (sampler is decoder) == (dtype == torch.bfloat16)
        assert sampler.dtype == torch.bfloat16 and not sampler.quantised
        return
    linears = {name: weight for name, weight in decoder.named_parameters() if name in sampler.quantised}
    expected = sum(
        weight.numel() + 4 * weight.shape[:-1].numel() for weight in linears.values()
    )  # whole tiles
    rest = [weight for name, weight in decoder.named_parameters() if name not in linears]
    assert {name.rpartition(".")[2] for name in linears} == {"qkv", "o", "gate_up", "down"}
    assert not set(linears) & set(dict(sampler.named_parameters()))
    if dtype == torch.bfloat16:
        assert count_own_bytes(sampler, decoder) == expected
    else:
        assert count_own_bytes(sampler, decoder) == expected + sum(2 * weight.numel() for weight in rest)
    mlp = sampler.blocks[1].mlp
    assert isinstance(mlp, Moe) and isinstance(mlp.gate_up, Quantised) and isinstance(mlp.router, Tensor)
    with pytest.raises(ValueError, match="quantised weights have no views"):
        sampler.named_linears()


# ---- the engine


def requests(temperature: float) -> list[Request]:
    rng = np.random.default_rng(0)
    sampling = Sampling(max_tokens=12, temperature=temperature)
    return [
        Request(tokens=rng.integers(0, VOCAB, length).astype(np.int32), sampling=sampling, seed=(7, length))
        for length in (3, 9, 17, 18, 30)
    ]


def engine_of(decoder: Decoder, kernels: Kernels | None, adapters: Adapters | None) -> LocalEngine:
    engine = LocalEngine(decoder, kernels=kernels, kv_memory_mb=4, context_limit=64)
    engine.publish(adapters, 1)
    return engine


@pytest.mark.parametrize("kind", CODED)
@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_engine_samples_from_quantised_weights(
    kernels: Kernels, kind: Weights, adapted: bool, temperature: float
) -> None:
    """Of a dense model: every token has the probability that the torch twin gives it, or wins as it does
    there up to a near-tie; and the torch twin's engine begins with the same tokens."""
    sampler = quantise(tiny(moe=False), kind)
    adapters = adapters_of(sampler, 1, 0.1) if adapted else None
    requested = requests(temperature)
    ours = answers(engine_of(sampler, kernels, adapters), requested)
    twins = answers(engine_of(sampler, None, adapters), requested)
    for request, answer in zip(requested, ours, strict=True):
        logits = twin_logits(sampler, request, answer, adapters)
        chosen = logits.gather(1, torch.from_numpy(answer.tokens.astype(np.int64))[:, None]).squeeze(1)
        if temperature:
            logprobs = (chosen - logits.logsumexp(dim=1)).numpy()
            error = np.abs(answer.logprobs - logprobs)
            assert error.mean() < 0.06 and error.max() < 0.2  # logits in bf16
        else:
            assert (logits.amax(dim=1) - chosen).max() < 0.2
    assert sum(a.tokens[0] == b.tokens[0] for a, b in zip(ours, twins, strict=True)) >= 4  # of 5


def twin_logits(decoder: Decoder, request: Request, answer: Completion, adapters: Adapters | None) -> Tensor:
    """[answer, V] fp32 of a torch forward over the finished sequence."""
    whole = torch.from_numpy(np.concatenate([request.tokens, answer.tokens]).astype(np.int64))
    with torch.inference_mode():
        hidden, _ = decoder(whole, torch.arange(len(whole)), CausalAttention(), adapters=adapters)
        return decoder.logits(hidden[len(request.tokens) - 1 : -1]).float()


@pytest.mark.parametrize("kind", CODED)
def test_answers_of_quantised_experts_are_alike_in_any_batch(kernels: Kernels, kind: Weights) -> None:
    """Bit for bit. Against the twin engine only the middle is close: where rounding flips an expert, a
    log-probability may differ by more than 1, which is what routing replay is for."""
    sampler = quantise(tiny(), kind)
    adapters, requested = adapters_of(sampler, 1, 0.1), requests(1.0)
    ours = answers(engine_of(sampler, kernels, adapters), requested)
    twins = answers(engine_of(sampler, None, adapters), requested)
    for request, answer in zip(requested, ours, strict=True):
        alone = answers(engine_of(sampler, kernels, adapters), [request])[0]
        assert np.array_equal(alone.tokens, answer.tokens) and np.array_equal(alone.logprobs, answer.logprobs)
    first = [abs(a.logprobs[0] - b.logprobs[0]) for a, b in zip(ours, twins, strict=True)]
    assert np.median(first) < 0.1


def test_full_training_with_copied_weights_is_refused() -> None:
    with pytest.raises(ValueError, match=r'engine\.weights is "int8" with adapter\.kind "full"'):
        Recipe.model_validate({"engine": {"weights": "int8"}, "adapter": {"kind": "full"}})
    with pytest.raises(ValueError, match=r"engine\.weights is 'int4'"):
        Recipe.load("quickstart", "engine.weights=int4")


@pytest.mark.parametrize("kind", CODED)
def test_a_weight_that_is_not_finite_has_no_code(kind: Weights) -> None:
    """As int8 a NaN was a plain 0: a broken checkpoint sampled on, silently."""
    weight = draw(8, 16)
    weight[3, 5] = torch.nan
    with pytest.raises(ValueError, match="not finite"):
        encode_weight(weight, kind)


# ---- matrices stored in bf16 under fp32 arithmetic


@pytest.fixture(params=KERNELS)
def ops(request: pytest.FixtureRequest) -> Ops:
    """The arithmetic of a trainer."""
    return request.param.training if request.param else TORCH_OPS


def pair() -> tuple[Decoder, Decoder]:
    """The same values, matrices stored in bf16 and in fp32."""
    config = parse_config(
        tiny_moe(
            hidden_size=48,
            intermediate_size=160,
            moe_intermediate_size=136,
            mlp_only_layers=[0],
            initializer_range=0.2,
        )
    )
    narrow = Decoder(config, storage=torch.bfloat16).init_weights(0)
    wide = Decoder(config)
    with torch.no_grad():
        for ours, theirs in zip(wide.parameters(), narrow.parameters(), strict=True):
            ours.copy_(theirs)
    return narrow, wide


def gradients(decoder: Decoder, ops: Ops, adapted: bool) -> tuple[Tensor, list[Tensor]]:
    """Hidden states, and the gradients of all factors (of the embedded input without adapters)."""
    adapters = adapters_of(decoder, 0) if adapted else None
    factors = [factor for each in adapters.tensors.values() for factor in each] if adapters else []
    for factor in factors:
        factor.requires_grad_(True)
    tokens = torch.arange(24) % VOCAB
    start = decoder.embed[tokens].to(decoder.dtype).detach().requires_grad_(True)
    hidden, _ = decoder.forward(
        tokens, torch.arange(24), CausalAttention(), adapters=adapters, ops=ops, residual=start
    )
    (hidden * torch.linspace(-1, 1, hidden.numel()).view_as(hidden)).sum().backward()
    return hidden.detach(), [leaf.grad for leaf in (start, *factors) if leaf.grad is not None]


@pytest.mark.parametrize("adapted", [True, False])
def test_the_numbers_are_those_of_the_same_values_in_fp32(ops: Ops, adapted: bool) -> None:
    narrow, wide = pair()
    (ours, own), (twin, theirs) = gradients(narrow, ops, adapted), gradients(wide, TORCH_OPS, adapted)
    assert ours.dtype == torch.float32 and len(own) == len(theirs) > 0
    # sums of at most 160 products in another order, a few dozen of them in a row
    bound = 40 * 160 * 2**-24
    for found, wanted in zip([ours, *own], [twin, *theirs], strict=True):
        assert (found - wanted).abs().max() <= bound * max(1.0, float(wanted.abs().max()))


def test_the_head_multiplies_in_fp32(ops: Ops) -> None:
    """The slopes of logits were rounded to the type of the head: stored in bf16, a gradient in bf16."""
    narrow, wide = pair()
    logits, slopes = choose_head_products(narrow, ops)
    if logits is None or slopes is None:
        pytest.skip("both products widen the head")
    hidden = torch.randn(9, 48, generator=torch.Generator().manual_seed(0))
    found = logits(hidden, narrow.head_weight)
    torch.testing.assert_close(found, hidden @ wide.head_weight.T, rtol=1e-5, atol=48 * 2**-24 * 10)
    back = slopes(found, narrow.head_weight)
    scale = float(found.abs().sum(-1).max())
    assert (back - found @ wide.head_weight).abs().max() <= 61 * 2**-24 * scale


def test_half_the_memory_and_what_stays_wide() -> None:
    narrow, wide = pair()
    assert narrow.storage == torch.bfloat16 and wide.storage == torch.float32
    assert narrow.dtype == wide.dtype == torch.float32
    kinds = {p.dim() > 1: p.dtype for p in narrow.parameters()}
    assert kinds == {True: torch.bfloat16, False: torch.float32}


# ---- a base in int8 for sampler and trainer


@pytest.fixture(scope="module")
def coded() -> tuple[Decoder, Decoder]:
    """Linear maps in int8 under fp32, and the same values in fp32."""
    base = quantise(pair()[1], Weights.INT8, torch.float32)
    stored = {
        name: nn.Parameter(values(weight), requires_grad=False) for name, weight in base.quantised.items()
    }
    wide = Decoder(base.config, stored={**dict(base.named_parameters()), **stored})
    return base, wide


@pytest.mark.parametrize("adapted", [True, False])
def test_gradients_over_int8_are_those_of_the_same_values_in_fp32(
    coded: tuple[Decoder, Decoder], ops: Ops, adapted: bool
) -> None:
    base, wide = coded
    (ours, own), (twin, theirs) = gradients(base, ops, adapted), gradients(wide, TORCH_OPS, adapted)
    assert ours.dtype == torch.float32 and len(own) == len(theirs) > 0
    bound = 40 * 160 * 2**-24 if ops is TORCH_OPS else 1e-3  # inputs of 15 bits; a part of 1e-5 a product
    for found, wanted in zip([ours, *own], [twin, *theirs], strict=True):
        assert (found - wanted).norm() <= bound * wanted.norm()


def test_a_base_in_int8_is_loaded_and_shared_matrix_by_matrix(tmp_path: Path) -> None:
    """As the whole is quantised; and its fingerprint is that of the folder, so adapters fit both."""
    wide = pair()[1]
    save_model(wide, tmp_path / "model")
    wanted = quantise(load_model(tmp_path / "model"), Weights.INT8, torch.float32)
    of_file = load_model(tmp_path / "model", storage=torch.int8)
    shared = load_shared_model(tmp_path / "model", storage=torch.int8, folder=tmp_path / "shared")
    for found in (of_file, shared):
        assert found.storage == torch.int8 and found.dtype == torch.float32
        assert compute_base_fingerprint(found) == compute_base_fingerprint(wide)
        assert found.quantised.keys() == wanted.quantised.keys()
        for name, weight in wanted.quantised.items():
            assert torch.equal(found.quantised[name].tiles, weight.tiles)
            assert torch.equal(found.quantised[name].scale, weight.scale)
        for (_, own), (_, other) in zip(found.named_parameters(), wanted.named_parameters(), strict=True):
            assert own.dtype == other.dtype and torch.equal(own, other)


def test_the_trainer_scores_what_the_sampler_drew_from_int8(
    kernels: Kernels, coded: tuple[Decoder, Decoder]
) -> None:
    """With the log-probabilities of the sampler, to the rounding of fp32 and of inputs."""
    base, _ = coded
    adapters, requested = adapters_of(base, 1, 0.1), requests(1.0)
    for request, answer in zip(
        requested, answers(engine_of(base, kernels, adapters), requested), strict=True
    ):
        whole = torch.from_numpy(np.concatenate([request.tokens, answer.tokens]).astype(np.int64))
        hidden, _ = base(
            whole, torch.arange(len(whole)), CausalAttention(), adapters=adapters, ops=kernels.training
        )
        logits = base.logits(hidden[len(request.tokens) - 1 : -1], ops=kernels.ops).float()
        chosen = logits.log_softmax(-1).gather(1, whole[len(request.tokens) :, None]).squeeze(1)
        assert np.median(np.abs(answer.logprobs - chosen.detach().numpy())) < 1e-4
