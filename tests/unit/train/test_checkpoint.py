"""What a run goes on with: checkpoints that are whole or not there, optimizers, one head for both sides."""

from __future__ import annotations

import errno
import json
import resource
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from nouns import sample_of
from safetensors import SafetensorError
from worlds import KERNELS, answers, tiny_dense

from ostinato.algo.algorithms import algorithm
from ostinato.algo.pack import Aggregation, aggregation_weights, pack
from ostinato.config import TrainerSection
from ostinato.engine.local import LocalEngine
from ostinato.files import find_remedy
from ostinato.model.config import parse_config
from ostinato.model.decoder import Decoder
from ostinato.model.lora import init_adapters
from ostinato.model.native import Kernels
from ostinato.model.ops import TORCH_OPS
from ostinato.model.shapes import AdapterSpec
from ostinato.train import checkpoint as module
from ostinato.train.checkpoint import (
    Checkpoint,
    CheckpointError,
    find_damage,
    list_checkpoints,
    load_checkpoint,
    repair_folder,
    save_checkpoint,
)
from ostinato.train.optimizer import (
    AdamW,
    build_optimizer,
    clip_gradients,
    gradient_norm,
    load_optimizer_tensors,
    lr_factor,
    optimizer_tensors,
)
from ostinato.train.trainer import PolicyTrainer
from ostinato.types import Completion, Request, Sampling

IDENTITY = {"model": "tiny", "base": "0123"}


def checkpoint_of(step: int, size: int = 10) -> Checkpoint:
    return Checkpoint(
        step=step,
        tensors={
            "parameters.x.A": torch.arange(size) / 7 + step,
            "optimizer.x.A.step": torch.tensor(float(step)),
        },
        state={"trainer": {"version": step}, "loop": {"cursor": 3 * step, "note": "ä"}},
        identity=IDENTITY,
        files={"pending.npz": bytes(range(256))},
    )


def load(folder: Path, **options) -> Checkpoint | None:
    return load_checkpoint(folder, **{"identity": IDENTITY, **options})


def test_round_trip_is_exact(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved = checkpoint_of(20)
    path = save_checkpoint(tmp_path, saved)
    assert path.name == "step-00000020"
    assert find_damage(path) == ""
    loaded = load(tmp_path)
    assert loaded is not None
    assert not caplog.messages
    assert (loaded.step, loaded.state, loaded.identity, loaded.files) == (
        20,
        saved.state,
        IDENTITY,
        saved.files,
    )
    assert loaded.tensors.keys() == saved.tensors.keys()
    assert all(torch.equal(loaded.tensors[name], tensor) for name, tensor in saved.tensors.items())


def test_all_files_have_the_mode_of_the_umask(tmp_path: Path) -> None:
    """The tensors alone were 0600: a colleague's ``ostinato eval`` of a shared run got Permission denied."""
    path = save_checkpoint(tmp_path, checkpoint_of(1))
    beside = tmp_path / "plain"
    beside.touch()
    assert {file.stat().st_mode & 0o777 for file in path.iterdir()} == {beside.stat().st_mode & 0o777}


@pytest.mark.parametrize(
    ("error", "fix"),
    [
        (PermissionError(errno.EACCES, "Permission denied"), "writable"),
        (OSError(errno.EROFS, "Read-only file system"), "writable"),
        (SafetensorError("I/O error: Permission denied (os error 13)"), "writable"),
        (OSError(errno.ENOSPC, "No space left on device"), "free disk space"),
    ],
)
def test_a_folder_that_must_not_be_written_is_no_full_disk(error: Exception, fix: str) -> None:
    """A rank whose run folder belongs to another user was told to free disk space."""
    assert fix in find_remedy(error)


def test_the_newest_k_are_kept(tmp_path: Path) -> None:
    for step in (1, 2, 30, 100):
        save_checkpoint(tmp_path, checkpoint_of(step), keep=2)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-00000030", "step-00000100"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000030", "step-00000100"]


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, checkpoint_of(5))
    again = Checkpoint(step=5, tensors={"y": torch.ones(2)}, state={}, identity=IDENTITY)
    save_checkpoint(tmp_path, again)
    loaded = load(tmp_path)
    assert loaded is not None
    assert list(loaded.tensors) == ["y"]
    assert loaded.files == {}
    assert len(list(tmp_path.iterdir())) == 1


