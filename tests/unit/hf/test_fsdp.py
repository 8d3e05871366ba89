"""A model of transformers over ranks: losses, gradients and the trained adapter are those of one process."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import on_ranks
from small_replay import batch_of, samples_of
from small_transformers import SPEC, saved, shaken
from trainer_options import trainer_options

pytest.importorskip("transformers", minversion="5.20")

from ostinato.algo.algorithms import algorithm
from ostinato.hf.factors import ModuleAdapters, init_sites
from ostinato.hf.fsdp import DividedEmbedding, DividedHead, PieceAdapters, PieceLeaves, load_sharded
from ostinato.hf.model import TransformersModel, load_transformers
from ostinato.model.hf import load_model
from ostinato.model.lora import init_adapters
from ostinato.parallel.collectives import Collectives, Mesh
from ostinato.parallel.layout import Layout
from ostinato.train.fully_sharded import fully_sharded_trainer
from ostinato.train.trainer import PolicyTrainer
from ostinato.types import Batch

KL = algorithm("grpo", kl_coef=0.1, kl_reference="start", entropy_coef=0.01)
OPTIONS = {"lr": 1e-2, "recompute": True}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "gemma3_text": {"tie_word_embeddings": True, "sliding_window": 6},
    "gemma2": {"sliding_window": 6, "query_pre_attn_scalar": 8},  # soft caps of scores and logits
}


def links_of(ranks: int) -> Collectives:
    return Collectives(Mesh(Layout(data=ranks, shard=ranks)))


def adapters_of(model: TransformersModel) -> ModuleAdapters:
    adapters = init_sites(model.sites, SPEC, 1, "cpu")
    shaken(adapters)
    return adapters


def trained(rank: int, ranks: int, folder: Path, batch: Batch) -> dict[str, Any]:
    """Scores, losses and the adapter of three steps."""
    settings, held = trainer_options(**OPTIONS), 0
    if ranks == 1:
        whole = load_transformers(folder, dtype=torch.float32, device="cpu")
        trainer = PolicyTrainer(whole, adapters_of(whole), KL, **settings)
    else:
        links = links_of(ranks)
        model = load_sharded(folder, dtype=torch.float32, device="cpu", links=links)
        pieces = PieceAdapters.cut(adapters_of(model), links)
        leaves = PieceLeaves(pieces, links)
        trainer = fully_sharded_trainer(links, model, pieces, leaves, KL, **settings)
    scores, losses, norms = trainer.score(batch), [], []
    for _ in range(3):
        report = trainer.step(batch)
        losses.append(report.metrics["loss"])
        norms.append(report.metrics["grad_norm"])
    if ranks > 1:
        parts: Any = model.parameters()
        held = sum((part.to_local() if hasattr(part, "to_local") else part).numel() for part in parts)
    return {
        "held": held,
        "scores": scores,
        "losses": losses,
        "norms": norms,
        "identity": trainer.identity(),
        "tensors": dict(trainer.tensors()),
    }


@pytest.mark.parametrize(("family", "ranks"), [("qwen3", 2), ("gemma3_text", 2), ("gemma2", 2), ("qwen3", 4)])
def test_ranks_train_as_one_process_does(tmp_path: Path, family: str, ranks: int) -> None:
    """To 1e-5 in fp32, with a part of every weight on each rank. Three microbatches leave a rank idle."""
    source = load_model(saved("qwen3", tmp_path / "source"), dtype=torch.float32)
    folder = saved(family, tmp_path / "model", **FAMILIES[family])
    samples = samples_of(source, init_adapters(source.config, SPEC, seed=1), groups=3, siblings=2, answer=7)
    batch = batch_of(samples, budget=32)
    assert len(batch.microbatches) % ranks
    expected = trained(0, 1, folder, batch)
    num_weights = sum(
        part.numel() for part in load_transformers(folder, dtype=torch.float32, device="cpu").parameters()
    )
    results = on_ranks(ranks, trained, folder, batch, timeout_s=240)
    for result in results:
        for own, other in zip(expected["scores"], result["scores"], strict=True):
            torch.testing.assert_close(torch.from_numpy(other), torch.from_numpy(own), rtol=1e-5, atol=1e-5)
        assert result["losses"] == pytest.approx(expected["losses"], rel=1e-5, abs=1e-6)
        assert result["norms"] == pytest.approx(expected["norms"], rel=1e-5)
        assert result["identity"] == expected["identity"]
        assert result["held"] <= 1.02 * num_weights / ranks  # gains of norms may not come out even
    assert results[0]["tensors"].keys() == expected["tensors"].keys()
    for name, tensor in expected["tensors"].items():
        torch.testing.assert_close(results[0]["tensors"][name], tensor, rtol=1e-5, atol=1e-5)


def test_mixtures_and_other_files_are_refused(tmp_path: Path) -> None:
    options: Any = {"dtype": torch.float32, "device": "cpu", "links": None}
    with pytest.raises(ValueError, match="is a mixture of experts"):
        load_sharded(saved("qwen3_moe", tmp_path / "moe"), **options)
    folder = saved("qwen3", tmp_path / "dense")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="plain safetensors"):
        load_sharded(folder, **options)


def divided(rank: int, ranks: int, seed: int) -> list[bool]:
    """Whether embeddings and logits of this rank's rows are those of the whole tables, for drawn sizes."""
    links, draw = links_of(ranks), random.Random(seed)  # the same sizes on all ranks
    results = []
    for _ in range(8):
        vocab_size, width = draw.randint(ranks * ranks, 40), draw.randint(1, 5)
        counts = [draw.choice((0, 1, 2, 7)) for _ in range(ranks - 1)] + [1]
        table = torch.randn(vocab_size, width, generator=torch.Generator().manual_seed(draw.randint(0, 99)))
        rows = torch.nn.Parameter(table.chunk(ranks)[rank].clone(), requires_grad=False)
        ids = torch.randint(vocab_size, (1, counts[rank]))
        embedded = DividedEmbedding(rows, vocab_size, links, torch.tensor(3.0))(ids)
        logits = DividedHead(rows, vocab_size, links)(embedded)
        results.append(torch.equal(embedded, table[ids] * 3.0))
        results.append(torch.allclose(logits, embedded @ table.T, rtol=1e-5, atol=1e-5))
    return results


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_divided_vocabulary_is_the_whole(ranks: int) -> None:
    """With vocabularies that do not come out even, and ranks with other numbers of rows, or none."""
    assert all(all(results) for results in on_ranks(ranks, divided, 5, timeout_s=60))
