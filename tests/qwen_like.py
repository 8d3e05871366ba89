"""A small untrained model with a tokenizer and a template in the manner of Qwen2.5's: byte-level BPE, tags of
calls that are added tokens, tools in the system message, and a vocabulary padded beyond the tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

from worlds import tiny_dense

from ostinato.model.config import parse_config
from ostinato.model.decoder import Decoder
from ostinato.model.hf import save_model

PADDED = 320  # rows of the embedding; the tokenizer has fewer
TEMPLATE = """\
{%- if tools %}{{ '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{ messages[0].content + '\\n\\n' }}{% endif %}
{{- 'Functions:' }}{% for tool in tools %}{{ '\\n' + tool | tojson }}{% endfor %}{{ '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
{%- elif not (tools and loop.first and message.role == 'system') %}
{{- '<|im_start|>' + message.role + '\\n' + message.content }}
{%- for call in message.tool_calls or [] %}
{{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson }}{{ '}\\n</tool_call>' }}
{%- endfor %}{{ '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and not enable_thinking %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}"""


def save_tokenizer(folder: Path) -> None:
    """tokenizer.json and tokenizer_config.json."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: id_ for id_, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tags = ("<tool_call>", "</tool_call>", "<think>", "</think>")
    tokenizer.add_tokens([AddedToken(tag, normalized=False) for tag in tags])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))


def save_qwen_like(folder: Path) -> Path:
    """The whole folder: the tokenizer and a random model of its size."""
    save_tokenizer(folder)
    sizes = {"vocab_size": PADDED, "max_position_embeddings": 16384, "initializer_range": 0.2}
    tree = tiny_dense(model_type="qwen2", architectures=["Qwen2ForCausalLM"], **sizes)
    save_model(Decoder(parse_config(tree)).init_weights(0), folder)
    return folder
