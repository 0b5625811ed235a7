"""Lanes: products with weights in 4 bits, for eight outputs at a time.

A vector has a lane for each output, so no sum crosses lanes. AVX2 multiplies 32 codes with 32
integers and adds up each four of them in two instructions. LLVM does not find these in plain loops,
so `add_in_vectors` writes them down. `add_pair` says the same in Python.
"""

import llvmlite.binding
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, overload

LANES = 8  # outputs: a block of a weight
HAS_AVX2 = bool(llvmlite.binding.get_host_cpu_features().get("avx2"))

NUMBER = ir.IntType(32)
PLACE = ir.IntType(64)
FLOAT = ir.FloatType()
SUMS = ir.VectorType(NUMBER, LANES)
FLOATS = ir.VectorType(FLOAT, LANES)
ZEROS = ir.VectorType(ir.IntType(8), LANES)
LINE = ir.VectorType(ir.IntType(8), 4 * LANES)  # four codes of each output
TWOS = ir.VectorType(ir.IntType(16), 2 * LANES)  # sums of two products
WIDE = ir.VectorType(NUMBER, 4 * LANES)


def add_pair(totals, rows, weights, ts, layer, block, pair):
    """Adds the products of a pair of groups to `totals` fp32 [len(ts), LANES]: of the rows `ts` of
    an Activations, and of one block of a layer's weight.

    The shapes of a layer's arrays are in numba_product.in_lanes.
    """
    codes = weights.codes[layer, block, pair]
    for group, part in ((2 * pair, codes & 15), (2 * pair + 1, codes >> 4)):
        for r, t in enumerate(ts):
            fours = rows.integers[t, group].astype(np.int32).reshape(-1, 1, 4)
            sums = (part * fours).sum((0, 2), np.int32)
            sums -= weights.zeros[layer, block, group] * rows.sums[t, group]
            scales = weights.scales[layer, block, group] * rows.scales[t, group]
            totals[r] += np.float32(sums) * scales


@overload(add_pair)
def _(totals, rows, weights, ts, layer, block, pair):
    def add(totals, rows, weights, ts, layer, block, pair):
        of_rows = (rows.integers, rows.scales, rows.sums)
        of_weights = (weights.codes, weights.scales, weights.zeros)
        add_in_vectors(totals, *of_rows, *of_weights, ts, layer, block, pair)

    return add


@intrinsic
def add_in_vectors(
    typing_context,
    totals,
    integers,
    row_scales,
    row_sums,
    codes,
    scales,
    zeros,
    ts,
    layer,
    block,
    pair,
):
    """Computes `add_pair`."""

    def code(context, builder, signature, arguments):
        arrays = [
            Numbers(context, builder, array_type, array)
            for array_type, array in zip(signature.args[:7], arguments)
        ]
        totals, integers, row_scales, row_sums, codes, scales, zeros = arrays
        ts, layer, block, pair = arguments[7:]
        rows = cgutils.unpack_tuple(builder, ts)
        first = builder.shl(pair, PLACE(1))
        second = builder.add(first, PLACE(1))
        groups = (first, second)
        lines = codes.pointer(LINE, layer, block, pair)
        num_lines = builder.extract_value(codes.array.shape, 3)
        numbers = [[integers.pointer(NUMBER, t, group) for t in rows] for group in groups]
        sums = sums_of_products(builder, lines, num_lines, numbers)
        for group, of_rows in zip(groups, sums):
            group_zeros = builder.zext(zeros.load(ZEROS, layer, block, group), SUMS)
            group_scales = scales.load(FLOATS, layer, block, group)
            for r, t in enumerate(rows):
                row_sum = spread(builder, row_sums.load(NUMBER, t, group))
                row_scale = spread(builder, row_scales.load(FLOAT, t, group))
                surplus = builder.mul(group_zeros, row_sum)
                exact = builder.sub(of_rows[r], surplus)
                number = builder.sitofp(exact, FLOATS)
                scale = builder.fmul(group_scales, row_scale)
                added = builder.fmul(number, scale)
                place = totals.pointer(FLOATS, PLACE(r))
                total = builder.load(place, align=4)
                builder.store(builder.fadd(total, added), place, align=4)
        return context.get_dummy_value()

    arrays = (totals, integers, row_scales, row_sums, codes, scales, zeros)
    return types.void(*arrays, ts, layer, block, pair), code


