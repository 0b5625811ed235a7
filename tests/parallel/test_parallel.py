"""Ranks that are processes: the same tokens, and what is said when one of them dies.

Run: pytest tests/parallel/test_parallel.py --slow
"""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from server_tools import Running

from nanovllm import LLM, SamplingParams
from nanovllm.recovery import RankError
from nanovllm.topics.parallel import ranks

if not Path("/proc/self/stat").exists():
    pytest.skip("it looks into /proc", allow_module_level=True)

ROOT = Path(__file__).parents[2]
PROMPTS = ["Once upon a time", "17 + 25 =", "Tell me a story about a duck."]
GREEDY = SamplingParams(temperature=0, max_tokens=20)
LONG = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)


SECONDS = 10  # within which a death is noticed


def is_alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def texts(llm: LLM) -> list[str]:
    return [output.outputs[0].text for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


def pids(llm: LLM) -> list[int]:
    return [child.process.pid for child in llm.runner.group.watch.children]


def wait_until_gone(processes: list[int]) -> None:
    end = time.monotonic() + SECONDS
    while any(map(is_alive, processes)):
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.fixture(scope="module")
def expected() -> list[str]:
    return texts(LLM(num_blocks=64))


def test_the_store_listens_on_this_machine_only():
    group = ranks.start({}, size=1, patience=60)
    port = group.store.port
    sockets = [
        line.split()
        for file in ("/proc/net/tcp", "/proc/net/tcp6")
        for line in Path(file).read_text(encoding="utf-8").splitlines()
    ]
    listening = {fields[1] for fields in sockets if fields[3] == "0A"}
    assert {place for place in listening if place.endswith(f":{port:04X}")} == {
        f"0100007F:{port:04X}"
    }


@pytest.mark.slow
def test_two_engines_at_a_time(expected):
    with_two = LLM(tensor_parallel_size=2, num_blocks=64)
    another = LLM(tensor_parallel_size=2, num_blocks=64)
    assert texts(another) == texts(with_two) == expected
    processes = pids(with_two) + pids(another)
    assert len(processes) == 2 and all(map(is_alive, processes))
    del with_two
    assert texts(another) == expected
    another.close()
    wait_until_gone(processes)
    assert not any(thread.name.startswith("watch") for thread in threading.enumerate())


@pytest.mark.slow
def test_a_server_whose_rank_dies_says_so():
    llm = LLM(tensor_parallel_size=2, num_blocks=64)
    with Running(llm) as server:
        body = {"prompt": "17 + 25 =", "max_tokens": 4, "temperature": 0}
        answer = server.http.post("/v1/completions", json=body).json()
        assert answer["choices"][0]["text"] == " 42"
        os.kill(pids(llm)[0], signal.SIGKILL)
        refused = server.http.post("/v1/completions", json=body)
        assert refused.status_code == 503 and "RankError" in refused.text, refused.text


@pytest.mark.slow
def test_ctrl_c_ends_the_call_and_not_the_ranks(expected):
    llm = LLM(tensor_parallel_size=2, num_blocks=64)
    steps: list[int] = []  # how many are left until the signal

    def count_down(*_) -> None:
        if steps:
            steps.pop()
            if not steps:
                interrupt()

    for num_steps in (1, 2, 3, 10):
        steps += [0] * num_steps
        llm.observers.append(count_down)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS, LONG, use_tqdm=False)
        llm.observers.clear()
        assert texts(llm) == expected
        assert llm.stats()["kv_blocks_used"] == 0


def interrupt() -> None:
    """As a terminal does it: soon, wherever the main thread is then."""
    code = f"import os, signal, time; time.sleep(0.02); os.kill({os.getpid()}, signal.SIGINT)"
    subprocess.Popen([sys.executable, "-c", code])


