"""What a recipe becomes before any work: prompts, sets, lengths, time, terms; ScaleRL as the paper has it."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nouns
import numpy as np
import pytest
import torch
from golden_run import rows_of
from worlds import tiny_dense

from ostinato.algo.advantages import Baseline, Pool, Scale
from ostinato.algo.algorithms import Anchor, Loss
from ostinato.algo.offpolicy import Correction
from ostinato.algo.pack import Aggregation, aggregation_weights, pack
from ostinato.config import Recipe, dump_toml
from ostinato.env.rows import add_columns, read_source
from ostinato.every import Axis, Every
from ostinato.launch.checks import (
    check_columns,
    check_recipe,
    check_solvable,
    compute_solved_at,
    list_caveats,
    warn_of_control_tokens,
)
from ostinato.launch.forgetting import estimate_answers
from ostinato.launch.inputs import (
    compute_stage_identity,
    find_longest_answer,
    find_overlong,
    new_interruption,
    read_downstream_prompts,
    read_prompts,
)
from ostinato.launch.loop import HELD_OUT_ROWS, TRAINING_ROWS, check_rows, dump_rules, new_evaluations
from ostinato.launch.trainer import new_adapters
from ostinato.model.config import parse_config
from ostinato.model.decoder import Decoder
from ostinato.model.flops import FlopModel, Part, Rates
from ostinato.model.named import find_model_folder
from ostinato.model.peft_io import save_peft
from ostinato.observe.page import solved_at as solved_at_in_report
from ostinato.pipeline.evaluate import Evaluation, digest_evaluation
from ostinato.render import Renderer
from ostinato.run import RunFolder
from ostinato.types import Prompt, Sample


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
    data = rows_of(recipe=tree)
    for found in (compute_solved_at(recipe.reward), solved_at_in_report(data)):
        assert found == pytest.approx(mark, abs=1e-5) and found < mark


def test_a_mark_that_no_answer_can_reach_is_refused_where_that_is_certain() -> None:
    """Built-in functions give 1 at most; a user's own may give 10. Without a weight above 0 "full" was 0, and
    every answer counted as solved."""
    for bad in (
        {"solved_at": 1.5},
        {"functions": ["exact", "numeric"], "weights": [1, -9], "solved_at": 1.1},
    ):
        with pytest.raises(ValueError, match=r"reward.solved_at is 1\.\d, but .* at most 1, so no answer"):
            check_solvable(Recipe.parse({"reward": bad}).reward)
    for weights in ([0], [-1]):
        with pytest.raises(ValueError, match=r"reward\.weights"):
            check_solvable(Recipe.parse({"reward": {"weights": weights}}).reward)
    for good in (
        {},
        {"solved_at": 1.0},
        {"weights": [-1], "solved_at": 0.0},
        {"functions": ["own.py:points"], "solved_at": 8.0},
    ):
        check_solvable(Recipe.parse({"reward": good}).reward)


def test_a_row_whose_answer_is_no_number_is_refused_before_the_run() -> None:
    reward = Recipe.parse({"reward": {"functions": ["numeric"]}}).reward
    good, bad = (Prompt(uid=one, text="?", columns={"answer": one}) for one in ("#### 3 1/2", "10^6"))
    check_columns(reward, [good])
    check_columns(Recipe().reward, [good, bad])
    for rows in ([good, bad], [Prompt(uid="10^6", text="?")]):
        with pytest.raises(ValueError, match=r"^prompt 10\^6.* answer"):
            check_columns(reward, rows)


@pytest.mark.parametrize(
    ("function", "column", "good", "bad"),
    [
        ("regex", "pattern", r"^\d+$", ["(", 7]),
        ("json_schema", "schema", {"type": "object"}, ["{", {"type": "objekt"}, 7]),
        ("length", "length", 200, [0, True, "200", 1.5]),
    ],
)
def test_a_pattern_or_a_schema_that_is_none_is_refused_before_the_run(
    function: str, column: str, good: Any, bad: list[Any]
) -> None:
    reward = Recipe.parse({"reward": {"functions": [function]}}).reward
    check_columns(reward, [Prompt(uid="a", text="?", columns={column: good})])
    for value in [None, *bad]:
        columns = {} if value is None else {column: value}
        with pytest.raises(ValueError, match=f"^prompt b.*{column}"):
            check_columns(reward, [Prompt(uid="b", text="?", columns=columns)])


def test_columns_of_a_task_are_those_of_rows_that_lack_them(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(
        '{"prompt": "a", "answer": "1"}\n{"prompt": "b", "answer": "2", "length": 3}\n'
    )
    task = {"source": str(tmp_path / "rows.jsonl"), "columns": {"length": 9}, "n_train": 0}
    rows = read_prompts(Recipe.parse({"task": task}), "train", None)
    assert [row.columns["length"] for row in rows] == [9, 3]


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ({}, []),
        ({"reward": {"functions": ["exact", "numeric"]}}, []),
        ({"reward": {"functions": ["exact", "own.py:brief"], "solved_at": 1.0}}, []),
        (
            {"reward": {"functions": ["exact", "own.py:brief"]}},
            ["a reward of 2 on, a 1 from each of exact, brief"],
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
    ],
)
def test_what_is_not_exact_is_said_before_the_run(tree: dict, words: list[str]) -> None:
    """Tokens of a cut distribution were scored by the trainer over the whole vocabulary: a ratio below 1
    on the first minibatch looked like a defect."""
    recipe = Recipe.parse(tree)
    output = list(list_caveats(recipe, check_recipe(recipe)))
    assert len(output) == len(words)
    assert all(word in sentence for word, sentence in zip(words, output, strict=True))


def test_keys_of_replay_are_said_to_do_nothing_where_nothing_is_routed() -> None:
    recipe = Recipe.parse({"trainer": {"replay": "shuffled"}})
    (output,) = list_caveats(recipe, check_recipe(recipe), moe=False)
    assert "trainer.replay change nothing" in output
    assert not list(list_caveats(Recipe(), check_recipe(Recipe()), moe=False))


def test_what_changes_the_groups_changes_the_stage() -> None:
    """A resumed run takes up groups of the same stage only; how long it trains is no part of that."""
    usual = compute_stage_identity(Recipe())
    assert usual == "57e09a01dcd8", "groups of older runs are not found: see stage_identity"
    for section, keys in (
        ("model", {"path": "x"}),
        ("model", {"fp32_head": True}),
        ("engine", {"weights": "int8"}),
        ("task", {"system_prompt": "Be brief."}),
        ("reward", {"functions": ["answer_tags"]}),
        ("rollout", {"interrupt_after": [8, 12], "answer_tokens": 4}),
        ("rollout", {"think_end": "####"}),
    ):
        assert compute_stage_identity(Recipe.parse({section: keys})) != usual
    longer = Recipe.parse(
        {"trainer": {"steps": 7, "lr": 1.0}, "reward": {"timeout_s": 3.0}, "eval": {"n": 3}}
    )
    assert compute_stage_identity(longer) == usual
    assert compute_stage_identity(Recipe.parse(tomllib.loads(dump_toml(Recipe())))) == usual


def test_a_recipe_of_an_older_run_is_read() -> None:
    """Each run folder has all keys: one that is gone must not make runs unreadable that never used it."""
    tree = tomllib.loads(dump_toml(Recipe()))
    tree["memory"]["importance"] = ""
    assert Recipe.parse(tree) == Recipe()


def test_columns_of_a_task_fill_what_rows_lack() -> None:
    """A null, as parquet has where other rows have a value, beat the column of the task."""
    rows = [
        Prompt(uid=str(n), text="?", columns=columns)
        for n, columns in enumerate(({}, {"length": None}, {"length": 3}))
    ]
    assert [row.columns["length"] for row in add_columns(rows, {"length": 20})] == [20, 20, 3]
    with pytest.raises(ValueError, match="in_thought"):
        add_columns(rows, {"in_thought": True})


def interrupting(**rollout: Any) -> Recipe:
    keys = {"interrupt_after": [8, 12], "answer_tokens": 4, "interrupt_phrase": " ####", "max_tokens": 900}
    return Recipe.parse({"rollout": keys | rollout})


def test_an_interrupted_answer_is_as_long_as_its_parts_whatever_max_tokens_says() -> None:
    renderer = Renderer(find_model_folder("asset:seed-moe"))
    found = new_interruption(interrupting().rollout, renderer)
    assert found is not None and (found.shortest, found.longest, found.answer_tokens) == (8, 12, 4)
    assert renderer.decode(found.phrase) == " ####" and found.think_end == "</think>"
    assert (
        find_longest_answer(interrupting().rollout, renderer)[0]
        == found.max_tokens
        == 12 + len(found.phrase) + 4
    )
    assert find_longest_answer(Recipe().rollout, renderer) == (64, "rollout.max_tokens")
    assert new_interruption(Recipe().rollout, renderer) is None
    prompts = [Prompt(uid="p", text="1 + 1 = ?")]
    find_overlong(interrupting(), prompts, renderer, 64, {"": {}})
    with pytest.raises(ValueError, match=r"prompt p has \d+ tokens; with an answer of 17 \(rollout.inter"):
        find_overlong(interrupting(), prompts, renderer, 20, {"": {}})
    with pytest.raises(ValueError, match=r"an answer has up to 17 tokens .* lower rollout.interrupt"):
        find_overlong(interrupting(), prompts, renderer, 17, {"": {}})


def test_a_chat_of_many_short_turns_is_measured_with_what_the_template_adds(tmp_path: Path) -> None:
    """The template adds more to 40 turns of one letter than to a longer text of one turn: such a row passed
    the check, and the run broke in the middle. The refusal named a hash, for which no user can search."""
    renderer = Renderer(find_model_folder("asset:seed-moe"))
    turns = [{"role": ("user", "assistant")[k % 2], "content": "a"} for k in range(41)]
    rows = [{"prompt": [{"role": "user", "content": f"{'word ' * 40}{k}"}], "answer": "1"} for k in range(3)]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in [*rows, {"prompt": turns, "answer": "1"}]))
    prompts = read_source(str(file), "train")
    tokens = len(renderer.prompt(prompts[-1]))
    assert len(renderer.prompt(prompts[0])) < tokens
    find_overlong(Recipe(), prompts, renderer, tokens + 64, {"": {}})
    with pytest.raises(ValueError, match=f"row 4 of .* has {tokens} tokens"):
        find_overlong(Recipe(), prompts, renderer, tokens + 63, {"": {}})


def test_a_phrase_that_ends_the_answer_is_refused() -> None:
    renderer = Renderer(find_model_folder("asset:seed-moe"))
    end = renderer.decode(list(renderer.stop_tokens)[:1], skip_special=False)
    with pytest.raises(ValueError, match=f"rollout.interrupt_phrase has '{re.escape(end)}', which ends"):
        new_interruption(interrupting(interrupt_phrase=f"Enough.{end}").rollout, renderer)


def small_decoder(seed: int) -> Decoder:
    return Decoder(parse_config(tiny_dense())).init_weights(seed)


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


# ---- which sets a recipe is scored on, and what is wrong with them, known before any work


def rows_file(path: Path, *questions: str) -> str:
    path.write_text("".join(json.dumps({"prompt": text, "answer": "1"}) + "\n" for text in questions))
    return str(path)


def recipe_of(task: str = "arithmetic", downstream: Any = None, **changes: Any) -> Recipe:
    tree = {"task": {"source": task}, "eval": {"k": 2, "every": "1e6 tokens", "downstream": downstream or {}}}
    return Recipe.parse(tree | changes)


def evaluations(recipe: Recipe, main: Sequence[Prompt], downstream: Any = None) -> list[Evaluation]:
    inputs: Any = SimpleNamespace(recipe=recipe, eval_prompts=main, downstream=downstream or {})
    inputs.renderer = SimpleNamespace(stop_tokens=(7,))
    return new_evaluations(inputs)


def test_sets_come_in_order_with_their_own_terms(tmp_path: Path) -> None:
    file = rows_file(tmp_path / "rows.jsonl", "1+1", "2+2", "3+3")
    sets = {"file": {"source": file, "every": 5, "k": 3}, "hard": {"source": "arithmetic", "n": 4}}
    recipe = recipe_of(downstream=sets)
    prompts = read_downstream_prompts(recipe, [])
    assert {name: len(each) for name, each in prompts.items()} == {"file": 3, "hard": 4}
    main = [Prompt(uid="a", text="1")]
    found = evaluations(recipe, main, prompts)
    assert [(one.name, one.k, one.samples, len(one.prompts)) for one in found] == [
        ("eval", 2, 2, 1),
        ("greedy", 1, 1, 1),
        ("file", 3, 3, 3),
        ("hard", 1, 1, 4),
    ]
    assert [one.every for one in found] == [
        Every(amount=1e6, unit=Axis.TOKENS),
        Every(amount=0),
        Every(amount=5),
        Every(amount=0),
    ]
    assert len({digest_evaluation(one) for one in found}) == 4
    assert [one.sampling.temperature for one in found] == [1.0, 0.0, 1.0, 1.0]
    greedy = recipe_of().model_copy(update={"eval": recipe_of().eval.model_copy(update={"temperature": 0.0})})
    (only,) = evaluations(greedy, main)
    assert only.name == "eval", "what is greedy already is not answered twice"


def test_a_set_of_the_training_source_must_not_be_trained_on(tmp_path: Path) -> None:
    file = rows_file(tmp_path / "rows.jsonl", "1+1", "2+2")
    recipe = recipe_of(task=file, downstream={"again": {"source": file}})
    trained_on = read_downstream_prompts(recipe, [])["again"]
    with pytest.raises(
        ValueError, match=r"^eval\.downstream\.again: 2 of 2 evaluation prompts are also in the"
    ):
        read_downstream_prompts(recipe, trained_on)


@pytest.mark.parametrize(
    "change",
    [
        {"reward": {"functions": ["exact", "numeric"]}},
        {"task": {"max_turns": 2, "tools": ["calculator"]}},
        {"rollout": {"interrupt_after": [8, 12], "answer_tokens": 4}},
    ],
    ids=str,
)
def test_rules_are_part_of_what_is_measured(change: dict[str, Any]) -> None:
    assert dump_rules(Recipe.parse(change)) != dump_rules(Recipe.parse({}))
    again = {"rollout": {"think_end": "</end>", "interrupt_phrase": "Stop."}}
    assert dump_rules(Recipe.parse(again)) == dump_rules(Recipe.parse({})), "nothing is interrupted"


def test_a_run_in_another_folder_is_measured_alike() -> None:
    """Recipes keep absolute paths: the scores of one recipe in two folders could not be compared."""
    here, there = (
        Recipe.parse(
            {
                "task": {"source": f"{folder}/rows.jsonl"},
                "reward": {
                    "functions": [f"{folder}/rewards.py:right", f"judge:{folder}/judge@3,asset:seed-moe"]
                },
            }
        )
        for folder in ("/home/a", "/data/b/c")
    )
    assert dump_rules(here) == dump_rules(there) and compute_stage_identity(here) == compute_stage_identity(
        there
    )
    assert "rewards.py:right" in dump_rules(here) and "judge:judge@3,asset:seed-moe" in dump_rules(here)
    others = {"trainer": {"lr": 1.0}, "model": {"path": "other"}, "engine": {"max_batch": 8}, "seed": 3}
    assert dump_rules(Recipe.parse(others)) == dump_rules(Recipe.parse({}))


def test_values_that_nobody_reads_do_not_tell_sets_apart() -> None:
    """rollout.max_tokens beside an interruption, and the phrase of one that is off, made other held-out sets
    of the same scores, and `scale compare` refused them."""

    def name(**rollout: Any) -> str:
        recipe = recipe_of(rollout=rollout)
        return digest_evaluation(evaluations(recipe, [Prompt(uid="a", text="1")])[0])

    interrupted = {"interrupt_after": [8, 12], "answer_tokens": 4}
    assert name(**interrupted, max_tokens=48) == name(**interrupted, max_tokens=64)
    assert name(think_end="</end>") == name() != name(max_tokens=65)
    assert len({name(**interrupted), name(**{**interrupted, "answer_tokens": 5}), name()}) == 3
    assert name(**interrupted, think_end="</end>") != name(**interrupted)


# ---- recipes/scalerl.toml says what the paper says, and each of its arms changes what its name says


RECIPE = Recipe.load("scalerl")
ARMS = RECIPE.ablate.arms


def leaves(tree: dict[str, Any], path: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in tree.items():
        nested = isinstance(value, dict) and path == ""
        found |= leaves(value, f"{key}.") if nested else {f"{path}{key}": value}
    return found


def test_it_is_the_papers_recipe() -> None:
    """arXiv 2510.13786, section 4 and appendix A.3; what depends on the size of a model is its own."""
    chosen = check_recipe(RECIPE)
    assert (chosen.loss, chosen.ratio_cap, chosen.anchor) == (Loss.CISPO, 5.0, Anchor.AUTO)
    assert (chosen.baseline, chosen.scale) == (Baseline.GROUP_MEAN, Scale.BATCH)
    assert (chosen.aggregation, chosen.batch_pool) == (Aggregation.PROMPT, Pool.KEPT)
    assert chosen.drop_zero_variance and chosen.correction is Correction.NONE
    assert (chosen.kl_coef, chosen.entropy_coef, chosen.overlong_buffer) == (0, 0, 0)
    assert RECIPE.model.fp32_head and RECIPE.rollout.solved_for_good == 0.9
    assert len(RECIPE.rollout.interrupt_after) == 2 and RECIPE.forecast.enabled
    trainer = RECIPE.trainer
    assert (trainer.eps, trainer.weight_decay, trainer.schedule) == (1e-15, 0.01, "constant")
    assert trainer.warmup_steps > 0 and compute_solved_at(RECIPE.reward) == pytest.approx(1, abs=1e-5)


def sample_of(group: int, member: int, length: int) -> Sample:
    """An answer of ``length`` tokens to a prompt of 12."""
    return nouns.sample_of(12 + length, 12, group=group, uid=f"{group}#{member}")


@pytest.mark.parametrize("name", ARMS)
def test_an_arm_changes_what_it_says_and_nothing_else(name: str) -> None:
    arm = Recipe.load("scalerl", *ARMS[name])
    check_recipe(arm)
    before, after = leaves(RECIPE.model_dump(mode="json")), leaves(arm.model_dump(mode="json"))
    changed = {key for key in after if before.get(key) != after[key]}
    assert changed == {override.partition("=")[0] for override in ARMS[name]}


def test_the_off_policy_arm_takes_as_many_optimizer_steps_on_as_many_prompts() -> None:
    """Counted on what its trainer is given, not on its keys: their products agreed while one optimizer step
    had 11 prompts and another 29."""
    arm = Recipe.load("scalerl", *ARMS["PPO-off-policy-8"])

    def steps(recipe: Recipe) -> list[int]:
        """Prompts of each optimizer step of a run in which every group is kept."""
        rng = np.random.default_rng(0)
        samples = [
            sample_of(group, member, length)
            for group in range(recipe.rollout.prompts_per_step)
            for member, length in enumerate(rng.integers(8, 45, recipe.rollout.group_size).tolist())
        ]
        weights = aggregation_weights(samples, check_recipe(recipe).aggregation)
        budget = recipe.trainer.tokens_per_microbatch
        batch = pack(samples, weights, tokens_per_microbatch=budget, minibatches=recipe.trainer.minibatches)
        groups = [{uid.partition("#")[0] for one in each for uid in one.uids} for each in batch.minibatches]
        return recipe.trainer.steps * [len(each) for each in groups]

    assert steps(arm) == steps(RECIPE) == RECIPE.trainer.steps * [RECIPE.rollout.prompts_per_step]
    warmed = arm.trainer.warmup_steps * arm.trainer.minibatches
    assert RECIPE.trainer.warmup_steps <= warmed < RECIPE.trainer.warmup_steps + arm.trainer.minibatches


def test_what_cannot_be_is_refused_and_what_is_not_corrected_is_said() -> None:
    with pytest.raises(
        ValueError, match=r"rollout\.solved_for_good is 0\.9 with rollout\.group_size 1, and one"
    ):
        Recipe.load("scalerl", "rollout.group_size=1")
    with pytest.raises(
        ValueError, match=r"algo\.overlong_scope has no effect because algo\.overlong_buffer is 0"
    ):
        check_recipe(Recipe.load("scalerl", "algo.overlong_scope=solved"))
    stale = Recipe.load("scalerl", "pipeline.staleness=8")
    assert not any("staleness" in line for line in list_caveats(stale, check_recipe(stale)))
    blind = Recipe.load("scalerl", "pipeline.staleness=8", "algo.anchor=trainer")
    assert any(
        "pipeline.staleness is 8, and nothing in" in line for line in list_caveats(blind, check_recipe(blind))
    )


@pytest.mark.parametrize(("budget", "answers"), [(0, 2560), (4, 256), ("1e10 flops", 64 * 1e10 / 3e9)])
def test_a_budget_bounds_the_answers_that_the_forgetting_watch_counts_on(budget: Any, answers: float) -> None:
    """Runs of ``ostinato compare`` end by a budget, long before a million steps: the questions of a run that
    is thought so long cost more than the watch may have, and nothing was left for a look."""
    rollout = {"prompts_per_step": 8, "group_size": 8, "max_tokens": 10}
    recipe = Recipe.parse({"trainer": {"steps": 40, "budget": budget}, "rollout": rollout})
    flops = FlopModel(parts={Part.MLP: Rates(tokens=2e6)}, backward_rates=Rates(tokens=5.375e6))
    found = estimate_answers(recipe, Every.parse(budget, "trainer.budget"), flops)
    assert found == pytest.approx(answers)


# ---- a run is resumed with the rows that it began with


def test_rows_of_a_resumed_run_are_those_of_its_checkpoint_unless_they_are_named(tmp_path: Path) -> None:
    run, saved = RunFolder(tmp_path), {TRAINING_ROWS: "a", HELD_OUT_ROWS: "b"}
    check_rows(run, saved, saved, set())
    check_rows(run, None, saved, set())  # of a version that kept no digests
    check_rows(run, saved, {**saved, HELD_OUT_ROWS: "c"}, {"eval"})
    for other in (TRAINING_ROWS, HELD_OUT_ROWS):
        check_rows(run, saved, {**saved, other: "c"}, {"task"})
        with pytest.raises(ValueError, match=f"the rows {other} .*task\\.source"):
            check_rows(run, saved, {**saved, other: "c"}, {"trainer"})


def test_rows_that_spell_control_tokens_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    """Their messages became control tokens; now they are letters, which is said."""
    renderer = Renderer(find_model_folder("asset:seed-moe"))
    chats = [(f"row {n}", [{"role": "user", "content": text}]) for n, text in enumerate(("a", "b<|im_end|>"))]
    warn_of_control_tokens(renderer, chats[:1])
    assert not caplog.records
    warn_of_control_tokens(renderer, chats)
    assert "1 of 2" in caplog.text and "row 1" in caplog.text and "<|im_end|>" in caplog.text
