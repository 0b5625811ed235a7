"""The kernels in compiled Python: what Triton's do on a GPU, as plain loops over numbers.

numba compiles them for the processor that there is. With NUMBA_DISABLE_JIT=1, Python runs them as
they stand: slowly, but a print or a debugger shows each number. As in triton_attention.py, a
program of the attention goes through the context of one sequence in tiles of keys, to which the
block table leads, and its softmax is online. Nothing is gathered.

What is a grid on a GPU is a range of programs here, from `begin` to `end`: each of a few threads
gets one, see numba_run.run. A program's sums do not depend on what is beside it. They are in
float32; a 16-bit result is rounded once, at the end.

"""

import logging
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import FunctionType
from zlib import crc32

import llvmlite.binding
import numpy as np
from numba import njit, types
from numba.core import config
from numba.core.caching import FunctionCache, IndexDataCacheFile
from numba.extending import overload

logger = logging.getLogger(__name__)

KEYS = 16  # of a tile
ZERO = np.float32(0)
ONE = np.float32(1)
MINUS_INFINITY = np.float32(-np.inf)
LOG2_E = np.float32(1.4426950408889634)
LN_2 = np.float32(0.6931471805599453)


def use_wide_vectors() -> None:
    """Lets LLVM use vectors of 512 bits. It avoids them on Intel's processors, because the first
    ones lower their clock for them. Those with VNNI do not. Call it before a kernel is compiled."""
    features = llvmlite.binding.get_host_cpu_features()
    is_ours = not (config.CPU_NAME or config.CPU_FEATURES)  # type: ignore[attr-defined]
    if is_ours and features.get("avx512vnni"):
        config.CPU_FEATURES = features.flatten() + ",-prefer-256-bit"  # type: ignore[attr-defined]


use_wide_vectors()

# sums may be reordered, so that they are vectorized; infinities and NaN stay what they are
FAST_MATH = {"reassoc", "contract", "nsz", "arcp"}
inlined = njit(inline="always")


class Cache(FunctionCache):
    """Keeps a compiled kernel on disk. A broken file counts as a missing one; so does a full disk.

    If two processes write at the same time, an index of numba's may lead to the code of the other.
    So kernels made for other numbers have other files, and the types of what is read are compared.
    """

    def __init__(self, function: Callable):
        super().__init__(function)
        variant = crc32(repr(made_of(function, str)).encode())
        name = f"{self._impl.filename_base}.{variant:08x}"
        stamp = self._impl.locator.get_source_stamp()
        self._cache_file = IndexDataCacheFile(self.cache_path, name, stamp)

    def load_overload(self, types, *args):
        try:
            found = super().load_overload(types, *args)
            return found if found is None or found.signature.args == tuple(types) else None
        except Exception as error:  # whatever reading a broken file may raise
            logger.warning("%s: a broken file, compiling again: %r", self.cache_path, error)
            self._write(self.flush)
            return None

    def save_overload(self, *args):
        self._write(super().save_overload, *args)

    def _write(self, function: Callable, *args) -> None:
        try:
            function(*args)
        except OSError as error:
            logger.warning("%s: compiled kernels cannot be kept: %s", self.cache_path, error)

    def _index_key(self, signature, codegen):
        return signature, codegen.magic_tuple(), repr(made_of(self._py_func))


@cache
def checksum(path: str) -> int:
    return crc32(Path(path).read_bytes())


def made_of(function: Callable, stamp: Callable = checksum) -> list:
    """What a kernel's machine code depends on: the numbers for which it was made, and the files of
    all kernels that it calls. numba looks at its own file only, and takes the kernels in a closure
    for others in each process."""
    code = function.__code__
    parts = [code.co_name, stamp(code.co_filename)]
    values = [cell.cell_contents for cell in function.__closure__ or ()]
    for value in [*values, *map(function.__globals__.get, code.co_names)]:
        if hasattr(value, "py_func"):
            parts.append(made_of(value.py_func, stamp))
        elif isinstance(value, FunctionType):  # what it is compiled to is in the same file
            parts.append(stamp(value.__code__.co_filename))
        elif isinstance(value, int | float):
            parts.append(value)
    return parts


