"""Virtual memory: addresses are reserved, and pages of physical memory are mapped to them.

vAttention (Prabhu et al., ASPLOS 2025, section 5) keeps the keys of a sequence contiguous this way:
the page table of the processor, or of the GPU, does what a block table does in software. A page
that is mapped to two addresses is seen at both.
"""

import ctypes
import errno
import mmap
import os
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

MAP_FIXED = 0x10  # in place of what is there
MAP_NORESERVE = 0x4000
FAILED = 2**64 - 1  # -1, as an address
MAPPINGS = Path("/proc/self/maps")  # of this process, one in a line


class VirtualMemory(Protocol):
    """Physical memory, and the addresses to which parts of it are mapped. All addresses, offsets
    and sizes are multiples of `page_bytes`."""

    page_bytes: int

    def reserve(self, num_bytes: int) -> int:
        """Reserves a range of addresses and returns its start. It takes no memory, and nothing is
        mapped. Raises OSError if there are not enough addresses."""

    def map(self, address: int, offset: int, num_bytes: int) -> None:
        """Maps physical memory from `offset` on to an address, in place of the earlier mapping."""

    def view(self, address: int, num_bytes: int) -> Tensor:
        """[num_bytes] uint8. The memory is freed when no view is left."""

    def wait(self) -> None:
        """Waits until no kernel runs that might read mapped memory. Only then may a mapping
        change."""


class System(NamedTuple):
    """What a device offers."""

    page_bytes: int
    num_mappings: int  # that there may be at a time
    new_memory: Callable[[int], VirtualMemory]  # of this number of bytes


def system_of(device: torch.device) -> System:
    """Raises ValueError if the system or the driver cannot map memory."""
    refused = "attention_backend='vattention' is not allowed: it needs"
    if device.type == "cpu":
        if not (hasattr(os, "memfd_create") and MAPPINGS.exists()):
            raise ValueError(f"{refused} memfd_create and /proc, which Linux has, or a GPU")
        num_mappings = mappings_free() * 3 // 4  # other code needs mappings, too
        return System(mmap.PAGESIZE, num_mappings, HostMemory)
    try:
        from cuda.bindings import driver

        page_bytes = page_bytes_of(driver, device)
    except (ImportError, OSError, RuntimeError) as error:
        raise ValueError(f"{refused} cuda-bindings and a driver that maps memory") from error
    new_memory = partial(CudaMemory, device=device, driver=driver)
    return System(page_bytes, 2**62, new_memory)


def mappings_free() -> int:
    """How many more mappings the system allows this process. Neighbors count as one mapping."""
    limit = int(Path("/proc/sys/vm/max_map_count").read_bytes())
    num_mappings = MAPPINGS.read_bytes().count(b"\n")
    return limit - num_mappings


def ending_of(memory: object) -> ExitStack:
    """What is done when the memory is no longer used, the last first. Not when the program ends:
    other threads may still compute, and the system takes all back."""
    ending = ExitStack()
    finalizer = weakref.finalize(memory, ending.close)
    finalizer.atexit = False
    return ending


# --- on a CPU ---


def libc() -> ctypes.CDLL:
    """The C library, with types. Python's own mmap cannot choose the address."""
    library = ctypes.CDLL(None, use_errno=True)
    pointer, number = ctypes.c_void_p, ctypes.c_int
    library.mmap.restype = pointer
    library.mmap.argtypes = [pointer, ctypes.c_size_t, number, number, number, ctypes.c_long]
    library.munmap.argtypes = [pointer, ctypes.c_size_t]
    return library


