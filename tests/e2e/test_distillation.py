"""On-policy distillation as a run: the student comes closer to its teacher, resume, bad teachers."""

from __future__ import annotations

import json
import shutil
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import wait_until
from safetensors.torch import load_file
from serving import server
from short_run import SHORT

from ostinato.launch import RunFailed
from ostinato.launch.session import Outcome, learn, resume
from ostinato.model.named import find_model_folder
from ostinato.model.peft_io import LOGICAL
from ostinato.observe.page import write_report
from ostinato.run import RunFolder

pytestmark = pytest.mark.slow


def run(recipe: str, folder: Path, **overrides: Any) -> Outcome:
    """Into ``folder``; keys have "__" for the dot."""
    given = {key.replace("__", "."): value for key, value in overrides.items()}
    settings = {**SHORT, "log.dir": folder, "trainer.lr": 5e-3, "rollout.prompts_per_step": 8, **given}
    return learn(recipe, *(f"{key}={value}" for key, value in settings.items()), quiet=True)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose adapter has left the base."""
    return run("quickstart", tmp_path_factory.mktemp("teacher"), trainer__steps=8).folder


def rows(folder: Path) -> list[dict[str, Any]]:
    return list(RunFolder(folder).metrics.rows())


@pytest.mark.parametrize(("rank", "size"), [(4, 1), pytest.param(16, 4, marks=pytest.mark.lab)])
def test_the_student_comes_closer_to_its_teacher(teacher: Path, tmp_path: Path, rank: int, size: int) -> None:
    """Without any verdict, and with one answer to a prompt too."""
    sizes = {"adapter__rank": rank, "rollout__group_size": size, "rollout__prompts_per_step": 32 // size}
    judged = {"reward__functions": '["none"]', "eval__at_start": "true"}
    outcome = run("opd", tmp_path, teacher__adapter=teacher, trainer__steps=10, **sizes, **judged)
    kl = [row["opd/reverse_kl"] for row in rows(outcome.folder)]
    assert kl[0] > 0.01 and sum(kl[-3:]) / 3 < 0.5 * kl[0]
    assert all(row["tokens/sampled"] == row["tokens/trained"] for row in rows(outcome.folder))
    page = write_report([RunFolder(outcome.folder)]).read_text(encoding="utf-8")
    assert "Reverse KL to the teacher" in page


def test_a_resumed_run_equals_an_undisturbed_one(teacher: Path, tmp_path: Path) -> None:
    whole = run("opd", tmp_path / "whole", teacher__adapter=teacher, trainer__steps=4)
    begun = run("opd", tmp_path / "begun", teacher__adapter=teacher, trainer__steps=2)
    resume(begun.folder, "trainer.steps=4", quiet=True)
    one, other = (load_file(outcome.folder / "adapter" / LOGICAL) for outcome in (whole, begun))
    assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def test_bad_teachers_are_refused_before_work(teacher: Path, tmp_path: Path) -> None:
    faults = [
        ({"teacher__adapter": ""}, r"algo\.teacher_coef is 1 without a teacher.* teacher\.adapter"),
        ({"teacher__adapter": tmp_path / "none"}, r"teacher\.adapter is .*none"),
        ({"algo__name": "grpo", "teacher__adapter": teacher}, "has no effect because algo.teacher_coef is 0"),
        ({"teacher__adapter": teacher, "adapter__kind": "full"}, "is on the base that adapter.kind"),
        ({"teacher__adapter": teacher, "algo__teacher_coef": 0}, "so nothing is learned"),
    ]
    for overrides, message in faults:
        with pytest.raises(ValueError, match=message):
            run("opd", tmp_path, **overrides)
    assert not list(tmp_path.glob("*/recipe.toml"))


def test_a_teacher_at_an_address_teaches_as_one_here(teacher: Path, tmp_path: Path) -> None:
    """`ostinato serve` beside the run: the same advantages but for rounding, and what is refused."""
    with server(str(teacher)) as at:
        url: dict[str, Any] = {"teacher__url": at.url, "teacher__adapter": ""}
        far = run("opd", tmp_path / "far", **url, trainer__steps=2)
        near = run("opd", tmp_path / "near", teacher__adapter=teacher, trainer__steps=2)
        one, two = (rows(outcome.folder)[0] for outcome in (far, near))
        assert one["opd/teacher_logprob"] == pytest.approx(two["opd/teacher_logprob"], abs=1e-4)
        assert one["opd/reverse_kl"] == pytest.approx(two["opd/reverse_kl"], abs=1e-4)
        assert one["teacher/requests"] == 32 and one["teacher/retries"] == 0
        faults = [
            ({"rollout__temperature": 0.7}, r"rollout\.temperature is 0\.7, and a server scores the plain"),
            ({"teacher__adapter": teacher}, "which serves its own; drop one"),
            ({"teacher__model": "nothing"}, r"teacher\.model is 'nothing'"),
            (
                {"model__path": "smollm2-135m", "adapter__targets": '["attn"]'},
                "has other tokens than the student",
            ),
            ({"teacher__url": "localhost:1"}, 'give it as "http://host:8000"'),
        ]
        for overrides, message in faults:
            with pytest.raises(ValueError, match=message):
                run("opd", tmp_path / "bad", **url | overrides)
        assert not list(tmp_path.glob("bad/*/recipe.toml"))


def test_a_teacher_that_is_lost_ends_the_run_in_one_sentence(teacher: Path, tmp_path: Path) -> None:
    """Nothing is learned from tokens without its numbers; the run goes on where the teacher is back."""
    with ExitStack() as stack:
        url: dict[str, Any] = {"teacher__url": stack.enter_context(server(str(teacher))).url}

        def leave() -> None:
            wait_until(lambda: [*tmp_path.glob("*/checkpoints/step-*2")], 60)
            stack.close()

        leaving = threading.Thread(target=leave)
        leaving.start()
        with pytest.raises(RunFailed, match=r"/v1/completions gave no answer .* to go on: ostinato resume"):
            more = {"teacher__adapter": "", "trainer__steps": 500}
            run("opd", tmp_path, **url | more)
        leaving.join()
    (folder,) = tmp_path.iterdir()
    with pytest.raises(ValueError, match=r"teacher\.url .* cannot be a teacher"):
        resume(folder, quiet=True)
    with server(str(teacher)) as at:
        end = rows(folder)[-1]["step"] + 2
        resume(folder, f"trainer.steps={end}", f"teacher.url={at.url}", quiet=True)
    assert [row["step"] for row in rows(folder)] == [*range(1, end + 1)]


def test_another_model_teaches_where_it_has_the_same_tokens(tmp_path: Path) -> None:
    """Here the base itself: a fresh adapter has nothing to learn from it."""
    other = tmp_path / "other"
    shutil.copytree(find_model_folder("asset:seed-moe"), other)
    base: dict[str, Any] = {"teacher__model": other, "teacher__adapter": ""}
    outcome = run("opd", tmp_path, **base, trainer__steps=1)
    assert abs(rows(outcome.folder)[0]["opd/reverse_kl"]) < 1e-6
    file = other / "tokenizer.json"
    tokenizer = json.loads(file.read_text(encoding="utf-8"))
    last = max(tokenizer["added_tokens"], key=lambda token: token["id"])
    tokenizer["added_tokens"].append(last | {"id": 9999, "content": "<|another|>"})
    file.write_text(json.dumps(tokenizer), encoding="utf-8")
    with pytest.raises(ValueError, match="has another vocabulary"):
        run("opd", tmp_path, **base)