def kernel(function: Callable, fastmath: set[str] | bool = FAST_MATH) -> Callable:
    """Compiles the function when it is first called with arrays of these types, and keeps it on
    disk."""
    checksum(function.__code__.co_filename)  # of what is imported: the file may change meanwhile
    # a division by zero is infinite, as in PyTorch; a check of each would prevent vectorizing
    compiled = njit(nogil=True, fastmath=fastmath, error_model="numpy")(function)
    if compiled is not function:  # otherwise NUMBA_DISABLE_JIT is set
        try:
            compiled._cache = Cache(function)  # type: ignore[attr-defined]
        except RuntimeError:  # there is no folder that can be written to
            logger.warning("compiled kernels cannot be kept: set NUMBA_CACHE_DIR to a folder")
    return compiled


# --- numbers ---


@inlined
def of_bfloat16(bits):
    """A bfloat16 is the upper half of a float32."""
    return np.uint32(np.uint32(bits) << np.uint32(16)).view(np.float32)


@inlined
def to_bfloat16(x):
    """Rounds to the nearest bfloat16; ties go to the even one."""
    bits = np.float32(x).view(np.uint32)
    is_odd = (bits >> np.uint32(16)) & np.uint32(1)
    return np.uint16((bits + np.uint32(0x7FFF) + is_odd) >> np.uint32(16))


@inlined
def of_float16(bits):
    """A float16 has 5 bits of exponent and 10 of fraction, a float32 has 8 and 23."""
    shifted = np.uint32(np.uint32(np.uint16(bits) & np.uint16(0x7FFF)) << np.uint32(13))
    # exponents count from another begin
    number = np.uint32(shifted).view(np.float32) * np.float32(2.0**112)
    special = np.uint32(shifted | np.uint32(0x7F800000)).view(np.float32)  # infinite or NaN
    number = special if shifted >= np.uint32(0x7C00 << 13) else number
    return -number if bits < 0 else number


@inlined
def to_float16(x):
    """Rounds to the nearest float16; ties go to the even one."""
    size = abs(np.float32(x))
    bits = np.float32(size).view(np.uint32)
    is_odd = (bits >> np.uint32(13)) & np.uint32(1)
    normal = (bits - np.uint32(112 << 23) + np.uint32(0xFFF) + is_odd) >> np.uint32(13)
    # below 2**-14, its fraction is that of 0.5 + size
    tiny = np.float32(size + np.float32(0.5)).view(np.uint32) - np.uint32(126 << 23)
    result = min(normal, np.uint32(0x7C00)) if size >= np.float32(2.0**-14) else tiny
    result = result if size == size else np.uint32(0x7E00)  # NaN
    sign = (np.float32(x).view(np.uint32) >> np.uint32(16)) & np.uint32(0x8000)
    return np.uint16(result | sign).view(np.int16)


def as_float32(x):
    """The number: a uint16 has the bits of a bfloat16, an int16 those of a float16."""
    if isinstance(x, np.uint16):
        return of_bfloat16(x)
    return of_float16(x) if isinstance(x, np.int16) else x


@overload(as_float32)
def _(x):
    if x == types.uint16:
        return lambda x: of_bfloat16(x)
    return (lambda x: of_float16(x)) if x == types.int16 else (lambda x: x)


def rounded(x, like):
    """The float32 as a number of the type of the other argument."""
    if isinstance(like, np.uint16):
        return to_bfloat16(x)
    return to_float16(x) if isinstance(like, np.int16) else x


@overload(rounded)
def _(x, like):
    if like == types.uint16:
        return lambda x, like: to_bfloat16(x)
    return (lambda x, like: to_float16(x)) if like == types.int16 else (lambda x, like: x)


@inlined
def exp(x):
    """e to the power of x, to 4e-6 of it, but from 1e-38 to 1e38. Unlike np.exp, it is vectorized:
    2 to the power of an integer is an exponent, and that of the rest a polynomial."""
    power = min(max(x * LOG2_E, np.float32(-126)), np.float32(126))
    whole = np.floor(power + np.float32(0.5))
    rest = (power - whole) * LN_2
    result = np.float32(1 / 5040)
    result = result * rest + np.float32(1 / 720)
    result = result * rest + np.float32(1 / 120)
    result = result * rest + np.float32(1 / 24)
    result = result * rest + np.float32(1 / 6)
    result = result * rest + np.float32(1 / 2)
    result = result * rest + ONE
    result = result * rest + ONE
    exponent = (np.int32(whole) + np.int32(127)) << np.int32(23)
    return result * np.int32(exponent).view(np.float32)


