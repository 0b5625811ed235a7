"""Assignment 4: preemption. What is served, and what is measured."""

from statistics import mean

from nanovllm import Job, Run
from nanovllm.config import Config
from nanovllm.topics.simulator.cost_model import Hardware
from nanovllm.topics.simulator.machines import Machine
from tutorials.assignments.task import Goal, Part, Task, mean_latency
from tutorials.simulation.metrics import ttft
from tutorials.simulation.workloads import lognormal, merged, poisson, shared_prefix, workload

# A card of 2016 computes little for its bandwidth. So what is computed again takes time: on newer
# ones it fills steps that wait for memory anyway.
P100 = Hardware("P100 SXM2", 732e9, 21.2e12, 16e9, "NVIDIA Tesla P100, data sheet")
MACHINE = Machine(P100, host_bytes_per_second=16e9)  # PCIe 3.0 with 16 lanes
# from year to year: another value, and the goals are measured again
NUM_BLOCKS = 1600
NO_SOONER = 0.965  # of FCFS's mean latency: what earns nothing
NO_SHORTER = 0.98  # of the seconds of FCFS's run, the same
LATE = 0.1  # on top of each measure, if first tokens take twice as long as with FCFS


def growing(seed: int) -> list[Job]:
    """Within about 2 s come 150 requests for a story, with short prompts, and 70 questions about
    three documents. All answers grow together, until the memory is full."""
    stories = lognormal(prompt=30, output=500, sigma=0.15, seed=seed)
    questions = lognormal(prompt=60, output=500, sigma=0.15, seed=seed + 1)
    return merged(
        workload(poisson(rate=100, seed=seed), stories, count=150),
        shared_prefix(
            poisson(rate=50, seed=seed + 1),
            questions,
            count=70,
            num_prefixes=3,
            prefix_tokens=2400,
            skew=0.3,
            seed=seed,
        ),
    )


def surcharge(run: Run, baseline: Run) -> float:
    """A scheduler that admits few preempts few, but the others wait for their first tokens."""
    later = mean(map(ttft, run.requests)) / mean(map(ttft, baseline.requests)) - 1
    return LATE * max(0.0, later)


def latency_share(run: Run, baseline: Run) -> float:
    return mean_latency(run) / mean_latency(baseline) + surcharge(run, baseline)


def seconds_share(run: Run, baseline: Run) -> float:
    return run.seconds / baseline.seconds + surcharge(run, baseline)


def sooner(run: Run, baseline: Run) -> float:
    """Counts only if the whole run is shorter, too: an order alone may help the mean."""
    share = latency_share(run, baseline)
    return share if seconds_share(run, baseline) < NO_SHORTER else max(share, NO_SOONER)


def shorter(run: Run, baseline: Run) -> float:
    """Counts only if the mean latency is clearly shorter: when the last answer ends is luck, too."""
    share = seconds_share(run, baseline)
    return share if latency_share(run, baseline) <= 0.955 else max(share, NO_SHORTER)


TASK = Task(
    "Preemption: how often, who, and how",
    [
        Part(
            "growing answers",
            growing,
            Config(
                model="qwen3-4b",
                num_blocks=NUM_BLOCKS,
                max_num_seqs=256,
                max_num_batched_tokens=512,
                max_model_len=4096,
                preemption_mode="swap",
                swap_gib=4.0,
            ),
            [
                Goal("mean latency / that of FCFS", sooner, none=NO_SOONER, full=0.954, points=30),
                Goal(
                    "seconds of the run / those of FCFS",
                    shorter,
                    none=NO_SHORTER,
                    full=0.968,
                    points=40,
                ),
            ],
            points=20,
            hardware=MACHINE,
        )
    ],
)
