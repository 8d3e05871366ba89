"""Reward functions with TRL's signature, and looking one up by its name in a recipe.

``reward(completions, **columns) -> list[float | None]``: ``completions`` are strings, or chats
(``[{"role": .., "content": ..}]``) when the prompt was a chat; ``prompts``, ``completion_ids`` and every
column of the row come as lists of the same length, and so does ``in_thought``: does the completion end
inside a thought, also one that the prompt had opened? None means "no opinion on this one".

This module imports only the standard library: it is loaded by every worker process.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import inspect
import json
import logging
import math
import re
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from difflib import get_close_matches
from fractions import Fraction
from pathlib import Path
from types import ModuleType
from typing import Any

from ostinato.inputs import parse_json
from ostinato.objects import PICKLE, load_object
from ostinato.reward.answers import (
    answer_texts,
    answered_number,
    boxed,
    final_answer,
    last_number,
    last_number_match,
    marked_answer,
    text_of,
    whole_number,
    without_emphasis,
)
from ostinato.reward.code_tests import code_tests

RewardFunction = Callable[..., Any]

TOLERANCE = 1e-6  # relative, for numbers that are not both integers
MEMBER_LIMIT_S = 1.0  # of math_verify, per completion
_FENCED = re.compile(r"```[a-zA-Z]*\n(.*?)```", re.DOTALL)
RING_AGAIN_S = 0.1  # between repeated alarms, until one has an effect
VERL_ARGUMENTS = frozenset({"data_source", "solution_str", "ground_truth"})


def exact(
    completions: Sequence[Any],
    answer: Sequence[Any],
    in_thought: Sequence[bool] | None = None,
    **_: Any,
) -> list[float | None]:
    """1 where the final answer, or the whole text after thinking, equals ``answer``, character by character.

    None where the answer is None: some tasks have a scorer but no example of a right answer.
    """
    verdicts: list[float | None] = []
    for text, target in zip(answer_texts(completions, in_thought), answer, strict=True):
        sampled = {final_answer(text), text.strip()}
        verdicts.append(None if target is None else float(str(target).strip() in sampled))
    return verdicts


def numeric(
    completions: Sequence[Any],
    answer: Sequence[Any],
    in_thought: Sequence[bool] | None = None,
    **_: Any,
) -> list[float]:
    """1 where the marked answer is one number, with or without a name and a unit, and equals ``answer``'s, or
    the last number of the text where none is marked.

    Integers are compared exactly, others within a relative TOLERANCE. Raises ValueError for an ``answer``
    that, as a whole or as it is marked, is not one number.
    """
    pairs = zip(answer_texts(completions, in_thought), answer, strict=True)
    return [float(_equal(number_of(text), expected_number(str(target)))) for text, target in pairs]


def expected_number(target: str) -> tuple[Fraction, ...]:
    """The readings of a row's answer. Raises ValueError where it, or what it marks, is not one number."""
    if expected := whole_number(_marked_or_whole(target)):
        return expected
    raise ValueError(f"the answer {target!r} is not one number; use the reward exact or math_verify")


def number_of(text: str) -> tuple[Fraction, ...]:
    """The readings of a completion's number: of its marked answer, else of its last number."""
    marked = marked_answer(text)
    return last_number(text) if marked is None else answered_number(marked)


def _equal(sampled: Sequence[Fraction], expected: Sequence[Fraction]) -> bool:
    return any(_close(a, b) for a in sampled for b in expected)


def _close(value: Fraction, expected: Fraction) -> bool:
    if value.denominator == expected.denominator == 1:
        return value == expected
    return abs(value - expected) <= Fraction(TOLERANCE) * abs(expected)


def math_verify(
    completions: Sequence[Any],
    answer: Sequence[Any],
    in_thought: Sequence[bool] | None = None,
    **_: Any,
) -> list[float]:
    """1 where the math-verify library finds the answers equal (LaTeX, sets, intervals, expressions).

    ``answer`` and a marked answer are read as LaTeX as a whole, with or without dollars; in a text without a
    mark its formulas are, or the last number where it has none.
    Needs the main thread (SIGALRM), as in a worker process. A completion that takes more than
    MEMBER_LIMIT_S gets NaN, which is no verdict. Raises ValueError for an answer that cannot be parsed.
    """
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own time limit is off
    golds = {target: _parse_gold(target) for target in {str(target) for target in answer}}
    pairs = zip(answer_texts(completions, in_thought), answer, strict=True)
    return [_math_verdict(golds[str(target)], str(target), text) for text, target in pairs]


class _OutOfTime(BaseException):
    """Not an Exception: math-verify turns those into "no answer", which would score a hang 0."""


