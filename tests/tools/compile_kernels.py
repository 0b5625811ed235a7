"""Compiles the kernels for a GPU that need not be there, with what Triton is told when the engine launches them.

Prints name, bytes of shared memory, bytes spilled, registers, and buffers for keys and values.

Run: python tests/tools/compile_kernels.py [80 | 86 | 89 | 90 | 100] [head_dim] [query heads per KV head]
"""

import re
import subprocess
import sys
import tempfile

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

from nanovllm.layers import triton_attention, triton_ops


def compile_kernel(name, kernel, pointers, scalars, constants, capability, warps=4, stages=2):
    signature = {**pointers, **scalars, **dict.fromkeys(constants, "constexpr")}
    signature = {argument: signature[argument] for argument in kernel.arg_names}
    # as the JIT finds them: tensors begin at multiples of 16 bytes, strides are multiples of 16
    aligned = [i for i, a in enumerate(kernel.arg_names) if a in pointers or "stride" in a]
    attributes = {(i,): [["tt.divisibility", 16]] for i in aligned}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    target, options = GPUTarget("cuda", capability, 32), {"num_warps": warps, "num_stages": stages}
    compiled = triton.compile(source, target=target, options=options)
    ptx = compiled.asm["ptx"]
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        arch = re.search(r"\.target (sm_\w+)", ptx)[1]
        command = [get_ptxas(capability).path, "-v", f"-arch={arch}", file.name, "-o", "/dev/null"]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    spilled = re.search(r"(\d+) bytes spill stores", report)[1]
    registers = re.search(r"Used (\d+) registers", report)[1]
    buffers = re.findall(r"local_alloc : .*memdesc<(\d+)x\d+x\d+x", compiled.asm["ttgir"])
    print(
        name,
        compiled.metadata.shared,
        spilled,
        registers,
        max(map(int, buffers), default=0),
        flush=True,
    )


def main(capability=80, head_dim=128, group=2):
    dim = triton.next_power_of_2(head_dim)
    for name in ("decode", "prefill"):
        tokens, rows, keys, warps, stages = triton_attention.tile_sizes(
            dim, group, 2, name == "decode"
        )
        result = "*fp32" if name == "decode" else "*bf16"
        pointers = dict.fromkeys(["q", "k_cache", "v_cache"], "*bf16") | dict.fromkeys(
            ["out", "maxima", "sums"], result
        )
        pointers |= dict.fromkeys(
            ["cu_seqlens_q", "context_lens", "cu_blocks", "block_tables"], "*i32"
        )
        scalars = {
            "scale": "fp32",
            "q_stride": "i32",
            "first_seq": "i32",
            "num_seqs": "i32",
            "num_splits": "i32",
        }
        constants = dict(
            HEADS=8 * group, KV_HEADS=8, HEAD_DIM=head_dim, BLOCK_SIZE=16, DIM=dim, PART=triton_attention.PART,
            TOKENS=tokens, ROWS=rows, KEYS=keys, IS_SPLIT=name == "decode",
        )  # fmt: skip
        kernel = triton_attention.attention_kernel
        compile_kernel(name, kernel, pointers, scalars, constants, capability, warps, stages)
    pointers = {
        "out": "*bf16",
        "parts": "*fp32",
        "maxima": "*fp32",
        "sums": "*fp32",
        "context_lens": "*i32",
    }
    constants = dict(HEAD_DIM=head_dim, DIM=dim, PADDED=triton_attention.MAX_SPLITS)
    scalars = {"num_splits": "i32"}
    combine = triton_attention.combine_kernel
    compile_kernel("combine", combine, pointers, scalars, constants, capability)
    pointers = dict.fromkeys(["k", "v", "k_cache", "v_cache"], "*bf16") | {"slots": "*i64"}
    scalars = {"k_stride": "i32", "v_stride": "i32"}
    constants = dict(WIDTH=8 * head_dim, PADDED=8 * dim)
    compile_kernel(
        "store_kv", triton_attention.store_kv_kernel, pointers, scalars, constants, capability
    )

    constants = dict(SIZE=16 * 8 * head_dim, PART=2048)
    pointers = {"cache": "*bf16", "pairs": "*i64"}
    compile_kernel(
        "copy_blocks",
        triton_attention.copy_blocks_kernel,
        pointers,
        {"num_blocks": "i32"},
        constants,
        capability,
    )

    def small(name, kernel, pointers, scalars, constants, warps=4):
        pointers = dict.fromkeys(pointers, "*bf16") | (
            {"cos_sin": "*fp32"} if name == "norm_and_rotate" else {}
        )
        compile_kernel(name, kernel, pointers, scalars, constants, capability, warps)

    size = dict(SIZE=1024, PADDED=1024)
    small(
        "add_and_norm",
        triton_ops.add_and_norm_kernel,
        ["out", "x", "update", "weight"],
        {"eps": "fp32"},
        size,
        8,
    )
    constants = dict(HEADS=8 * group, HEAD_DIM=head_dim, PADDED=dim // 2, HAS_NORM=True)
    scalars = {"stride": "i32", "eps": "fp32"}
    small(
        "norm_and_rotate",
        triton_ops.norm_and_rotate_kernel,
        ["qk", "q_weight", "k_weight"],
        scalars,
        constants,
        1,
    )
    small(
        "silu_and_mul", triton_ops.silu_and_mul_kernel, ["out", "x"], {}, dict(SIZE=3072, PART=1024)
    )
    pointers = dict.fromkeys(["out", "seed", "position"], "*i64") | {
        "logits": "*bf16",
        "lowest": "*bf16",
        "temperature": "*fp32",
    }
    constants = dict(VOCAB=151936, TILE=8192)
    scalars = {"row_stride": "i32"}
    kernel = triton_ops.sample_kernel
    compile_kernel("sample", kernel, pointers, scalars, constants, capability, warps=8)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
