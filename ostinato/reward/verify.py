"""Reward functions with TRL's signature, and their lookup by the name in a recipe.

``reward(completions, **columns) -> list[float | None]``: ``completions`` are strings, or chats
(``[{"role": .., "content": ..}]``) when the prompt was a chat; ``prompts``, ``completion_ids`` and every
column of the row come as lists of the same length, and so does ``in_thought``: whether the completion ends
inside a thought, also one that the prompt had opened. A reward of None means "no opinion".

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
    extract_final_answer,
    extract_marked_answer,
    extract_texts,
    find_boxes,
    find_last_number,
    get_text,
    read_last_number,
    read_marked_number,
    read_whole_number,
    strip_emphasis,
)
from ostinato.reward.code_tests import code_tests

RewardFunction = Callable[..., Any]

TOLERANCE = 1e-6  # relative, for numbers that are not both integers
MEMBER_LIMIT_S = 1.0  # of math_verify, per completion
_FENCED_BLOCK = re.compile(r"```[a-zA-Z]*\n(.*?)```", re.DOTALL)
ALARM_PERIOD_S = 0.1  # between repeated alarms, until one has an effect
VERL_ARGUMENTS = frozenset({"data_source", "solution_str", "ground_truth"})


def exact(
    completions: Sequence[Any],
    answer: Sequence[Any],
    in_thought: Sequence[bool] | None = None,
    **_: Any,
) -> list[float | None]:
    """Return 1 where the final answer, or the whole text after thinking, equals ``answer`` exactly, else 0.

    None where ``answer`` is None: some tasks have a scorer but no example of a right answer.
    """
    verdicts: list[float | None] = []
    for text, target in zip(extract_texts(completions, in_thought), answer, strict=True):
        answers = {extract_final_answer(text), text.strip()}
        verdicts.append(None if target is None else float(str(target).strip() in answers))
    return verdicts


def numeric(
    completions: Sequence[Any],
    answer: Sequence[Any],
    in_thought: Sequence[bool] | None = None,
    **_: Any,
) -> list[float]:
    """Return 1 where the number of the completion equals that of ``answer``, else 0. The number is the marked
    answer, if that is a single number with or without a name and a unit; if nothing is marked, the last
    number of the text.

    Integers are compared exactly, others within a relative TOLERANCE. Raises ValueError for an ``answer``
    that, as a whole or in its marked part, is not a single number.
    """
    pairs = zip(extract_texts(completions, in_thought), answer, strict=True)
    return [float(_are_equal(read_number(text), read_expected_number(str(target)))) for text, target in pairs]


def read_expected_number(target: str) -> tuple[Fraction, ...]:
    """Return the readings of a row's answer. Raises ValueError unless the answer, or the part that it marks,
    is a single number."""
    if readings := read_whole_number(_extract_answer(target)):
        return readings
    raise ValueError(f"the answer {target!r} is not one number; use the reward exact or math_verify")


def read_number(text: str) -> tuple[Fraction, ...]:
    """Return the readings of a completion's number: of its marked answer, else of its last number. () if that
    is none."""
    mark = extract_marked_answer(text)
    return read_last_number(text) if mark is None else read_marked_number(mark)


def _are_equal(readings: Sequence[Fraction], golds: Sequence[Fraction]) -> bool:
    return any(_is_close(a, b) for a in readings for b in golds)


def _is_close(value: Fraction, gold: Fraction) -> bool:
    if value.denominator == gold.denominator == 1:
        return value == gold
    return abs(value - gold) <= Fraction(TOLERANCE) * abs(gold)


def math_verify(
    completions: Sequence[Any],
    answer: Sequence[Any],
    in_thought: Sequence[bool] | None = None,
    **_: Any,
) -> list[float]:
    """Return 1 where the math-verify library finds the answers equal (LaTeX, sets, intervals, expressions),
    else 0.

    The whole of ``answer``, and of a marked answer, is read as LaTeX, with or without dollars. In a text
    without a marked answer, the formulas are read, or the last number if there are none. Needs the main
    thread (SIGALRM), as in a worker process, and sets the log level of the library. A completion that takes
    more than MEMBER_LIMIT_S gets NaN, which is no verdict. Raises ValueError for an answer that cannot be
    parsed.
    """
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it would warn that its own time limit is off
    golds = {target: _parse_gold(target) for target in {str(target) for target in answer}}
    pairs = zip(extract_texts(completions, in_thought), answer, strict=True)
    return [_judge_math(golds[str(target)], str(target), text) for text, target in pairs]


class _OutOfTime(BaseException):
    """The time limit was reached. It is no Exception, since math-verify turns those into "no answer", and a
    completion that hangs would get 0."""


@contextlib.contextmanager
def _limit_time(seconds: float) -> Iterator[None]:
    """Raise _OutOfTime in the context after ``seconds``, by SIGALRM, whose handler is then restored."""

    def raise_out_of_time(*_: object) -> None:
        raise _OutOfTime

    old_handler = signal.signal(signal.SIGALRM, raise_out_of_time)
    # The alarm repeats: an exception raised in a destructor or a weak reference's callback is swallowed.
    signal.setitimer(signal.ITIMER_REAL, seconds, ALARM_PERIOD_S)
    try:
        yield
    finally:
        _stop_timer()
        signal.signal(signal.SIGALRM, old_handler)


def _stop_timer() -> None:
    """Stop the timer, also if the alarm fires meanwhile."""
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
_BASE = re.compile(r"[0-9]+_\{?([0-9]+)")  # as in 52_8, which the library reads as 52
_FORMULA = re.compile(r"\$([^$]+)\$")


def _parse_gold(target: str) -> list[Any]:
    """Parse a row's answer. Raises ValueError if it cannot be parsed."""
    answer = _extract_answer(target)
    formulas = [] if _NO_FORMULA.fullmatch(answer.strip(" $")) else _parse_whole(answer)
    # strings are texts that the library could not read
    if any(not isinstance(formula, str) for formula in formulas):
        return formulas
    raise ValueError(f"the answer {target!r} cannot be parsed; use the reward exact or numeric")


