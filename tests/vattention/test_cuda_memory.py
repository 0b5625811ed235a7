"""CudaMemory, without a GPU: its calls against a driver that keeps the rules of CUDA's documentation and counts what it
has given out. Whether a GPU's driver keeps them, too, test_gpu.py asks.

Run: pytest tests/vattention/test_cuda_memory.py
"""

import gc
import sys
from enum import IntEnum
from types import ModuleType, SimpleNamespace

import pytest
import torch
from garbage import look_at_little_garbage
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm.config import Limits
from nanovllm.layers.kv_cache import CacheShape
from nanovllm.vattention.cache import PageTable, VirtualShape
from nanovllm.vattention.memory import CudaMemory, System, page_bytes_of, system_of

assert look_at_little_garbage  # a fixture
pytestmark = pytest.mark.usefixtures("little_garbage")
PAGE = 2**21
DEVICE = torch.device("cuda", 0)


class CUresult(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2


class Driver:
    """Of a device with `num_pages` pages. Refuses what the documentation forbids: to map where something is mapped, to
    unmap what is not a whole mapping, to free addresses in use, to grant access to what is not mapped."""

    CUresult = CUresult
    CUmemAccessDesc = SimpleNamespace
    CUmemAllocationType = SimpleNamespace(CU_MEM_ALLOCATION_TYPE_PINNED=1)
    CUmemLocationType = SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE=1)
    CUmemAccess_flags = SimpleNamespace(CU_MEM_ACCESS_FLAGS_PROT_READWRITE=3)
    CUmemAllocationGranularity_flags = SimpleNamespace(CU_MEM_ALLOC_GRANULARITY_MINIMUM=0)

    def __init__(self, num_pages):
        self.num_pages = num_pages
        self.handles = set()
        self.num_handles = 0
        self.ranges = {}
        self.mapped = {}  # page -> handle
        self.accessible = set()
        self.next_address = 7 * PAGE
        self.num_calls = 0
        self.countdown = 10**9  # the n-th call from now on is interrupted

    def CUmemAllocationProp(self):
        return SimpleNamespace(location=SimpleNamespace())

    def count(self):
        self.num_calls += 1
        self.countdown -= 1
        if self.countdown == 0:
            raise KeyboardInterrupt

    def cuMemGetAllocationGranularity(self, prop, option):
        assert prop.location.id == 0 and prop.type == prop.location.type == 1 and option == 0
        return CUresult.CUDA_SUCCESS, PAGE

    def cuMemCreate(self, size, prop, flags):
        assert size == PAGE and flags == 0
        if len(self.handles) == self.num_pages:
            return CUresult.CUDA_ERROR_OUT_OF_MEMORY, None
        self.num_handles += 1
        self.handles.add(self.num_handles)
        return CUresult.CUDA_SUCCESS, self.num_handles

    def cuMemAddressReserve(self, size, alignment, address, flags):
        assert size % PAGE == alignment == address == flags == 0
        found = self.next_address
        self.next_address += size + PAGE
        self.ranges[found] = size
        return CUresult.CUDA_SUCCESS, found

    def cuMemMap(self, address, size, offset, handle, flags):
        self.count()
        assert size == PAGE and offset == flags == 0 and handle in self.handles
        assert any(begin <= address < begin + size for begin, size in self.ranges.items())
        if address in self.mapped:
            return (CUresult.CUDA_ERROR_INVALID_VALUE,)
        self.mapped[address] = handle
        return (CUresult.CUDA_SUCCESS,)

    def cuMemSetAccess(self, address, size, descriptions, count):
        self.count()
        pages = range(address, address + size, PAGE)
        assert count == len(descriptions) == 1 and descriptions[0].flags == 3
        if not all(page in self.mapped for page in pages):
            return (CUresult.CUDA_ERROR_INVALID_VALUE,)
        self.accessible |= set(pages)
        return (CUresult.CUDA_SUCCESS,)

    def cuMemUnmap(self, address, size):
        self.count()
        if self.mapped.pop(address, None) is None or size != PAGE:
            return (CUresult.CUDA_ERROR_INVALID_VALUE,)
        self.accessible.discard(address)
        return (CUresult.CUDA_SUCCESS,)

    def cuMemAddressFree(self, address, size):
        assert self.ranges.pop(address) == size
        assert not any(address <= page < address + size for page in self.mapped)
        return (CUresult.CUDA_SUCCESS,)

    def cuMemRelease(self, handle):
        self.handles.remove(handle)
        return (CUresult.CUDA_SUCCESS,)

    def has_all_back(self):
        return not (self.handles or self.ranges or self.mapped)


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    """Nothing runs on it. Returns the devices that were waited for."""
    waited = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    return waited


class Memory(CudaMemory):
    """A view is memory that no kernel reads: there is no GPU."""

    def view(self, address, num_bytes):
        return torch.empty(num_bytes, dtype=torch.uint8)