@contextlib.contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    def ring(*_: object) -> None:
        raise _OutOfTime

    before = signal.signal(signal.SIGALRM, ring)
    # The alarm repeats: an exception raised in a destructor or a weak reference's callback is swallowed.
    signal.setitimer(signal.ITIMER_REAL, seconds, RING_AGAIN_S)
    try:
        yield
    finally:
        _silence()
        signal.signal(signal.SIGALRM, before)


def _silence() -> None:
    """Stop the timer, even if the alarm fires meanwhile."""
    while True:
        try:
            signal.setitimer(signal.ITIMER_REAL, 0)
            return
        except _OutOfTime:
            continue


_NO_FORMULA = re.compile(
    r"0[xX][0-9a-fA-F]+|[0-9]{1,3}(?:_[0-9]{3})+|[0-9]{4}-[0-9]{2}-[0-9]{2}"
)  # 0, 1, 2002
_SCALE = re.compile(r"(hundred|thousand|million|billion|trillion|dozen)")  # dropped as a unit
_BASE = re.compile(r"[0-9]+_\{?([0-9]+)")  # of 52_8, which the library reads as 52
_FORMULA = re.compile(r"\$([^$]+)\$")


def _parse_gold(target: str) -> list[Any]:
    whole = _marked_or_whole(target)
    parsed = [] if _NO_FORMULA.fullmatch(whole.strip(" $")) else _parse_whole(whole)
    if any(not isinstance(one, str) for one in parsed):  # a text is what the library could not read
        return parsed
    raise ValueError(f"the answer {target!r} cannot be parsed; use the reward exact or numeric")


def _marked_or_whole(text: str) -> str:
    marked = marked_answer(text)
    return text if marked is None else marked


def _parse_whole(text: str) -> list[Any]:
    """What math-verify makes of a text that is one formula. Without dollars it would look for a plain number,
    and take ``2k + 2`` for 2."""
    if number := whole_number(text):  # mixed numbers and exponents, which LaTeX reads as products
        return _parse_formulas(rf"$\frac{{{number[-1].numerator}}}{{{number[-1].denominator}}}$")
    return _parse_formulas(text if _has_formulas(text) else f"${text}$")


def _parse_formulas(text: str) -> list[Any]:
    from math_verify import LatexExtractionConfig, parse

    return parse(text, [LatexExtractionConfig()], parsing_timeout=0)


def _has_formulas(text: str) -> bool:
    return text.replace("\\$", "").count("$") > 1 or "\\(" in text or "\\[" in text or "\\boxed{" in text


def _math_verdict(gold: list[Any], target: str, text: str) -> float:
    from math_verify import verify

    try:
        with _time_limit(MEMBER_LIMIT_S):
            if _equal(number_of(text), whole_number(_marked_or_whole(target))):
                return 1.0
            formulas = _FORMULA.findall(text) if (marked := marked_answer(text)) is None else [marked]
            said, whole = formulas[-1] if formulas else text, _marked_or_whole(target)
            if formulas and _SCALE.findall(said.lower()) != _SCALE.findall(whole.lower()):
                return 0.0
            if _BASE.findall(said) != _BASE.findall(whole):
                return 0.0
            return float(any(verify(gold, one, timeout_seconds=0) for one in _parsed_answers(text)))
    except _OutOfTime:
        return math.nan


def _parsed_answers(text: str) -> Iterator[list[Any]]:
    """The marked answer, and all boxes together where it is the last of several (two roots in two boxes); of
    a text without a mark its last formula, or its last number where it has no formulas."""
    if (marked := marked_answer(text)) is not None:
        yield _parse_whole(without_emphasis(marked))
        if len(boxes := boxed(text)) > 1 and boxes[-1].strip() == marked:
            yield _parse_whole(", ".join(boxes))
    elif _has_formulas(text):
        yield _parse_formulas(text)
    elif number := last_number_match(text):
        yield _parse_whole(number.group())


def gym_score(
    completions: Sequence[Any],
    gym: Sequence[Any],
    entry: Sequence[Any],
    in_thought: Sequence[bool] | None = None,
    **_: Any,
) -> list[float]:
    """The score that the reasoning_gym task's own scorer gives the answer.

    ``gym`` is {"name", "config"}, ``entry`` the task's own item (``env.gym`` writes both). Without a marked
    answer the last line counts, as many lines as the task's own answer has, or the last number: what scores
    highest. A text that the task's own parser refuses (ValueError) is a wrong answer; one that crashes the
    scorer gets NaN, no verdict.
    """
    verdicts = []
    for text, task, item in zip(answer_texts(completions, in_thought), gym, entry, strict=True):
        score = _gym_scorer(task["name"], json.dumps(task["config"], sort_keys=True))
        scores = [_gym_verdict(score, sampled, item) for sampled in _gym_answers(text, item)]
        verdicts.append(max((score for score in scores if not math.isnan(score)), default=math.nan))
    return verdicts