def _extract_answer(text: str) -> str:
    mark = extract_marked_answer(text)
    return text if mark is None else mark


def _parse_whole(text: str) -> list[Any]:
    """Parse a text that is one formula with math-verify. A text without dollars is put between dollars:
    otherwise the library would look for a plain number, and take ``2k + 2`` for 2."""
    if number := read_whole_number(text):  # mixed numbers and exponents, which LaTeX reads as products
        return _parse_formulas(rf"$\frac{{{number[-1].numerator}}}{{{number[-1].denominator}}}$")
    return _parse_formulas(text if _has_formulas(text) else f"${text}$")


def _parse_formulas(text: str) -> list[Any]:
    from math_verify import LatexExtractionConfig, parse

    return parse(text, [LatexExtractionConfig()], parsing_timeout=0)


def _has_formulas(text: str) -> bool:
    return text.replace("\\$", "").count("$") > 1 or "\\(" in text or "\\[" in text or "\\boxed{" in text


def _judge_math(gold: list[Any], target: str, text: str) -> float:
    """Return 1 if math-verify finds an answer of ``text`` equal to ``gold``, else 0; NaN after the limit.
    Answers with another word of scale, or another base of a number, are never equal."""
    from math_verify import verify

    try:
        with _limit_time(MEMBER_LIMIT_S):
            if _are_equal(read_number(text), read_whole_number(_extract_answer(target))):
                return 1.0
            formulas = _FORMULA.findall(text) if (mark := extract_marked_answer(text)) is None else [mark]
            formula, expected_text = formulas[-1] if formulas else text, _extract_answer(target)
            if formulas and _SCALE.findall(formula.lower()) != _SCALE.findall(expected_text.lower()):
                return 0.0
            if _BASE.findall(formula) != _BASE.findall(expected_text):
                return 0.0
            return float(any(verify(gold, answer, timeout_seconds=0) for answer in _parse_answers(text)))
    except _OutOfTime:
        return math.nan


