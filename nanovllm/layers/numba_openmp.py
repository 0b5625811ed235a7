"""Compiled functions on the threads of PyTorch's OpenMP.

Such threads stay awake for a while after an operation. Those of a pool sleep, and often wake up on
the processor of the thread that calls them: then two threads take as long as one.
"""

import ctypes

import llvmlite.binding
import torch
from llvmlite import ir
from numba import types
from numba.core.cgutils import alloca_once_value, get_or_insert_function, unpack_tuple
from numba.extending import intrinsic

BYTES = ir.IntType(8).as_pointer()
INT = ir.IntType(32)
NUMBER = ir.IntType(64)
TASK = ir.FunctionType(ir.VoidType(), [BYTES])
# of GCC's library; LLVM's has them, too
FUNCTIONS = {
    "GOMP_parallel": ir.FunctionType(ir.VoidType(), [TASK.as_pointer(), BYTES, INT, INT]),
    "omp_get_thread_num": ir.FunctionType(INT, []),
    "omp_get_num_threads": ir.FunctionType(INT, []),
}


def find_openmp() -> bool:
    """Lets compiled code call the OpenMP library that PyTorch has loaded. False if there is
    none."""
    try:
        library = ctypes.CDLL(torch._C.__file__)  # and what it depends on
        for name in FUNCTIONS:
            address = ctypes.cast(getattr(library, name), ctypes.c_void_p)
            llvmlite.binding.add_symbol(name, address.value)
    except (AttributeError, OSError):
        return False
    return True


@intrinsic
def in_team(typing_context, function, arguments, num_threads):
    """Calls function(*arguments, thread, size) in each thread of a team, all at the same time, and
    returns when all have returned. `size` may be less than `num_threads`: OpenMP decides."""
    numbers = (types.int64, types.int64)
    called = function.get_call_type(typing_context, (*arguments.types, *numbers), {})

    def code(context, builder, signature, values):
        compiled = function.dispatcher.get_compile_result(called)
        context.active_code_library.add_linking_library(compiled.library)
        module = builder.module
        gomp_parallel, *own_numbers = [
            get_or_insert_function(module, kind, name) for name, kind in FUNCTIONS.items()
        ]
        place = alloca_once_value(builder, values[1])

        task = ir.Function(module, TASK, f"{compiled.fndesc.mangled_name}.task")
        task.linkage = "internal"
        inside = ir.IRBuilder(task.append_basic_block())
        loaded = inside.load(inside.bitcast(task.args[0], place.type))
        given = unpack_tuple(inside, loaded)
        given += [inside.sext(inside.call(number, []), NUMBER) for number in own_numbers]
        context.call_internal_no_propagate(inside, compiled.fndesc, called, given)
        inside.ret_void()

        size = builder.trunc(values[2], INT)
        builder.call(gomp_parallel, [task, builder.bitcast(place, BYTES), size, INT(0)])
        return context.get_dummy_value()

    return types.void(function, arguments, num_threads), code
