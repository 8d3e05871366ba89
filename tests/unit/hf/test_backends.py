"""One contract for both backends of the trainer: our decoder, and the same model loaded by transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from small_replay import GRPO, SLOW, batch_of, bytes_of, samples_of
from small_transformers import OTHERS, SIZES, SPEC, saved, shaken

transformers = pytest.importorskip("transformers", minversion="5.0")
peft = pytest.importorskip("peft")

from trainer_options import trainer_options  # noqa: E402

from ostinato.algo.algorithms import algorithm  # noqa: E402
from ostinato.hf.factors import init_sites, read_folder, write_folder  # noqa: E402
from ostinato.hf.model import TransformersModel, load_transformers  # noqa: E402
from ostinato.model.decoder import Decoder  # noqa: E402
from ostinato.model.hf import load_model  # noqa: E402
from ostinato.model.hf_names import name_hf_module  # noqa: E402
from ostinato.model.lora import Adapters, init_adapters  # noqa: E402
from ostinato.model.packed import PackedAttention  # noqa: E402
from ostinato.model.peft_io import write_peft  # noqa: E402
from ostinato.model.shapes import AdapterSpec  # noqa: E402
from ostinato.train.inputs import as_inputs  # noqa: E402
from ostinato.train.local import LocalPasses  # noqa: E402
from ostinato.train.passes import ScoreOptions, batch_objective  # noqa: E402
from ostinato.train.trainer import PolicyTrainer  # noqa: E402
from ostinato.types import Segment  # noqa: E402

KNOWN_TO_BOTH = ("llama", "qwen2", "qwen3", "mistral", "gemma3_text", "qwen3_moe", "mixtral", "olmoe")
WINDOWS = {
    "mistral": {"sliding_window": 6},
    "gemma3_text": {"sliding_window": 6, "sliding_window_pattern": 2},
}


def trained(adapters: Adapters) -> Adapters:
    for leaf in adapters.list_leaves().values():
        leaf.requires_grad_()
    return adapters


class Both(NamedTuple):
    decoder: Decoder
    native: Adapters
    model: TransformersModel
    theirs: Adapters


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Both]:
    made: dict[str, Both] = {}

    def of(model_type: str) -> Both:
        if model_type not in made:
            folder = saved(model_type, tmp_path_factory.mktemp(model_type), **WINDOWS.get(model_type, {}))
            decoder = load_model(folder, dtype=torch.float32)
            native = shaken(init_adapters(decoder.config, SPEC, seed=1))
            write_peft(native, folder / "adapter")
            model = load_transformers(folder, dtype=torch.float32, device="cpu")
            theirs = read_folder(folder / "adapter", model.sites, "cpu")
            made[model_type] = Both(decoder, trained(native), model, trained(theirs))
        return made[model_type]

    return of


def passes_of(base: Any, adapters: Adapters, **options: Any) -> LocalPasses:
    from ostinato.model.ops import TORCH_OPS

    settings = {"ops": TORCH_OPS, "temperature": 0.8, "recompute": False, "entropy_grad": False}
    return LocalPasses(base, adapters, **{**settings, **options})


@pytest.mark.parametrize("model_type", KNOWN_TO_BOTH)
def test_losses_and_gradients_are_those_of_our_decoder(both: Callable[[str], Both], model_type: str) -> None:
    """To 1e-5 in fp32; routes that our decoder recorded are replayed in both."""
    decoder, native, model, theirs = both(model_type)
    assert model.packs
    mixture = decoder.config.moe is not None
    batch = batch_of(samples_of(decoder, native, groups=2, siblings=2, answer=7))
    losses, counts = [], []
    for base, adapters in ((decoder, native), (model, theirs)):
        for leaf in adapters.list_leaves().values():
            leaf.grad = None
        parts = [
            as_inputs(one, torch.device("cpu"), moe=mixture, replay=mixture) for one in batch.microbatches
        ]
        outcomes = passes_of(base, adapters).train(parts, batch_objective(GRPO, batch.num_samples), 1.0)
        losses.append(torch.stack([one.loss for one in outcomes]))
        counts += [one.counts for one in outcomes if one.counts is not None]
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=1e-6)
    if mixture:
        assert torch.equal(counts[0], counts[-1]), "the model's own routers chose other experts"
    for name, pair in native.tensors.items():
        if ".experts." in name:
            continue
        module = name_hf_module(name, "qwen3_moe" if mixture else model_type)
        for ours, other in zip(pair, theirs.tensors[module], strict=True):
            torch.testing.assert_close(other.grad, ours.grad, rtol=1e-4, atol=1e-6)
    for layer in decoder.config.moe.layers if decoder.config.moe else ():
        a, b = theirs.tensors[f"model.layers.{layer}.mlp.experts.gate_up_proj"]
        gate, up = (native.tensors[f"layers.{layer}.experts.{role}"] for role in ("gate", "up"))
        assert a.grad is not None and b.grad is not None
        torch.testing.assert_close(a.grad[:, :3], gate[0].grad, rtol=1e-4, atol=1e-6)
        width = up[1].shape[-2]  # read with half its scale, alpha / 6, and twice the factor
        torch.testing.assert_close(2 * b.grad[:, width:, 3:], up[1].grad, rtol=1e-4, atol=1e-6)
        down = theirs.tensors[f"model.layers.{layer}.mlp.experts.down_proj"]
        for ours, other in zip(native.tensors[f"layers.{layer}.experts.down"], down, strict=True):
            torch.testing.assert_close(other.grad, ours.grad, rtol=1e-4, atol=1e-6)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, TransformersModel]]:
    made: dict[str, tuple[Path, TransformersModel]] = {}

    def of(model_type: str) -> tuple[Path, TransformersModel]:
        if model_type not in made:
            folder = saved(model_type, tmp_path_factory.mktemp(model_type), **OTHERS[model_type])
            made[model_type] = folder, load_transformers(folder, dtype=torch.float32, device="cpu")
        return made[model_type]

    return of


def adapters_of(model: TransformersModel) -> Adapters:
    return shaken(init_sites(model.sites, SPEC, 1, "cpu"))


def tensors(trainer: PolicyTrainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.tensors().items()}


class SampledBy:
    """What ``samples_of`` asks: one sequence, by the model's own attention."""

    def __init__(self, model: TransformersModel) -> None:
        self.model, self.logits = model, model.logits

    def __call__(self, tokens: torch.Tensor, positions: torch.Tensor, attend: Any, **given: Any) -> Any:
        rows = PackedAttention((Segment(start=0, stop=len(tokens)),))
        return self.model(tokens, positions, rows, **given)