@pytest.mark.slow
def test_a_rank_that_is_killed_in_the_middle_of_a_step():
    llm = LLM(tensor_parallel_size=2, num_blocks=64)
    (pid,) = pids(llm)
    steps = []

    def kill_in_the_fifth(*_) -> None:
        steps.append(1)
        if len(steps) == 5:
            code = f"import os, signal; os.kill({pid}, signal.SIGKILL)"
            subprocess.Popen([sys.executable, "-c", code])

    llm.observers.append(kill_in_the_fifth)
    # seldom, gloo does not notice the death, and its call ends by the timeout
    with pytest.raises(RankError, match="rank 1 has died: exit code -9"):
        llm.generate(PROMPTS, LONG, use_tqdm=False)
    for _ in range(2):  # and it says so again
        with pytest.raises(RankError, match="rank 1 has died"):
            llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert llm.stats()["kv_blocks_used"] == 0


# --- ranks that do not answer ---


@pytest.mark.slow
def test_a_rank_that_is_stopped_is_given_up():
    llm = LLM(tensor_parallel_size=2, num_blocks=64, rank_timeout=8)
    (pid,) = pids(llm)
    os.kill(pid, signal.SIGSTOP)
    sentence = r"rank 1 gives no sign of life \(rank_timeout=8 seconds\)"
    for _ in range(2):
        with pytest.raises(RankError, match=sentence):
            llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert llm.stats()["kv_blocks_used"] == 0
    wait_until_gone([pid])


@pytest.mark.slow
def test_the_second_ctrl_c_ends_a_step_that_hangs():
    """No Python code runs in rank 0 meanwhile: it waits for gloo."""
    llm = LLM(tensor_parallel_size=2, num_blocks=64)
    (pid,) = pids(llm)
    os.kill(pid, signal.SIGSTOP)
    twice = "import os, signal, time\n" + 2 * (
        f"time.sleep(1.5)\nos.kill({os.getpid()}, signal.SIGINT)\n"
    )
    subprocess.Popen([sys.executable, "-c", twice])
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    with pytest.raises(
        RankError, match="a step was interrupted twice, while rank 1 gives no sign of life"
    ):
        llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    wait_until_gone([pid])


@pytest.mark.slow
def test_a_rank_that_cannot_connect_says_why(tmp_path, monkeypatch):
    """Between the meeting of all ranks and the first collective, where rank 0 waits for its address."""
    fail = """
import os
if "FAILS" in os.environ:
    from nanovllm.topics.parallel.ranks import Group

    def fail(*_):
        raise RuntimeError("there is no such interface")

    Group._gloo = fail
"""
    (tmp_path / "sitecustomize.py").write_text(fail)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setenv("FAILS", "1")
    with pytest.raises(RankError, match="(?s)rank 1 has died: .*there is no such interface"):
        LLM(tensor_parallel_size=2, num_blocks=64, rank_timeout=8)


class NCCL:
    """PyTorch's process group for NCCL, as far as a group makes one."""

    class Options:
        pass

    def __init__(self, store, rank, size, options):
        # PyTorch reads it in the constructor; otherwise an error would end the process
        self.handling = os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING")
        self.seconds = options._timeout.total_seconds()
        self.aborted = []

    def abort(self):
        self.aborted.append(1)


def test_an_error_of_nccl_does_not_end_the_process_of_the_user(monkeypatch):
    """The watch ends its calls, and the group's end ends it."""
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "to be restored")
    del os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"]
    monkeypatch.setattr(dist, "ProcessGroupNCCL", NCCL, raising=False)
    group = ranks.start({}, size=1, patience=7)
    group.connect(torch.device("cuda", 0))
    data = group.connections.data
    assert data.handling == "0" and data.seconds > 7
    group.watch.give_up("a reason")
    assert len(data.aborted) == 1
    group.close()
    assert len(data.aborted) == 2


FORK = """
import os
import sys

from nanovllm import LLM, SamplingParams

llm = LLM(tensor_parallel_size=2, num_blocks=64)
params = SamplingParams(temperature=0)
child = os.fork()
if not child:
    try:
        llm.generate("17 + 25 =", params, use_tqdm=False)
    except RuntimeError as error:
        print(error, flush=True)
    sys.exit(0)
print(os.waitpid(child, 0)[1], llm.generate("17 + 25 =", params, use_tqdm=False)[0].outputs[0].text)
"""


