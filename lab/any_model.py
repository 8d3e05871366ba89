"""Every causal language model that transformers has, tiny and random, through the transformers backend.

    python -m lab.any_model                 # the table of docs/models.md, in minutes
    python -m lab.any_model mistral gemma2  # these alone, with what was refused in full

For each: three GRPO steps with LoRA (recorded routes replayed where it is a mixture), a checkpoint after two
of them that resumes to the same bits, and an export that PEFT loads.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any

HIDDEN, LAYERS, VOCAB, EXPERTS, TOP_K = 32, 2, 96, 4, 2
SMALL: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCAB),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim"), HIDDEN),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "n_layers"), LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads",), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("head_dim", "global_head_dim", "v_head_dim", "attention_head_dim"), 8),
    **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "index_head_dim"), 8),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "o_lora_rank"), 16),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "shared_intermediate_size"), 48),
    **dict.fromkeys(("block_ff_dim", "decoder_ffn_dim", "encoder_ffn_dim", "ffn_hidden_size"), 48),
    **dict.fromkeys(("moe_intermediate_size", "expert_ffn_hidden_size", "expert_dim"), 24),
    **dict.fromkeys(("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"), 24),
    **dict.fromkeys(("intermediate_size_mlp", "moe_ffn_hidden_size"), 48),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), EXPERTS),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_top_k", "top_k_experts", "moe_k"), TOP_K),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"), 1),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group"), 1),
    **dict.fromkeys(("first_k_dense_replace", "moe_layer_start_index"), 1),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 2),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 8),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads"), 8),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim"), 8),
    **dict.fromkeys(("mamba_n_groups", "n_groups"), 1),
    **dict.fromkeys(("mamba_d_state", "ssm_state_size", "state_size"), 8),
    **dict.fromkeys(("mamba_d_ssm",), 64),
    **dict.fromkeys(("mamba_dt_rank", "time_step_rank"), 4),
    **dict.fromkeys(("lru_width",), HIDDEN),
    **dict.fromkeys(("hidden_size_per_layer_input",), 8),
    **dict.fromkeys(("max_position_embeddings",), 256),
    **dict.fromkeys(("sliding_window", "attention_window_size"), 6),
    **dict.fromkeys(("rotary_dim",), 8),
    **dict.fromkeys(("moe_latent_size",), 16),
}
TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id")
PER_LAYER = ("layer_types", "layers_block_type", "mlp_layer_types", "no_rope_layers", "is_moe", "attn_layers")


def tiny_config(model_type: str, **own: Any) -> Any:
    """The configuration of a type at its defaults, of two layers (more where kinds alternate), small."""
    from transformers import CONFIG_MAPPING

    config = CONFIG_MAPPING[model_type]()
    text = config.get_text_config()
    layers = LAYERS
    kinds = getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None)
    if kinds:
        layers = min(len(kinds), 1 + max(kinds.index(kind) for kind in set(kinds)))
        layers = max(LAYERS, layers)
    for key, value in {**SMALL, **own}.items():
        if key not in own and (getattr(text, key, None) is None or isinstance(getattr(text, key), list)):
            continue
        object.__setattr__(text, text.attribute_map.get(key, key), value)
    for key in ("num_hidden_layers", "n_layer", "num_layers", "n_layers"):
        if hasattr(text, key):
            object.__setattr__(text, text.attribute_map.get(key, key), layers)
    for key in PER_LAYER:
        value = getattr(text, key, None)
        if isinstance(value, list | tuple) and len(value) > layers:
            object.__setattr__(text, key, list(value)[:layers])
    for key in TOKENS:
        if isinstance(getattr(text, key, None), int):
            object.__setattr__(text, key, 0)
    if isinstance(getattr(text, "rope_parameters", None), dict):
        for part in (text.rope_parameters, *text.rope_parameters.values()):
            if isinstance(part, dict) and part.get("rope_type") not in (None, "default"):
                part["rope_type"] = "default"
    return text


def tiny_model(model_type: str, **own: Any) -> Any:
    """Random, float32, so that scores of tokens differ."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(model_type, **own), dtype=torch.float32)
    generator = torch.Generator().manual_seed(1)
    for weight in model.parameters():
        if weight.dim() >= 2 and weight.is_floating_point():
            weight.data.copy_(torch.randn(weight.shape, generator=generator) / weight.shape[-1] ** 0.5)
    return model.eval()


# what a type needs beside ``SMALL`` to be a model at all
OWN: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"num_key_value_heads": 4, "head_dim": 8, "num_experts_per_tok": TOP_K},
    "ministral": {"head_dim": 8},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "nemotron": {"num_key_value_heads": 2, "head_dim": 8},
    "dots1": {
        "n_routed_experts": EXPERTS,
        "n_shared_experts": 1,
        "num_experts_per_tok": TOP_K,
        "head_dim": 8,
    },
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "deepseek_v3": {"num_key_value_heads": 4, "head_dim": 8},
}
# of issue 39, and those that our decoder has
NAMED = (
    "llama mistral ministral ministral3 qwen2 qwen3 qwen3_moe mixtral olmoe gemma gemma2 "
    "gemma3_text gpt_oss glm glm4 glm4_moe qwen2_moe qwen3_next qwen3_5_text qwen3_5_moe_text "
    "deepseek_v2 deepseek_v3 minimax minimax_m2 phi phi3 phimoe olmo olmo2 olmo3 smollm3 "
    "granite granitemoe granitemoeshared granitemoehybrid ernie4_5 ernie4_5_moe exaone4 lfm2 "
    "lfm2_moe falcon_h1 hunyuan_v1_dense hunyuan_v1_moe seed_oss dots1 llama4_text apertus "
    "nemotron nemotron_h cohere cohere2 starcoder2 stablelm helium jamba arcee "
)