@pytest.mark.parametrize("model_type", OTHERS)
def test_families_that_our_decoder_has_not(
    other: Callable[[str], tuple[Path, TransformersModel]], model_type: str, tmp_path: Path
) -> None:
    """Packed is alone; three steps of GRPO, of which a checkpoint after two goes on to the same bits, with
    layers computed again too; what PEFT reads gives the same logits."""
    folder, model = other(model_type)
    assert model.packs == (model_type not in {"qwen3_5_text", "minimax"})  # these have layers with a state
    adapters = adapters_of(model)
    samples: Any = samples_of(SampledBy(model), adapters, groups=2, siblings=2, answer=7)  # type: ignore[arg-type]
    batch = batch_of(samples)

    def scores() -> torch.Tensor:
        parts = [as_inputs(one, torch.device("cpu"), moe=False, replay=False) for one in batch.microbatches]
        found = passes_of(model, adapters, temperature=1.0).score(parts, ScoreOptions())
        return torch.cat([one.logprobs for one in found if one.logprobs is not None])

    packed, own = scores(), torch.cat([torch.from_numpy(one.logprobs) for one in batch.microbatches])
    torch.testing.assert_close(packed, own, rtol=1e-4, atol=1e-5)

    def trainer(recompute: bool = False) -> PolicyTrainer:
        options = trainer_options(settings=SLOW, recompute=recompute)
        return PolicyTrainer(model, adapters_of(model), GRPO, **options)

    first, again = trainer(), trainer(recompute=True)
    for _ in range(2):
        report = first.step(batch)
        again.step(batch)
        assert not report.skipped
    if model.config.moe:
        assert report.metrics["routing/replay"] == 1
    for name, tensor in tensors(first).items():
        torch.testing.assert_close(again.tensors()[name], tensor, rtol=1e-3, atol=1e-5)
    resumed = trainer()
    resumed.restore(tensors(first), first.counters())
    assert resumed.identity() == first.identity()
    for one in (first, resumed):
        one.step(batch)
    assert bytes_of(first) == bytes_of(resumed)
    learned = first.adapters()
    write_folder(learned, tmp_path, str(folder))  # type: ignore[arg-type]
    read = read_folder(tmp_path, model.sites, "cpu")
    assert all(torch.equal(read.list_leaves()[name], leaf) for name, leaf in learned.list_leaves().items())  # type: ignore[union-attr]
    tokens = torch.arange(11) * 7 % SIZES["vocab_size"]
    rows = PackedAttention((Segment(start=0, stop=11),))
    with torch.no_grad():
        ours = model.logits(model(tokens, torch.arange(11), rows, adapters=learned)[0])
        plain = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        theirs = peft.PeftModel.from_pretrained(plain, str(tmp_path)).eval()(input_ids=tokens[None]).logits[0]
    torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=1e-5)


def test_targets_and_folders_that_are_not_of_the_model_are_refused(
    other: Callable[[str], tuple[Path, TransformersModel]], tmp_path: Path
) -> None:
    _, model = other("granite")
    with pytest.raises(ValueError, match=r"attn\.query"):
        init_sites(model.sites, AdapterSpec(targets=("attn.query",)), 0, "cpu")
    with pytest.raises(ValueError, match="adapter_config"):
        read_folder(tmp_path, model.sites, "cpu")
    _, mixture = other("gpt_oss")
    write_folder(init_sites(mixture.sites, SPEC, 0, "cpu"), tmp_path, "")
    with pytest.raises(ValueError, match=r"check its base|no linear map"):
        read_folder(tmp_path, model.sites, "cpu")
    assert algorithm("grpo").needs_reference is False
