r"""The parts of a step, as LLM._step has them, each with its seconds: what comes before the model runs, the
model, and what comes after it. Chapter 09 shows them.

    OMP_NUM_THREADS=1 python -m measure.step_parts \
        --json tutorials/results/step_parts.json

The embedded model. Eight requests run, each with a stop string, so that text is made in
each step. A ninth one comes with a prompt of 50 tokens. Measured are the step that computes its
prompt, and the step after that. The numbers are medians of the CPU time of the one thread, so other
programs on the machine hardly change them.
"""

import time

from tutorials.arguments import experiment
from tutorials.machine import device_name, environment, installed
from tutorials.report import median, write_json

NUM_RUNNING = 8
WARM_UP = 20


def new_engine():
    from nanovllm import LLM, SamplingParams

    llm = LLM(num_blocks=512, dtype="float32", device="cpu", enable_prefix_caching=False)
    params = SamplingParams(temperature=0, max_tokens=1000, ignore_eos=True, stop=["\nUser:"])
    for i in range(NUM_RUNNING):
        llm.add_request(f"Once upon a time there was a fox with {i} friends", params)
    return llm


def step_in_parts(llm) -> dict[str, float]:
    """What LLM._step does. Returns the seconds of each part, and how many tokens were computed."""
    seconds: dict[str, float] = {}

    def timed(name: str, function, *args):
        begin = time.thread_time()
        result = function(*args)
        seconds[name] = time.thread_time() - begin
        return result

    timed("settle", llm.recovery.settle)
    schedule = timed("plan", llm.scheduler.schedule)
    token_ids, logprobs = timed("run", lambda: llm.runner.launch(schedule)())
    timed("update", llm.scheduler.update, schedule, token_ids, logprobs)
    timed("deliver", llm._deliver, schedule)
    return {"tokens": schedule.num_tokens, **seconds}


def two_steps(llm) -> list[dict[str, float]]:
    """A request comes; the step that computes its prompt, and the next one."""
    from nanovllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True, stop=["\nUser:"])
    request_id = llm.add_request("word " * 48, params)
    steps = [step_in_parts(llm), step_in_parts(llm)]
    llm.abort(request_id)
    step_in_parts(llm)
    return steps


def measure(repeat: int) -> dict:
    import torch

    llm = new_engine()
    for _ in range(WARM_UP):
        step_in_parts(llm)
    two_steps(llm)
    rounds = [two_steps(llm) for _ in range(repeat)]
    report = environment() | {"device": device_name(torch.device("cpu")), "repeat": repeat}
    report["versions"] = {name: installed(name) for name in ("torch",)}
    report["requests"] = NUM_RUNNING + 1
    report["steps"] = [median([each[i] for each in rounds]) for i in (0, 1)]
    return report


def main() -> None:
    parser = experiment(__doc__)
    parser.add_argument("--repeat", type=int, default=200)
    args = parser.parse_args()
    report = measure(args.repeat)
    for step in report["steps"]:
        parts = [
            f"{name} {1000 * value:.3f} ms" for name, value in step.items() if name != "tokens"
        ]
        print(f"{step['tokens']:.0f} tokens:", ", ".join(parts))
    write_json(report, args.json)


if __name__ == "__main__":
    main()
