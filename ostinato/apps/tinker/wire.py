"""Tinker's messages (SDK 0.38): training requests and the results of training and sampling are protobuf,
whose generated code ships with the SDK; all other messages are JSON. Invalid messages raise a UserError."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import numpy as np
import zstandard
from google.protobuf.message import DecodeError
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from tinker.proto import tinker_public_pb2 as pb  # pyright: ignore[reportMissingImports]

from ostinato.algo.token_losses import TokenLoss, token_loss
from ostinato.apps.tinker.registry import PROTO, Result, UserError
from ostinato.train.accumulate import Row, Scored
from ostinato.types import Completion, Emitted, Sampling, Stop

DTYPES = {pb.DTYPE_FLOAT32: np.float32, pb.DTYPE_INT64: np.int64, pb.DTYPE_INT32: np.int32}
EMPTY_LOGPROB = -99999.0  # the log-probability of an empty cell of a top-k matrix
MAX_BODY_BYTES = 64 << 20  # of a body, decompressed


class Body(BaseModel):
    """A JSON request; fields of a newer SDK are ignored where they change no answer."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=())


B = TypeVar("B", bound=Body)
Seq = Annotated[int, Field(ge=-(2**63), lt=2**63)]  # the integers of SQLite
Seconds = Annotated[int, Field(ge=0, le=100 * 365 * 24 * 3600)]  # until a checkpoint expires


def parse_body(form: type[B], body: bytes) -> B:
    """Return the validated body. Raises UserError, which names the first invalid field."""
    try:
        return form.model_validate_json(body or b"{}")
    except ValidationError as error:
        first_error = error.errors()[0]
        field_name = ".".join(map(str, first_error["loc"])) or "the body"
        raise UserError(f"{field_name}: {first_error['msg']}") from error


def unpack_body(body: bytes, encoding: str) -> bytes:
    """Return the body with its ``Content-Encoding`` decoded."""
    if encoding in ("", "identity"):
        return body
    if encoding != "zstd":
        raise UserError(f"the body has the encoding {encoding!r}; send zstd or none")
    try:
        with zstandard.ZstdDecompressor().stream_reader(io.BytesIO(body)) as reader:
            data = reader.read(MAX_BODY_BYTES + 1)
    except zstandard.ZstdError as error:
        raise UserError(f"the body is no zstd: {error}") from error
    if len(data) > MAX_BODY_BYTES:
        raise UserError(f"the body has more than {MAX_BODY_BYTES} bytes; send fewer datums at once")
    return data


# ---- training


def parse_training_request(body: bytes) -> Any:
    """Return the message of a forward_backward. Raises UserError for bytes of another kind."""
    try:
        return pb.ForwardBackwardRequest.FromString(body)
    except DecodeError as error:
        raise UserError(f"the body is no ForwardBackwardRequest: {error}") from error


def parse_loss(message: Any) -> TokenLoss:
    config = {
        key: value.text if value.WhichOneof("value") == "text" else value.number
        for key, value in message.loss_fn_config_v2.items()
    } or dict(message.loss_fn_config)
    return token_loss(message.loss_fn, config)


def parse_rows(message: Any) -> list[Row]:
    """Return the rows to train on. Raises UserError, which names the first invalid datum."""
    if not message.data:
        raise UserError("the request has no data; send at least one datum")
    tensors = (tensor for datum in message.data for tensor in datum.loss_fn_inputs.values())
    if (size := sum(4 * math.prod(map(abs, tensor.shape)) for tensor in tensors)) > MAX_BODY_BYTES:
        raise UserError(f"the tensors have {size} bytes, dense; send {MAX_BODY_BYTES} at most at once")
    rows = []
    for index, datum in enumerate(message.data):
        try:
            rows.append(_make_row(datum))
        except ValueError as error:
            raise UserError(f"datum {index} {error}") from error
    return rows


def _make_row(datum: Any) -> Row:
    arrays = {name: _read_tensor(tensor, name) for name, tensor in datum.loss_fn_inputs.items()}
    if (targets := arrays.pop("target_tokens", None)) is None:
        raise UserError("has no target_tokens")
    values = {name: array.astype(np.float32) for name, array in arrays.items()}
    return Row(tokens=_read_tokens(datum.model_input), targets=targets.astype(np.int64), values=values)


