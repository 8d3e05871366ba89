"""What a recipe becomes, as far as no model is needed for it."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

from ostinato.config import Recipe, dump_toml
from ostinato.launch.caveats import caveats
from ostinato.launch.checks import check
from ostinato.launch.inputs import check_lengths, longest_answer, new_interruption, stage_identity
from ostinato.launch.solved import check_solvable, solved_at
from ostinato.launch.trainer import new_adapters
from ostinato.model.config import parse_config
from ostinato.model.decoder import Decoder
from ostinato.model.named import model_folder
from ostinato.model.peft_io import save_peft
from ostinato.observe.report.page import solved_at as solved_at_in_report
from ostinato.observe.report.reading import RunData
from ostinato.render import Renderer
from ostinato.types import Prompt


@pytest.mark.parametrize(
    ("reward", "mark"),
    [
        ({}, 1.0),
        ({"functions": ["exact", "answer_tags"], "weights": [1.0, 0.2]}, 1.2),
        ({"functions": ["exact", "length.py:penalty"], "weights": [1.0, -0.1]}, 1.0),
        ({"functions": ["exact", "length.py:penalty"], "solved_at": 0.5}, 0.5),
        ({"solved_at": 0}, 0.0),
    ],
)
def test_a_solved_answer_has_full_marks_or_what_the_recipe_says(reward: dict, mark: float) -> None:
    """A function that returns penalties has no full marks: pass@1 of such a run was 0 for ever."""
    recipe = Recipe.parse({"reward": reward})
    tree = recipe.model_dump(mode="json")
    data = RunData(
        name="", recipe_text="", recipe=tree, metrics=[], evals=[], ledger=[], starts=[], damage=[]
    )
    for found in (solved_at(recipe.reward), solved_at_in_report(data)):
        assert found == pytest.approx(mark, abs=1e-5) and found < mark


def test_a_mark_that_no_answer_can_reach_is_refused_where_that_is_certain() -> None:
    """Built-in functions give 1 at most; a user's own may give 10."""
    for bad in (
        {"solved_at": 1.5},
        {"functions": ["exact", "numeric"], "weights": [1, -9], "solved_at": 1.1},
    ):
        with pytest.raises(ValueError, match=r"reward.solved_at is 1\.\d, but .* at most 1, so no answer"):
            check_solvable(Recipe.parse({"reward": bad}).reward)
    for good in ({}, {"solved_at": 1.0}, {"functions": ["own.py:points"], "solved_at": 8.0}):
        check_solvable(Recipe.parse({"reward": good}).reward)


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ({}, []),
        ({"reward": {"functions": ["exact", "numeric"]}}, []),
        ({"reward": {"functions": ["exact", "own.py:brief"], "solved_at": 1.0}}, []),
        (
            {"reward": {"functions": ["exact", "own.py:brief"]}},
            ["a reward of 2 on, a 1 from each of exact, own"],
        ),
        ({"rollout": {"top_p": 0.9}}, ["rollout.top_p cut"]),
        ({"rollout": {"top_k": 5, "min_p": 0.05}}, ["rollout.top_k and rollout.min_p cut"]),
        ({"trainer": {"minibatches": 4}}, []),
        (
            {"adapter": {"path": "a"}, "algo": {"kl_coef": 0.1}},
            ["from the base model, not from adapter.path"],
        ),
        ({"algo": {"name": "rloo"}, "trainer": {"minibatches": 4}}, ["trainer.minibatches = 4"]),
        ({"engine": {"weights": "int8"}}, ["the sampler is not quite the policy"]),
        ({"engine": {"weights": "bf16"}}, ["the sampler is not quite the policy"]),
        ({"engine": {"weights": "bf16"}, "model": {"dtype": "bfloat16"}}, ["changes nothing"]),
        (
            {"rollout": {"interrupt_after": [8, 12], "answer_tokens": 4}},
            ["rollout.interrupt_after = [8, 12] bounds answers, with rollout.answer_tokens = 4; rollout"],
        ),
        ({"pipeline": {"staleness": 19}}, []),
        (
            {"pipeline": {"staleness": 20}},
            ["pipeline.staleness is 20: the first 21 of 100 batches are all sampled by the policy of the"],
        ),
        ({"trainer": {"replay": "auto"}}, []),
        ({"trainer": {"replay": "auto"}, "log": {"mismatch_every": 0}}, ["holds for the whole run"]),
    ],
)
def test_what_is_not_exact_is_said_before_the_run(tree: dict, words: list[str]) -> None:
    """Tokens of a cut distribution were scored by the trainer over the whole vocabulary: a ratio below 1
    on the first minibatch looked like a defect."""
    recipe = Recipe.parse(tree)
    said = list(caveats(recipe, check(recipe)))
    assert len(said) == len(words)
    assert all(word in sentence for word, sentence in zip(words, said, strict=True))


