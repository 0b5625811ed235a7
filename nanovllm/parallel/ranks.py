"""Ranks: the processes of tensor parallelism, how they find each other, and how each notices that
another one has died.

Rank 0 is the process of the LLM. It starts the others itself, unless `torchrun` has started all.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nanovllm.config import Config
from nanovllm.options import refusal
from nanovllm.recovery import RankError

PATIENCE = timedelta(seconds=60)  # with a rank that lives and does not answer
FOREVER = timedelta(days=3650)  # until the next step comes
GRACE = 5.0  # seconds for ranks to end
ENGINES = count()  # of this process
LOST = 3  # the exit code of a rank that has lost another one


class Group:
    """All ranks, as one of them sees them. What waits for others raises RankError."""

    def __init__(self, store: dist.Store, rank: int, size: int, address: str):
        self.store = store
        self.rank = rank
        self.size = size
        self.address = address  # of this machine, for the others
        self.children: list[Child] = []  # of rank 0
        self.num_gathered = 0  # calls of `gather`
        self.end = ""  # why it is over
        self.control: Any = None  # a process group, to tell a step
        self.data: Any = None  # another one, for what layers do

    def connect(self, device: torch.device) -> None:
        self.meet("here")
        self.control = self._gloo("control", FOREVER)
        if device.type == "cuda":
            self.data = self._nccl("data", PATIENCE)
        else:
            self.data = self._gloo("data", PATIENCE)

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
        return dist.ProcessGroupNCCL(store, self.rank, self.size, options)

    def meet(self, place: str) -> None:
        """Waits for all ranks, however long they load. Only one that dies ends it."""
        self.store.set(f"{place}/{self.rank}", "")
        while not self.store.check([f"{place}/{rank}" for rank in range(self.size)]):
            self.end = self.cause_of_death()
            if self.end:
                raise RankError(self.end)
            time.sleep(0.01)

    # --- what all ranks do together ---

    def add_up(self, x: Tensor) -> Tensor:
        """The sum over all ranks, on each of them, in place."""
        self._wait(lambda: self.data.allreduce([x]))
        return x

    def least(self, number: int) -> int:
        numbers = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        self._wait(lambda: self.control.allgather([numbers], [torch.tensor([number])]))
        return int(min(numbers))

    def gather(self, x: Tensor) -> list[Tensor]:
        """Gathers the tensors of all ranks on rank 0."""
        parts = [torch.empty_like(x) for _ in range(self.size)] if self.rank == 0 else []
        outputs = [parts] if self.rank == 0 else []
        self._wait(lambda: self.data.gather(outputs, [x], dist.GatherOptions()))
        self.num_gathered += 1
        return parts

    def tell(self, message: Tensor) -> None:
        """Sends the tensor from rank 0 to all other ranks."""
        self._wait(lambda: self.control.broadcast([message], dist.BroadcastOptions()))

    def _wait(self, begin: Callable[[], dist.Work]) -> None:
        if self.end:
            raise RankError(self.end)
        try:
            begin().wait()
        except RuntimeError as error:
            self.end = self._look_for(error)
            raise RankError(self.end) from error

    # --- ranks die ---

    def _look_for(self, error: Exception) -> str:
        """Waits until it is known which rank has died."""
        end = time.monotonic() + GRACE
        while time.monotonic() < end:
            cause = self.cause_of_death()
            if cause:
                return cause
            time.sleep(0.01)
        return f"rank {self.rank} has lost another one: {str(error)[:300]}"

    def cause_of_death(self) -> str:
        """The cause why the first rank died; empty while all are known to live."""
        for rank in range(self.size):
            if self.store.check([f"died/{rank}"]):
                return f"rank {rank} has died: {self.store.get(f'died/{rank}').decode()}"
        for rank, child in enumerate(self.children, 1):
            cause = child.cause_of_death()
            if cause:
                return f"rank {rank} has died: {cause}"
        return ""


# --- processes ---


class Child:
    """The process of another rank, which rank 0 has started."""

    def __init__(self, settings: dict, num_threads: int):
        self.log = tempfile.TemporaryFile()  # noqa: SIM115 (it is open as long as the process)
        folder = str(Path(__file__).parents[2])  # where the package lies
        paths = os.pathsep.join([folder, *filter(None, sys.path)])
        self.process = subprocess.Popen(
            [sys.executable, "-c", "from nanovllm.parallel import runner; runner.main()"],
            env={"OMP_NUM_THREADS": str(num_threads), **os.environ, "PYTHONPATH": paths},
            stdin=subprocess.PIPE,
            stdout=self.log,
            stderr=self.log,
            start_new_session=True,  # Ctrl-C is for rank 0
        )
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(settings).encode() + b"\n")
        self.process.stdin.flush()  # and it stays open: the process ends with it

    def cause_of_death(self) -> str:
        code = self.process.poll()
        if code in (None, LOST):
            return ""
        self.log.seek(0)
        lines = self.log.read().decode(errors="replace").splitlines()
        return " ".join([f"exit code {code}", *lines[-3:]])[:1000]

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(GRACE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.log.close()


def start(settings: dict, size: int) -> Group:
    """Starts ranks 1 to size - 1 on this machine. Returns the group of rank 0. They end with it,
    and with this process, however it ends."""
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
    group = Group(store, 0, size, "127.0.0.1")
    num_threads = torch.get_num_threads()
    share = max(1, num_threads // size)
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(share)
        weakref.finalize(group, torch.set_num_threads, num_threads)
    for rank in range(1, size):
        place = {"port": port, "rank": rank, "size": size}
        child = Child(settings | place, share)
        weakref.finalize(group, child.end)
        group.children.append(child)
    return group


def started(settings: dict) -> Group:
    """The group of a rank that rank 0 has started with these settings."""
    threading.Thread(target=end_with_rank_0, daemon=True).start()
    store = dist.TCPStore("127.0.0.1", settings["port"], is_master=False)
    return Group(store, settings["rank"], settings["size"], "127.0.0.1")


def started_by_torchrun(size: int) -> Group:
    """The group of this process, whose rank and whose place to meet are in its environment."""
    num_ranks = int(os.environ["WORLD_SIZE"])
    if num_ranks != size:
        raise refusal("tensor_parallel_size", size, f"torchrun has started {num_ranks} processes")
    store, rank, _ = next(dist.rendezvous("env://"))
    store = dist.PrefixStore(f"nanovllm/{next(ENGINES)}", store)
    return Group(store, rank, size, address_towards(os.environ["MASTER_ADDR"]))


def address_towards(host: str) -> str:
    """The address of the interface through which this machine reaches a host. Nothing is sent."""
    family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as sock:
        sock.connect(address)
        return sock.getsockname()[0]


def end_with_rank_0() -> None:
    sys.stdin.read()
    os._exit(0)  # wherever the main thread may wait


def device_of(config: Config, device: torch.device, local_rank: int, size: int) -> torch.device:
    """One GPU for each rank of a machine. Raises ValueError if there are too few."""
    if device.type == "cpu":
        return device
    problem = f"PyTorch finds {torch.cuda.device_count()} CUDA devices, and each rank needs one"
    if local_rank + size > torch.cuda.device_count():
        raise refusal("tensor_parallel_size", config.tensor_parallel_size, problem)
    if ":" in config.device:
        raise refusal("device", config.device, "with tensor parallelism leave the number out")
    return torch.device("cuda", local_rank)


@contextmanager
def interrupts_wait() -> Iterator[None]:
    """Ctrl-C waits for the end: within a step it would leave the ranks at different places."""
    is_main = threading.current_thread() is threading.main_thread()  # no other is interrupted
    if not is_main or signal.getsignal(signal.SIGINT) is None:  # None: not a handler of Python's
        yield
        return
    seen: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if seen:
            signal.raise_signal(signal.SIGINT)
