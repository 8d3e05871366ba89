"""Every router class of the installed transformers: replayed exactly, or refused by name and reason.

Each block that holds a router is built tiny, twice, between an embedding and a head, with random weights and
a selection bias where it has one. Exact means: its own experts replayed give its own logits; other experts
give the logits and gradients of a twin in which ``topk`` itself answers with them. The floors at the end hold
a release of transformers to what this one gives: a class that changes its formula or its output fails by
name.
"""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ostinato.hf.replay import Routes, UnsupportedRouter, attach_replay
from ostinato.hf.routers import TopKSwap

pytestmark = pytest.mark.slow

transformers = pytest.importorskip("transformers", minversion="5.0")

HIDDEN, EXPERTS, TOP_K, VOCAB, LAYERS = 32, 8, 3, 40, 2
EXACT = 72  # router classes that replay exactly in transformers 5.23; no fewer
REFUSED = {  # and why these do not
    "NllbMoeTop2Router": "drops tokens beyond a capacity, so the experts of one depend on the others",
    "SwitchTransformersTop1Router": "drops tokens beyond a capacity",
}
BY_LARGEST = "PhimoeTopKRouter"  # calls no top-k, so its twin is another one
NOT_OF_TOKENS = {"GraniteDoclingDensityRouter", "Dots3NoteVisionTopKRouter"}  # of images
ROUTER = re.compile(r"(?:Router|Gate|Gating)$")
NO_ROUTER = re.compile(r"Forget|Residual|DFineGate|Deimv2Gate")  # gates of other things
SMALL: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model"), HIDDEN),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), EXPERTS),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_top_k", "top_k_experts"), TOP_K),
    **dict.fromkeys(("intermediate_size", "moe_intermediate_size", "expert_ffn_hidden_size", "ffn_dim"), 16),
    **dict.fromkeys(("shared_expert_intermediate_size", "ffn_hidden_size", "encoder_ffn_dim"), 16),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"), 1),
    **{"n_group": 2, "topk_group": 1, "zero_expert_num": 2, "router_hidden_size": 12, "vocab_size": VOCAB},
}


def routers() -> list[tuple[str, str]]:
    """(module, class) of every router in the sources, without importing them."""
    folder = Path(transformers.__file__).parent / "models"
    found = []
    for file in sorted(folder.glob("*/modeling_*.py")):
        names = re.findall(r"^class (\w+)\(", file.read_text(encoding="utf-8"), re.MULTILINE)
        found += [
            (f"transformers.models.{file.parent.name}.{file.stem}", name)
            for name in names
            if ROUTER.search(name) and not NO_ROUTER.search(name)
        ]
    return found


class Pair(nn.Module):
    """A router and its experts, for families that keep both in the decoder layer itself (Gemma 4)."""

    def __init__(self, router: nn.Module, experts: nn.Module) -> None:
        super().__init__()
        self.router, self.experts = router, experts

    def forward(self, hidden_states: Tensor) -> Tensor:
        flat = hidden_states.flatten(0, 1)
        _, weights, ids = self.router(flat)
        return self.experts(flat, ids, weights).view_as(hidden_states)


class Tiny(nn.Module):
    """The least that is a language model around mixture blocks."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList(blocks)
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for block in self.layers:
            extra = (
                {"input_ids": input_ids} if "input_ids" in inspect.signature(block.forward).parameters else {}
            )
            y = block(x, **extra)
            x = x + (y[0] if isinstance(y, tuple) else y).view_as(x)
        return self.head(x)


def tiny(module: str, name: str, **settings: Any) -> Tiny:
    """Two blocks that hold the router, with random weights."""
    code = importlib.import_module(module)
    router = getattr(code, name)
    block = holder(code, name)
    torch.manual_seed(0)
    config = small_config(code, (block or router).__name__, settings)
    if "Hash" not in name and hasattr(config, "mlp_layer_types"):
        config.mlp_layer_types = ["moe"] * LAYERS  # DeepSeek-V4 begins with hash layers
    model = Tiny([build(code, block, router, config, layer) for layer in range(LAYERS)])
    randomise(model)
    return model.eval()


def holder(code: Any, name: str) -> type | None:
    """The class that makes one of these routers, if any does."""
    classes = re.split(r"^(?=class )", Path(code.__file__).read_text(encoding="utf-8"), flags=re.MULTILINE)[
        1:
    ]
    makers = [
        match.group(1) for text in classes if (match := re.match(rf"class (\w+)(?s:.)* {name}\(", text))
    ]
    return getattr(code, makers[0]) if makers else None


def shared(a: str, b: str) -> int:
    """How many letters two names have in common, from the first on."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def small_config(code: Any, block: str, settings: dict[str, Any]) -> Any:
    """The block's configuration at its defaults, with all that is large made small."""
    base = transformers.PretrainedConfig
    known = [
        cls
        for _, cls in inspect.getmembers(code, inspect.isclass)
        if issubclass(cls, base) and cls is not base
    ]
    cls: Any = max(known, key=lambda one: (shared(one.__name__, block), "Text" in one.__name__))
    config = cls().get_text_config()
    for part in (config, getattr(config, "ffn_config", config)):
        for key, value in {**SMALL, **settings}.items():
            if hasattr(part, key) and not (
                getattr(part, key) is None and key not in settings and "group" in key
            ):
                object.__setattr__(part, part.attribute_map.get(key, key), value)
    if "Talker" in block:  # its configuration lacks what the block reads
        config.shared_expert_intermediate_size = 16
    return config


