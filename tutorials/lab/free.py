"""A free sheet: your load, your server, your scheduler."""

from nanovllm.config import Config
from nanovllm.scheduler import Scheduler
from tutorials.simulation.workloads import lognormal, poisson, workload

SERVER = Config(
    model="qwen3-8b",
    num_blocks=300,
    max_num_seqs=16,
    max_num_batched_tokens=512,
    max_model_len=2048,
)


def load(seed):
    lengths = lognormal(prompt=200, output=80, seed=seed)
    return workload(poisson(rate=20, seed=seed), lengths, count=200)


class MyScheduler(Scheduler):
    """So far: first come, first served."""

    def priority(self, request):
        return request.arrival
