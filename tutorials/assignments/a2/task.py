"""Assignment 2: stall-free batching. What is served, and what is measured."""

from statistics import mean

from nanovllm import Job, Run
from nanovllm.config import Config
from tutorials.assignments.task import Goal, Part, Task
from tutorials.report import percentile
from tutorials.simulation.metrics import between_tokens, ttft
from tutorials.simulation.workloads import lognormal, merged, poisson, workload

# from year to year: another value, and the goals are measured again
DOCUMENTS = 7  # per second
IN_ORDER = 1.0  # of FCFS's time to first token: later ones earn nothing for even gaps
SHORT = 600  # tokens of a prompt: questions have fewer, documents more
STANDS_STILL = 50.0  # ms between two tokens: what earns nothing
NO_GAIN = 45.0  # ms, the same for their p99


def questions_and_documents(seed: int) -> list[Job]:
    """Per second come 40 questions of about 100 tokens and 7 documents of about 2,500, for 16 s.
    Each answer has about 100."""
    questions = lognormal(prompt=100, output=100, sigma=0.3, seed=seed)
    documents = lognormal(prompt=2500, output=100, sigma=0.3, max_model_len=8192, seed=seed + 1)
    return merged(
        workload(poisson(rate=40, seed=seed), questions, count=640),
        workload(poisson(DOCUMENTS, seed=seed + 1), documents, count=16 * DOCUMENTS),
    )


def mean_wait(run: Run) -> float:
    """Of the questions: seconds to the first token."""
    return mean(ttft(one) for one in run.requests if one.job.num_prompt_tokens < SHORT)


def wait_share(run: Run, baseline: Run) -> float:
    return mean_wait(run) / mean_wait(baseline)


def p99_of_gaps(run: Run) -> float:
    """In ms."""
    return 1e3 * percentile(sorted(between_tokens(run.requests)), 99)


def sooner(run: Run, baseline: Run) -> float:
    """Counts only if answers stand still for less time: short prompts first are soon, too."""
    share = wait_share(run, baseline)
    return share if p99_of_gaps(run) < NO_GAIN else max(share, IN_ORDER)


def p99_gap(run: Run, baseline: Run) -> float:
    """Counts only if questions do not pay for it with their first tokens."""
    return p99_of_gaps(run) if wait_share(run, baseline) <= IN_ORDER else STANDS_STILL


def longest_gap(run: Run, baseline: Run) -> float:
    if wait_share(run, baseline) > IN_ORDER:
        return STANDS_STILL
    return 1e3 * max(between_tokens(run.requests))


TASK = Task(
    "Stall-free batching: no answer stands still for the sake of a prompt",
    [
        Part(
            "questions and documents",
            questions_and_documents,
            Config(
                model="qwen3-8b",
                num_blocks=12000,
                max_num_seqs=256,
                max_num_batched_tokens=2048,
                max_model_len=8192,
            ),
            [
                Goal(
                    "questions' mean time to first token / that of FCFS",
                    sooner,
                    none=IN_ORDER,
                    full=0.97,
                    points=34,
                ),
                Goal("time between tokens, p99 (ms)", p99_gap, none=NO_GAIN, full=34, points=18),
                Goal(
                    "longest time between tokens (ms)",
                    longest_gap,
                    none=STANDS_STILL,
                    full=36,
                    points=18,
                ),
            ],
            points=20,
        )
    ],
)