def _read_tokens(chunks: Sequence[Any]) -> np.ndarray:
    """Return the tokens [N] int32 of encoded text."""
    parts = []
    for chunk in chunks:
        if (kind := chunk.WhichOneof("chunk")) != "encoded_text":
            raise UserError(f"has a chunk of kind {kind}; this server takes text alone")
        parts.append(_read_array(chunk.encoded_text.tokens, np.int32))
    return np.concatenate([np.zeros(0, np.int32), *parts])


def _read_array(data: bytes, dtype: Any) -> np.ndarray:
    if len(data) % np.dtype(dtype).itemsize:
        raise UserError(f"has {len(data)} bytes where {np.dtype(dtype).name} is meant")
    return np.frombuffer(data, dtype)


def _read_tensor(tensor: Any, name: str) -> np.ndarray:
    """Return the tensor as a dense array; unlisted entries of a sparse tensor are 0."""
    if tensor.dtype not in DTYPES:
        raise UserError(f"has {name} of an unknown dtype; use float32 or int64")
    dtype, shape = DTYPES[tensor.dtype], tuple(tensor.shape)
    if any(size < 0 for size in shape):
        raise UserError(f"has {name} of the shape {list(shape)}; sizes count from 0")
    if tensor.WhichOneof("encoding") == "sparse_csr":
        sparse = tensor.sparse_csr
        rows, columns = _read_array(sparse.crow_indices, np.int64), _read_array(sparse.col_indices, np.int64)
        values = _read_array(sparse.values, dtype)
        if (
            len(shape) != 2
            or len(rows) != shape[0] + 1
            or rows[0]
            or not (len(columns) == len(values) == rows[-1])
        ):
            raise UserError(f"has {name} as a sparse tensor whose indices do not fit its shape")
        if (np.diff(rows) < 0).any() or (len(columns) and not 0 <= columns.min() <= columns.max() < shape[1]):
            raise UserError(f"has {name} as a sparse tensor with indices outside of its shape")
        dense = np.zeros(shape, dtype)
        dense[np.repeat(np.arange(shape[0]), np.diff(rows)), columns] = values
        return dense
    flat = _read_array(tensor.dense, dtype)
    if shape and math.prod(shape) != len(flat):
        raise UserError(f"has {name} with {len(flat)} entries for the shape {list(shape)}")
    return flat.reshape(shape or (-1,))


def make_training_result(scored: Scored) -> Result:
    """Return log-probabilities as ragged tensors, one for each width of the targets."""
    message = pb.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
    message.metrics["loss:sum"] = scored.loss
    arrays, start = scored.logprobs, 0
    while start < len(arrays):  # neighbours of the same width share a record
        trailing, end = arrays[start].shape[1:], start
        while end < len(arrays) and arrays[end].shape[1:] == trailing:
            end += 1
        group = arrays[start:end]
        record = message.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=len(group))
        field = record.fields["logprobs"]
        field.data = b"".join(np.ascontiguousarray(array, np.float32).tobytes() for array in group)
        field.offsets = np.cumsum([0, *(4 * array.size for array in group)], dtype=np.int64).tobytes()
        field.dtype = pb.DTYPE_FLOAT32
        field.trailing_shape.extend(trailing)
        start = end
    return Result(message.SerializeToString(), PROTO)


# ---- sampling


class Chunk(Body):
    type: str = "encoded_text"
    tokens: list[int] = []


class Prompt(Body):
    chunks: list[Chunk]


class SamplingParams(Body):
    max_tokens: int | None = None
    seed: int | None = None
    stop: str | list[int] | list[str] | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0


class TensorBody(Body):
    data: list[int]
    shape: list[int] | None = None
    sparse_crow_indices: list[int] | None = None


