"""What a simulated run comes to: latency, throughput, fairness, memory; as a dict, as a table, as a
picture in text.

    runs = {name: summary(simulate(jobs, scheduler_cls=cls), slo=(1.0, 0.05)) for name, cls in schedulers.items()}
    print(table(runs))

Times are in seconds. A request is finished when it has `job.num_outputs` tokens; all others are
unfinished. Each number says what it does with unfinished ones. Latencies leave most of them out, so
look at their count first. A number that does not exist, such as the mean of nothing, is None.
Imports no torch.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import accumulate, chain, combinations, groupby, pairwise
from math import fsum

from nanovllm import Run, Served
from nanovllm.options import is_number, shown
from nanovllm.topics.simulator.jobs import PlannedStep
from tutorials.report import aligned, percentile


def is_finished(request: Served) -> bool:
    return len(request.token_times) >= request.job.num_outputs


# --- latency, of a request ---


def ttft(request: Served) -> float | None:
    """Time to first token, of any request that has one."""
    return request.token_times[0] - request.arrival if request.token_times else None


def tpot(request: Served) -> float | None:
    """Time per output token after the first; a request with one token has none."""
    times = request.token_times
    if not is_finished(request) or len(times) < 2:
        return None
    return (times[-1] - times[0]) / (len(times) - 1)


def latency(request: Served) -> float | None:
    """End to end: from the arrival to the last token."""
    return request.token_times[-1] - request.arrival if is_finished(request) else None


def normalized_latency(request: Served) -> float | None:
    """End-to-end latency divided by the output tokens, as in the PagedAttention paper."""
    seconds = latency(request)
    return None if seconds is None else seconds / len(request.token_times)


def distribution(values: Iterable[float | None]) -> dict[str, float | None]:
    """Percentiles are interpolated linearly between the two nearest values."""
    present = sorted(value for value in values if value is not None)
    mean = ratio(fsum(present), len(present))
    return {
        "mean": mean,
        **{f"p{q}": percentile(present, q) for q in (50, 90, 99)},
        "max": percentile(present, 100),
    }


def between_tokens(requests: Iterable[Served]) -> Iterator[float]:
    """Seconds between a token and the next one of the same answer."""
    return chain.from_iterable(
        (b - a for a, b in pairwise(request.token_times)) for request in requests
    )


def ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


# --- promises ---


def meets(request: Served, slo: tuple[float, float]) -> bool:
    """Whether it is finished, and both its TTFT and its TPOT are within the objective. No TPOT is a
    good one."""
    return (
        is_finished(request)
        and (ttft(request) or 0.0) <= slo[0]
        and (tpot(request) or 0.0) <= slo[1]
    )


def meets_deadline(request: Served) -> bool:
    """Whether its last token came at most extra_args["deadline"] seconds after its arrival."""
    seconds = latency(request)
    return seconds is not None and seconds <= request.job.extra_args["deadline"]


# --- fairness ---


def jain(values: Iterable[float]) -> float | None:
    """Jain's index: 1 if all are equal, 1/n if one of n has everything. It takes two to compare.

    (R. Jain, D. Chiu, W. Hawe: A quantitative measure of fairness and discrimination, DEC-TR-301,
    1984.)
    """
    numbers = list(values)
    if len(numbers) < 2:
        return None
    return ratio(fsum(numbers) ** 2, len(numbers) * fsum(x * x for x in numbers))


def service(requests: list[Served]) -> Counter[float]:
    """Service received at each point in time: 1 for each prompt token, cached ones too, and 2 for
    each output token.

    These are the weights of Sheng et al., Fairness in Serving Large Language Models, OSDI 2024.
    Service comes in lumps, at the end of steps: the whole prompt with the first output token.
    """
    received: Counter[float] = Counter()
    for request in requests:
        for i, time in enumerate(request.token_times):
            received[time] += 2 if i else 2 + request.job.num_prompt_tokens
    return received


def backlog(requests: list[Served], end: float) -> list[tuple[float, float]]:
    """When at least one of the requests waited or ran, as intervals that do not touch. Unfinished
    ones do until `end`."""
    periods: list[tuple[float, float]] = []
    ends = [
        (r.arrival, r.token_times[-1] if is_finished(r) else end)
        for r in requests
        if r.arrival < end
    ]
    for begin, until in sorted(ends):
        if periods and begin <= periods[-1][1]:
            begin, until = periods[-1][0], max(periods.pop()[1], until)
        periods.append((begin, until))
    return periods


def service_rate(requests: list[Served], end: float) -> float:
    """Service per second of backlog."""
    seconds = fsum(until - begin for begin, until in backlog(requests, end))
    return ratio(service(requests).total(), seconds) or 0.0


def overlaps(
    a: list[tuple[float, float]], b: list[tuple[float, float]]
) -> Iterator[tuple[float, float]]:
    """The intervals that lie in an interval of each list."""
    a, b = a[::-1], b[::-1]
    while a and b:
        begin, until = max(a[-1][0], b[-1][0]), min(a[-1][1], b[-1][1])
        if begin < until:
            yield begin, until
        (a if a[-1][1] == until else b).pop()


def service_gap(a: list[Served], b: list[Served], end: float) -> int | None:
    """The largest difference of the service that two tenants received in the same time, while both
    had a backlog.

    It is the maximum over all intervals in which both had requests that waited or ran. In such a
    period, it is how far the difference since its start goes up and down, looked at after each
    step. It says most when both always want more: a tenant that asks for little falls behind
    without being wronged.
    """
    changes = service(a)
    changes.subtract(service(b))
    times, gaps = sorted(changes), list[int]()
    for begin, until in overlaps(backlog(a, end), backlog(b, end)):
        together = times[bisect_right(times, begin) : bisect_right(times, until)]
        differences = [*accumulate((changes[time] for time in together), initial=0)]
        gaps.append(max(differences) - min(differences))
    return max(gaps, default=None)


def largest_service_gap(run: Run) -> int | None:
    """The largest one of any two tenants."""
    pairs = combinations(by_tenant(run.requests).values(), 2)
    gaps = [service_gap(a, b, run.seconds) for a, b in pairs]
    return max((gap for gap in gaps if gap is not None), default=None)


def by_tenant(requests: list[Served]) -> dict[str, list[Served]]:
    """Requests without extra_args["tenant"] are left out."""
    tenants: dict[str, list[Served]] = {}
    for request in requests:
        if (name := request.job.extra_args.get("tenant")) is not None:
            tenants.setdefault(str(name), []).append(request)
    return tenants


# --- all of it ---


def tokens_needed(request: Served) -> int:
    """Tokens to compute for what it has got. The last output token is never computed. (For a prompt
    whose first token never came this says 0.)"""
    received = len(request.token_times)
    if not received:
        return 0
    return request.job.num_prompt_tokens - request.num_cached_tokens + received - 1


def summary(run: Run, slo: tuple[float, float] | None = None) -> dict:
    """Everything about a run, ready for JSON. `slo` is an objective for each request: (TTFT, TPOT),
    in seconds.

    Of unfinished requests count: their tokens for the output tokens per second and the time between
    tokens, and the TTFT if there is one. They miss the objective and their deadline.

    `jain_requests` compares the output tokens per second of the finished requests, from arrival to
    end; `jain_tenants` compares the service per second of backlog. Tenants that always want more
    should get the same; one that seldom has requests may well get less. `tokens_computed_again` is
    more than what the prompts, as far as they were not cached at first, and outputs need: the price
    of preemption. It falls below 0 if a request found more in the cache when it came back.
    """
    if slo is not None and not (
        isinstance(slo, tuple | list) and len(slo) == 2 and all(is_number(x, 0) for x in slo)
    ):
        raise ValueError(
            f"slo={shown(slo)} is not allowed: it must be None or (TTFT, TPOT) in seconds"
        )
    requests, finished = run.requests, [request for request in run.requests if is_finished(request)]
    good = None if slo is None else sum(meets(request, slo) for request in requests)
    with_deadline = [request for request in requests if "deadline" in request.job.extra_args]
    tenants = by_tenant(requests)
    rates = {name: service_rate(members, run.seconds) for name, members in tenants.items()}
    return {
        "requests": len(requests),
        "unfinished": len(requests) - len(finished),
        "seconds": run.seconds,
        "steps": run.num_steps,
        "ttft": distribution(map(ttft, requests)),
        "tpot": distribution(map(tpot, requests)),
        "between_tokens": distribution(between_tokens(requests)),
        "latency": distribution(map(latency, requests)),
        "normalized_latency": distribution(map(normalized_latency, requests)),
        "requests_per_second": ratio(len(finished), run.seconds),
        "output_tokens_per_second": ratio(
            sum(len(request.token_times) for request in requests), run.seconds
        ),
        "slo": None if slo is None else list(slo),
        "goodput": None if good is None else ratio(good, run.seconds),
        "goodput_share": None if good is None else ratio(good, len(requests)),
        "deadlines_met": ratio(sum(map(meets_deadline, with_deadline)), len(with_deadline)),
        "service_per_second": rates,
        "jain_tenants": jain(rates.values()),
        "jain_requests": jain(1 / x for x in map(normalized_latency, finished) if x),
        "service_gap": largest_service_gap(run),
        "busy_share": ratio(run.busy_seconds, run.seconds),
        "kv_use": run.kv_use,
        "prefix_hit_rate": ratio(run.num_cached_tokens, run.num_prompt_tokens),
        "preemptions": run.num_preemptions,
        "swapped_blocks": run.num_swapped_blocks,
        "tokens_computed_again": run.num_computed_tokens - sum(map(tokens_needed, requests)),
    }


ROWS = (  # name and unit, where it is in a summary, format
    ("requests", "requests", ",d"),
    ("unfinished requests", "unfinished", ",d"),
    ("TTFT, p50 (s)", "ttft p50", ",.3f"),
    ("TTFT, p99 (s)", "ttft p99", ",.3f"),
    ("TPOT, p50 (s)", "tpot p50", ",.4f"),
    ("between tokens, p99 (s)", "between_tokens p99", ",.4f"),
    ("end to end, p99 (s)", "latency p99", ",.2f"),
    ("normalized latency, mean (s/token)", "normalized_latency mean", ",.4f"),
    ("requests/s", "requests_per_second", ",.2f"),
    ("output tokens/s", "output_tokens_per_second", ",.0f"),
    ("within the SLO, requests/s", "goodput", ",.2f"),
    ("within the SLO", "goodput_share", ".1%"),
    ("deadlines met", "deadlines_met", ".1%"),
    ("Jain's index of tenants", "jain_tenants", ".3f"),
    ("service gap of tenants (tokens)", "service_gap", ",d"),
    ("KV blocks in use", "kv_use", ".1%"),
    ("prompt tokens from the cache", "prefix_hit_rate", ".1%"),
    ("preemptions", "preemptions", ",d"),
    ("tokens computed again", "tokens_computed_again", ",d"),
)


def table(summaries: dict[str, dict]) -> str:
    """A column for each run. A row that no run has anything for is left out."""
    return aligned(cells(summaries))


def cells(summaries: dict[str, dict], rows: Iterable[tuple[str, str, str]] = ROWS) -> list[list]:
    """The same as texts: a line for each row, the first one with the names."""
    lines = [["", *summaries]]
    for label, path, spec in rows:
        values = list(summaries.values())
        for key in path.split():
            values = [value[key] for value in values]
        if any(value is not None for value in values):
            lines.append(
                [label, *("-" if value is None else format(value, spec) for value in values)]
            )
    return lines


# --- a picture in text ---


LEGEND = "# prompt  o decode  . waits  x preempted  - no part"


def states(run: Run) -> dict[int, str]:
    """For each request by its index, in order of arrival: what became of it in each step, one
    character per step.

    '#': computes a prompt, or again what it had before a preemption; 'o': decodes; '.': waits for
    its first step; 'x': preempted, waits to come back; '-': runs, but has no part in this step; '
    ': not there yet, or done.
    """
    if not run.steps:
        raise ValueError("the run has no steps: simulate with keep_steps=True")
    rows = {
        i: [" "] * len(run.steps)
        for i in sorted(range(len(run.requests)), key=lambda i: run.requests[i].arrival)
    }
    for column, step in enumerate(run.steps):
        for i, num_tokens, is_prompt in step.items:
            rows[i][column] = "#" if is_prompt or num_tokens > 1 else "o"
    for i, row in rows.items():
        request = run.requests[i]
        ran = [column for column, cell in enumerate(row) if cell != " "] or [len(row)]
        last = ran[-1] if is_finished(request) else len(row)
        for column, step in enumerate(run.steps[:last]):
            if row[column] == " " and request.arrival < step.end:
                row[column] = "-" if i in step.running else "." if column < ran[0] else "x"
    return {i: "".join(row) for i, row in rows.items()}


def spans(row: str, steps: list[PlannedStep]) -> Iterator[tuple[str, float, float]]:
    """Of a row of `states`: a state, and the seconds in which it begins and ends. Steps with the same
    state are one span."""
    column = 0
    for state, same in groupby(row):
        first, column = column, column + len(list(same))
        if state != " ":
            yield state, steps[first].start, steps[column - 1].end


def gantt_text(run: Run, width: int = 100) -> str:
    """A line for each request, a character for each of the first `width` steps; see `states` for
    their meaning."""
    rows = states(run)
    shown_steps, margin = min(width, len(run.steps)), len(f"job {max(rows)}") + 2
    ruler = "".join(str(i).ljust(10) for i in range(0, shown_steps, 10))
    lines = [
        "step".ljust(margin) + ruler,
        *(f"job {i}".ljust(margin) + row[:shown_steps] for i, row in rows.items()),
    ]
    more = f"; {len(run.steps) - shown_steps:,} more steps" if shown_steps < len(run.steps) else ""
    return "\n".join(line.rstrip() for line in [*lines, LEGEND + more])