def samples_of(model: Any, adapters: Any) -> list[Any]:
    """Two prompts with two answers each, sampled by the engine, with their routes."""
    import asyncio

    import numpy as np

    from ostinato.hf.sampler import TransformersEngine
    from ostinato.types import Request, Sample, Sampling

    engine = TransformersEngine(model, context_limit=64)
    engine.publish(adapters, 0)
    prompts = [np.arange(9, dtype=np.int32) * (3 + index) % (VOCAB - 4) + 4 for index in (0, 0, 1, 1)]
    asked = [
        Request(tokens=tokens, sampling=Sampling(max_tokens=6), seed=(index,))
        for index, tokens in enumerate(prompts)
    ]

    async def answers() -> dict[int, Any]:
        return {index: answer async for index, answer in engine.generate(asked)}

    found, samples = asyncio.run(answers()), []
    for index, prompt in enumerate(prompts):
        answer, size = found[index], len(prompt)
        experts = None
        if answer.experts is not None:
            experts = np.concatenate([answer.prompt_experts, answer.experts]).astype(np.int16)
        length = size + len(answer.tokens)
        mask = np.arange(length) >= size
        samples.append(
            Sample(
                tokens=np.concatenate([prompt, answer.tokens]),
                loss_mask=mask,
                logprobs=np.concatenate([np.zeros(size, np.float32), answer.logprobs]),
                advantages=np.where(mask, 1.0 if index % 2 else -1.0, 0).astype(np.float32),
                versions=np.where(mask, 0, -1).astype(np.int32),
                group=index // 2,
                prompt_len=size,
                uid=f"{index // 2}#{index % 2}",
                experts=experts,
            )
        )
    return samples


def walk(model_type: str) -> str:
    """What became of a type: one cell of the table. Raises what it raises."""
    import tempfile
    from pathlib import Path

    import torch
    from peft import PeftModel

    from ostinato.algo.algorithms import algorithm
    from ostinato.algo.pack import Aggregation, aggregation_weights, pack
    from ostinato.config import TrainerSection
    from ostinato.hf.factors import init_sites, read_folder, write_folder
    from ostinato.hf.model import TransformersModel
    from ostinato.model.shapes import AdapterSpec
    from ostinato.train.trainer import PolicyTrainer

    model = TransformersModel(tiny_model(model_type, **OWN.get(model_type, {})))
    spec = AdapterSpec(rank=4, alpha=8)

    def trainer() -> PolicyTrainer:
        return PolicyTrainer(
            model,
            init_sites(model.sites, spec, 0, "cpu"),
            algorithm("grpo", correction="token_truncate"),
            settings=TrainerSection(lr=1e-3),
        )

    first, second = trainer(), trainer()
    for step in range(3):
        samples = samples_of(model, first.adapters())
        weights = aggregation_weights(samples, Aggregation.TOKEN)
        batch = pack(samples, weights, tokens_per_microbatch=64, version=step)
        if step == 2:
            saved = {name: tensor.clone() for name, tensor in first.tensors().items()}
            second.restore(saved, first.counters())
            second.step(batch)
        report = first.step(batch)
        if report.skipped:
            raise AssertionError(report.skipped)
        if model.config.moe and report.metrics["routing/replay"] != 1:
            raise AssertionError("routes were not replayed")
        gaps = [value for name, value in report.metrics.items() if name.endswith("k3")]
        if not gaps or max(map(abs, gaps)) > 1e-4:
            raise AssertionError(f"k3 of sampler and trainer is {gaps}")
    ours = first.tensors()
    if not all(torch.equal(tensor, ours[name]) for name, tensor in second.tensors().items()):
        raise AssertionError("a resumed step gave other bits")
    with tempfile.TemporaryDirectory() as place:
        adapters: Any = first.adapters()
        write_folder(adapters, Path(place), "")
        read_folder(Path(place), model.sites, "cpu")
        tokens = torch.arange(12)[None] * 5 % VOCAB
        with torch.no_grad(), model.using(adapters.prepare(torch.float32)):
            logits = model.model(input_ids=tokens, use_cache=False).logits
        plain = tiny_model(model_type, **OWN.get(model_type, {}))
        with torch.no_grad():
            theirs = PeftModel.from_pretrained(plain, place).eval()(input_ids=tokens, use_cache=False).logits
        torch.testing.assert_close(theirs, logits, rtol=1e-4, atol=1e-4)
    return "packed" if model.packs else "one sequence a pass"


def main(names: list[str]) -> None:
    """Print the table, a row per type."""
    from ostinato.model.config import NotNative, parse_config

    warnings.filterwarnings("ignore")
    print("| model_type | native | transformers |\n|---|---|---|")
    for name in names or NAMED.split():
        native = "yes"
        try:
            parse_config(tiny_config(name).to_dict())
        except NotNative:
            native = "no"
        except Exception as error:
            native = f"not this tiny one ({str(error)[:60]})"
        try:
            found = walk(name)
        except Exception as error:
            said = " ".join(str(error).split())[: 400 if len(names) == 1 else 160]
            found = f"refused: {type(error).__name__}: {said}"
        print(f"| {name} | {native} | {found} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
