"""Compiles the kernels for a GPU that need not be there: prints name, bytes of shared memory, bytes spilled.

Run: python tests/compile_kernels.py [80 | 86 | 90] [head_dim] [query heads per KV head]
"""

import re
import subprocess
import sys
import tempfile

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

from nanovllm.layers import fused, kernels


def compile_kernel(name, kernel, pointers, scalars, constants, capability, warps=4, stages=2):
    signature = {**pointers, **scalars, **dict.fromkeys(constants, "constexpr")}
    signature = {argument: signature[argument] for argument in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    target, options = GPUTarget("cuda", capability, 32), {"num_warps": warps, "num_stages": stages}
    compiled = triton.compile(source, target=target, options=options)
    ptx = compiled.asm["ptx"]
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        arch = re.search(r"\.target (sm_\w+)", ptx)[1]
        command = [get_ptxas(capability).path, "-v", f"-arch={arch}", file.name, "-o", "/dev/null"]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    print(name, compiled.metadata.shared, re.search(r"(\d+) bytes spill stores", report)[1], flush=True)


def main(capability=80, head_dim=128, group=2):
    dim = triton.next_power_of_2(head_dim)
    for name in ("decode", "prefill"):
        tokens, rows, keys, warps, stages = kernels.tile_sizes(dim, group, 2, name == "decode")
        splits = 8 if name == "decode" else 1
        half = dict.fromkeys(["q", "k_cache", "v_cache"], "*bf16")
        pointers = half | {"out": "*fp32" if splits > 1 else "*bf16", "maxima": "*fp32", "sums": "*fp32"}
        pointers |= dict.fromkeys(["cu_seqlens_q", "context_lens", "block_tables"], "*i32")
        scalars = {"scale": "fp32", "q_stride": "i32", "table_stride": "i32", "num_seqs": "i32"}
        constants = dict(
            HEADS=8 * group, KV_HEADS=8, HEAD_DIM=head_dim, BLOCK_SIZE=16,
            TOKENS=tokens, ROWS=rows, KEYS=keys, DIM=dim, SPLITS=splits,
        )  # fmt: skip
        compile_kernel(name, kernels.attention_kernel, pointers, scalars, constants, capability, warps, stages)
    pointers = {"out": "*bf16", "parts": "*fp32", "maxima": "*fp32", "sums": "*fp32", "context_lens": "*i32"}
    constants = dict(HEAD_DIM=head_dim, DIM=dim, SPLITS=8)
    compile_kernel("combine", kernels.combine_kernel, pointers, {}, constants, capability)
    pointers = dict.fromkeys(["k", "v", "k_cache", "v_cache"], "*bf16") | {"slots": "*i64"}
    scalars = {"k_stride": "i32", "v_stride": "i32"}
    constants = dict(WIDTH=8 * head_dim, PADDED=8 * dim)
    compile_kernel("store_kv", kernels.store_kv_kernel, pointers, scalars, constants, capability)

    constants = dict(SIZE=16 * 8 * head_dim, PART=2048)
    pointers = {"cache": "*bf16", "pairs": "*i64"}
    compile_kernel("copy_blocks", kernels.copy_blocks_kernel, pointers, {"num_blocks": "i32"}, constants, capability)

    def small(name, kernel, pointers, scalars, constants, warps=4):
        pointers = dict.fromkeys(pointers, "*bf16") | ({"cos_sin": "*fp32"} if name == "norm_rotate" else {})
        compile_kernel(name, kernel, pointers, scalars, constants, capability, warps)

    size = dict(SIZE=1024, PADDED=1024)
    small("add_rms_norm", fused.add_rms_norm_kernel, ["out", "x", "residual", "weight"], {"eps": "fp32"}, size, 8)
    constants = dict(HEADS=8 * group, HEAD_DIM=head_dim, PADDED=dim // 2, HAS_NORM=True)
    scalars = {"stride": "i32", "eps": "fp32"}
    small("norm_rotate", fused.norm_rotate_kernel, ["qk", "q_weight", "k_weight"], scalars, constants, 1)
    small("silu_and_mul", fused.silu_and_mul_kernel, ["out", "x"], {}, dict(SIZE=3072, PART=1024))
    pointers = dict.fromkeys(["out", "seed", "position"], "*i64") | dict.fromkeys(["logits", "temperature"], "*fp32")
    constants = dict(VOCAB=151936, TILE=8192)
    compile_kernel("sample", fused.sample_kernel, pointers, {}, constants, capability, warps=8)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
