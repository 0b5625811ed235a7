"""Ranks: the processes of tensor parallelism: how they start, how they find each other, and the
operations that they do together. Rank 0 is the process of the LLM. It starts the others itself,
unless `torchrun` has started all."""

from __future__ import annotations

import ctypes
import logging
import os
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from itertools import count
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nanovllm.config import Config
from nanovllm.options import refusal
from nanovllm.recovery import RankError
from nanovllm.topics.parallel.watch import GRACE, SECONDS_BETWEEN, Child, Watch, repeat

FOREVER = timedelta(days=3650)  # until the next step comes
ENGINES = count()  # of this process


class Group:
    """All ranks, as one of them sees them. An operation that waits for another rank may raise
    RankError."""

    def __init__(
        self, store: dist.Store, rank: int, size: int, address: str, patience: float = 60.0
    ):
        self.store = store
        self.rank = rank
        self.size = size
        self.address = address  # of this machine, for the others
        self.process = os.getpid()
        # a connection of its own: a call that waits keeps the other one for itself
        own: Any = store
        self.watch = Watch(own.clone(), size, patience)
        self.num_gathered = 0  # calls of `gather`
        # process groups: `control` tells a step, `data` is for what layers do
        self.connections = SimpleNamespace()
        self.ending = ExitStack()  # functions to call when the group ends
        self.ending.callback(self.watch.close)
        # before Python's own end: a thread of theirs that frees a tensor later aborts the process
        self.ending.callback(vars(self.connections).clear)
        self.close = weakref.finalize(self, end_in, self.process, self.ending)

    @property
    def end(self) -> str:
        """Ends the group, with the reason if there is one."""
        return self.watch.end

    def connect(self, device: torch.device) -> None:
        self.meet("here")
        # a Watch gives up a little earlier, and says why
        timeout = timedelta(seconds=self.watch.patience + GRACE)
        try:
            control = self._gloo("control", FOREVER if self.rank else timeout)
            data = (self._nccl if device.type == "cuda" else self._gloo)("data", timeout)
            self.connections.control = control
            self.connections.data = data
        except RuntimeError as error:
            if self.rank:
                raise  # rank 0 gets the reason
            raise RankError(self._look_for(error)) from error
        if device.type == "cuda":
            self.watch.abort = data.abort
            self.ending.callback(data.abort)
        for connection in (control, data):
            os.register_at_fork(after_in_child=partial(keep_forever, weakref.ref(connection)))

    def begin_watch(self) -> None:
        """Starts the thread that watches the other ranks until the group ends."""
        self.ending.callback(repeat(SECONDS_BETWEEN, self.watch.look))

    def _gloo(self, name: str, timeout: timedelta) -> Any:
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._timeout = timeout
        options._devices = [gloo.create_device(hostname=self.address)]
        store = dist.PrefixStore(name, self.store)
        return gloo(store, self.rank, self.size, options)

    def _nccl(self, name: str, timeout: timedelta) -> Any:
        options: Any = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        store = dist.PrefixStore(name, self.store)
        if self.rank == 0:  # an error must not end this process, which is the user's
            os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
        return dist.ProcessGroupNCCL(store, self.rank, self.size, options)

    def meet(self, place: str) -> None:
        """Waits until all ranks are here, however long they load. It fails only if a rank dies or
        gives no sign of life."""
        self.store.set(f"{place}/{self.rank}", "")
        while not self.store.check([f"{place}/{rank}" for rank in range(self.size)]):
            cause = self.end or self.watch.cause_of_death()
            if cause:
                raise RankError(cause)
            time.sleep(0.01)

    # --- what all ranks do together ---

    def add_up(self, x: Tensor) -> Tensor:
        """The sum over all ranks (all-reduce), in place, on each rank."""
        options = dist.AllreduceOptions()
        options.asyncOp = False  # NCCL then stays on the current stream
        self._wait(lambda: self.connections.data.allreduce([x], options))
        return x

    def least(self, number: int) -> int:
        numbers = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        self._wait(lambda: self.connections.control.allgather([numbers], [torch.tensor([number])]))
        return int(min(numbers))

    def gather(self, x: Tensor) -> list[Tensor]:
        """Gathers the tensors of all ranks on rank 0."""
        parts = [torch.empty_like(x) for _ in range(self.size)] if self.rank == 0 else []
        outputs = [parts] if self.rank == 0 else []
        self._wait(lambda: self.connections.data.gather(outputs, [x], dist.GatherOptions()))
        self.num_gathered += 1
        return parts

    def tell(self, message: Tensor) -> None:
        """Sends the tensor from rank 0 to all other ranks."""
        self._wait(lambda: self.connections.control.broadcast([message], dist.BroadcastOptions()))

    def _wait(self, begin: Callable[[], dist.Work | None]) -> None:
        if os.getpid() != self.process:
            raise RankError("the ranks belong to the process that has started them, not to a fork")
        if self.end:
            raise RankError(self.end)
        try:
            work = begin()
            if work is not None:  # NCCL's calls are only queued
                work.wait()
        except RuntimeError as error:
            self.watch.give_up(self._look_for(error))
            raise RankError(self.end) from error

    def _look_for(self, error: Exception) -> str:
        """Waits until it is known which rank has died."""
        end = time.monotonic() + GRACE
        while time.monotonic() < end:
            cause = self.end or self.watch.cause_of_death()
            if cause:
                return cause
            time.sleep(0.01)
        return f"rank {self.rank} has lost another one: {str(error)[:300]}"