class SampleBody(Body):
    prompt: Prompt
    sampling_params: SamplingParams
    num_samples: int = 1
    sampling_session_id: str | None = None
    seq_id: Seq | None = None
    base_model: str | None = None
    model_path: str | None = None
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    target_prompt_logprobs: TensorBody | None = None
    prompt_alt_tokens_k: int = 0
    prompt_logprobs_last_n: int | None = None

    def read_tokens(self) -> np.ndarray:
        """Return the prompt's tokens [P] int32. Raises UserError for other chunks than text."""
        if kind := next((chunk.type for chunk in self.prompt.chunks if chunk.type != "encoded_text"), None):
            raise UserError(f"the prompt has a chunk of kind {kind}; this server takes text alone")
        ids = [token for chunk in self.prompt.chunks for token in chunk.tokens]
        if not ids:
            raise UserError("the prompt has no tokens; give at least one")
        return np.array(ids, np.int64).clip(-1, 2**31 - 1).astype(np.int32)

    def make_sampling(self, eos: Sequence[int], room: int) -> Sampling:
        """Return the sampling settings. ``stop`` as tokens replaces the model's stop tokens; strings are
        added to them; [] means none. Raises UserError for settings that are invalid or exceed ``room``."""
        params, stop = self.sampling_params, self.sampling_params.stop
        strings = [stop] if isinstance(stop, str) else [item for item in stop or [] if isinstance(item, str)]
        tokens = [item for item in stop or [] if isinstance(item, int)]
        max_tokens = room if params.max_tokens is None else params.max_tokens
        if max_tokens > room:
            raise UserError(
                f"max_tokens is {max_tokens} and the context leaves {room}; lower it or cut the prompt"
            )
        try:
            return Sampling(
                temperature=params.temperature,
                top_k=max(0, params.top_k),
                top_p=params.top_p,
                max_tokens=max_tokens,
                stop_tokens=tuple(tokens) if tokens or stop == [] else tuple(eos),
                stop_strings=tuple(strings),
            )
        except ValueError as error:
            raise UserError(str(error).removeprefix("sampling.")) from error


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PromptScores:
    """Scores of a request's prompt [P], except its first token, which has no context."""

    logprobs: np.ndarray  # [P - 1] of the prompt's tokens
    top: tuple[np.ndarray, np.ndarray] | None = None  # ids, log-probabilities [P - 1, k]


def make_sampling_result(
    answers: Sequence[Completion],
    tops: Sequence[Sequence[Emitted]],
    top: int,
    scores: PromptScores | None,
    last: int,
) -> Result:
    """Return the response. ``tops``: the emitted events with top tokens, by answer; ``last``: how many prompt
    tokens to score."""
    message = pb.SampleResponse(prompt_cache_hit_tokens=max(answer.cached_tokens for answer in answers))
    for answer, emitted in zip(answers, tops, strict=True):
        is_cut = answer.stop in (Stop.LENGTH, Stop.ABORT)
        sequence = message.sequences.add(
            stop_reason=pb.STOP_REASON_LENGTH if is_cut else pb.STOP_REASON_STOP,
            tokens=answer.tokens.astype(np.int32).tobytes(),
            logprobs=answer.logprobs.astype(np.float32).tobytes(),
        )
        if top:
            rows = [pair for event in emitted for pair in event.top][: len(answer.tokens)]
            _fill_top(sequence.topk_sampled_logprobs, [ids for ids, _ in rows], [p for _, p in rows], top)
    if scores is not None:
        num_skipped = len(scores.logprobs) - last
        line = np.concatenate([[np.nan], scores.logprobs]).astype(np.float32)
        line[: num_skipped + 1] = np.nan
        message.prompt_logprobs = line.tobytes()
        if scores.top is not None:
            ids, logprobs = scores.top
            empty_rows = [np.zeros(0)] * (num_skipped + 1)
            rows = [*empty_rows, *ids[num_skipped:]], [*empty_rows, *logprobs[num_skipped:]]
            _fill_top(message.topk_prompt_logprobs, *rows, ids.shape[1])
    return Result(message.SerializeToString(), PROTO)


def _fill_top(message: Any, ids: Sequence[np.ndarray], logprobs: Sequence[np.ndarray], k: int) -> None:
    """Fill ``message`` with rows of at most k entries, padded to a matrix [rows, k]."""
    tokens, values = np.zeros((len(ids), k), np.int32), np.full((len(ids), k), EMPTY_LOGPROB, np.float32)
    for row, (row_ids, row_logprobs) in enumerate(zip(ids, logprobs, strict=True)):
        tokens[row, : len(row_ids)], values[row, : len(row_logprobs)] = row_ids[:k], row_logprobs[:k]
    message.token_ids, message.logprobs = tokens.tobytes(), values.tobytes()
    message.k, message.length = k, len(ids)
