"""A teacher at an address: an OpenAI-compatible server whose ``/v1/completions`` gives ``prompt_logprobs``,
as vLLM and ``ostinato serve`` do. They are at temperature 1, over the whole vocabulary.

A sequence is one request, of which ``MAX_REQUESTS`` run at once. Transient failures (no answer, a timeout,
429 and 5xx) are retried and counted; after ``max_retries`` the run ends: no token is learned from without its
log-probability.
"""

from __future__ import annotations

import json
import math
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from ostinato.algo.routing import sequence_spans
from ostinato.failure import NamedFailure
from ostinato.train.inputs import Inputs, locate_in_sequence
from ostinato.types import Microbatch

MAX_REQUESTS = 8
MAX_PAUSE_S = 8.0
MAX_IDS = 4096  # token ids per request when tokenizers are compared


class TeacherFailed(NamedFailure):
    """The server gave no usable answer; its HTTP ``status`` where it refused."""

    def __init__(self, why: str, status: int = 0) -> None:
        super().__init__(why, status)
        self.why, self.status = why, status

    def __str__(self) -> str:
        return f"teacher.url: {self.why}"


class TeacherAt:
    """Implements ``train.teacher.Teacher`` on the server at ``url``, whose policy is ``model`` (empty: the
    first that it lists). ``sleep`` waits between tries."""

    def __init__(
        self,
        url: str,
        model: str = "",
        *,
        key: str = "",
        timeout_s: float = 60.0,
        max_retries: int = 4,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._url, self._model = url.rstrip("/").removesuffix("/v1"), model
        self._headers = {"Content-Type": "application/json"}
        self._headers |= {"Authorization": f"Bearer {key}"} if key else {}
        self._timeout_s, self._max_retries, self._sleep = timeout_s, max_retries, sleep
        self._open_url = urllib.request.build_opener(urllib.request.ProxyHandler({})).open
        self._counts = Counter[str]()
        self.progress = 0.0

    def check(self, texts: Callable[[list[int]], str], ids: Sequence[int]) -> None:
        """Raise ValueError for a server that lacks the model or an endpoint, or that decodes any of ``ids``,
        all tokens of the student, differently from ``texts``, the student's tokenizer. Sets the model, if
        none was named, to the first of the server, and scores three tokens."""
        try:
            served_models = self._list_models()
            if (model := self._model or served_models[0]) not in served_models:
                raise ValueError(f"teacher.model is {model!r}; {self._url} serves {', '.join(served_models)}")
            for start in range(0, len(ids), MAX_IDS):
                chunk = list(ids[start : start + MAX_IDS])
                body = {"model": model, "tokens": chunk}
                if not self._matches_text(body, texts(chunk)):
                    raise ValueError(
                        f"teacher.url {self._url} has other tokens than the student between {chunk[0]} and "
                        f"{chunk[-1]}, so it cannot score the same; use a teacher with the same tokenizer"
                    )
            self._model = model
            self.logprobs(np.array(ids[:3]))
        except (TeacherFailed, KeyError, TypeError, IndexError) as error:
            reason = getattr(error, "why", repr(error))
            raise ValueError(
                f"teacher.url {self._url} cannot be a teacher: {reason}; it has to answer /v1/models, "
                "/detokenize and /v1/completions with prompt_logprobs, as vLLM and ostinato serve do"
            ) from error

    def _matches_text(self, body: dict[str, Any], text: str) -> bool:
        """Whether the server decodes the tokens of ``body`` to ``text``; False if it has no such tokens."""
        try:
            return self._ask("/detokenize", body)["prompt"] == text
        except TeacherFailed as error:
            if error.status == 400:  # the server has no such tokens
                return False
            raise

    def score(self, parts: Sequence[Inputs]) -> tuple[list[Inputs], float]:
        """See ``Teacher.score``; the FLOPs are 0, since none are spent here. Sequences are scored in
        ``MAX_REQUESTS`` threads; after the first TeacherFailed, which is raised, no further one is sent."""
        self._model = self._model or self._list_models()[0]
        sequences_by_part = [list(_iterate_sequences(part.source)) for part in parts]
        with ThreadPoolExecutor(MAX_REQUESTS) as pool:
            try:
                logprobs = list(
                    pool.map(
                        self.logprobs, [tokens for sequences in sequences_by_part for tokens, _ in sequences]
                    )
                )
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        logprobs_iterator, scored = iter(logprobs), []
        for part, sequences in zip(parts, sequences_by_part, strict=True):
            flat = np.concatenate(
                [next(logprobs_iterator)[target_indices] for _, target_indices in sequences]
            )
            scored.append(replace(part, teacher=torch.from_numpy(flat).to(part.targets.device)))
        return scored, 0.0

    def logprobs(self, tokens: np.ndarray) -> np.ndarray:
        """Log-probabilities [L] fp32 of ``tokens`` [L]; the first is NaN, since nothing predicts it. Counts
        the request. Raises TeacherFailed for a failed one and for an unusable answer."""
        body = {"model": self._model, "prompt": tokens.tolist(), "prompt_logprobs": 0, "max_tokens": 1}
        answer = self._ask("/v1/completions", body)
        try:
            entries = answer["choices"][0]["prompt_logprobs"]
            pairs = zip(tokens[1:].tolist(), entries[1:], strict=True)
            logprobs = [float(entry[str(token)]["logprob"]) for token, entry in pairs]
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise TeacherFailed(
                f"an answer has no prompt_logprobs of the {len(tokens)} tokens sent ({error!r})"
            ) from error
        if not all(map(math.isfinite, logprobs)):
            raise TeacherFailed("an answer has a log-probability that is not finite")
        self.progress += 1
        self._counts["teacher/requests"] += 1
        return np.array([math.nan, *logprobs], np.float32)

    def metrics(self) -> dict[str, float]:
        """The numbers of requests and retries since the last call."""
        counts, self._counts = self._counts, Counter()
        return {name: float(counts[name]) for name in ("teacher/requests", "teacher/retries")}

    def _list_models(self) -> list[str]:
        return [str(model["id"]) for model in self._ask("/v1/models")["data"]]

    def _ask(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """The JSON reply to a POST of ``body``, or to a GET without one. Transient failures are counted and
        tried again after a pause. Raises TeacherFailed for a refusal, and after ``max_retries``."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data, self._headers)
        for attempt in range(self._max_retries + 1):
            try:
                return json.loads(self._read(request))
            except urllib.error.HTTPError as error:
                reason = f"{path} gave {error.code} {_read_message(error)}"
                if error.code != 429 and error.code < 500:
                    raise TeacherFailed(reason, error.code) from error
            except (OSError, ValueError) as error:  # URLError and TimeoutError are OSErrors
                reason = f"{path} gave no answer ({error})"
            if attempt < self._max_retries:
                self._counts["teacher/retries"] += 1
                self._sleep(min(MAX_PAUSE_S, 0.5 * 2**attempt))
        raise TeacherFailed(f"{reason}, {self._max_retries + 1} times in a row")

    def _read(self, request: urllib.request.Request) -> bytes:
        """The body of the reply. Raises TimeoutError where it takes longer than ``timeout_s`` in all."""
        deadline, content = time.monotonic() + self._timeout_s, bytearray()
        with self._open_url(request, timeout=self._timeout_s) as answer:
            while chunk := answer.read1(1 << 20):
                content += chunk
                if time.monotonic() > deadline:
                    raise TimeoutError(f"it was not whole after {self._timeout_s:g} s")
        return bytes(content)


def _read_message(error: urllib.error.HTTPError) -> str:
    """The server's message about an error, on one line."""
    try:
        return " ".join(error.read(4096).decode(errors="replace").split())[:300]
    except OSError:
        return error.reason


def _iterate_sequences(source: Microbatch) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(tokens [L], indices of the targets among them) of each sequence, in the order of the targets; the last
    token is only a target."""
    sequence_starts = np.flatnonzero(np.diff(source.sample_idx)) + 1
    rows, targets = (np.split(indices, sequence_starts) for indices in (source.rows, source.targets))
    for span, sequence_rows, sequence_targets in zip(sequence_spans(source), rows, targets, strict=True):
        start, stop, prompt_start, prompt_stop = span
        context = source.tokens[np.r_[prompt_start:prompt_stop, start:stop]]
        yield np.append(context, sequence_targets[-1]), locate_in_sequence(sequence_rows, span) + 1
