"""What a run of tests costs: processor seconds, also in those of a reference machine.

Each process that runs tests first times a loop of known work. A limit in seconds of the reference machine then holds on
any machine. Processor time is counted, that of ended child processes too, and no clock on the wall: a busy machine takes
longer, and counts nearly the same.
"""

import os
import time

import pytest

# processor seconds of `loop` on the slowest machine that was met: two cores with AVX2
REFERENCE_LOOP = 0.25
NUM_DEAREST = 10


def processor_seconds(*, children: bool = True) -> float:
    times = os.times()
    seconds = times.user + times.system
    if children:  # those that have ended; on Windows they count nothing
        seconds += times.children_user + times.children_system
    return seconds


def loop() -> None:
    """Half of it is Python, half are products in PyTorch."""
    import torch

    counts: dict[int, int] = {}
    for i in range(800_000):
        counts[i % 1000] = counts.get(i % 1000, 0) + i
    matrix = torch.ones(160, 160)
    for _ in range(600):
        matrix = torch.softmax(matrix @ matrix, dim=-1)


def loop_seconds() -> float:
    """The least of three, since the first one also warms up."""
    seconds = []
    for _ in range(3):
        begin = time.process_time()
        loop()
        seconds.append(time.process_time() - begin)
    return min(seconds)


class Gauge:
    """A plugin of pytest, in the process that reports and in each worker of pytest-xdist."""

    def __init__(self, limit: float | None):
        self.limit = limit
        self.begin = 0.0  # processor seconds when the setup of the running test began
        self.cost_of_test: dict[str, float] = {}
        self.loops: list[float] = []  # one for each process that ran tests
        self.total = 0.0

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        if getattr(session.config.option, "dist", "no") == "no" or is_worker(session.config):
            self.loops.append(loop_seconds())

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self) -> None:
        self.begin = processor_seconds()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self, item: pytest.Item):
        try:
            return (yield)
        finally:
            cost = processor_seconds() - self.begin
            item.user_properties.append(("processor_seconds", cost))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for name, value in report.user_properties:
            if name == "processor_seconds":
                self.cost_of_test[report.nodeid] = value

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node) -> None:
        """A worker has ended. One that died has told nothing."""
        loop, total = getattr(node, "workeroutput", {}).get("gauge", (None, 0.0))
        self.total += total
        if loop is not None:
            self.loops.append(loop)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if is_worker(session.config):
            session.config.workeroutput["gauge"] = (self.loops[0], processor_seconds())
            return
        # with workers, the children of this process are the workers, which have told theirs
        self.total += processor_seconds(children=not self.total)
        if self.is_above and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    @property
    def reference_seconds(self) -> float:
        mean = sum(self.loops) / max(1, len(self.loops))
        return self.total * REFERENCE_LOOP / mean if mean else 0.0

    @property
    def is_above(self) -> bool:
        return self.limit is not None and self.reference_seconds > self.limit

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        write = terminalreporter.write_line
        seconds = f"{self.total:.0f} s of processor time"
        write(f"{seconds}, {self.reference_seconds:.0f} s on the reference machine")
        if self.is_above:
            write(
                f"FAILED: at most {self.limit:.0f} s are allowed. The dearest tests, in seconds here:"
            )
            dearest = sorted(self.cost_of_test.items(), key=lambda pair: -pair[1])
            for name, cost in dearest[:NUM_DEAREST]:
                write(f"{cost:6.1f}  {name}")


def is_worker(config: pytest.Config) -> bool:
    return hasattr(config, "workerinput")
