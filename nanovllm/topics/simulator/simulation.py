"""Simulator: a thousand requests in a second, under a virtual clock. Imports no torch.

Each replica (`replica.py`) goes its own way, step by step, at the pace of the cost model
(`topics/simulator/cost_model.py`); they share nothing but the router before them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from heapq import heappop, heappush

from nanovllm.config import Config
from nanovllm.options import is_int, refusal
from nanovllm.sampling_params import SamplingParams
from nanovllm.schedule import check_choice
from nanovllm.scheduler import Scheduler
from nanovllm.sequence import Request
from nanovllm.topics.routing.router import MOST_REPLICAS, PrefixAffinity, Router
from nanovllm.topics.simulator.jobs import STOP, Arrivals, Job, Run, Served, check_job, total_of
from nanovllm.topics.simulator.machines import MACHINES, Machine
from nanovllm.topics.simulator.replica import Replica


def simulate(
    jobs: Sequence[Job],
    config: Config | None = None,
    hardware: str | Machine = "h100",
    scheduler_cls: Callable[..., Scheduler] | None = None,
    check: bool = False,
    keep_steps: bool = False,
    replicas: int = 1,
    router_cls: type[Router] = PrefixAffinity,
) -> Run:
    """Serves the jobs, and says when each of their tokens came.

    The model is `config.model`, by default Qwen3-8B; without `num_blocks`, blocks fill the memory
    of the hardware. Each of several `replicas` has hardware of its own: as many devices as
    `config.tensor_parallel_size` says. With `check`, each step is checked: for lost requests and
    blocks, for more than the limits, for answers that end too early or too late. Raises ValueError
    for what cannot run at all, and ScheduleError, with the number of the step, for a scheduler or a
    router that has gone wrong.
    """
    machine = hardware if isinstance(hardware, Machine) else MACHINES.get(str(hardware))
    if machine is None:
        raise refusal("hardware", hardware, f"it must be one of {', '.join(MACHINES)}")
    if not is_int(replicas, 1, MOST_REPLICAS):
        raise refusal("replicas", replicas, f"it must be an integer from 1 to {MOST_REPLICAS}")
    if not (isinstance(router_cls, type) and issubclass(router_cls, Router)):
        raise refusal(
            "router_cls", router_cls, "it must be a subclass of nanovllm.topics.routing.Router"
        )
    config = Config(model="qwen3-8b") if config is None else config
    scheduler_cls = scheduler_cls or config.scheduler_cls or Scheduler
    served = [Served(job) for job in jobs]
    new_replica = partial(Replica, config, machine, scheduler_cls, check, served)
    return Simulation(served, [new_replica() for _ in range(replicas)], router_cls).run(keep_steps)


class Simulation:
    """One run of `simulate`."""

    def __init__(self, served: list[Served], replicas: list[Replica], router_cls: type[Router]):
        jobs = [one.job for one in served]
        for i, job in enumerate(jobs):
            check_job(i, job, replicas[0].limits.max_model_len)
        self.served = served
        self.replicas = replicas
        manager = replicas[0].manager
        self.router = router_cls(manager.block_size, len(manager.blocks))
        self.loads = dict.fromkeys(range(len(replicas)), 0)
        self.arrivals = Arrivals(jobs)
        # heaps of (time, index of a replica): those that have something to do, by their clocks, ...
        self.busy: list[tuple[float, int]] = []
        self.ends: list[tuple[float, int]] = []  # ... and ends that the router does not know yet

    def run(self, keep_steps: bool) -> Run:
        coming = self.arrivals.coming
        while coming or self.busy:
            if coming and (not self.busy or coming[0][0] <= self.busy[0][0]):
                self._arrive(*heappop(coming))
            else:
                self._step(keep_steps)
        runs = [replica.finish() for replica in self.replicas]
        if len(runs) == 1:
            return runs[0]
        return total_of(runs)

    def _arrive(self, time: float, index: int) -> None:
        served = self.served[index]
        job = served.job
        params = SamplingParams(
            max_tokens=job.max_tokens,
            stop_token_ids=[STOP],
            extra_args=job.extra_args,
        )
        request = Request(str(index), None, job.prompt_token_ids, params, arrival_time=time)
        name = self._choose(time, request)
        served.arrival = time
        served.replica = name
        self.loads[name] += 1
        replica = self.replicas[name]
        is_idle = not replica.unfinished
        replica.add(time, index, request)
        if is_idle:
            heappush(self.busy, (replica.now, name))

    def _choose(self, time: float, request: Request) -> int:
        """The index of a replica."""
        while self.ends and self.ends[0][0] <= time:
            _, name = heappop(self.ends)
            self.loads[name] -= 1
        if len(self.replicas) == 1:
            return 0
        chosen = self.router.choose(request, self.loads.copy())
        check_choice(self.router, "choose", chosen, [*self.loads])
        return int(chosen)

    def _step(self, keep_steps: bool) -> None:
        """Steps the replica whose clock is the earliest: so no request arrives in the past of a
        replica."""
        _, name = heappop(self.busy)
        replica = self.replicas[name]
        for index in replica.step(keep_steps):
            heappush(self.ends, (replica.now, name))
            self.arrivals.follow(index, replica.now)
        if replica.unfinished:
            heappush(self.busy, (replica.now, name))