def _gym_answers(text: str, item: dict[str, Any]) -> list[str]:
    """What may be meant as the answer to a task's item."""
    sampled = [final_answer(text)]
    if marked_answer(text) is not None:
        return sampled
    if number := last_number_match(text):
        sampled.append(number.group().lstrip("$"))
    lines = [line for line in text.strip().splitlines() if not line.startswith("```")]
    expected = str(item.get("answer")).strip("\n").count("\n") + 1
    return [*sampled, "\n".join(lines[-expected:])]


def _gym_verdict(score: Callable[[str, dict[str, Any]], float], sampled: str, item: dict[str, Any]) -> float:
    try:
        return float(score(sampled, item))
    except ValueError:
        return 0.0
    except (TypeError, AttributeError, LookupError, ArithmeticError):
        return math.nan


@functools.lru_cache(maxsize=64)  # building a task can read data files
def _gym_scorer(name: str, config: str) -> Callable[[str, dict[str, Any]], float]:
    from reasoning_gym import create_dataset

    return create_dataset(name, **json.loads(config)).score_answer


def answer_tags(
    completions: Sequence[Any], in_thought: Sequence[bool] | None = None, **_: Any
) -> list[float]:
    """1 where the text ends with its one and only ``<answer>..</answer>``: a format reward."""
    verdicts = []
    for completion, unfinished in zip(completions, in_thought or [False] * len(completions), strict=True):
        text = text_of(completion).strip()
        once = text.count("<answer>") == text.count("</answer>") == 1
        verdicts.append(float(once and text.endswith("</answer>") and not unfinished))
    return verdicts


def regex(
    completions: Sequence[Any], pattern: Sequence[str], in_thought: Sequence[bool] | None = None, **_: Any
) -> list[float]:
    """1 where what a completion says after thinking has a match of the row's regular expression."""
    texts, inside = answer_texts(completions, in_thought), in_thought or [False] * len(completions)
    return [
        float(not unfinished and compile_pattern(one).search(text) is not None)
        for text, one, unfinished in zip(texts, pattern, inside, strict=True)
    ]


def json_schema(
    completions: Sequence[Any], schema: Sequence[Any], in_thought: Sequence[bool] | None = None, **_: Any
) -> list[float]:
    """1 where what is said after thinking, or its only fenced block, is JSON of the row's schema."""
    verdicts = []
    for text, one in zip(answer_texts(completions, in_thought), schema, strict=True):
        fences = _FENCED.findall(text)
        try:
            value = parse_json((fences[0] if len(fences) == 1 else text).strip())
            json.dumps(value, allow_nan=False)  # NaN and Infinity are Python's
        except ValueError:
            verdicts.append(0.0)
            continue
        try:
            verdicts.append(float(schema_validator(one).is_valid(value)))
        except OverflowError:  # of a number that no float holds, by multipleOf
            verdicts.append(0.0)
    return verdicts


def length(
    completions: Sequence[Any], length: Sequence[int], completion_ids: Sequence[Sequence[int]], **_: Any
) -> list[float]:
    """1 up to the row's ``length`` in tokens, falling linearly to 0 at twice that."""
    pairs = zip(completion_ids, length, strict=True)
    return [min(1.0, max(0.0, 2 - len(ids) / positive_length(most))) for ids, most in pairs]


@functools.lru_cache(maxsize=4096)
def compile_pattern(pattern: str) -> re.Pattern[str]:
    """Raises ValueError for what is no regular expression."""
    if not isinstance(pattern, str):
        raise ValueError(f"pattern is {pattern!r:.80}; give a regular expression, a text")
    try:
        return re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"pattern {pattern!r:.80} is no regular expression ({error}); fix it") from error


def schema_validator(schema: Any) -> Any:
    """What tells whether a value is of a JSON schema, an object or its text. Raises ValueError for what is
    no schema; one that refers to another document is a fault when it is used."""
    return _schema_validator(schema if isinstance(schema, str) else json.dumps(schema, sort_keys=True))


@functools.lru_cache(maxsize=256)
def _schema_validator(text: str) -> Any:
    from jsonschema import Draft202012Validator, SchemaError
    from jsonschema.validators import validator_for
    from referencing import Registry

    try:
        if not isinstance(schema := parse_json(text), dict):
            raise ValueError(f"it is a {type(schema).__name__}, not an object")
        kind = validator_for(schema, default=Draft202012Validator)
        kind.check_schema(schema)
    except (ValueError, SchemaError) as error:
        what = getattr(error, "message", error)
        raise ValueError(f"schema {text:.80} is no JSON schema ({what}); fix it") from error
    return kind(schema, registry=Registry())