def _parse_answers(text: str) -> Iterator[list[Any]]:
    """Yield the parses of what may be the answer. Of a marked answer these are the mark, and if it is the
    last of several boxes, all boxes together (two roots in two boxes). Of any other text it is the last
    formula, or without formulas the last number."""
    if (mark := extract_marked_answer(text)) is not None:
        yield _parse_whole(strip_emphasis(mark))
        if len(boxes := find_boxes(text)) > 1 and boxes[-1].strip() == mark:
            yield _parse_whole(", ".join(boxes))
    elif _has_formulas(text):
        yield _parse_formulas(text)
    elif number := find_last_number(text):
        yield _parse_whole(number.group())


def gym_score(
    completions: Sequence[Any],
    gym: Sequence[Any],
    entry: Sequence[Any],
    in_thought: Sequence[bool] | None = None,
    **_: Any,
) -> list[float]:
    """Return the score that the reasoning_gym task's own scorer gives the answer.

    ``gym`` is {"name", "config"}, ``entry`` the task's own item (``env.gym`` writes both). Without a marked
    answer, the score is the highest of the last line, of as many last lines as the task's own answer has, and
    of the last number. A text that the task's own parser refuses (ValueError) is a wrong answer; a text for
    which every attempt crashes the scorer gets NaN, no verdict.
    """
    verdicts = []
    for text, task, item in zip(extract_texts(completions, in_thought), gym, entry, strict=True):
        score = _load_gym_scorer(task["name"], json.dumps(task["config"], sort_keys=True))
        scores = [_score_answer(score, answer, item) for answer in _list_gym_answers(text, item)]
        verdicts.append(max((score for score in scores if not math.isnan(score)), default=math.nan))
    return verdicts


def _list_gym_answers(text: str, item: dict[str, Any]) -> list[str]:
    """Return the parts of a text that may be meant as the answer to a task's item."""
    answers = [extract_final_answer(text)]
    if extract_marked_answer(text) is not None:
        return answers
    if number := find_last_number(text):
        answers.append(number.group().lstrip("$"))
    lines = [line for line in text.strip().splitlines() if not line.startswith("```")]
    num_lines = str(item.get("answer")).strip("\n").count("\n") + 1
    return [*answers, "\n".join(lines[-num_lines:])]


def _score_answer(score: Callable[[str, dict[str, Any]], float], answer: str, item: dict[str, Any]) -> float:
    """Return the score of an answer: 0 if the task's parser refuses it, NaN if it crashes the scorer."""
    try:
        return float(score(answer, item))
    except ValueError:
        return 0.0
    except (TypeError, AttributeError, LookupError, ArithmeticError):
        return math.nan


@functools.lru_cache(maxsize=64)  # building a task can read data files
def _load_gym_scorer(name: str, config: str) -> Callable[[str, dict[str, Any]], float]:
    from reasoning_gym import create_dataset

    return create_dataset(name, **json.loads(config)).score_answer


def answer_tags(
    completions: Sequence[Any], in_thought: Sequence[bool] | None = None, **_: Any
) -> list[float]:
    """Return 1 where the text has a single ``<answer>..</answer>`` and ends with it, else 0: a format
    reward."""
    verdicts = []
    for completion, is_unfinished in zip(completions, in_thought or [False] * len(completions), strict=True):
        text = get_text(completion).strip()
        is_single = text.count("<answer>") == text.count("</answer>") == 1
        verdicts.append(float(is_single and text.endswith("</answer>") and not is_unfinished))
    return verdicts