def test_the_page_of_a_device():
    assert page_bytes_of(Driver(0), DEVICE) == PAGE


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a driver")
def test_without_a_driver():
    problem = "attention_backend='vattention' is not allowed: it needs cuda-bindings and a driver"
    with pytest.raises(ValueError, match=problem):
        system_of(DEVICE)


def test_a_driver_that_refuses(monkeypatch):
    driver = Driver(0)
    refused = (CUresult.CUDA_ERROR_INVALID_VALUE, None)
    monkeypatch.setattr(driver, "cuMemGetAllocationGranularity", lambda *args: refused)
    modules = {"cuda": ModuleType("cuda"), "cuda.bindings": ModuleType("cuda.bindings")}
    modules["cuda.bindings"].driver = driver
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    with pytest.raises(ValueError, match="it needs cuda-bindings and a driver that maps memory"):
        system_of(DEVICE)
    monkeypatch.undo()


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["map", "unmap", "fill"]),
            *[st.integers(0, 9), st.integers(0, 5), st.integers(1, 6)],
        ),
        max_size=20,
    ),
    st.integers(1, 60),
)
@settings(max_examples=50, deadline=None)
def test_every_page_shows_what_was_mapped_last(actions, every):
    """Whatever is interrupted is done again, as the page table does it."""
    driver = Driver(7)
    memory = Memory(6 * PAGE, DEVICE, driver)
    *handles, zeros = memory.handles
    address = memory.reserve(16 * PAGE)
    expected = [None] * 16
    for kind, place, page, length in actions:
        length = min(length, 6 - page)
        begin, size = address + place * PAGE, length * PAGE
        driver.countdown = every
        for _ in range(2):
            try:
                if kind == "map":
                    memory.map(begin, page * PAGE, size)
                elif kind == "unmap":
                    memory.unmap(begin, size)
                else:
                    memory.fill(begin, size)
                break
            except KeyboardInterrupt:
                driver.countdown = 10**9
        for i in range(length):
            shown = {"map": handles[page + i], "unmap": None, "fill": zeros}
            expected[place + i] = shown[kind]
        assert [driver.mapped.get(address + i * PAGE) for i in range(16)] == expected
        seen = {address + i * PAGE for i in range(16) if expected[i] is not None}
        assert seen <= driver.accessible
    driver.countdown = 10**9
    del memory
    assert driver.has_all_back()


@pytest.mark.parametrize("num_seqs", [1, 256])
def test_an_engine_with_long_rows_begins_with_few_calls(num_seqs):
    """As many as blocks are shown. Qwen3-0.6B with 40,960 tokens and 256 rows has 655,360 pages of addresses."""
    driver = Driver(2000)
    system = System(PAGE, 2**62, lambda num_bytes: Memory(num_bytes, DEVICE, driver))
    shape = CacheShape(28, 16, 8, 128, torch.bfloat16)
    limits = Limits(max_model_len=40_960, max_num_seqs=256, max_num_batched_tokens=8192)
    shape = VirtualShape(shape, limits, system)
    assert shape.pieces.num_rows * shape.row_blocks * shape.block_bytes // PAGE == 655_360
    table = PageTable(shape, 1000, shape.system.new_memory(1000 * shape.block_bytes))
    assert driver.num_calls < 10  # for the page of zeros
    rows = table.show([[i, i + 1, i + 2] for i in range(num_seqs)], [0] * num_seqs)
    assert rows == [*range(num_seqs)]
    table.fill(slice(0, num_seqs), 3 * 16)
    assert driver.num_calls < 10 + 2 * 3 * num_seqs  # each page is mapped, and made accessible
    del table
    gc.collect()
    assert driver.has_all_back() and driver.num_calls < 20 + 3 * 3 * num_seqs


def test_memory_is_given_back_when_no_kernel_reads_it(no_gpu):
    driver = Driver(4)
    memory = Memory(3 * PAGE, DEVICE, driver)
    memory.wait()
    assert no_gpu == [DEVICE] and not driver.has_all_back()
    del memory
    gc.collect()
    assert no_gpu == [DEVICE] * 2 and driver.has_all_back()


def test_a_device_without_so_much_memory_gets_all_back():
    driver = Driver(5)
    with pytest.raises(OSError, match="the CUDA driver refuses: CUDA_ERROR_OUT_OF_MEMORY"):
        Memory(6 * PAGE, DEVICE, driver)
    gc.collect()
    assert driver.has_all_back()


def test_an_interrupt_in_the_middle_leaves_nothing_behind():
    for n in range(1, 40):
        driver = Driver(7)
        try:
            driver.countdown = n
            memory = Memory(3 * PAGE, DEVICE, driver)
            memory.map(memory.reserve(4 * PAGE), 0, 3 * PAGE)
        except KeyboardInterrupt:
            memory = None
        driver.countdown = 10**9
        del memory
        gc.collect()
        assert driver.has_all_back()