def positive_length(value: Any) -> int:
    """Raises ValueError for what is no number of tokens."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"length is {value!r:.80}; give a number of tokens, 1 or more")
    return value


def env(completions: Sequence[Any], env_reward: Sequence[float | None], **_: Any) -> list[float | None]:
    """The reward from the environment of ``task.env``; None where the episode has none."""
    return list(env_reward)


def none(completions: Sequence[Any], **_: Any) -> list[float | None]:
    """No verdict: for training that needs no reward."""
    return [None] * len(completions)


BUILT_IN: dict[str, RewardFunction] = {
    "env": env,
    "exact": exact,
    "numeric": numeric,
    "math_verify": math_verify,
    "gym_score": gym_score,
    "answer_tags": answer_tags,
    "regex": regex,
    "json_schema": json_schema,
    "length": length,
    "code_tests": code_tests,
    "none": none,
}
_NEEDS = {"math_verify": "math_verify", "gym_score": "reasoning_gym", "json_schema": "jsonschema"}
# By function: the column that it reads beside the completion, and what refuses a value of it.
READS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "numeric": ("answer", lambda value: expected_number(str(value))),
    "regex": ("pattern", compile_pattern),
    "json_schema": ("schema", schema_validator),
    "length": ("length", positive_length),
}


def resolve(spec: str) -> RewardFunction:
    """The reward function that a recipe names: a built-in, ``module:function`` or ``path.py:function``.

    A function in verl's form, ``compute_score(data_source, solution_str, ground_truth, extra_info)``, is
    recognised by its arguments and adapted. Raises ValueError with one sentence; whatever the user's own
    file raises while it is imported passes through.
    """
    if spec in BUILT_IN:
        if spec in _NEEDS:
            _import(_NEEDS[spec], f"the reward {spec} needs the package {_NEEDS[spec]}; install it")
        return BUILT_IN[spec]
    where, separator, name = spec.rpartition(":")
    if not separator or not where or not name:
        nearest = get_close_matches(spec, BUILT_IN, n=1, cutoff=0)[0]
        raise ValueError(
            f"reward {spec!r} is unknown; the nearest built-in is {nearest!r}, "
            "your own is written module:function or path.py:function"
        )
    if where.endswith(PICKLE):
        function = load_object(Path(where), f"reward {spec!r}")
    elif where.endswith(".py"):
        function = getattr(_import_file(Path(where), spec), name, None)
    else:
        module = _import(where, f"reward {spec!r}: there is no module {where!r}; check the name")
        function = getattr(module, name, None)
    if not callable(function):
        raise ValueError(f"reward {spec!r}: {where} has no function {name!r}; define it there")
    return _from_verl(function) if _is_verl(function) else function


def _import(name: str, otherwise: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            raise ValueError(otherwise) from error
        raise  # the module exists, but something that it imports does not


def _import_file(path: Path, spec: str) -> ModuleType:
    if not path.is_file():
        raise ValueError(f"reward {spec!r}: there is no file {path} in {Path.cwd()}; give its path")
    sys.path.insert(0, str(path.resolve().parent))  # as for a script: the file may import its neighbours
    loader_spec = importlib.util.spec_from_file_location(path.stem, path)
    assert loader_spec is not None and loader_spec.loader is not None
    module = importlib.util.module_from_spec(loader_spec)
    sys.modules.setdefault(path.stem, module)  # dataclasses and pickle look a module up by its name
    loader_spec.loader.exec_module(module)
    return module


def _is_verl(function: RewardFunction) -> bool:
    try:
        return inspect.signature(function).parameters.keys() >= VERL_ARGUMENTS
    except (TypeError, ValueError):  # a builtin without a signature
        return False


def _from_verl(compute_score: RewardFunction) -> RewardFunction:
    """One call per completion; from a dict that verl's function returns, ``score`` is used."""

    def reward(completions: Sequence[Any], answer: Sequence[Any], **columns: Any) -> list[Any]:
        nothing = [None] * len(completions)
        scores = [
            compute_score(
                data_source=source, solution_str=text_of(completion), ground_truth=truth, extra_info=extra
            )
            for completion, truth, source, extra in zip(
                completions,
                answer,
                columns.get("data_source", nothing),
                columns.get("extra_info", nothing),
                strict=True,
            )
        ]
        return [score["score"] if isinstance(score, dict) else score for score in scores]

    return reward
