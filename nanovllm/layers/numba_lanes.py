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
CODES = ir.VectorType(ir.IntType(8), 4 * LANES)  # four of each output
TWOS = ir.VectorType(ir.IntType(16), 2 * LANES)  # sums of two products


def add_pair(totals, rows, weights, ts, block, pair):
    """Adds the products of a pair of groups to `totals` fp32 [len(ts), LANES]: of the rows `ts` of
    an Activations, and of one block of a weight.

    The arrays of `weights` are those of one layer. Their shapes are in numba_product.in_lanes.
    """
    codes = weights.codes[block, pair]
    for group, part in ((2 * pair, codes & 15), (2 * pair + 1, codes >> 4)):
        for r, t in enumerate(ts):
            fours = rows.integers[t, group].astype(np.int32).reshape(-1, 1, 4)
            sums = (part * fours).sum((0, 2), np.int32)
            sums -= weights.zeros[block, group] * rows.sums[t, group]
            totals[r] += np.float32(sums) * (rows.scales[t, group] * weights.scales[block, group])


@overload(add_pair)
def _(totals, rows, weights, ts, block, pair):
    def add(totals, rows, weights, ts, block, pair):
        activations = (rows.integers, rows.scales, rows.sums)
        weight = (weights.codes, weights.scales, weights.zeros)
        add_in_vectors(totals, *activations, *weight, ts, block, pair)

    return add


@intrinsic
def add_in_vectors(
    typing_context, totals, integers, row_scales, sums, codes, scales, zeros, ts, block, pair
):
    """Computes `add_pair`."""

    def code(context, builder, signature, arguments):
        def pointer(i, kind, *place):
            """Where a `kind` lies in array i: at this place, and at 0 in its other dimensions."""
            array_type = signature.args[i]
            array = context.make_array(array_type)(context, builder, arguments[i])
            place += (PLACE(0),) * (array_type.ndim - len(place))
            number = cgutils.get_item_pointer(context, builder, array_type, array, place)
            return builder.bitcast(number, kind.as_pointer())

        def load(*where):
            return builder.load(pointer(*where), align=1)

        ts, block, pair = arguments[7:]
        rows = cgutils.unpack_tuple(builder, ts)
        first = builder.shl(pair, PLACE(1))
        groups = (first, builder.add(first, PLACE(1)))
        found = sums_of_products(
            builder,
            pointer(4, CODES, block, pair),
            context.make_array(codes)(context, builder, arguments[4]).shape,
            [[pointer(1, NUMBER, t, group) for t in rows] for group in groups],
        )
        for group, of_rows in zip(groups, found):
            group_zeros = builder.zext(load(6, ZEROS, block, group), SUMS)
            group_scales = load(5, FLOATS, block, group)
            for r, (t, of_row) in enumerate(zip(rows, of_rows)):
                surplus = builder.mul(group_zeros, spread(builder, load(3, NUMBER, t, group)))
                exact = builder.sitofp(builder.sub(of_row, surplus), FLOATS)
                scale = builder.fmul(spread(builder, load(2, FLOAT, t, group)), group_scales)
                total = pointer(0, FLOATS, PLACE(r))
                added = builder.fadd(builder.load(total, align=4), builder.fmul(exact, scale))
                builder.store(added, total, align=4)
        return context.get_dummy_value()

    arrays = (totals, integers, row_scales, sums, codes, scales, zeros)
    return types.void(*arrays, ts, block, pair), code


def sums_of_products(builder, lines, shape, numbers):
    """The sums int32 [LANES] of each group and row. A line has four codes of each output, and four
    integers of a row are one number."""
    found = [[cgutils.alloca_once_value(builder, SUMS(None)) for _ in rows] for rows in numbers]
    with cgutils.for_range(builder, builder.extract_value(shape, 2)) as loop:
        line = builder.load(builder.gep(lines, [loop.index]), align=1)
        low = builder.and_(line, CODES([15] * 4 * LANES))
        high = builder.lshr(line, CODES([4] * 4 * LANES))
        for half, rows, of_rows in zip((low, high), numbers, found):
            for row, of_row in zip(rows, of_rows):
                four = spread(builder, builder.load(builder.gep(row, [loop.index]), align=1))
                products = sums_of_fours(builder, half, builder.bitcast(four, CODES))
                builder.store(builder.add(builder.load(of_row), products), of_row)
    return [[builder.load(of_row) for of_row in of_rows] for of_rows in found]


def sums_of_fours(builder, codes, integers):
    """The sum of four products in each lane. Two products fit in 16 bits: codes are 0 to 15."""

    def call(name, kind, *operands):
        types = ir.FunctionType(kind, [operand.type for operand in operands])
        function = cgutils.get_or_insert_function(builder.module, types, f"llvm.x86.avx2.{name}")
        return builder.call(function, operands)

    if HAS_AVX2:
        twos = call("pmadd.ub.sw", TWOS, codes, integers)
        return call("pmadd.wd", SUMS, twos, TWOS([1] * 2 * LANES))
    wide = ir.VectorType(NUMBER, 4 * LANES)
    products = builder.mul(builder.zext(codes, wide), builder.sext(integers, wide))
    return neighbors_added(builder, neighbors_added(builder, products))


def neighbors_added(builder, vector):
    """The sums of the first two numbers, of the next two, and so on."""
    some = [
        ir.VectorType(NUMBER, vector.type.count // 2)([*range(first, vector.type.count, 2)])
        for first in range(2)
    ]
    return builder.add(*(builder.shuffle_vector(vector, vector, half) for half in some))


def spread(builder, number):
    """The number in each lane."""
    lanes = ir.VectorType(number.type, LANES)
    empty = lanes(ir.Undefined)
    first = builder.insert_element(empty, number, NUMBER(0))
    return builder.shuffle_vector(first, empty, SUMS(None))
