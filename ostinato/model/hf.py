"""Read and write Hugging Face folders; the table of names is in ``hf_names``."""

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

from ostinato.files import find_remedy
from ostinato.model.config import ModelConfig, read_config
from ostinato.model.decoder import Decoder
from ostinato.model.hf_names import (
    StoredTensor,
    is_extra_layer,
    is_redundant,
    list_hf_tensors,
    list_stored_tensors,
    normalise_name,
)
from ostinato.model.published import Tensors
from ostinato.model.published import Weights as Files
from ostinato.model.quantise import Weights, encode_weight
from ostinato.model.share import Share, is_whole, iterate_blocks
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
    """Load the decoder in a Hugging Face folder, cast to ``dtype``, and its matrices to ``storage`` if that
    is given. With ``share`` only that part of the model is loaded. On other devices than the CPU the context
    is limited to the window of the model, if it has one, with a warning.

    Raises ValueError as ``fill_decoder`` does, for an unsupported config, and for int8 of a share or off the
    CPU.
    """
    config = read_config(folder)
    if torch.device(device).type != "cpu":  # kernels for other devices have no window
        config = config.windowless_config
        if config.max_positions < config.raw.get("max_position_embeddings", 0):
            warnings.warn(
                f"{folder}: sliding_window is {config.max_positions}; longer contexts are refused on a GPU",
                stacklevel=2,
            )
    if storage == torch.int8:
        if share is not None or torch.device(device).type != "cpu":
            raise ValueError('model.storage is "int8", which is for a whole model on a CPU; use "same"')
        return _load_coded(Path(folder), config, dtype, fp32_head)
    options: dict[str, Any] = {"dtype": dtype, "storage": storage, "share": share}
    check_sizes(Decoder(config, device="meta", **options), folder)
    decoder = Decoder(config, device=device, fp32_head=fp32_head, **options)
    fill_decoder(decoder, folder)
    return decoder


def _load_coded(folder: Path, config: ModelConfig, dtype: torch.dtype, fp32_head: bool) -> Decoder:
    """Load the decoder with its linear maps in int8 (``quantise.encode_weight``) and other matrices in bf16.
    A matrix is wide only while it is read."""
    empty = Decoder(config, dtype=dtype, storage=torch.bfloat16, device="meta")
    check_sizes(empty, folder)
    coding = Coding(empty)
    fill_decoder(empty, folder, coding)
    return Decoder(config, dtype=dtype, fp32_head=fp32_head, stored=coding.stored)


class Coding:
    """The destination of tensors that are coded while they are read. A tensor is identified by its view into
    a decoder without memory ("meta"). The matrix of the view is allocated until all of it is read, and then
    coded."""

    def __init__(self, empty: Decoder) -> None:
        self.stored: dict[str, nn.Parameter | Quantised] = {}
        self._names = {id(weight): name for name, weight in empty.named_parameters()}
        self._pending: dict[str, tuple[Tensor, int]] = {}  # matrix, number of its values still missing

    def allocate_view(self, view: Tensor) -> Tensor:
        """Return the memory that ``view`` stands for, in a matrix that is allocated at its first view."""
        name, weight = self._find_weight(view)
        if name not in self._pending:
            dtype = torch.float32 if is_quantised(name, weight.shape) else weight.dtype
            self._pending[name] = torch.empty(weight.shape, dtype=dtype), weight.numel()
        return self._pending[name][0].as_strided(view.shape, view.stride(), view.storage_offset())

    def finish_view(self, view: Tensor) -> None:
        """Count the values of ``view`` as read. If its matrix has all values now, code and store it."""
        name, _ = self._find_weight(view)
        matrix, num_missing = self._pending.pop(name)
        if num_missing > view.numel():
            self._pending[name] = matrix, num_missing - view.numel()
        elif is_quantised(name, matrix.shape):
            self.stored[name] = encode_weight(matrix, Weights.INT8)
        else:
            self.stored[name] = nn.Parameter(matrix, requires_grad=False)

    def _find_weight(self, view: Tensor) -> tuple[str, Tensor]:
        """Return (name, weight) of the parameter of which ``view`` is a part."""
        weight = view if view._base is None else view._base
        return self._names[id(weight)], weight


