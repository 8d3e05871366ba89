"""Convert GGUF to a Hugging Face folder, by transformers: ``python -m ostinato.hf.gguf FILE FOLDER``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any


def convert_gguf(file: Path, folder: Path) -> None:
    """Write config, tokenizer and weights of any of llama.cpp's formats (Q4_K_M, Q8_0) to ``folder``;
    weights are widened to bf16."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    options = {"gguf_file": file.name, "local_files_only": True}
    tokenizer = AutoTokenizer.from_pretrained(file.parent, **options)
    gguf_config = GgufConfig(dequantize=True)
    model: Any = AutoModelForCausalLM.from_pretrained(
        file.parent, dtype=torch.bfloat16, quantization_config=gguf_config, **options
    )
    model.hf_quantizer = None  # the weights are plain now, and may be saved
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    convert_gguf(Path(sys.argv[1]), Path(sys.argv[2]))
