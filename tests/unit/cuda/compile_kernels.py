"""Compile every kernel for a card without one, and print what the binaries need: run as a program.

    python compile_kernels.py 90        a JSON object {kernel: {"registers", "spills", "shared"}} for sm_90

Another process than the tests', since these have chosen Triton's interpreter.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ostinato.model.cuda import elementwise, mixture, paged, policies, products, sampling, scoring, varlen

POINTERS = {
    "*bf16": "x residual out total grad direct cos sin gate_up queries keys values k v"
    " qkv q_norm k_norm low a b y rows weight grads slopes key_slopes value_slopes",
    "*fp32": "parts lses logprobs edges cuts temperature top_p min_p scores weights bias lse deltas",
    "*fp64": "u masses",
    "*i32": "tables sequence lengths tile_first tile_count order places spans tiles readers starts owners",
    "*i64": "slots tokens targets ids routing native",
    "fp32": "eps scale sign scaling",
}
TYPES = {name: kind for kind, names in POINTERS.items() for name in names.split()}
# The shapes of Qwen3-8B: hidden 4096, heads of 128, 4 query heads a key head.
CASES: list[tuple[str, Any, dict[str, Any], dict[str, str]]] = [
    ("rms_norm", elementwise._normalise_kernel, {"ADD": False, "ROWS": 32, "BLOCK": 128}, {}),
    ("add_rms_norm", elementwise._normalise_kernel, {"ADD": True, "ROWS": 1, "BLOCK": 4096}, {}),
    (
        "rms_norm backward",
        elementwise._normalise_backward_kernel,
        {"ADD": True, "ROWS": 1, "BLOCK": 4096},
        {},
    ),
    ("rope", elementwise._rotate_kernel, {"ROWS": 32, "HALF": 64}, {}),
    ("silu_mul", elementwise._silu_mul_kernel, {"BLOCK": elementwise.BLOCK_F}, {}),
    ("silu_mul backward", elementwise._silu_mul_backward_kernel, {"BLOCK": elementwise.BLOCK_F}, {}),
    ("project", paged._project_kernel, {"NORM": True, "HEADS": paged.HEADS, "HALF": 64}, {}),
    ("write_cache", paged._write_kernel, {"BLOCK": 128}, {}),
    *(
        (
            f"attention, {'a program a split' if parallel else 'one program'}",
            paged._attention_kernel,
            {
                "PARALLEL": parallel,
                "ROWS": 4,
                "GROUP": 4,
                "N": paged.TILE_N,
                "PAGE": paged.PAGE,
                "SPLIT": paged.SPLIT,
                "KEY": 128,
                "VALUE": 128,
            },
            {},
        )
        for parallel in (True, False)
    ),
    ("merge", paged._merge_kernel, {"SPLIT": paged.SPLIT, "VALUE": 128}, {}),
    ("cut_off", sampling._cut_kernel, {"CHUNK": sampling.CHUNK}, {"logits": "*fp32", "top_k": "*i32"}),
    ("draw", sampling._draw_kernel, {"CHUNK": sampling.CHUNK}, {"logits": "*bf16", "out": "*fp64"}),
    # Qwen3-30B-A3B: 128 experts of 768, 8 of them for a row; adapters of rank 16
    (
        "route",
        mixture._route_kernel,
        {"SIGMOID": False, "BIAS": True, "RENORMALISE": True, "E": 128, "K": 8},
        {"logits": "*fp32"},
    ),
    ("sort", mixture._sort_kernel, {"CHUNK": mixture.CHUNK}, {}),
    *(
        (
            f"grouped product, {'gated' if gated else 'plain'}, {rows} rows",
            mixture._grouped_kernel,
            {
                "K": 8 if gated else 0,
                "LOW_K": 8 if gated else 0,
                "GATED": gated,
                "RANK": 32 if gated else 16,
                "M": rows,
                "N": mixture.BLOCK_N,
                "D": mixture.BLOCK_K if rows == 16 else mixture.BLOCK_K // 2,
            },
            {},
        )
        for gated in (True, False)
        for rows in (16, 64)
    ),
    ("combine", mixture._combine_kernel, {"BLOCK": mixture.COLUMNS}, {}),
    # adapters of several policies, rank 32
    (
        "adapters of several policies, down",
        policies._down_kernel,
        {"M": paged.TILE_M, "R": 32, "D": policies.DEPTH, "SPAN": policies.SPAN},
        {"rows": "i32"},
    ),
    (
        "adapters of several policies, up",
        policies._up_kernel,
        {"M": paged.TILE_M, "R": 32, "N": policies.COLUMNS},
        {"rows": "i32"},
    ),
    ("score", scoring._score_kernel, {"CHUNK": scoring.CHUNK}, {"logits": "*fp32"}),
]
# of ``model.exact``
ROWS_BF16 = {"bias": "*bf16", "rows": "i32"}
PRODUCT = {"BIAS": False, "EVEN": True, "M": products.ROWS, "N": products.COLUMNS, "num_stages": 4}
PRODUCTS = (
    ("exact product", {"ADD": False, "D": products.DEPTHS[2]}, ROWS_BF16),
    ("exact product, added", {"ADD": True, "D": products.DEPTHS[2]}, ROWS_BF16),
    (
        "exact product, float32",
        {"ADD": False, "D": products.DEPTHS[4]},
        ROWS_BF16 | dict.fromkeys(("x", "weight", "bias", "out"), "*fp32"),
    ),
)
# Of the trainer's attention: products on the tensor cores, with the blocks that a card runs.
BLOCKS = varlen.Shape.of(128, 2)
VARLEN = (
    ("packed attention", varlen._forward_kernel, BLOCKS.forward),
    ("packed attention backward, queries", varlen._queries_kernel, BLOCKS.of_queries),
    ("packed attention backward, keys", varlen._keys_kernel, BLOCKS.of_keys),
)
HEADS_OF_128 = {"KEY_DIM": 128, "VALUE_DIM": 128, "KEY": 128, "VALUE": 128}


def needs(
    kernel: Any,
    constants: dict[str, Any],
    types: dict[str, str],
    capability: int,
    warps: int = 4,
    aligned: bool = False,
) -> dict[str, int]:
    """Registers of a thread, bytes of a thread that spill, bytes of shared memory of a program."""
    known, launch = TYPES | types, {"num_warps": warps, "num_stages": constants.pop("num_stages", 3)}
    signature = {
        name: "constexpr" if name in constants else known.get(name, "i32") for name in kernel.arg_names
    }
    facts = {  # as a launch finds them: addresses and the strides of rows and heads
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(kernel.arg_names)
        if (aligned or warps != 4) and (signature[name].startswith("*") or name.endswith(("_row", "_head")))
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=facts)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=launch)
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(compiled.asm["cubin"])
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        text = subprocess.run([tool, "-res-usage", cubin], capture_output=True, text=True, check=True).stdout
    found = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", text))
    spills = int(found.get("STACK", 0)) + int(found.get("LOCAL", 0))
    return {"registers": int(found["REG"]), "spills": spills, "shared": compiled.metadata.shared}


if __name__ == "__main__":
    capability = int(sys.argv[1])
    found = {case[0]: needs(*case[1:], capability) for case in CASES}
    for name, kernel, blocks in VARLEN:
        constants = HEADS_OF_128 | blocks.launch
        warps = constants.pop("num_warps")
        found[name] = needs(kernel, constants, {"out": "*bf16"}, capability, warps)
    for name, constants, types in PRODUCTS:
        found[name] = needs(products._product_kernel, PRODUCT | constants, types, capability, aligned=True)
    print(json.dumps(found))