def fill_decoder(decoder: Decoder, folder: str | Path, coding: Coding | None = None) -> int:
    """Copy the weights in a Hugging Face folder (safetensors, or pickles of torch) into ``decoder``, or into
    ``coding`` for a ``decoder`` without memory.

    A share reads only its parts of tensors, and does not open a file in which the index lists none of its
    tensors. Returns the number of bytes read; quantised weights count as widened. Warns of layers that are
    not computed.

    Raises ValueError, in one sentence, for a missing, unexpected or misshapen tensor, a head that is not the
    embedding although config.json ties them, and a truncated file. Tensors that a share does not keep may be
    missing: the rank that keeps them raises.
    """
    folder, config = Path(folder), decoder.config
    expected = list_stored_tensors(decoder)
    missing_names = {name for name, target in expected.items() if name in target.names}
    unexpected_names, heads = list[str](), dict[Path, Tensor]()
    num_bytes, weights = 0, Files(folder, config.raw)
    with torch.no_grad():
        for path, file_names in weights.files.items():
            has_head = HEAD in file_names and path.suffix == ".bin" and config.tie_embeddings
            if (
                file_names
                and not has_head
                and not any(normalise_name(name, config) in expected for name in file_names)
            ):
                unexpected_names += file_names
                continue
            for name, file in weights.iterate_file(path):
                target = expected.get(normalise_name(name, config))
                if target is None:
                    if name == HEAD and path.suffix == ".bin" and config.tie_embeddings:
                        # read_config has checked the heads of other files
                        heads[path] = file.get_tensor(HEAD)
                    unexpected_names.append(name)
                    continue
                if coding is None:
                    num_bytes += _copy_part(target, file, name, path)
                else:
                    num_bytes += _copy_part(
                        target._replace(view=coding.allocate_view(target.view)), file, name, path
                    )
                    coding.finish_view(target.view)
                missing_names -= target.names
    _check_complete(decoder, folder, sorted(missing_names), unexpected_names)
    for path, head in heads.items():
        embed = decoder.embed if coding is None else coding.stored["embed"]
        if isinstance(embed, Tensor):
            _check_tied(head, embed, path)
    return num_bytes


def check_sizes(empty: Decoder, folder: str | Path) -> None:
    """Compare the names and shapes of a decoder without memory ("meta") with the headers of the weight files.
    This comes before memory is allocated, because a wrong config.json may call for more than there is.

    Raises ValueError, in one sentence, for a missing or misshapen tensor, and a truncated file.
    """
    expected = list_stored_tensors(empty)
    missing_names = {name for name, target in expected.items() if name in target.names}
    weights = Files(Path(folder), empty.config.raw)
    for path, file_names in weights.files.items():
        if file_names and not any(normalise_name(name, empty.config) in expected for name in file_names):
            continue
        with weights.open_file(path) as file:
            for name in file.keys():  # noqa: SIM118 - not a dict
                if target := expected.get(normalise_name(name, empty.config)):
                    _check_shape(target, file.get_slice(name), name, path)
                    missing_names -= target.names
    _check_missing(Path(folder), sorted(missing_names))


def _check_complete(
    decoder: Decoder, folder: Path, missing_names: list[str], unexpected_names: list[str]
) -> None:
    """Raise ValueError if a tensor is ``missing_names``, or if one of ``unexpected_names`` would be needed.
    Warn of layers for multi-token prediction, which are not loaded."""
    _check_missing(folder, missing_names)
    config = decoder.config
    unexpected_names = [
        name
        for name in (normalise_name(name, config) for name in unexpected_names)
        if not is_redundant(name, config)
    ]
    if unexpected_names and decoder.share != Share.all(config):
        model_tensors = list_stored_tensors(Decoder(config, device="meta"))
        unexpected_names = [name for name in unexpected_names if name not in model_tensors]
    uncomputed = [name for name in unexpected_names if not is_extra_layer(name, config)]
    if uncomputed:
        raise ValueError(
            f"{folder} has {len(uncomputed)} tensors that its config.json does not call for, the first is "
            f"{uncomputed[0]}; this decoder would not compute what the model was trained to"
        )
    if unexpected_names:
        warnings.warn(
            f"{folder}: {len(unexpected_names)} tensors of multi-token-prediction layers were not loaded",
            stacklevel=3,
        )


def _check_missing(folder: Path, names: list[str]) -> None:
    """Raise ValueError if any tensor is missing."""
    if names:
        raise ValueError(
            f"{folder} lacks {len(names)} tensors that config.json calls for, the first is {names[0]}; "
            "download the model again or correct config.json"
        )


def _check_tied(head: Tensor, embedding: Tensor, path: Path) -> None:
    """Raise ValueError if the head is not the embedding although config.json ties the two."""
    if head.shape != embedding.shape or not torch.equal(head.to(embedding), embedding):
        raise ValueError(
            f"{path} has a {HEAD} that is not the embedding, and config.json has tie_word_embeddings true; "
            "set it to false"
        )


