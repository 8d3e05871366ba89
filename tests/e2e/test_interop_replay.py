"""Replay in whole transformers models: what it changes, what it leaves alone, what it survives, what it
refuses.

The laws are those of rollout routing replay (arXiv 2510.11370) and of the bugs that its implementations had.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ostinato.algo.routing import Misaligned, require_aligned
from ostinato.hf.replay import Routes, UnsupportedRouter, attach_replay
from ostinato.types import NO_EXPERT

transformers = pytest.importorskip("transformers", minversion="5.0")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # gradient_checkpointing_enable was renamed in v5
    pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad"),
]

B, S, VOCAB = 2, 10, 61
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,  # large, so that routers are far from ties
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
}
MOE = {"num_experts": 8, "num_local_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 16}
LATENT = {
    "n_routed_experts": 8,
    "kv_lora_rank": 16,
    "q_lora_rank": None,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen3Moe": {"head_dim": 16, "mlp_only_layers": [1], "norm_topk_prob": True},  # a dense layer in between
    "Qwen2Moe": {"decoder_sparse_step": 2, "shared_expert_intermediate_size": 16},
    "Olmoe": {},
    "Mixtral": {"sliding_window": None},
    "GptOss": {"head_dim": 16, "layer_types": ["full_attention"] * 3},
    "GraniteMoe": {},
    "DeepseekV3": {**LATENT, "n_group": 2, "topk_group": 2},  # dense first, sigmoid, a bias that selects
    "Llama4": {"head_dim": 16, "interleave_moe_layer_step": 1},  # top-k swapped
}


def tiny(family: str = "Qwen3Moe", **settings: Any) -> Any:
    name = "Llama4Text" if family == "Llama4" else family
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **MOE, **FAMILIES[family], **settings})
    torch.manual_seed(0)
    return getattr(transformers, f"{family}ForCausalLM")(config).eval()


def tokens(rows: int = B, length: int = S, seed: int = 1) -> Tensor:
    return torch.randint(3, VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))


def random_routes(replay: Any, rows: int = B * S, seed: int = 5) -> Routes:
    order = torch.rand(
        rows, len(replay.sites), replay.num_experts, generator=torch.Generator().manual_seed(seed)
    )
    return Routes.of(order.argsort(-1)[..., : replay.top_k], replay.num_experts)


def loss(model: Any, ids: Tensor) -> Tensor:
    return model(input_ids=ids).logits.float().log_softmax(-1).gather(2, ids[..., None]).mean()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def train(model: Any, ids: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss(model, ids).backward()
    return gradients(model)


# what changes and what does not


@pytest.mark.parametrize("family", FAMILIES)
def test_off_recorded_and_identical_are_the_model_itself(family: str) -> None:
    """Bit for bit: attached, recording, replaying its own experts, detached."""
    model, ids = tiny(family), tokens()
    plain = model(ids).logits
    with attach_replay(model) as replay:
        assert replay.layers == {"Qwen3Moe": (0, 2), "Qwen2Moe": (1,), "DeepseekV3": (1, 2)}.get(
            family, (0, 1, 2)
        )
        assert torch.equal(model(ids).logits, plain)
        with replay.record() as tape:
            assert torch.equal(model(ids).logits, plain)
        with replay.using(tape.native()) as again:
            assert torch.equal(model(ids).logits, plain)
        assert (again.overlap() == 1).all()
        with replay.using(random_routes(replay)) as other:
            assert not torch.allclose(model(ids).logits, plain, atol=1e-3)
        assert other.overlap().mean() < 0.9
    assert torch.equal(model(ids).logits, plain)


def test_weights_are_the_formula_on_live_logits() -> None:
    """Under fixed ids, a changed router gives changed weights: those of its formula, in the given order."""
    model = tiny()
    with attach_replay(model) as replay:
        routes = random_routes(replay)
        router: Any = replay.sites[1].module
        seen: list[Any] = []
        watch = router.register_forward_hook(lambda _, __, out: seen.append(out))
        for _ in range(2):
            with replay.using(routes):
                model(tokens())
            with torch.no_grad():
                router.weight.mul_(1.5)
        watch.remove()
    ids = torch.from_numpy(routes.ids[:, 1]).long()
    for logits, weights, used in seen:
        assert torch.equal(used, ids)
        chosen = logits.softmax(-1).gather(1, ids)
        torch.testing.assert_close(weights, chosen / chosen.sum(-1, keepdim=True))
    assert not torch.allclose(seen[0][1], seen[1][1])


def test_gradient_reaches_the_router_as_finite_differences_say() -> None:
    model = tiny(num_hidden_layers=1, mlp_only_layers=[]).double()
    model.set_experts_implementation("eager")  # the grouped products know no double
    weight, ids = model.model.layers[0].mlp.gate.weight, tokens()
    with attach_replay(model) as replay:
        routes = random_routes(replay)

        with replay.using(routes):
            loss(model, ids).backward()
        assert weight.grad is not None
        row, column = divmod(int(weight.grad.abs().argmax()), weight.shape[1])

        def at(step: float) -> float:
            with replay.using(routes), torch.no_grad():
                weight[row, column] += step
                value = float(loss(model, ids))
                weight[row, column] -= step
            return value

        expected = (at(0.02) - at(-0.02)) / 0.04
    assert float(weight.grad[row, column]) == pytest.approx(expected, rel=0.01)  # fp32 inside the router


def test_experts_implementations_agree() -> None:
    outputs = []
    for implementation in ("eager", "batched_mm", "grouped_mm"):
        model = tiny()
        model.set_experts_implementation(implementation)
        with attach_replay(model) as replay, replay.using(random_routes(replay)), torch.no_grad():
            outputs.append(model(tokens()).logits)
    for output in outputs[1:]:
        torch.testing.assert_close(output, outputs[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", ["Qwen3Moe", "DeepseekV3", "GptOss"])
def test_bfloat16_and_autocast(family: str) -> None:
    """Fitted in one precision, used in another: where a router rounds is found out anew; identity exact."""
    model, ids = tiny(family), tokens()
    for autocast in (True, False):
        with attach_replay(model) as replay, torch.no_grad():
            model = model if autocast else model.bfloat16()
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                with replay.record() as tape:
                    plain = model(ids).logits
                with replay.using(tape.native()):
                    assert torch.equal(model(ids).logits, plain)


# rows


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_batches_are_their_sequences(side: str) -> None:
    model, lengths = tiny(), (4, 7)
    texts = [tokens(1, length, seed=length) for length in lengths]
    ids, mask = torch.zeros(2, 7, dtype=torch.long), torch.zeros(2, 7, dtype=torch.bool)
    for line, real, text in zip(ids, mask, texts, strict=True):
        part = slice(7 - text.shape[1], None) if side == "left" else slice(text.shape[1])
        line[part], real[part] = text[0], True
    with attach_replay(model) as replay, torch.no_grad():
        each = [
            random_routes(replay, length - 1, seed=length) for length in lengths
        ]  # T - 1 rows of T tokens
        alone = []
        for text, routes in zip(texts, each, strict=True):
            with replay.using(Routes.packed([routes], [text.shape[1]])):
                alone.append(model(text).logits[0])
        places = (mask.cumsum(1) - 1).clamp(min=0)
        with replay.using(Routes.padded(each, mask)) as tape:
            together = model(ids, attention_mask=mask.long(), position_ids=places).logits
    torch.testing.assert_close(together[mask], torch.cat(alone), rtol=1e-4, atol=1e-4)
    assert np.isnan(tape.overlap()[~Routes.padded(each, mask).known]).all()


def test_packed_sequences_are_their_sequences() -> None:
    model, lengths = tiny(), [4, 6]
    texts = [tokens(1, length, seed=length) for length in lengths]
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    with attach_replay(model) as replay, torch.no_grad():
        each = [random_routes(replay, length, seed=length) for length in lengths]
        alone = []
        for text, routes in zip(texts, each, strict=True):
            with replay.using(routes):
                alone.append(model(text).logits)
        with replay.using(Routes.packed(each, lengths)):
            packed = model(torch.cat(texts, 1), position_ids=positions, use_cache=False).logits
    torch.testing.assert_close(packed, torch.cat(alone, 1), rtol=1e-4, atol=1e-4)


def test_unknown_rows_choose_natively_and_are_told() -> None:
    """The last token was never an input of the engine: its row is native, and touches no other."""
    model, ids = tiny(num_hidden_layers=1, mlp_only_layers=[]), tokens(1)
    with attach_replay(model) as replay, torch.no_grad():
        native = model(ids).logits
        routes = Routes.packed([random_routes(replay, S - 1)], [S])
        with replay.using(routes) as tape:
            logits = model(ids).logits
    # one layer: attention sees embeddings only, so a row depends on its own experts alone
    torch.testing.assert_close(logits[0, -1], native[0, -1])
    assert not torch.allclose(logits[0, :-1], native[0, :-1], atol=1e-3)
    assert np.isnan(tape.overlap()[-1]).all() and not np.isnan(tape.overlap()[:-1]).any()


def test_a_generation_records_what_a_forward_would() -> None:
    """A prompt and then tokens one by one, with a KV cache: T - 1 rows, those of one whole forward."""
    model, prompt = tiny("DeepseekV3"), tokens(3, 5)
    with attach_replay(model) as replay, torch.no_grad():
        with replay.record() as tape:
            out = model.generate(prompt, max_new_tokens=6, min_new_tokens=6, do_sample=False)
        rows = tape.native(batch=3).dense().reshape(3, 10, len(replay.layers), -1)
        with replay.record() as whole:
            model(out[:, :-1])
        np.testing.assert_array_equal(np.sort(rows), np.sort(whole.native().dense().reshape(rows.shape)))
        shifted = [np.concatenate([one[:1], one[:-1]]) for one in rows]
        with pytest.raises(Misaligned, match="shifted"):
            require_aligned(list(rows), shifted)


# training


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("family", ["Qwen3Moe", "Llama4"])  # by formula, by swapped top-k
def test_checkpointing_recomputes_with_the_same_experts(family: str, reentrant: bool) -> None:
    """Who disarms before backward recomputes with native experts: wrong gradients, or a crash."""
    model, ids = tiny(family), tokens()
    with attach_replay(model) as replay:
        routes = random_routes(replay)
        with replay.using(routes):
            plain = train(model, ids)
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
        model.train()
        with replay.using(routes):
            recomputed = train(model, ids)
        torch.testing.assert_close(recomputed, plain)
        with replay.using(routes):
            late = loss(model, ids)
        with pytest.raises(RuntimeError, match="keep both inside"):
            late.backward()
        native = train(model, ids)  # and an ordinary step, checkpointed and native, is none of our business
    torch.testing.assert_close(train(model, ids), native)


def test_backward_inside_another_batch_is_caught() -> None:
    """Recomputed experts have to be those of the forward: other routes of its shape are not."""
    model = tiny()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    with attach_replay(model) as replay:
        with replay.using(random_routes(replay)):
            first = loss(model, tokens())
        with pytest.raises(RuntimeError, match="other routes"), replay.using(random_routes(replay, seed=6)):
            with torch.no_grad():
                model(tokens(seed=9))
            first.backward()


def test_accumulated_micro_batches_are_the_batch() -> None:
    model, ids = tiny(), tokens(4)
    with attach_replay(model) as replay:
        routes = random_routes(replay, 4 * S)
        with replay.using(routes):
            whole = train(model, ids)
        model.zero_grad()
        for start in (0, 2):
            with replay.using(routes.rows(start * S, (start + 2) * S)):
                (loss(model, ids[start : start + 2]) / 2).backward()
    torch.testing.assert_close(gradients(model), whole, rtol=1e-4, atol=1e-6)


def test_the_first_minibatch_has_ratio_one() -> None:
    """Old log-probabilities without gradients, then the update pass: equal to the last bit."""
    model, ids = tiny(), tokens()
    with attach_replay(model) as replay:
        routes = random_routes(replay)
        with replay.using(routes), torch.no_grad():
            old = model(ids).logits.log_softmax(-1)
        model.train()
        with replay.using(routes):
            new = model(ids).logits.log_softmax(-1)
            new.sum().backward()
    assert torch.equal(old, new)


def test_two_models_and_a_copy_keep_apart() -> None:
    """A reference model is often a deep copy made later: it has the hooks too, and has to stay native."""
    model, ids = tiny(), tokens()
    native = model(ids).logits
    with attach_replay(model) as replay:
        reference = copy.deepcopy(model)
        with attach_replay(tiny()) as other, replay.using(random_routes(replay)) as tape, torch.no_grad():
            with pytest.raises(RuntimeError, match="every router"), other.record():
                changed, same = model(ids).logits, reference(ids).logits
            assert len(tape.native()) == B * S
    assert torch.equal(same, native) and not torch.allclose(changed, native, atol=1e-3)


# adapters


def lora(model: Any, **settings: Any) -> Any:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, init_lora_weights=False, **settings)
    torch.manual_seed(3)
    return peft.get_peft_model(model, config).eval()


@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": ["q_proj", "v_proj"]},
        {"target_modules": [], "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]},
        {"target_modules": [], "target_parameters": ["mlp.gate.weight"]},
    ],
    ids=["attention", "experts", "router"],
)
def test_adapters_and_their_reference(settings: dict[str, Any]) -> None:
    """Merged or not is one function; with the adapter disabled, inside ``native``, the base model."""
    base, ids = tiny(), tokens()
    native = base(ids).logits
    model = lora(base, **settings)
    with attach_replay(model) as replay:
        assert replay.layers == (0, 2)
        routes = random_routes(replay)
        with replay.using(routes):
            trained = train(model, ids)
            with replay.native(), model.disable_adapter(), torch.no_grad():
                assert torch.equal(model(ids).logits, native)
            logits = model(ids).logits
    assert trained and all(grad.abs().max() > 0 for grad in trained.values())
    merged = model.merge_and_unload()
    with attach_replay(merged) as replay, replay.using(routes), torch.no_grad():
        torch.testing.assert_close(merged(ids).logits, logits, rtol=1e-4, atol=1e-4)


# what is refused, by name


def test_a_block_that_goes_round_its_router_is_refused() -> None:
    """Fused kernels replace a block's whole forward and never call the router; replay would do nothing."""
    model = tiny()
    block = model.model.layers[2].mlp
    block.forward = lambda x: x  # before
    with pytest.raises(UnsupportedRouter, match=r"Qwen3MoeTopKRouter at model.layers.2.mlp.gate"):
        attach_replay(model)
    del block.forward
    replay = attach_replay(model)
    block.forward = lambda x: x  # and after
    with pytest.raises(RuntimeError, match=r"layers\.2\.mlp\.gate': 0"), replay.using(random_routes(replay)):
        model(tokens())