@pytest.mark.slow
def test_a_fork_leaves_the_ranks_to_its_parent(tmp_path):
    """It ends by itself, without an error, and the parent goes on."""
    file = tmp_path / "script.py"
    file.write_text(FORK)
    done = subprocess.run(
        [sys.executable, str(file)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    problem = "this LLM belongs to the process before a fork: make a new one here"
    assert done.stdout.splitlines() == [problem, "0  42"], done


FAILING = """
import os
from nanovllm.topics.parallel import runner as parallel

plain = parallel.Follower.forward
count = 0

def forward(self, step):
    global count
    count += 1
    if count > int(os.environ["FAIL_AFTER"]):
        raise SystemExit(7)
    return plain(self, step)

if "FAIL_AFTER" in os.environ:
    parallel.Follower.forward = forward
"""


@pytest.mark.slow
def test_an_exception_in_another_rank(tmp_path, monkeypatch):
    """It is put there by a module that Python imports at its start."""
    (tmp_path / "sitecustomize.py").write_text(FAILING)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setenv("FAIL_AFTER", "3")
    # with PyTorch: kernels that are compiled have had more steps before a request comes
    llm = LLM(tensor_parallel_size=2, num_blocks=64, attention_backend="torch")
    begin = time.monotonic()
    with pytest.raises(RankError, match="(?s)rank 1 has died: .*SystemExit: 7"):
        llm.generate(PROMPTS, LONG, use_tqdm=False)
    assert time.monotonic() - begin < SECONDS
    wait_until_gone(pids(llm))


SCRIPT = """
from nanovllm import LLM, SamplingParams

llm = LLM(tensor_parallel_size=2, num_blocks=64)
print(llm.runner.group.watch.children[0].process.pid, flush=True)
llm.generate("Hello", SamplingParams(max_tokens=2000, ignore_eos=True), use_tqdm=False)
"""
END = "print(llm.generate('17 + 25 =', SamplingParams(temperature=0), use_tqdm=False)[0].outputs[0].text)"


@pytest.mark.slow
def test_the_process_of_rank_0_is_killed(tmp_path):
    """It has no `if __name__ == "__main__"`."""
    file = tmp_path / "script.py"
    file.write_text(SCRIPT)
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(file)]
    process = subprocess.Popen(command, env=environ, text=True, stdout=subprocess.PIPE)
    pid = int(process.stdout.readline())
    time.sleep(0.3)
    process.kill()
    assert process.wait(SECONDS) != 0
    wait_until_gone([pid])


def test_what_cannot_be_split_begins_nothing(monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("a process"))
    with pytest.raises(ValueError, match="tensor_parallel_size=4 is not allowed: 6 query heads"):
        LLM(tensor_parallel_size=4)
    for wrong in (0, -1, 2.0, "2", True):
        with pytest.raises(ValueError, match="tensor_parallel_size"):
            LLM(tensor_parallel_size=wrong)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(ValueError, match="=2 is not allowed: torchrun has started 3 processes"):
        LLM(tensor_parallel_size=2)


@pytest.mark.slow
@pytest.mark.parametrize("num_nodes", [1, 2])
def test_torchrun(tmp_path, expected, num_nodes):
    """Ranks above 0 serve, and end when rank 0 does. Two nodes: what torchrun would start on each, in its environment;
    two agents on one machine may wait for each other."""
    file = tmp_path / "script.py"
    file.write_text(
        "from nanovllm import LLM, SamplingParams\n"
        "llm = LLM(tensor_parallel_size=2, num_blocks=64)\n"
        + END.replace("print(", "print('answer', ")
    )
    command, environs = [sys.executable, str(file)], [{}]
    if num_nodes == 1:
        run = "-m torch.distributed.run --standalone --nproc-per-node 2"
        command[1:1] = run.split()
    else:
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(20_000 + os.getpid() % 10_000)}
        place |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}
        environs = [place | {"RANK": str(rank)} for rank in range(2)]
    common = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            command, env=common | own, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        for own in environs
    ]
    outputs = [process.communicate(timeout=120) for process in processes]
    for process, _ in zip(processes, outputs, strict=True):
        assert process.returncode == 0, outputs
    assert [out.split() for out, _ in outputs if out] == [["answer", "42"]]