class Numbers:
    """An array, from which vectors are read."""

    def __init__(self, context, builder, array_type, array):
        self.context = context
        self.builder = builder
        self.array_type = array_type
        self.array = context.make_array(array_type)(context, builder, array)

    def pointer(self, kind, *place):
        """Where a `kind` lies: at this place, and at 0 in the other dimensions."""
        place += (PLACE(0),) * (self.array_type.ndim - len(place))
        arguments = (self.array_type, self.array, place)
        number = cgutils.get_item_pointer(self.context, self.builder, *arguments)
        return self.builder.bitcast(number, kind.as_pointer())

    def load(self, kind, *place):
        return self.builder.load(self.pointer(kind, *place), align=1)


def sums_of_products(builder, lines, num_lines, numbers):
    """The sums [group][row] of a pair, int32 [LANES] each.

    `lines` has four codes of each output in a line. `numbers` has a pointer [group][row] to the
    integers, of which four are one number here.
    """
    zeros = SUMS(None)
    sums = [[cgutils.alloca_once_value(builder, zeros) for _ in rows] for rows in numbers]
    with cgutils.for_range(builder, num_lines) as loop:
        place = builder.gep(lines, [loop.index])
        line = builder.load(place, align=1)
        fifteens = LINE([15] * 4 * LANES)
        fours = LINE([4] * 4 * LANES)
        low = builder.and_(line, fifteens)
        high = builder.lshr(line, fours)
        halves = (low, high)
        for codes, rows, of_rows in zip(halves, numbers, sums):
            for row, sum_of_row in zip(rows, of_rows):
                place = builder.gep(row, [loop.index])
                four = builder.load(place, align=1)
                everywhere = spread(builder, four)
                integers = builder.bitcast(everywhere, LINE)
                added = sums_of_fours(builder, codes, integers)
                total = builder.load(sum_of_row)
                builder.store(builder.add(total, added), sum_of_row)
    return [[builder.load(sum_of_row) for sum_of_row in of_rows] for of_rows in sums]


def sums_of_fours(builder, codes, integers):
    """The sum of four products in each lane. Two products fit in 16 bits: codes are 0 to 15."""
    if HAS_AVX2:
        ones = TWOS([1] * 2 * LANES)
        twos = avx2(builder, "pmadd.ub.sw", TWOS, codes, integers)
        return avx2(builder, "pmadd.wd", SUMS, twos, ones)
    wide_codes = builder.zext(codes, WIDE)
    wide_integers = builder.sext(integers, WIDE)
    products = builder.mul(wide_codes, wide_integers)
    twos = neighbors_added(builder, products)
    return neighbors_added(builder, twos)


def avx2(builder, name, kind, *operands):
    """The result of an instruction."""
    operand_types = [operand.type for operand in operands]
    function_type = ir.FunctionType(kind, operand_types)
    name = f"llvm.x86.avx2.{name}"
    function = cgutils.get_or_insert_function(builder.module, function_type, name)
    return builder.call(function, operands)


def neighbors_added(builder, vector):
    """The sums of the first two numbers, of the next two, and so on."""
    count = vector.type.count
    half = ir.VectorType(NUMBER, count // 2)
    evens = half([*range(0, count, 2)])
    odds = half([*range(1, count, 2)])
    first = builder.shuffle_vector(vector, vector, evens)
    second = builder.shuffle_vector(vector, vector, odds)
    return builder.add(first, second)


def spread(builder, number):
    """The number in each lane."""
    lanes = ir.VectorType(number.type, LANES)
    empty = lanes(ir.Undefined)
    first = builder.insert_element(empty, number, NUMBER(0))
    return builder.shuffle_vector(first, empty, SUMS(None))