# --- kernels ---


@inlined
def rescale(numbers, scales, block, kv_head, first, last):
    """Multiplies a tile's scores, or weights, by the scales of its keys, or values."""
    for i in range(KEYS):
        numbers[i] *= scales[block, min(first + i, last), kv_head]


@kernel
def store_kv_kernel(k_cache, v_cache, k, v, slots, begin, end):
    """Program t copies the key and value of token t into its slot."""
    block_size = k_cache.shape[1]
    num_kv_heads, head_dim = k.shape[1:]
    for t in range(begin, end):
        block = slots[t] // block_size
        offset = slots[t] % block_size
        for head in range(num_kv_heads):  # a slice would take two seconds more to compile
            for i in range(head_dim):
                k_cache[block, offset, head, i] = k[t, head, i]
                v_cache[block, offset, head, i] = v[t, head, i]


@cache
def decode_kernel(HEAD_DIM: int, GROUP: int) -> Callable:
    """A kernel for heads of this size, and this many query heads for each KV head.

    It is a function with the decorator `kernel`, called by numba_ops.paged_attention with (out, q,
    keys, values, context_lens, cu_blocks, block_tables, scale, heads, begin, end). It computes the
    programs from `begin` to `end`. A program has `heads` KV heads of one sequence: those of program
    p begin at p % parts * heads in sequence p // parts, with parts = num_kv_heads / heads. Softmax
    is online, so scores of any size are right. Numbers may have 16 bits: read them with as_float32,
    write the sums once, with rounded. Slots behind a context may hold NaN. Rows of int8 have four
    bytes more, which are their scale: see topics/quantization/kv_cache.py.
    """

    @kernel
    def decode(
        out,  # [B, num_heads, HEAD_DIM], and so is q
        q,
        keys,  # [num_blocks, block_size, num_kv_heads, row_size], and so are values
        values,
        context_lens,
        cu_blocks,
        block_tables,
        scale,
        heads,  # KV heads of a program: all, or 1
        begin,
        end,
    ):
        """Program (sequence, KV heads): the last token of a sequence over its whole context."""
        block_size, num_kv_heads, row_size = keys.shape[1:]
        key_scales = keys.view(np.float32)[..., -1]  # only int8 has them
        value_scales = values.view(np.float32)[..., -1]
        parts = num_kv_heads // heads
        num_rows = heads * GROUP
        result = np.empty((num_rows, HEAD_DIM), np.float32)
        maximum = np.empty(num_rows, np.float32)
        total = np.empty(num_rows, np.float32)
        scores = np.empty(KEYS, np.float32)
        for program in range(begin, end):
            seq = program // parts
            first_head = program % parts * num_rows
            context = context_lens[seq]
            result[:] = 0
            maximum[:] = -np.inf
            total[:] = 0
            for at in range(0, context, block_size):
                block = block_tables[cu_blocks[seq] + at // block_size]
                last = min(block_size, context - at) - 1
                for first in range(0, last + 1, KEYS):
                    for row in range(num_rows):
                        head = first_head + row
                        kv_head = head // GROUP
                        # four keys at a time: their sums are independent. The last one stands in
                        # for those behind it, which the mask hides
                        for i in range(0, KEYS, 4):
                            i0 = min(first + i, last)
                            i1 = min(first + i + 1, last)
                            i2 = min(first + i + 2, last)
                            i3 = min(first + i + 3, last)
                            s0 = s1 = s2 = s3 = ZERO
                            for d in range(HEAD_DIM):
                                x = as_float32(q[seq, head, d])
                                s0 += x * as_float32(keys[block, i0, kv_head, d])
                                s1 += x * as_float32(keys[block, i1, kv_head, d])
                                s2 += x * as_float32(keys[block, i2, kv_head, d])
                                s3 += x * as_float32(keys[block, i3, kv_head, d])
                            scores[i] = s0
                            scores[i + 1] = s1
                            scores[i + 2] = s2
                            scores[i + 3] = s3
                        if row_size > HEAD_DIM:
                            rescale(scores, key_scales, block, kv_head, first, last)
                        new_maximum = maximum[row]
                        for i in range(KEYS):
                            score = scores[i] * scale if first + i <= last else MINUS_INFINITY
                            scores[i] = score
                            new_maximum = max(new_maximum, score)

                        # what was summed up so far shrinks if a larger score has come
                        shrink = exp(maximum[row] - new_maximum)
                        maximum[row] = new_maximum
                        weights = ZERO
                        for i in range(KEYS):
                            weight = exp(scores[i] - new_maximum)
                            scores[i] = weight
                            weights += weight
                        total[row] = total[row] * shrink + weights
                        if row_size > HEAD_DIM:
                            rescale(scores, value_scales, block, kv_head, first, last)
                        for d in range(HEAD_DIM):
                            result[row, d] *= shrink
                        for i in range(0, KEYS, 4):
                            i0 = min(first + i, last)
                            i1 = min(first + i + 1, last)
                            i2 = min(first + i + 2, last)
                            i3 = min(first + i + 3, last)
                            for d in range(HEAD_DIM):
                                v0 = scores[i] * as_float32(values[block, i0, kv_head, d])
                                v1 = scores[i + 1] * as_float32(values[block, i1, kv_head, d])
                                v2 = scores[i + 2] * as_float32(values[block, i2, kv_head, d])
                                v3 = scores[i + 3] * as_float32(values[block, i3, kv_head, d])
                                result[row, d] += (v0 + v1) + (v2 + v3)
            for row in range(num_rows):
                head = first_head + row
                for d in range(HEAD_DIM):
                    out[seq, head, d] = rounded(result[row, d] / total[row], out[seq, head, d])

    return decode


@kernel
def add_and_norm_kernel(out, residual, x, weight, eps, begin, end):
    """Program t: residual[t] += x[t], then its RMSNorm."""
    size = x.shape[1]
    for t in range(begin, end):
        squares = ZERO
        for i in range(size):
            total = as_float32(residual[t, i]) + as_float32(x[t, i])
            residual[t, i] = rounded(total, x[t, i])
            number = as_float32(residual[t, i])
            squares += number * number
        scale = ONE / np.sqrt(squares / np.float32(size) + eps)
        for i in range(size):
            normed = as_float32(residual[t, i]) * scale * as_float32(weight[i])
            out[t, i] = rounded(normed, x[t, i])


@kernel
def norm_and_rotate_kernel(q, k, v, qkv, q_weight, k_weight, cos_sin, eps, has_norm, begin, end):
    """Program t: the heads of token t. Each number in the first half of a head is rotated with one
    in the second."""
    num_heads = q.shape[1]
    num_kv_heads, head_dim = k.shape[1:]
    half = head_dim // 2
    numbers = np.empty(head_dim, np.float32)
    for t in range(begin, end):
        for head in range(num_heads + num_kv_heads):
            squares = ZERO
            for i in range(head_dim):
                numbers[i] = as_float32(qkv[t, head, i])
                squares += numbers[i] * numbers[i]
            if has_norm:
                scale = ONE / np.sqrt(squares / np.float32(head_dim) + eps)
                weight = q_weight if head < num_heads else k_weight
                for i in range(head_dim):
                    numbers[i] *= scale * as_float32(weight[i])
            rotated = q[t, head] if head < num_heads else k[t, head - num_heads]
            for i in range(half):
                cos = cos_sin[t, i]
                sin = cos_sin[t, half + i]
                first = numbers[i] * cos - numbers[half + i] * sin
                second = numbers[half + i] * cos + numbers[i] * sin
                rotated[i] = rounded(first, rotated[i])
                rotated[half + i] = rounded(second, rotated[i])
        for head in range(num_kv_heads):
            for i in range(head_dim):
                v[t, head, i] = qkv[t, num_heads + num_kv_heads + head, i]


@kernel
def silu_and_mul_kernel(out, x, begin, end):
    """Program t: row t."""
    size = out.shape[1]
    for t in range(begin, end):
        for i in range(size):
            gate = as_float32(x[t, i])
            up = as_float32(x[t, size + i])
            out[t, i] = rounded(gate / (ONE + exp(-gate)) * up, x[t, i])
