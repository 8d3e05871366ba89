"""Reward functions with TRL's signature, and looking one up by its name in a recipe.

``reward(completions, **columns) -> list[float | None]``: ``completions`` are strings, or chats
(``[{"role": .., "content": ..}]``) when the prompt was a chat; ``prompts``, ``completion_ids`` and every
column of the row come as lists of the same length. None means "no opinion on this one".

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
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from difflib import get_close_matches
from fractions import Fraction
from pathlib import Path
from types import ModuleType
from typing import Any

RewardFunction = Callable[..., Any]

TOLERANCE = 1e-6  # relative, for numbers that are not both integers
MAX_DIGITS = 300  # of a number; longer ones do not count as answers: parsing takes quadratic time
MEMBER_LIMIT_S = 1.0  # of math_verify, per completion
RING_AGAIN_S = 0.1  # between repeated alarms, until one has an effect
VERL_ARGUMENTS = frozenset({"data_source", "solution_str", "ground_truth"})

_NUMBER = re.compile(
    r"""(?P<minus>(?<![\w)}\]])-)?\$?                                # 3-4 holds 4, not -4
        (?: \\[dt]?frac\{\s*(?P<over>-?[0-9]{1,300})\s*\}\{\s*(?P<under>[0-9]{1,300})\s*\}
          | (?P<digits>[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])(?:\.[0-9]+)? | [0-9]+(?:\.[0-9]+)? | \.[0-9]+)
            (?: [eE](?P<exponent>[+-]?[0-9]{1,3})(?!\w) | \s?/\s?(?P<denominator>[0-9]+(?!\.[0-9])) )?
        ) (?P<percent>\s?\\?%)?""",
    re.VERBOSE,
)
_OF_NUMBERS = frozenset("\N{SUPERSCRIPT MINUS}\N{SUPERSCRIPT PLUS SIGN}\N{SUPERSCRIPT LATIN SMALL LETTER N}")


def text_of(completion: str | Sequence[dict[str, str]]) -> str:
    """The text that is graded: the string itself, or the last message of a chat."""
    if isinstance(completion, str):
        return completion
    return completion[-1]["content"] if completion else ""


def after_thinking(text: str) -> str:
    """The text after the last ``</think>``; empty when thinking was opened and never closed."""
    _, closed, rest = text.rpartition("</think>")
    return "" if "<think>" in rest else rest if closed else text


def marked_answer(text: str) -> str | None:
    r"""The last ``<answer>..</answer>``, else the last ``\boxed{..}``, else the rest of a ``####`` line."""
    opened, _, tail = text.rpartition("</answer>")
    if tail != text and "<answer>" in opened:
        return opened.rpartition("<answer>")[2].strip()
    if (boxed := _last_boxed(text)) is not None:
        return boxed.strip()
    _, marker, tail = text.rpartition("####")
    return tail.strip().partition("\n")[0].strip() if marker else None


def _last_boxed(text: str) -> str | None:
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth = 0
    for end in range(start + len("\\boxed"), len(text)):
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        if depth == 0:
            return text[start + len("\\boxed{") : end]
    return None


def final_answer(text: str) -> str:
    """The marked answer after thinking, else the last line that is not blank."""
    text = after_thinking(text)
    marked = marked_answer(text)
    return marked if marked is not None else text.strip().rpartition("\n")[2].strip()


def last_number(text: str) -> tuple[Fraction, ...]:
    r"""The readings of the last number of a text: none, one, or two for a percentage (50 and 1/2).

    Reads ``-3``, ``1,234.5``, ``.5``, ``2e-3``, ``3/4``, ``\frac{3}{4}``, ``$20``, ``50%``.
    Digits are 0 to 9; a number next to other numerals (``5²``, ``1½``, ``10⁻³``, ``5千``) is not read.
    """
    found = _last_match(text)
    if found is None:
        return ()
    over, under = found["over"], found["under"]
    if found["digits"] is not None:
        over, under = found["digits"].replace(",", ""), found["denominator"] or "1"
    if int(under) == 0:
        return ()
    value = Fraction(over) / int(under) * Fraction(10) ** int(found["exponent"] or 0)
    value = -value if found["minus"] else value
    return (value, value / 100) if found["percent"] else (value,)


def _last_match(text: str) -> re.Match[str] | None:
    found = deque(_NUMBER.finditer(text.replace("\N{MINUS SIGN}", "-")), maxlen=1)
    if not found or len(found[0].group()) > MAX_DIGITS:
        return None
    beside = text[max(0, found[0].start() - 1) : found[0].start()] + text[found[0].end() : found[0].end() + 1]
    goes_on = any(one in _OF_NUMBERS or (one.isnumeric() and not one.isascii()) for one in beside)
    return None if goes_on else found[0]