def _copy_part(target: StoredTensor, file: Tensors, name: str, path: Path) -> int:
    """Copy the part of a tensor that is kept to its view, and return the bytes read of the file. Raises
    ValueError for a wrong shape or dtype."""
    source = file.get_slice(name)
    _check_shape(target, source, name, path)
    if is_whole(target.spans, target.shape):
        return _copy_cast(file.get_tensor(name), target.view, name, path)
    return sum(
        _copy_cast(source[file_box], target.view[view_box], name, path)
        for file_box, view_box in iterate_blocks(target.spans)
    )


def _check_shape(target: StoredTensor, tensor: Any, name: str, path: Path) -> None:
    """Raise ValueError if a tensor in a file has not the shape that config.json calls for."""
    if tuple(tensor.get_shape()) != target.shape:
        raise ValueError(
            f"{name} in {path} has shape {list(tensor.get_shape())}, "
            f"config.json calls for {list(target.shape)}; the weights and config.json are of different models"
        )


def _copy_cast(tensor: Tensor, view: Tensor, name: str, path: Path) -> int:
    """Copy a tensor to its view, cast to the view's dtype; return its bytes. Raises ValueError for whole
    numbers and for fewer than 16 bits."""
    if not tensor.is_floating_point() or tensor.element_size() < 2:
        raise ValueError(
            f"{name} in {path} is {tensor.dtype}; quantised weights are not supported, use a 16-bit model"
        )
    view.copy_(tensor)
    return tensor.nbytes


def save_model(
    decoder: Decoder, folder: str | Path, tokenizer_from: str | Path | None = None, shard_bytes: float = 5e9
) -> None:
    """Write a folder that ``transformers`` and ``load_model`` read: config, weights, tokenizer files. Weight
    files of an earlier save that are not written again are deleted.

    ``tokenizer_from``: a folder whose tokenizer, chat template and generation config are copied along. Every
    file of weights and the config are written under a temporary name and then moved, so a full disk leaves no
    half file. Raises ValueError for a share of a model, and OSError.
    """
    if decoder.share != Share.all(decoder.config):
        raise ValueError("a share of a model is no model to save; save one that has been put together")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    shards = _split_shards(decoder, shard_bytes)
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
        num_bytes = sum(_count_bytes(view) for tensors in shards for view in tensors.values())
        weight_map = {key: name for name, tensors in zip(names, shards, strict=True) for key in tensors}
        _write_json(index, {"metadata": {"total_size": num_bytes}, "weight_map": weight_map})
    # files of an earlier save with other shards would shadow these
    for path in folder.glob("model*.safetensors*"):
        if path.name not in names and not (path == index and len(shards) > 1):
            path.unlink()
    _write_json(folder / "config.json", _build_config(decoder))
    if tokenizer_from is not None and Path(tokenizer_from).resolve() != folder.resolve():
        for name in _COMPANIONS.split():
            if (Path(tokenizer_from) / name).is_file():
                shutil.copyfile(Path(tokenizer_from) / name, folder / name)


def _build_config(decoder: Decoder) -> dict[str, Any]:
    """Build the config: as it was read, with the present dtype of the weights, and untied if the decoder
    is."""
    raw = dict(decoder.config.raw)
    for key in ("torch_dtype", "quantization_config"):  # they describe the weights that were read
        raw.pop(key, None)
    if decoder.config.is_untied:
        raw["tie_word_embeddings"] = False
    return raw | {"dtype": str(decoder.storage).removeprefix("torch.")}


def _split_shards(decoder: Decoder, shard_bytes: float) -> list[dict[str, Tensor]]:
    """Split the weights into shards of at most ``shard_bytes``, or of a single larger tensor."""
    shards: list[dict[str, Tensor]] = [{}]
    num_bytes = 0
    for name, view in list_hf_tensors(decoder):
        if shards[-1] and num_bytes + _count_bytes(view) > shard_bytes:
            shards.append({})
            num_bytes = 0
        shards[-1][name] = view
        num_bytes += _count_bytes(view)
    return shards


def _count_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def write_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Write a safetensors file, completely or not at all. Raises OSError, also for a full disk."""
    try:
        atomic_write(path, lambda partial: save_file(tensors, partial, metadata=metadata))
    except SafetensorError as error:
        raise OSError(f"{path} could not be written ({error}); {find_remedy(error)}") from error


def _write_json(path: Path, content: dict[str, Any]) -> None:
    atomic_write(path, (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode())