def regex(
    completions: Sequence[Any], pattern: Sequence[str], in_thought: Sequence[bool] | None = None, **_: Any
) -> list[float]:
    """Return 1 where the text after thinking has a match of the row's regular expression, else 0. Raises
    ValueError for a pattern that is none."""
    texts, thought_flags = extract_texts(completions, in_thought), in_thought or [False] * len(completions)
    return [
        float(not is_unfinished and compile_pattern(row_pattern).search(text) is not None)
        for text, row_pattern, is_unfinished in zip(texts, pattern, thought_flags, strict=True)
    ]


def json_schema(
    completions: Sequence[Any], schema: Sequence[Any], in_thought: Sequence[bool] | None = None, **_: Any
) -> list[float]:
    """Return 1 where the text after thinking, or its only fenced block, is JSON of the row's schema, else 0.
    Raises ValueError for a schema that is none."""
    verdicts = []
    for text, row_schema in zip(extract_texts(completions, in_thought), schema, strict=True):
        fences = _FENCED_BLOCK.findall(text)
        try:
            value = parse_json((fences[0] if len(fences) == 1 else text).strip())
            json.dumps(value, allow_nan=False)  # Python's parser accepts NaN and Infinity
        except ValueError:
            verdicts.append(0.0)
            continue
        try:
            verdicts.append(float(make_schema_validator(row_schema).is_valid(value)))
        except OverflowError:  # multipleOf fails on a number that no float holds
            verdicts.append(0.0)
    return verdicts


def length(
    completions: Sequence[Any], length: Sequence[int], completion_ids: Sequence[Sequence[int]], **_: Any
) -> list[float]:
    """Return 1 up to the row's ``length`` in tokens, falling linearly to 0 at twice that. Raises ValueError
    for a length that is no number of tokens."""
    pairs = zip(completion_ids, length, strict=True)
    return [min(1.0, max(0.0, 2 - len(ids) / check_length(max_tokens))) for ids, max_tokens in pairs]


@functools.lru_cache(maxsize=4096)
def compile_pattern(pattern: str) -> re.Pattern[str]:
    """Compile a regular expression; results are cached. Raises ValueError for a value that is none."""
    if not isinstance(pattern, str):
        raise ValueError(f"pattern is {pattern!r:.80}; give a regular expression, a text")
    try:
        return re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"pattern {pattern!r:.80} is no regular expression ({error}); fix it") from error


def make_schema_validator(schema: Any) -> Any:
    """Return the validator of a JSON schema, which is an object or its text. Raises ValueError for a value
    that is no schema. A schema that refers to another document fails when it is used."""
    return _make_validator(schema if isinstance(schema, str) else json.dumps(schema, sort_keys=True))


@functools.lru_cache(maxsize=256)
def _make_validator(text: str) -> Any:
    from jsonschema import Draft202012Validator, SchemaError
    from jsonschema.validators import validator_for
    from referencing import Registry

    try:
        if not isinstance(schema := parse_json(text), dict):
            raise ValueError(f"it is a {type(schema).__name__}, not an object")
        kind = validator_for(schema, default=Draft202012Validator)
        kind.check_schema(schema)
    except (ValueError, SchemaError) as error:
        reason = getattr(error, "message", error)
        raise ValueError(f"schema {text:.80} is no JSON schema ({reason}); fix it") from error
    return kind(schema, registry=Registry())