def test_a_formula_that_no_longer_holds_is_refused() -> None:
    """Fitted once, checked in every forward: a switch thrown later does not pass."""
    model = tiny()
    with attach_replay(model) as replay:
        routers: list[Any] = [site.module for site in replay.sites]
        for router in routers:
            router.norm_topk_prob = False
        with pytest.raises(UnsupportedRouter, match="no longer softmax"), replay.using(random_routes(replay)):
            model(tokens())


def test_no_formula_is_guessed() -> None:
    """All logits alike: every formula fits, and any would be a guess. Swapping the top-k needs none."""
    model = tiny()
    for layer in (0, 2):
        nn.init.zeros_(model.model.layers[layer].mlp.gate.weight)
    with attach_replay(model) as replay:
        assert [site.rule for site in replay.sites] == [None, None]


def test_dense_models_are_refused() -> None:
    config = transformers.LlamaConfig(**SIZES)
    with pytest.raises(UnsupportedRouter, match="mixture of experts"):
        attach_replay(transformers.LlamaForCausalLM(config))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda ids: ids[:, :1], "layers"),
        (lambda ids: ids[..., :2], "layers, K"),
        (lambda ids: ids[:-1], "19 rows"),
    ],
)
def test_routes_of_another_shape_are_refused(change: Callable[[np.ndarray], np.ndarray], says: str) -> None:
    model = tiny()
    with attach_replay(model) as replay:
        wrong = Routes.of(change(random_routes(replay).ids), replay.num_experts)
        with pytest.raises(ValueError, match=says), replay.using(wrong):
            model(tokens())
        model(tokens())  # and nothing stays set