# --- processes ---


def end_in(process: int, ending: ExitStack) -> None:
    """Ends a group in the process that owns it. A fork has a copy of the group."""
    if os.getpid() == process:
        ending.close()


def keep_forever(connection: weakref.ref) -> None:
    """Prevents that a fork closes the group: the threads that closing waits for exist in the parent
    only."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(connection()))


def start(settings: dict, size: int, patience: float) -> Group:
    """Starts ranks 1 to size - 1 on this machine. Returns the group of rank 0. The ranks end with
    this group, and with this process, even if it is killed."""
    # on this machine's own interface only: the store asks for no password
    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    store = dist.TCPStore(
        "127.0.0.1",
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listening.detach(),
    )
    group = Group(store, 0, size, "127.0.0.1", patience)
    num_threads = torch.get_num_threads()
    share = max(1, num_threads // size)
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(share)
        group.ending.callback(torch.set_num_threads, num_threads)
    for rank in range(1, size):
        place = {"port": port, "rank": rank, "size": size}
        child = Child(settings | place, share)
        group.ending.callback(child.end)
        group.watch.children.append(child)
    group.begin_watch()
    return group


def started(settings: dict) -> Group:
    """The group of a rank that rank 0 has started, with these settings."""
    threading.Thread(target=end_with_rank_0, daemon=True).start()
    # rank 0 prints the same; the last line of a rank that dies is the reason in the error message
    logging.getLogger("nanovllm").setLevel(logging.ERROR)
    store = dist.TCPStore("127.0.0.1", settings["port"], is_master=False)
    place = (settings["rank"], settings["size"], "127.0.0.1")
    return Group(store, *place, settings["config"]["rank_timeout"])


def started_by_torchrun(size: int, patience: float) -> Group:
    """The group of this process. Its rank and its address are in the environment."""
    num_ranks = int(os.environ["WORLD_SIZE"])
    if num_ranks != size:
        raise refusal("tensor_parallel_size", size, f"torchrun has started {num_ranks} processes")
    store, rank, _ = next(dist.rendezvous("env://"))
    store = dist.PrefixStore(f"nanovllm/{next(ENGINES)}", store)
    group = Group(store, rank, size, address_towards(os.environ["MASTER_ADDR"]), patience)
    if rank == 0:
        group.begin_watch()
    return group


def address_towards(host: str) -> str:
    """The address of the interface through which this machine reaches a host. It sends nothing."""
    family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as sock:
        sock.connect(address)
        return sock.getsockname()[0]


def end_with_rank_0() -> None:
    sys.stdin.read()
    os._exit(0)  # wherever the main thread may wait


def device_of(config: Config, device: torch.device, local_rank: int, size: int) -> torch.device:
    """One GPU for each rank of this machine. Raises ValueError if there are too few."""
    if device.type == "cpu":
        return device
    problem = f"PyTorch finds {torch.cuda.device_count()} CUDA devices, and each rank needs one"
    if local_rank + size > torch.cuda.device_count():
        raise refusal("tensor_parallel_size", config.tensor_parallel_size, problem)
    if ":" in config.device:
        raise refusal("device", config.device, "with tensor parallelism leave the number out")
    return torch.device("cuda", local_rank)