def exact(completions: Sequence[Any], answer: Sequence[Any], **_: Any) -> list[float | None]:
    """1 where the final answer, or the whole text after thinking, equals ``answer``, character by character.

    None where the answer is None: some tasks have a scorer but no example of a right answer.
    """
    verdicts: list[float | None] = []
    for completion, target in zip(completions, answer, strict=True):
        text = text_of(completion)
        sampled = {final_answer(text), after_thinking(text).strip()}
        verdicts.append(None if target is None else float(str(target).strip() in sampled))
    return verdicts


def numeric(completions: Sequence[Any], answer: Sequence[Any], **_: Any) -> list[float]:
    """1 where the last number of the marked answer (of the text, when none is marked) equals ``answer``'s.

    Integers are compared exactly, others within a relative TOLERANCE. Raises ValueError for an answer
    without a number.
    """
    pairs = zip(completions, answer, strict=True)
    return [float(_same_number(text_of(completion), str(target))) for completion, target in pairs]


def _same_number(text: str, target: str) -> bool:
    marked = marked_answer(target)
    expected = last_number(target if marked is None else marked)
    if not expected:
        raise ValueError(f"the answer {target!r} holds no number; use the reward exact or math_verify")
    text = after_thinking(text)
    marked = marked_answer(text)
    return any(_close(a, b) for a in last_number(text if marked is None else marked) for b in expected)


def _close(value: Fraction, expected: Fraction) -> bool:
    if value.denominator == expected.denominator == 1:
        return value == expected
    return abs(value - expected) <= Fraction(TOLERANCE) * abs(expected)


def math_verify(completions: Sequence[Any], answer: Sequence[Any], **_: Any) -> list[float]:
    """1 where the math-verify library finds the answers equal (LaTeX, sets, intervals, expressions).

    Needs the main thread (SIGALRM), as in a worker process. A completion that takes more than
    MEMBER_LIMIT_S gets NaN, which is no verdict. Raises ValueError for an answer that cannot be parsed.
    """
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own time limit is off
    golds = {target: _parse_gold(target) for target in {str(target) for target in answer}}
    return [
        _math_verdict(golds[str(target)], after_thinking(text_of(completion)))
        for completion, target in zip(completions, answer, strict=True)
    ]


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


def _parse_gold(target: str) -> list[Any]:
    from math_verify import parse

    parsed = parse(target, parsing_timeout=0) or parse(f"${target}$", parsing_timeout=0)
    if not parsed:
        raise ValueError(f"the answer {target!r} cannot be parsed; use the reward exact or numeric")
    return parsed


def _math_verdict(gold: list[Any], text: str) -> float:
    from math_verify import parse, verify

    marked = marked_answer(text)
    try:
        with _time_limit(MEMBER_LIMIT_S):
            sampled = parse(text, parsing_timeout=0)
            if not sampled and marked:
                sampled = parse(f"${marked}$", parsing_timeout=0)
            return float(verify(gold, sampled, timeout_seconds=0))
    except _OutOfTime:
        return math.nan


def gym_score(completions: Sequence[Any], gym: Sequence[Any], entry: Sequence[Any], **_: Any) -> list[float]:
    """The score that the reasoning_gym task's own scorer gives the answer.

    ``gym`` is {"name", "config"}, ``entry`` the task's own item (``env.gym`` writes both). Without a marked
    answer the last line counts, or the last number where that scores higher. A text that the task's own
    parser refuses (ValueError) is a wrong answer; one that crashes the scorer gets NaN, no verdict.
    """
    verdicts = []
    for completion, task, item in zip(completions, gym, entry, strict=True):
        score = _gym_scorer(task["name"], json.dumps(task["config"], sort_keys=True))
        text = after_thinking(text_of(completion))
        sampled = [final_answer(text)]
        if marked_answer(text) is None and (number := _last_match(text)):
            sampled.append(number.group().lstrip("$"))
        scores = [_gym_verdict(score, candidate, item) for candidate in sampled]
        verdicts.append(max((score for score in scores if not math.isnan(score)), default=math.nan))
    return verdicts


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


def answer_tags(completions: Sequence[Any], **_: Any) -> list[float]:
    """1 where the text ends with its one and only ``<answer>..</answer>``: a format reward."""
    verdicts = []
    for completion in completions:
        text = text_of(completion).strip()
        once = text.count("<answer>") == text.count("</answer>") == 1
        verdicts.append(float(once and text.endswith("</answer>")))
    return verdicts


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
    "none": none,
}
_NEEDS = {"math_verify": "math_verify", "gym_score": "reasoning_gym"}


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
    if where.endswith(".py"):
        module = _import_file(Path(where), spec)
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