def check_length(value: Any) -> int:
    """Return ``value``. Raises ValueError unless it is a number of tokens."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"length is {value!r:.80}; give a number of tokens, 1 or more")
    return value


def env(completions: Sequence[Any], env_reward: Sequence[float | None], **_: Any) -> list[float | None]:
    """Return the reward from the environment of ``task.env``; None for an episode that has none."""
    return list(env_reward)


def none(completions: Sequence[Any], **_: Any) -> list[float | None]:
    """Return no verdicts: for training that needs no reward."""
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
_PACKAGES = {"math_verify": "math_verify", "gym_score": "reasoning_gym", "json_schema": "jsonschema"}
# By function: the column that it reads beside the completion, and the check of a value of that column.
READS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "numeric": ("answer", lambda value: read_expected_number(str(value))),
    "regex": ("pattern", compile_pattern),
    "json_schema": ("schema", make_schema_validator),
    "length": ("length", check_length),
}


def resolve_function(spec: str) -> RewardFunction:
    """Return the reward function that a recipe names: a built-in, ``module:function`` or
    ``path.py:function``. Modules and files are imported, and the folder of a file becomes the first of
    ``sys.path``.

    A function in verl's form, ``compute_score(data_source, solution_str, ground_truth, extra_info)``, is
    recognised by its arguments and adapted. Raises ValueError with one sentence; an exception of the user's
    own file while it is imported passes through.
    """
    if spec in BUILT_IN:
        if spec in _PACKAGES:
            _import_module(
                _PACKAGES[spec], f"the reward {spec} needs the package {_PACKAGES[spec]}; install it"
            )
        return BUILT_IN[spec]
    source, separator, name = spec.rpartition(":")
    if not separator or not source or not name:
        nearest = get_close_matches(spec, BUILT_IN, n=1, cutoff=0)[0]
        raise ValueError(
            f"reward {spec!r} is unknown; the nearest built-in is {nearest!r}, "
            "your own is written module:function or path.py:function"
        )
    if source.endswith(PICKLE):
        function = load_object(Path(source), f"reward {spec!r}")
    elif source.endswith(".py"):
        function = getattr(_import_file(Path(source), spec), name, None)
    else:
        fix = f"write {source}.py:{name}" if Path(f"{source}.py").is_file() else "check the name"
        module = _import_module(source, f"reward {spec!r}: there is no module {source!r}; {fix}")
        function = getattr(module, name, None)
    if not callable(function):
        raise ValueError(f"reward {spec!r}: {source} has no function {name!r}; define it there")
    return _adapt_verl(function) if _has_verl_form(function) else function


def _import_module(name: str, message: str) -> ModuleType:
    """Import a module. Raises ValueError with ``message`` if it does not exist, and what it raises itself."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            raise ValueError(message) from error
        raise  # the module exists, but something that it imports does not


def _import_file(path: Path, spec: str) -> ModuleType:
    """Import a file, and put its folder first in ``sys.path``. Raises ValueError if there is no such file."""
    if not path.is_file():
        raise ValueError(f"reward {spec!r}: there is no file {path} in {Path.cwd()}; give its path")
    sys.path.insert(0, str(path.resolve().parent))  # as for a script: the file may import its neighbours
    loader_spec = importlib.util.spec_from_file_location(path.stem, path)
    assert loader_spec is not None and loader_spec.loader is not None
    module = importlib.util.module_from_spec(loader_spec)
    sys.modules.setdefault(path.stem, module)  # dataclasses and pickle look a module up by its name
    loader_spec.loader.exec_module(module)
    return module


def _has_verl_form(function: RewardFunction) -> bool:
    try:
        return inspect.signature(function).parameters.keys() >= VERL_ARGUMENTS
    except (TypeError, ValueError):  # a builtin without a signature
        return False


def _adapt_verl(compute_score: RewardFunction) -> RewardFunction:
    """Return a reward function that calls ``compute_score`` once per completion. If that returns a dict, its
    ``score`` is the reward."""

    def reward(completions: Sequence[Any], answer: Sequence[Any], **columns: Any) -> list[Any]:
        nones = [None] * len(completions)
        scores = [
            compute_score(
                data_source=source, solution_str=get_text(completion), ground_truth=truth, extra_info=extra
            )
            for completion, truth, source, extra in zip(
                completions,
                answer,
                columns.get("data_source", nones),
                columns.get("extra_info", nones),
                strict=True,
            )
        ]
        return [score["score"] if isinstance(score, dict) else score for score in scores]

    return reward