def build(code: Any, block: type | None, router: type, config: Any, layer: int) -> nn.Module:
    if block is None or "DecoderLayer" in block.__name__ or "TextLayer" in block.__name__:
        experts: Any = next(
            cls for n, cls in inspect.getmembers(code, inspect.isclass) if n.endswith("TextExperts")
        )
        return Pair(router(config), experts(config))
    known = inspect.signature(block.__init__).parameters
    extra = {"layer_idx": layer, "ffn_dim": 16, "intermediate_size": 16}
    return block(config, **{key: value for key, value in extra.items() if key in known})


def randomise(model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(1)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if not tensor.is_floating_point():
            continue
        noise = torch.randn(tensor.shape, generator=generator)
        if "bias" in name:
            tensor.data.copy_(0.1 * noise)
        elif tensor.dim() < 2 or "scale" in name:
            tensor.data.copy_(1 + 0.1 * noise)
        else:
            tensor.data.copy_(noise / tensor.shape[-1] ** 0.5)
    for name, table in model.named_buffers():
        if name.endswith("tid2eid"):
            table.copy_(
                torch.rand(table.shape[0], EXPERTS, generator=generator).argsort(-1)[:, : table.shape[1]]
            )


def run(model: nn.Module, tokens: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits, and the gradients of something that depends on all of them."""
    model.zero_grad()
    logits = model(tokens)
    (logits * torch.linspace(-1, 1, logits.numel()).view_as(logits)).sum().backward()
    return logits.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def census(module: str, name: str, **settings: Any) -> str:
    """Check that the class replays exactly; how it does. Raises UnsupportedRouter."""
    model = tiny(module, name, **settings)
    tokens = torch.randint(0, VOCAB, (2, 9), generator=torch.Generator().manual_seed(2))
    with attach_replay(model) as replay:
        assert all(name in {type(inner).__name__ for inner in site.module.modules()} for site in replay.sites)
        plain, _ = run(model, tokens)
        with replay.record() as tape:
            assert torch.equal(run(model, tokens)[0], plain), "recording changed something"
        with replay.using(tape.native()) as again:
            torch.testing.assert_close(run(model, tokens)[0], plain, rtol=0, atol=1e-6)
        assert again.overlap().min() == 1
        order = torch.rand(18, LAYERS, replay.num_experts, generator=torch.Generator().manual_seed(3))
        given = order.argsort(-1)[..., : replay.top_k]
        with replay.using(Routes.of(given, replay.num_experts)):
            logits, grads = run(model, tokens)
        method = "; ".join(sorted({str(site.rule or "top-k swapped") for site in replay.sites}))
        shape = replay.num_experts, replay.top_k
    assert torch.equal(run(model, tokens)[0], plain), "detaching left something behind"
    assert not torch.allclose(logits, plain, atol=1e-3), "other experts made no difference"
    twin_logits, twin_grads = twin(model, tokens, given, *shape)
    torch.testing.assert_close(logits, twin_logits, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(grads, twin_grads, rtol=1e-4, atol=1e-5)
    routing = [g for n, g in grads.items() if re.search(r"gate\.|router|gate$", n)]
    assert any(g.abs().max() > 0 for g in routing), "no gradient to the router"
    return method


def twin(
    model: nn.Module, tokens: Tensor, given: Tensor, experts: int, top_k: int
) -> tuple[Tensor, dict[str, Tensor]]:
    """The same by other means: topk answers with the given experts, layer after layer."""
    layer = iter(range(LAYERS))
    with TopKSwap(experts, top_k, lambda _: given[:, next(layer)]) as swap:
        result = run(model, tokens)
    assert swap.calls == LAYERS
    return result


CASES = [one for one in routers() if one[1] not in NOT_OF_TOKENS]


# Of a release of transformers; CI has the families that are trained most, make test-lab all.
EVERYDAY = ("qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss", "glm4_moe", "olmoe", "llama4", "dbrx")


def is_everyday(module: str) -> bool:
    return module.split(".")[-2] in EVERYDAY


@pytest.mark.parametrize(
    ("module", "name"),
    [
        pytest.param(*one, marks=() if is_everyday(one[0]) else pytest.mark.lab)
        for one in CASES
        if "Hash" not in one[1] and one[1] != BY_LARGEST
    ],
    ids=lambda one: one.rpartition(".")[2],
)
def test_a_router_replays_exactly_or_is_refused(module: str, name: str) -> None:
    if name in REFUSED:
        with pytest.raises(UnsupportedRouter, match=name) as refusal:
            census(module, name)
        print(f"{name}: refused, {refusal.value.why}")
    else:
        print(f"{name}: {census(module, name)}")


def test_a_sparse_mixer_gives_its_equation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Phi-3.5-MoE takes the largest logit, then the largest of the rest: each weighs against those within 2 %
    of it (arXiv 2409.12136 section 2.1). Other experts weigh as if they had been the largest."""
    module = "transformers.models.phimoe.modeling_phimoe"
    model, noise = tiny(module, BY_LARGEST, router_jitter_noise=0.3), 0.3
    tokens = torch.randint(0, VOCAB, (2, 9), generator=torch.Generator().manual_seed(2))
    plain, _ = run(model, tokens)
    with attach_replay(model) as replay:
        with replay.record() as tape:
            run(model, tokens)
        native = tape.native()
        with replay.using(native):
            torch.testing.assert_close(run(model, tokens)[0], plain, rtol=0, atol=1e-6)
        given = torch.from_numpy(native.dense()).flip(-1).long()  # the second expert first
        given[::3, :, 1] = (given[::3].sum(-1) + 1) % EXPERTS
        given[..., 1] = torch.where(
            given[..., 0] == given[..., 1], (given[..., 1] + 1) % EXPERTS, given[..., 1]
        )
        with replay.using(Routes.of(given, EXPERTS)):
            logits, grads = run(model, tokens)
    layer = iter(range(LAYERS))

    def slow(scores: Tensor, jitter_eps: float, training: bool, top_k: int = 2) -> tuple[Tensor, Tensor]:
        chosen, rows = given[:, next(layer)], []
        for row, (first, second) in zip(scores, chosen.tolist(), strict=True):
            left, weights, numbers = list(range(EXPERTS)), [], row.tolist()
            for expert in (first, second):
                best = max(numbers[e] for e in left)
                near = [
                    e
                    for e in left
                    if e == expert or (best - numbers[e]) / max(abs(numbers[e]), best) <= 2 * noise
                ]
                weights.append(row[expert].exp() / row[near].exp().sum())
                left.remove(expert)
            rows.append(torch.stack(weights))
        return torch.stack(rows), chosen

    monkeypatch.setattr(f"{module}.sparsemixer", slow)
    twin_logits, twin_grads = run(model, tokens)
    assert not torch.allclose(logits, plain, atol=1e-3)
    torch.testing.assert_close(logits, twin_logits, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(grads, twin_grads, rtol=1e-4, atol=1e-5)


def test_group_limits_do_not_zero_weights() -> None:
    """DeepSeek-V2 gathers weights from scores masked by group: swapping its top-k loses the other groups'.

    Measured elsewhere: 46.9 % of replayed slots had weight 0, and no gradient, silently. The formula has the
    unmasked scores.
    """
    module, name = "transformers.models.deepseek_v2.modeling_deepseek_v2", "DeepseekV2TopkRouter"
    model = tiny(module, name, topk_method="group_limited_greedy", n_group=2, topk_group=1)
    tokens = torch.arange(18).view(2, 9)
    given = torch.rand(18, LAYERS, EXPERTS, generator=torch.Generator().manual_seed(3)).argsort(-1)[
        ..., :TOP_K
    ]
    seen: list[tuple[Tensor, Tensor]] = []
    with attach_replay(model) as replay, replay.using(Routes.of(given, EXPERTS)):
        for site in replay.sites:
            site.module.register_forward_hook(lambda _, __, out: seen.append((out[0], out[1])))
        model(tokens)
    for layer, (logits, weights) in enumerate(seen):
        torch.testing.assert_close(weights, logits.softmax(-1).gather(1, given[:, layer]))
        assert weights.min() > 0


class MaskedBlock(nn.Module):
    """A router inside a block: the better half of the groups, then a top-k, and no logits to be seen."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(HIDDEN, EXPERTS), nn.Identity()

    def forward(self, hidden_states: Tensor) -> Tensor:
        scores = self.gate(hidden_states.flatten(0, 1)).softmax(-1)
        best = scores.unflatten(1, (2, -1)).amax(-1).argmax(-1, keepdim=True)
        scores = scores * (torch.arange(EXPERTS) // (EXPERTS // 2) == best)
        weights, ids = scores.topk(TOP_K, dim=-1)
        return hidden_states * (weights * ids).sum(-1).view(*hidden_states.shape[:2], 1)


def test_a_masked_top_k_is_not_swapped() -> None:
    """Without logits only the swap is left, and would give weight 0 to experts of other groups: refused."""
    with pytest.raises(UnsupportedRouter, match=r"MaskedBlock at layers\.0: .* masked"):
        attach_replay(Tiny([MaskedBlock(), MaskedBlock()]))


def inkling(logits: Tensor, ids: Tensor, shared: Tensor) -> Tensor:
    """Shared experts are in the normaliser, so no formula of logits and ids alone gives the weights."""
    chosen = torch.cat([logits.gather(1, ids), shared], 1).sigmoid()
    return (chosen / chosen.sum(1, keepdim=True))[:, :TOP_K]


@pytest.mark.parametrize("family", ["dbrx", "llama4", "longcat_flash", "inkling"])
def test_swapped_top_k_gives_the_closed_form(family: str) -> None:
    """Where the twin is the same means as the replay, weights are compared with the family's equation."""
    module = f"transformers.models.{family}.modeling_{family}"
    name = next(name for where, name in CASES if where == module)
    model = tiny(module, name)
    seen: list[tuple[Any, ...]] = []
    with attach_replay(model) as replay:
        given = torch.rand(18, LAYERS, replay.num_experts, generator=torch.Generator().manual_seed(3))
        given = given.argsort(-1)[..., :TOP_K]
        router: Any = next(inner for inner in model.modules() if type(inner).__name__ == name)
        experts: Any = next(inner for inner in model.modules() if type(inner).__name__.endswith("Experts"))
        router.register_forward_hook(lambda _, args, out: seen.append((args[0], out)))
        experts.register_forward_pre_hook(lambda _, args: seen.append(args))
        with replay.using(Routes.of(given, replay.num_experts)), torch.no_grad():
            model(torch.arange(18).view(2, 9))
    (hidden, out), to_experts, ids = seen[0], seen[1], given[:, 0]
    match family:
        case "dbrx":
            scores = out.softmax(-1).gather(1, ids)
            found, expected = to_experts[2], scores / scores.sum(-1, keepdim=True)
        case "llama4":
            found, expected = (
                out[0],
                torch.zeros(18, EXPERTS).scatter(1, ids, out[1].gather(1, ids).sigmoid()),
            )
        case "longcat_flash":
            found, expected = out[1], out[0].softmax(-1).gather(1, ids) * router.routed_scaling_factor
        case _:
            shared = (hidden.flatten(0, -2) @ router.weight.T)[:, -router.n_shared_experts :]
            expected = inkling(out[0], ids, shared) * router.route_scale * router.global_scale
            found = out[1]
    torch.testing.assert_close(found, expected.detach())


def test_as_many_are_exact_as_before() -> None:
    """A release that drops or renames routers shows here; one that changes them, above."""
    exact = [name for _, name in CASES if name not in REFUSED]
    print(
        f"{len(exact)} exact, {len(REFUSED)} refused: {sorted(REFUSED)}, {len(NOT_OF_TOKENS)} not of tokens"
    )
    assert len(exact) >= EXACT