def test_misuse_is_named() -> None:
    model = tiny()
    replay = attach_replay(model)
    routes = random_routes(replay)
    with pytest.raises(ValueError, match="set already"), replay.using(routes), replay.using(routes):
        pass
    with pytest.raises(RuntimeError, match="every router"), replay.using(routes):
        pass
    replay.set(routes)
    model(tokens())
    replay.clear()
    replay.detach()
    with pytest.raises(RuntimeError, match="detached"):
        replay.set(routes)
    assert NO_EXPERT == -1


# torch.compile and FSDP2


def test_compiled_models_leave_the_graph_at_routers() -> None:
    """Attached first: replay works, in eager between compiled pieces. Attached later: refused."""
    model, ids = tiny(), tokens()
    with attach_replay(model) as replay:
        routes = random_routes(replay)
        with replay.using(routes), torch.no_grad():
            eager = model(ids).logits
        compiled = torch.compile(model, backend="eager")
        for _ in range(2):
            with replay.using(routes), torch.no_grad():
                torch.testing.assert_close(compiled(ids).logits, eager)
        with torch.no_grad():
            torch.testing.assert_close(compiled(ids).logits, tiny()(ids).logits)
    with pytest.raises(UnsupportedRouter, match="compiled"):
        attach_replay(torch.compile(model))  # type: ignore[arg-type]


def fsdp(rank: int, world: int, port: int) -> None:
    """On each process: gradients of a sharded model under replay, against those of the whole one."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (world,))
    ids = tokens(world, S)
    reference = tiny()
    with attach_replay(reference) as replay:
        routes = random_routes(replay, world * S)
        with replay.using(routes):
            expected = train(reference, ids)
    for late in (False, True):
        model = tiny()
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
        early = None if late else attach_replay(model)
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        with early or attach_replay(model) as replay, replay.using(routes.rows(rank * S, (rank + 1) * S)):
            gradient = train(model, ids[rank : rank + 1])
        for name, grad in gradient.items():
            whole: Any = grad
            torch.testing.assert_close(whole.full_tensor(), expected[name], rtol=1e-3, atol=1e-6)
        assert set(gradient) == set(expected)
    dist.destroy_process_group()


def test_sharded_models() -> None:
    """FSDP2 on gloo, two processes, checkpointed; attached before sharding and after."""
    import socket

    import torch.multiprocessing as mp

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.start_processes(fsdp, args=(2, port), nprocs=2, start_method="spawn")  # type: ignore[no-untyped-call]