class HostMemory:
    """VirtualMemory on Linux: parts of a file without a name (memfd_create) are mapped. Where no
    part is mapped, the system shows its page of zeros."""

    page_bytes = mmap.PAGESIZE

    def __init__(self, num_bytes: int):
        installed = os.sysconf("SC_PHYS_PAGES") * self.page_bytes
        if num_bytes > installed:  # the system would find out when it is too late
            raise OSError(errno.ENOMEM, f"the machine has {installed:,} bytes")
        self.libc = libc()
        self.file = os.memfd_create("nanovllm")
        self.ending = ending_of(self)
        self.ending.callback(os.close, self.file)
        os.ftruncate(self.file, num_bytes)

    def _mmap(self, address: int | None, num_bytes: int, protection: int, flags: int, *file) -> int:
        found = self.libc.mmap(address, num_bytes, protection, flags, *file)
        if found == FAILED:
            number = ctypes.get_errno()
            raise OSError(number, f"{os.strerror(number)} (mmap, {num_bytes:,} bytes)")
        return found

    def reserve(self, num_bytes: int) -> int:
        flags = MAP_NORESERVE | mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        address = self._mmap(None, num_bytes, mmap.PROT_READ, flags, -1, 0)
        self.ending.callback(self.libc.munmap, address, num_bytes)
        return address

    def map(self, address: int, offset: int, num_bytes: int) -> None:
        access = mmap.PROT_READ | mmap.PROT_WRITE
        flags = mmap.MAP_SHARED | MAP_FIXED
        self._mmap(address, num_bytes, access, flags, self.file, offset)

    def view(self, address: int, num_bytes: int) -> Tensor:
        memory: Any = (ctypes.c_char * num_bytes).from_address(address)
        memory.owner = self  # the tensor refers to `memory`, and `memory` to this object
        return torch.frombuffer(memory, dtype=torch.uint8)

    def wait(self) -> None:
        """Does nothing: an operation on a CPU has ended when it returns."""


# --- on a GPU ---


class CudaMemory:
    """VirtualMemory of a GPU, through calls of the CUDA driver. Each page has a handle.
    `driver` is the module cuda.bindings.driver. The device must be the current one."""

    def __init__(self, num_bytes: int, device: torch.device, driver: Any):
        self.driver = driver
        self.device = device
        self.property = device_memory(driver, device)
        self.page_bytes = page_bytes_of(driver, device)
        self.handles: list[Any] = []
        self.mapped: set[int] = set()  # addresses of pages where something is, or may be
        self.ending = ending_of(self)
        for _ in range(num_bytes // self.page_bytes):
            handle = done(driver, driver.cuMemCreate(self.page_bytes, self.property, 0))
            self.handles.append(handle)
            self.ending.callback(driver.cuMemRelease, handle)

    def reserve(self, num_bytes: int) -> int:
        found = self.driver.cuMemAddressReserve(num_bytes, 0, 0, 0)
        address = int(done(self.driver, found))
        self.ending.callback(self.driver.cuMemAddressFree, address, num_bytes)
        self.ending.callback(unmap_all, self.driver, self.device, self.mapped, self.page_bytes)
        return address

    def map(self, address: int, offset: int, num_bytes: int) -> None:
        first = offset // self.page_bytes
        for i in range(num_bytes // self.page_bytes):
            self._show(address + i * self.page_bytes, self.handles[first + i])
        access = self.driver.CUmemAccessDesc()
        access.location = self.property.location
        access.flags = self.driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        done(self.driver, self.driver.cuMemSetAccess(address, num_bytes, [access], 1))

    def _show(self, page: int, handle: Any) -> None:
        if page in self.mapped:
            # refused if an interrupted change has done it already
            self.driver.cuMemUnmap(page, self.page_bytes)
        self.mapped.add(page)  # before the call: Ctrl-C may come after it
        done(self.driver, self.driver.cuMemMap(page, self.page_bytes, 0, handle, 0))

    def view(self, address: int, num_bytes: int) -> Tensor:
        bytes_there = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }
        # the tensor refers to `memory`, and `memory` to this object
        memory = SimpleNamespace(owner=self, __cuda_array_interface__=bytes_there)
        return torch.as_tensor(memory, device=self.device)

    def wait(self) -> None:
        torch.cuda.synchronize(self.device)


def device_memory(driver: Any, device: torch.device) -> Any:
    """The CUDA driver's property for memory on this device."""
    found = driver.CUmemAllocationProp()
    found.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    found.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    found.location.id = device.index
    return found


def page_bytes_of(driver: Any, device: torch.device) -> int:
    """The smallest page of this device: 2 MiB on today's GPUs."""
    flags = driver.CUmemAllocationGranularity_flags
    smallest = flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
    found = driver.cuMemGetAllocationGranularity(device_memory(driver, device), smallest)
    return done(driver, found)


def done(driver: Any, answer: tuple) -> Any:
    """The results of a call of the driver, without its error. Raises OSError if the call failed."""
    error, *values = answer
    if error != driver.CUresult.CUDA_SUCCESS:
        raise OSError(f"the CUDA driver refuses: {error.name}")
    return values[0] if values else None


def unmap_all(driver: Any, device: torch.device, mapped: set[int], page_bytes: int) -> None:
    """Goes on after an error: after an interrupt, a page may have no mapping."""
    torch.cuda.synchronize(device)  # a kernel may still read them
    while mapped:
        page = mapped.pop()
        driver.cuMemUnmap(page, page_bytes)