def truncate(path: Path) -> None:
    file = path / "tensors.safetensors"
    file.write_bytes(file.read_bytes()[:-7])


def flip(path: Path) -> None:
    file = path / "tensors.safetensors"
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)


def cut_manifest(path: Path) -> None:
    file = path / "manifest.json"
    file.write_bytes(file.read_bytes()[:30])


def forget_state(path: Path) -> None:
    (path / "state.json").unlink()


def another_format(path: Path) -> None:
    file = path / "manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"format": 99}))


@pytest.mark.parametrize(
    ("harm", "reported"),
    [
        (truncate, "tensors.safetensors has"),
        (flip, "tensors.safetensors has changed"),
        (cut_manifest, "manifest.json is missing or not readable"),
        (forget_state, "state.json is missing"),
        (another_format, "its format is 99"),
    ],
)
def test_a_damaged_checkpoint_is_skipped_with_a_sentence_or_named(
    tmp_path: Path, harm, reported: str, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (1, 2):
        save_checkpoint(tmp_path, checkpoint_of(step))
    harm(tmp_path / "step-00000002")
    loaded = load(tmp_path)
    assert loaded is not None
    assert loaded.step == 1
    (warned,) = caplog.messages
    assert reported in warned
    harm(tmp_path / "step-00000001")
    with pytest.raises(CheckpointError, match="none of the 2 checkpoints"):
        load(tmp_path)


def test_what_a_kill_left_is_ignored_and_cleared(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_checkpoint(tmp_path, checkpoint_of(1))
    torn = tmp_path / ".step-00000002.abc"
    torn.mkdir()
    (torn / "tensors.safetensors").write_bytes(b"half")
    loaded = load(tmp_path)
    assert loaded is not None
    assert (loaded.step, caplog.messages) == (1, [])
    save_checkpoint(tmp_path, checkpoint_of(3))
    assert not torn.exists()


def test_a_replacement_that_was_killed_between_two_renames_is_found(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Replacing a folder takes two renames; killed between them, the old version lies under a hidden name."""
    path = save_checkpoint(tmp_path, checkpoint_of(1))
    path.rename(tmp_path / ".step-00000001.old")
    found = load(tmp_path)
    assert found is not None
    assert (found.step, caplog.messages) == (1, [])
    assert not path.exists(), "who only reads, beside a run, moves nothing"
    (tmp_path / ".step-00000002.abc").mkdir()
    repair_folder(tmp_path)
    assert [one.name for one in tmp_path.iterdir()] == ["step-00000001"]


@pytest.mark.parametrize("when", ["before it is looked at", "while it is read"])
def test_a_reader_beside_a_run_finds_the_next_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str, caplog: pytest.LogCaptureFixture
) -> None:
    """`eval` of a live run: the run saves two more and deletes the one that is being read."""
    save_checkpoint(tmp_path, checkpoint_of(1), keep=1)
    name = "find_damage" if when == "before it is looked at" else "_read"
    plain, calls = getattr(module, name), list[Path]()

    def overtaken(path: Path, *more: Any) -> Any:
        calls.append(path)
        if len(calls) == 1:
            save_checkpoint(tmp_path, checkpoint_of(2), keep=1)
        return plain(path, *more)

    monkeypatch.setattr(module, name, overtaken)
    loaded = load(tmp_path)
    assert loaded is not None
    assert (loaded.step, caplog.messages) == (2, [])


@pytest.mark.parametrize("size", [10, 1_000_000])
def test_a_full_disk_leaves_the_last_one(tmp_path: Path, size: int, caplog: pytest.LogCaptureFixture) -> None:
    """A limit on file size stands for the full disk: to the writer both are an error of write()."""
    save_checkpoint(tmp_path, checkpoint_of(1), keep=1)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200 if size == 10 else 100_000, limit[1]))
    try:
        with pytest.raises(
            CheckpointError, match=r"step-00000002 could not be written .*the last good one is"
        ):
            save_checkpoint(tmp_path, checkpoint_of(2, size), keep=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    loaded = load(tmp_path)
    assert loaded is not None
    assert (loaded.step, caplog.messages) == (1, [])
    save_checkpoint(tmp_path, checkpoint_of(2, size), keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000002"]


# ---- adamW against its formula, schedules, clipping, and state that survives bit for bit


def leaves(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "matrix": torch.randn(3, 4, generator=generator).requires_grad_(),
        "experts": torch.randn(2, 3, 4, generator=generator).requires_grad_(),
        "vector": torch.randn(5, generator=generator).requires_grad_(),
    }


def descend(optimizer: AdamW | torch.optim.AdamW, named: dict[str, torch.Tensor], step: int) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for leaf in named.values():
        leaf.grad = torch.randn(leaf.shape, generator=generator)
    optimizer.step()


def test_it_is_torchs_adamw_to_the_bit() -> None:
    """A parameter without a gradient is left alone, and has no state."""
    config = TrainerSection(lr=0.1, betas=(0.9, 0.95), weight_decay=0.2)
    named, twins = leaves(), leaves()
    idle = torch.ones(3, requires_grad=True)
    one = build_optimizer([*named.values(), idle], config)
    groups = [
        {"params": [twins["matrix"], twins["experts"]], "weight_decay": 0.2},
        {"params": [twins["vector"]], "weight_decay": 0.0},
    ]
    two = torch.optim.AdamW(groups, lr=0.1, betas=(0.9, 0.95), fused=True)
    for step in range(4):
        descend(one, named, step)
        descend(two, twins, step)
    assert all(torch.equal(named[name], twins[name]) for name in named)
    assert idle not in one.state and torch.equal(idle, torch.ones(3))


@pytest.mark.slow
def test_an_optimizer_step_imports_no_compiler() -> None:
    """torch.optim imports torch._dynamo with the first optimizer, a third of a short run's start."""
    program = (
        "import sys, torch; from ostinato.config import TrainerSection;"
        "from ostinato.train.optimizer import build_optimizer;"
        "leaf = torch.ones(2, 2, requires_grad=True); leaf.grad = torch.ones(2, 2);"
        "build_optimizer([leaf], TrainerSection(lr=0.1)).step();"
        "assert 'torch._dynamo' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_state_round_trip_is_bitwise() -> None:
    config = TrainerSection(lr=0.1, weight_decay=0.1)
    named, copies = leaves(), leaves()
    one, two = build_optimizer(named.values(), config), build_optimizer(copies.values(), config)
    descend(one, named, 0)
    saved = {name: tensor.clone() for name, tensor in optimizer_tensors(one, named).items()}
    with torch.no_grad():
        for name, leaf in copies.items():
            leaf.copy_(named[name])
    load_optimizer_tensors(two, copies, saved)
    for step in (1, 2):
        descend(one, named, step)
        descend(two, copies, step)
    assert all(torch.equal(named[name], copies[name]) for name in named)
    after, twin = optimizer_tensors(one, named), optimizer_tensors(two, copies)
    assert all(torch.equal(after[name], twin[name]) for name in after)
    assert not torch.equal(saved["matrix.exp_avg"], after["matrix.exp_avg"]), "the saved state was not copied"


@given(
    schedule=st.sampled_from(["constant", "linear", "cosine"]),
    warmup=st.integers(0, 20),
    length=st.integers(1, 200),
    step=st.integers(0, 300),
)
def test_schedules_never_stall_in_warmup_and_never_leave_0_1(
    schedule: Any, warmup: int, length: int, step: int
) -> None:
    config = TrainerSection(lr=1.0, schedule=schedule, warmup_steps=warmup, steps=warmup + length)
    factor = lr_factor(config, step)
    assert 0 <= factor <= 1
    if step < config.steps:
        assert factor > 0
    if step < warmup:
        assert factor == pytest.approx((step + 1) / warmup)
    elif schedule == "constant":
        assert factor == 1
    else:
        assert lr_factor(config, step + 1) <= factor
        assert lr_factor(config, config.steps) == pytest.approx(0, abs=1e-12)


def test_clipping_by_hand() -> None:
    gradients = [torch.tensor([3.0]), torch.tensor([[0.0, 4.0]])]
    assert gradient_norm(gradients) == 5
    clip_gradients(gradients, norm=5.0, max_norm=1.0)
    torch.testing.assert_close(gradients[0], torch.tensor([0.6]))
    torch.testing.assert_close(gradients[1], torch.tensor([[0.0, 0.8]]))
    untouched = [gradient.clone() for gradient in gradients]
    clip_gradients(gradients, norm=1.0, max_norm=1.0)
    assert all(torch.equal(one, two) for one, two in zip(gradients, untouched, strict=True))


# ---- model.fp32_head is of the sampler and of the trainer (ScaleRL, arXiv 2510.13786, A.19)


# one token in, one token out: attention over a single key rounds nothing, so only the heads can differ
REQUESTS = [
    Request(tokens=np.array([n + 1], np.int32), sampling=Sampling(max_tokens=1), seed=(0, n))
    for n in range(60)
]


def decoder_of(fp32_head: bool) -> Decoder:
    """With logits of some tens, which are multiples of 1/8 or 1/4 in bfloat16."""
    decoder = Decoder(
        parse_config(
            tiny_dense(
                vocab_size=64,
                hidden_size=64,
                intermediate_size=64,
                tie_word_embeddings=False,
                initializer_range=0.3,
            )
        ),
        dtype=torch.bfloat16,
        fp32_head=fp32_head,
    ).init_weights(seed=0)
    decoder.head_weight.data.mul_(8)
    return decoder


def sampled(fp32_head: bool, kernels: Kernels | None) -> list[Completion]:
    return answers(LocalEngine(decoder_of(fp32_head), kernels=kernels, kv_memory_mb=1), REQUESTS)


def furthest(completion: Sequence[Completion], fp32_head: bool, kernels: Kernels | None) -> float:
    """The largest |log p| between sampler and trainer, whose head is in fp32 or not."""
    samples = [
        sample_of(
            np.append(request.tokens, done.tokens),
            1,
            logprobs=np.append(np.float32(0), done.logprobs),
            group=number,
        )
        for number, (request, done) in enumerate(zip(REQUESTS, completion, strict=True))
    ]
    decoder = decoder_of(fp32_head)
    adapters = init_adapters(decoder.config, AdapterSpec(rank=2, targets=("attn",)), seed=0)
    trainer = PolicyTrainer(
        decoder,
        adapters,
        algorithm("cispo"),
        settings=TrainerSection(lr=1e-6),
        ops=kernels.training if kernels else TORCH_OPS,
    )
    weights = aggregation_weights(samples, Aggregation.PROMPT)
    batch = pack(samples, weights, tokens_per_microbatch=1000)
    return trainer.measure(batch, floor=False)["arms"]["native"]["abs_max"]


@pytest.mark.parametrize("kernels", KERNELS)
def test_with_the_flag_both_sides_score_alike_and_one_without_it_does_not(kernels: Kernels | None) -> None:
    """Logits of 8 bits are off by more than a tenth of a nat here, so one switch is for both sides. The test
    before this one compared a softmax with another, and never set the flag."""
    completion = sampled(True, kernels)
    assert furthest(completion, True, kernels) < 1e-4
    assert furthest(completion, False, kernels) > 0.1
    assert furthest(sampled(False, kernels), True, kernels) > 0.1
