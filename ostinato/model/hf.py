"""Hugging Face folders in and out; ``hf_names`` says what goes where."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from ostinato.files import remedy
from ostinato.model.config import ModelConfig, read_config
from ostinato.model.decoder import Decoder
from ostinato.model.hf_names import Stored, canonical, hf_tensors, is_extra_layer, is_redundant, stored
from ostinato.model.published import Tensors
from ostinato.model.published import Weights as Files
from ostinato.model.quantise import Weights, codes
from ostinato.model.share import Share, blocks, is_whole
from ostinato.model.weight_files import HEAD, INDEX, SINGLE
from ostinato.model.weights import Quantised, is_quantised
from ostinato.run import atomic_write

# Files that travel with the weights: tokenizer, chat template, generation defaults.
_COMPANIONS = (
    "tokenizer.json tokenizer_config.json special_tokens_map.json added_tokens.json vocab.json merges.txt"
    " tokenizer.model tiktoken.model chat_template.jinja chat_template.json generation_config.json"
    " tokenization_kimi.py"
)


def load_model(
    folder: str | Path,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    *,
    storage: torch.dtype | None = None,
    fp32_head: bool = False,
    share: Share | None = None,
) -> Decoder:
    """The decoder in a Hugging Face folder, cast to ``dtype``, its matrices to ``storage`` where that is
    given; with ``share`` that part of it.

    Raises ValueError as ``fill`` does, and for an unsupported config.
    """
    config = read_config(folder)
    if torch.device(device).type != "cpu":  # its kernels have no window
        config = config.within_window
        if config.max_positions < config.raw.get("max_position_embeddings", 0):
            warnings.warn(
                f"{folder}: sliding_window is {config.max_positions}; longer contexts are refused on a GPU",
                stacklevel=2,
            )
    if storage == torch.int8:
        if share is not None or torch.device(device).type != "cpu":
            raise ValueError('model.storage is "int8", which is for a whole model on a CPU; use "same"')
        return _load_coded(Path(folder), config, dtype, fp32_head)
    kinds: dict[str, Any] = {"dtype": dtype, "storage": storage, "share": share}
    check_sizes(Decoder(config, device="meta", **kinds), folder)
    decoder = Decoder(config, device=device, fp32_head=fp32_head, **kinds)
    fill(decoder, folder)
    return decoder


def _load_coded(folder: Path, config: ModelConfig, dtype: torch.dtype, fp32_head: bool) -> Decoder:
    """The decoder with its linear maps in int8 (``quantise.codes``) and other matrices in bf16. A matrix is
    wide only while it is read."""
    empty = Decoder(config, dtype=dtype, storage=torch.bfloat16, device="meta")
    check_sizes(empty, folder)
    coding = Coding(empty)
    fill(empty, folder, coding)
    return Decoder(config, dtype=dtype, fp32_head=fp32_head, stored=coding.stored)


class Coding:
    """Where the tensors of a folder go that are to be codes: in place of the memory that the views into a
    decoder without any ("meta") stand for, there is a matrix until all of it is read."""

    def __init__(self, empty: Decoder) -> None:
        self.stored: dict[str, nn.Parameter | Quantised] = {}
        self._names = {id(weight): name for name, weight in empty.named_parameters()}
        self._open: dict[str, tuple[Tensor, int]] = {}  # the matrix, and how many of its values are missing

    def place(self, view: Tensor) -> Tensor:
        """The memory of ``view``."""
        name, whole = self._whole(view)
        if name not in self._open:
            dtype = torch.float32 if is_quantised(name, whole.shape) else whole.dtype
            self._open[name] = torch.empty(whole.shape, dtype=dtype), whole.numel()
        return self._open[name][0].as_strided(view.shape, view.stride(), view.storage_offset())

    def done(self, view: Tensor) -> None:
        """``view`` has its values."""
        name, _ = self._whole(view)
        matrix, missing = self._open.pop(name)
        if missing > view.numel():
            self._open[name] = matrix, missing - view.numel()
        elif is_quantised(name, matrix.shape):
            self.stored[name] = codes(matrix, Weights.INT8)
        else:
            self.stored[name] = nn.Parameter(matrix, requires_grad=False)

    def _whole(self, view: Tensor) -> tuple[str, Tensor]:
        whole = view if view._base is None else view._base
        return self._names[id(whole)], whole


def fill(decoder: Decoder, folder: str | Path, coding: Coding | None = None) -> int:
    """Copy the weights in a Hugging Face folder (single or sharded safetensors) into ``decoder``, or with
    ``coding`` there, for a ``decoder`` without memory.

    Of a tensor that a share keeps in part, that part alone is read, of others nothing; a file in which the
    index lists none of its own is not opened. Returns the bytes of what was read, of
    quantised weights once widened.

    Raises ValueError, in one sentence, for a missing, unexpected or misshapen tensor, and a truncated file.
    Tensors that a share does not keep may be missing: the rank that keeps them will say so.
    """
    folder, config = Path(folder), decoder.config
    expected = stored(decoder)
    missing = {name for name, one in expected.items() if name in one.covers}
    others, heads = list[str](), dict[Path, Tensor]()
    read, weights = 0, Files(folder, config.raw)
    with torch.no_grad():
        for path, listed in weights.files.items():
            has_head = HEAD in listed and path.suffix == ".bin" and config.tie_embeddings
            if listed and not has_head and not any(canonical(name, config) in expected for name in listed):
                others += listed
                continue
            for name, file in weights.each(path):
                one = expected.get(canonical(name, config))
                if one is None:
                    if name == HEAD and path.suffix == ".bin" and config.tie_embeddings:
                        heads[path] = file.get_tensor(HEAD)  # of other files config.py has looked
                    others.append(name)
                    continue
                if coding is None:
                    read += _copy(one, file, name, path)
                else:
                    read += _copy(one._replace(view=coding.place(one.view)), file, name, path)
                    coding.done(one.view)
                missing -= one.covers
    _report(decoder, folder, sorted(missing), others)
    for path, head in heads.items():
        embed = decoder.embed if coding is None else coding.stored["embed"]
        if isinstance(embed, Tensor):
            _check_tied(head, embed, path)
    return read


def check_sizes(empty: Decoder, folder: str | Path) -> None:
    """Hold the names and shapes of a decoder without memory ("meta") against the heads of the weight files,
    before memory for it is taken: what config.json calls for by mistake may be more than there is.

    Raises ValueError, in one sentence, for a missing or misshapen tensor, and a truncated file.
    """
    expected = stored(empty)
    missing = {name for name, one in expected.items() if name in one.covers}
    weights = Files(Path(folder), empty.config.raw)
    for path, listed in weights.files.items():
        if listed and not any(canonical(name, empty.config) in expected for name in listed):
            continue
        with weights.opened(path) as file:
            for name in file.keys():  # noqa: SIM118 - not a dict
                if one := expected.get(canonical(name, empty.config)):
                    _check_shape(one, file.get_slice(name), name, path)
                    missing -= one.covers
    _check_missing(Path(folder), sorted(missing))


def _report(decoder: Decoder, folder: Path, missing: list[str], others: list[str]) -> None:
    """Judge what was not found, and what was not looked for."""
    _check_missing(folder, missing)
    config = decoder.config
    others = [name for name in (canonical(name, config) for name in others) if not is_redundant(name, config)]
    if others and decoder.share != Share.all(config):
        of_all = stored(Decoder(config, device="meta"))
        others = [name for name in others if name not in of_all]
    unexpected = [name for name in others if not is_extra_layer(name, config)]
    if unexpected:
        raise ValueError(
            f"{folder} has {len(unexpected)} tensors that its config.json does not call for, the first is "
            f"{unexpected[0]}; this decoder would not compute what the model was trained to"
        )
    if others:
        warnings.warn(
            f"{folder}: {len(others)} tensors of multi-token-prediction layers were not loaded", stacklevel=3
        )


def _check_missing(folder: Path, missing: list[str]) -> None:
    if missing:
        raise ValueError(
            f"{folder} lacks {len(missing)} tensors that config.json calls for, the first is {missing[0]}; "
            "download the model again or correct config.json"
        )


def _check_tied(head: Tensor, embedding: Tensor, path: Path) -> None:
    """Raises ValueError for a head that is not the embedding that config.json calls it."""
    if head.shape != embedding.shape or not torch.equal(head.to(embedding), embedding):
        raise ValueError(
            f"{path} has a {HEAD} that is not the embedding, and config.json has tie_word_embeddings true; "
            "set it to false"
        )


def _copy(one: Stored, file: Tensors, name: str, path: Path) -> int:
    """The part of a tensor that is kept, to where it goes; how many bytes of the file that is."""
    found = file.get_slice(name)
    _check_shape(one, found, name, path)
    if is_whole(one.spans, one.shape):
        return _cast(file.get_tensor(name), one.view, name, path)
    return sum(_cast(found[there], one.view[here], name, path) for there, here in blocks(one.spans))


def _check_shape(one: Stored, found: Any, name: str, path: Path) -> None:
    if tuple(found.get_shape()) != one.shape:
        raise ValueError(
            f"{name} in {path} has shape {list(found.get_shape())}, config.json calls for {list(one.shape)}; "
            "the weights and config.json are of different models"
        )


def _cast(tensor: Tensor, view: Tensor, name: str, path: Path) -> int:
    if not tensor.is_floating_point() or tensor.element_size() < 2:
        raise ValueError(
            f"{name} in {path} is {tensor.dtype}; quantised weights are not supported, use a 16-bit model"
        )
    view.copy_(tensor)
    return tensor.nbytes


def save_model(
    decoder: Decoder, folder: str | Path, tokenizer_from: str | Path | None = None, shard_bytes: float = 5e9
) -> None:
    """Write a folder that ``transformers`` and ``load_model`` load: config, weights, tokenizer files.

    ``tokenizer_from``: a folder whose tokenizer, chat template and generation config are copied along.
    Every file is written beside its name and then moved, so a full disk leaves no half file.
    Raises ValueError for a share of a model.
    """
    if decoder.share != Share.all(decoder.config):
        raise ValueError("a share of a model is no model to save; save one that has been put together")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    shards = _shards(decoder, shard_bytes)
    names = (
        [SINGLE]
        if len(shards) == 1
        else [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    )
    for name, tensors in zip(names, shards, strict=True):
        content = {key: view.detach().cpu().contiguous() for key, view in tensors.items()}
        write_tensors(folder / name, content, {"format": "pt"})
    index = folder / INDEX
    if len(shards) > 1:
        size = sum(_num_bytes(view) for tensors in shards for view in tensors.values())
        weight_map = {key: name for name, tensors in zip(names, shards, strict=True) for key in tensors}
        _write_json(index, {"metadata": {"total_size": size}, "weight_map": weight_map})
    for stale in folder.glob(
        "model*.safetensors*"
    ):  # an earlier save with other shards would shadow this one
        if stale.name not in names and not (stale == index and len(shards) > 1):
            stale.unlink()
    _write_json(folder / "config.json", _config_json(decoder))
    if tokenizer_from is not None and Path(tokenizer_from).resolve() != folder.resolve():
        for name in _COMPANIONS.split():
            if (Path(tokenizer_from) / name).is_file():
                shutil.copyfile(Path(tokenizer_from) / name, folder / name)


def _config_json(decoder: Decoder) -> dict[str, Any]:
    """The config as it was read, with the dtype that the weights now have."""
    raw = dict(decoder.config.raw)
    for key in ("torch_dtype", "quantization_config"):  # what is written has the dtype of the weights
        raw.pop(key, None)
    if decoder.config.is_untied:
        raw["tie_word_embeddings"] = False
    return raw | {"dtype": str(decoder.storage).removeprefix("torch.")}


def _shards(decoder: Decoder, shard_bytes: float) -> list[dict[str, Tensor]]:
    shards: list[dict[str, Tensor]] = [{}]
    filled = 0
    for name, view in hf_tensors(decoder):
        if shards[-1] and filled + _num_bytes(view) > shard_bytes:
            shards.append({})
            filled = 0
        shards[-1][name] = view
        filled += _num_bytes(view)
    return shards


def _num_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def write_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """A safetensors file, whole or not at all. A full disk is an OSError, as for every other file."""
    try:
        atomic_write(path, lambda partial: save_file(tensors, partial, metadata=metadata))
    except SafetensorError as error:
        raise OSError(f"{path} could not be written ({error}); {remedy(error)}") from error


def _write_json(path: Path, content: dict[str, Any]) -> None:
    atomic_write(path, (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode())