def test_keys_of_replay_are_said_to_do_nothing_where_nothing_is_routed() -> None:
    recipe = Recipe.parse(
        {"trainer": {"replay": "auto", "replay_threshold": 0.8}, "log": {"mismatch_every": 0}}
    )
    (said,) = caveats(recipe, check(recipe), moe=False)
    assert "trainer.replay and trainer.replay_threshold change nothing" in said
    assert not list(caveats(Recipe(), check(Recipe()), moe=False))


def test_what_changes_the_groups_changes_the_stage() -> None:
    """A resumed run takes up groups of the same stage only; how long it trains is no part of that."""
    usual = stage_identity(Recipe())
    for section, keys in (
        ("model", {"path": "x"}),
        ("model", {"fp32_head": True}),
        ("engine", {"weights": "int8"}),
        ("task", {"system_prompt": "Be brief."}),
        ("reward", {"functions": ["answer_tags"]}),
        ("rollout", {"interrupt_after": [8, 12], "answer_tokens": 4}),
        ("rollout", {"think_end": "####"}),
    ):
        assert stage_identity(Recipe.parse({section: keys})) != usual
    longer = Recipe.parse(
        {"trainer": {"steps": 7, "lr": 1.0}, "reward": {"timeout_s": 3.0}, "eval": {"n": 3}}
    )
    assert stage_identity(longer) == usual
    assert stage_identity(Recipe.parse(tomllib.loads(dump_toml(Recipe())))) == usual


def interrupting(**rollout: Any) -> Recipe:
    keys = {"interrupt_after": [8, 12], "answer_tokens": 4, "interrupt_phrase": " ####", "max_tokens": 900}
    return Recipe.parse({"rollout": keys | rollout})


def test_an_interrupted_answer_is_as_long_as_its_parts_whatever_max_tokens_says() -> None:
    renderer = Renderer(model_folder("asset:seed-moe"))
    found = new_interruption(interrupting(), renderer)
    assert found is not None and (found.shortest, found.longest, found.answer_tokens) == (8, 12, 4)
    assert renderer.decode(found.phrase) == " ####" and found.think_end == "</think>"
    assert longest_answer(interrupting(), renderer)[0] == found.most_tokens == 12 + len(found.phrase) + 4
    assert longest_answer(Recipe(), renderer) == (64, "rollout.max_tokens")
    assert new_interruption(Recipe(), renderer) is None
    prompts = [Prompt(uid="p", text="1 + 1 = ?")]
    check_lengths(interrupting(), prompts, renderer, 64)
    with pytest.raises(ValueError, match=r"prompt p has \d+ tokens; with an answer of 17 \(rollout.inter"):
        check_lengths(interrupting(), prompts, renderer, 20)
    with pytest.raises(ValueError, match=r"an answer has up to 17 tokens .* lower rollout.interrupt"):
        check_lengths(interrupting(), prompts, renderer, 17)


def test_a_phrase_that_ends_the_answer_is_refused() -> None:
    renderer = Renderer(model_folder("asset:seed-moe"))
    end = renderer.decode(list(renderer.stop_tokens)[:1], skip_special=False)
    with pytest.raises(ValueError, match=f"rollout.interrupt_phrase has '{re.escape(end)}', which ends"):
        new_interruption(interrupting(interrupt_phrase=f"Enough.{end}"), renderer)


def small_decoder(seed: int) -> Decoder:
    config = {
        "model_type": "llama",
        "vocab_size": 32,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "max_position_embeddings": 64,
    }
    return Decoder(parse_config(config)).init_weights(seed)


def test_a_run_can_begin_with_an_adapter_and_refuses_one_of_another_base(tmp_path: Path) -> None:
    decoder = small_decoder(0)
    trained = new_adapters(Recipe.parse({"adapter": {"rank": 3}}), decoder)
    assert trained is not None
    with torch.no_grad():
        for _, b in trained.tensors.values():
            b.normal_()
    save_peft(trained, decoder, tmp_path, "base")
    recipe = Recipe.parse({"adapter": {"path": str(tmp_path)}})
    found = new_adapters(recipe, decoder)
    assert found is not None and found.spec == trained.spec
    assert all(torch.equal(a, b) for a, b in zip(found.parameters(), trained.parameters(), strict=True))
    with pytest.raises(ValueError, match="belongs to another base"):
        new_adapters(recipe, small_decoder(1))
    with pytest.raises(ValueError, match=r"adapter\.path is 'x' with adapter\.kind"):
        Recipe.parse({"adapter": {"path": "x", "kind": "full"}})
