"""LLM: the engine's interface for users. Requests come in as text or token ids; each step computes
some tokens of all running requests together."""

from __future__ import annotations

import time
from collections import ChainMap
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

from nanovllm.block_manager import BlockManager
from nanovllm.config import TOKENS_PER_STEP, Config
from nanovllm.device.choose import choose_device
from nanovllm.inbox import Inbox, Turns
from nanovllm.layers.rotary import longest_context
from nanovllm.loader import (
    find_model,
    has_states,
    load_config,
    load_generation_config,
    load_tokenizer,
)
from nanovllm.model_runner import ModelRunner, Runner
from nanovllm.options import refusal
from nanovllm.processing.inputs import (
    AllParams,
    Conversations,
    Inputs,
    Params,
    Prompts,
    for_each,
    is_one_prompt,
)
from nanovllm.processing.messages import Prompt, is_conversation
from nanovllm.processing.outputs import RequestOutput
from nanovllm.processing.states import Reader, RequestState, RequestStates
from nanovllm.recovery import Recovery
from nanovllm.sampling_params import SamplingParams
from nanovllm.schedule import Counts, Drawn, Schedule, ScheduleError
from nanovllm.scheduler import Scheduler
from nanovllm.sequence import Request

if TYPE_CHECKING:
    from nanovllm.processing.progress import Progress
    from nanovllm.topics.checks.schedules import ScheduleChecks
    from nanovllm.topics.decoding.beam_search import BeamSearchParams

SEED_STEP = 0x5851F42D4C957F2D  # odd, so that the seeds of 2**63 requests are all different


class LLM:
    """An inference engine for one model.

    `LLM()` runs the embedded model on whatever device there is;
    `LLM("Qwen/Qwen3-0.6B", max_model_len=4096)` runs a real one. Keyword arguments are the fields
    of `Config`. For input that cannot work, every method raises ValueError with the name and the
    value of what is wrong, before it has changed anything.

    Threads may share an engine: their requests share its steps. `with LLM() as llm:` closes it at
    the end. `runner` takes the place of the model, as in tests.
    """

    def __init__(self, model: str | None = None, *, runner: Runner | None = None, **kwargs):
        self.config = config = Config(**kwargs) if model is None else Config(model=model, **kwargs)
        proposer = None
        if config.speculative_config is not None:
            from nanovllm.topics.drafting.draft_model import new_proposer  # chapter 22

            proposer = new_proposer(config.speculative_config)
        num_drafts = proposer.config.num_speculative_tokens if proposer else 0

        # the model, and what computes it
        path = find_model(config.model)
        hf_config = load_config(path)
        self.tokenizer = load_tokenizer(path)
        self.backend_tokenizer = self.tokenizer and self.tokenizer.backend_tokenizer
        device = choose_device(config)
        longest = longest_context(hf_config)
        limits = config.resolved(longest, TOKENS_PER_STEP[device.type], num_drafts)
        manager_cls: Callable = config.block_manager_cls or BlockManager
        if config.swap_prefixes:
            from nanovllm.topics.swapping.tiers import two_tiers  # chapter 04

            manager_cls = two_tiers(manager_cls)
        if has_states(hf_config):
            from nanovllm.topics.hybrid.states import with_slots  # chapter 23

            limits, manager_cls = with_slots(config, limits, hf_config, path, device)
        self.limits = limits
        arguments = (config, limits, hf_config, path, device)
        draft = proposer.load(*arguments) if proposer else None
        if runner is None and config.tensor_parallel_size > 1:
            # some builds of PyTorch lack torch.distributed
            from nanovllm.topics.parallel.runner import new_runner  # chapter 18

            runner = new_runner(*arguments)
        self.runner: Runner = runner or ModelRunner(*arguments, draft)

        # what decides which requests run, and on which blocks
        sizes = (self.runner.num_blocks, config.block_size)
        options = (config.enable_prefix_caching, self.runner.num_host_blocks)
        new_block_manager = partial(manager_cls, *sizes, *options)
        scheduler_cls = config.scheduler_cls or Scheduler
        self.scheduler: Scheduler = scheduler_cls(limits, new_block_manager())
        self.scheduler.proposer = proposer

        # requests come in, and states go out
        defaults = load_generation_config(path, hf_config, self.tokenizer)
        self.inputs = Inputs(
            config.model, self.scheduler, self.tokenizer, hf_config.vocab_size, *defaults
        )
        self.states = RequestStates()
        self.recovery = Recovery(self.scheduler, self.states, new_block_manager)
        self.inbox = Inbox(self.scheduler, self.states, self.recovery)

        # a user's scheduler is checked in each step
        self.planner: Scheduler | ScheduleChecks = self.scheduler
        if config.block_manager_cls or not vars(scheduler_cls).get("is_trusted"):
            from nanovllm.topics.checks.classes import check_made  # chapter 03
            from nanovllm.topics.checks.schedules import ScheduleChecks  # chapter 03

            check_made(self.scheduler, config, self.runner)
            self.planner = ScheduleChecks(self.scheduler, limits, self.states.unfinished)

        is_asynchronous = getattr(self.runner, "is_asynchronous", False)
        is_wanted = is_asynchronous if config.overlap is None else config.overlap
        # a user's class may look at any token, and only rank 0 has those that it drew
        is_possible = self.planner is self.scheduler and config.tensor_parallel_size == 1
        self.overlaps = is_wanted and is_possible
        self.turns = Turns()  # of the threads that share the engine
        self.arrivals = count()
        self.counts = Counts()
        self.is_closed = False
        self.observers: list[Callable[[Schedule, float], None]] = []
        """Called after each step with its schedule and its seconds."""

    # --- the loop ---

    def add_request(
        self,
        prompt: Prompt,
        params: Params | None = None,
        request_id: str | None = None,
        priority: int = 0,
    ) -> str:
        """Queues a request for the next step and returns its id. `params=None` takes the defaults
        of the model's generation_config.json. The smallest priority is served first."""
        request = self.inputs.request(prompt, params, priority, request_id)
        return self._submit(request).output.request_id

    def step(self, report: bool = True) -> list[RequestOutput]:
        """Runs one step of all requests together: schedule, run, update, deliver.

        Returns each output that has got tokens since the last call with `report=True`. Later steps
        append to the same objects. With `report=False`, returns an empty list, and the outputs come
        with the next call: `generate` and `stream` hold their own outputs.
        """
        if self.turns.is_taken_here():
            caller = "called within a step, by an observer or a method of Scheduler"
            allowed = "there, only add_request and abort are allowed"
            raise ScheduleError(self, "step", f"{caller}: {allowed}")
        with self.turns.take():
            self._step()
        return self.states.take() if report else []

    def _step(self) -> None:
        """Plans a step, computes it, and delivers its tokens. Without unfinished requests, nothing
        is computed, and only what has come in is settled. A step that fails is not counted. If no
        request is left, the step in flight is dropped, and its tokens are counted as wasted."""
        self.inbox.settle()  # new requests and aborts take effect here
        if self.states.unfinished:
            start = time.perf_counter()
            with self.recovery.of_step():  # an exception ends at most the request that caused it
                schedule, drawn = self._plan_and_run()
                self.planner.update(schedule, *drawn)
                self._deliver(schedule)
            if self.recovery.schedule is not None:  # the step has not failed
                self._count(self.recovery.schedule, time.perf_counter() - start)
        behind = self.recovery.in_flight
        if behind is not None and not self.states.unfinished:  # no request waits for its tokens
            self.counts.wasted_tokens += len(behind.schedule.sampled)
            self.recovery.in_flight = None

    def abort(self, request_id: str) -> bool:
        """Ends a request and frees its blocks before the next step. Returns False if no unfinished
        request has this id."""
        state = self.states.unfinished.get(request_id) if isinstance(request_id, str) else None
        if state is None or state.is_unwanted:
            return False
        self.inbox.unwanted.append(state.request)
        state.is_unwanted = True
        return True

    def has_unfinished(self) -> bool:
        """Whether `step` has something left to compute or to report."""
        return bool(self.states.unfinished or self.states.unreported)

    # --- what most people use ---

    def generate(
        self,
        prompts: Prompts,
        sampling_params: AllParams = None,
        use_tqdm: bool = True,
        priority: int | list[int] = 0,
    ) -> list[RequestOutput]:
        """Answers all prompts; the outputs are in the same order. `sampling_params` is one for all
        prompts, or a list with one for each. So is `priority`: the smallest is served first. Raises
        ValueError for a list of another length: "2 prompts, but 1 priorities".

        If the engine fails on a request, its exception is raised after the other requests have
        ended. If the call is interrupted, its requests are aborted.
        """
        prompts = [prompts] if is_one_prompt(prompts) else prompts
        all_params = for_each("sampling params", sampling_params, prompts)
        priorities = for_each("priorities", priority, prompts)
        # all are checked before any is added
        requests = [
            self.inputs.request(prompt, params, user_priority)
            for prompt, params, user_priority in zip(prompts, all_params, priorities)
        ]
        try:
            states = [self._submit(request, is_reported=False) for request in requests]
            with self._progress(requests) if use_tqdm else nullcontext():
                for request in requests:
                    while self.states.of(request) is not None:  # it has not ended
                        self.step(report=False)
            outputs = [state.final_output() for state in states]
        except BaseException:  # even Ctrl-C: nothing of this call is left behind
            self.inbox.unwanted.extend(requests)
            raise
        for output in outputs:
            if output.error is not None:
                raise output.error
        return outputs

    def chat(
        self,
        messages: Conversations,
        sampling_params: AllParams = None,
        use_tqdm: bool = True,
        **template: Any,
    ) -> list[RequestOutput]:
        """Answers one conversation or several, formatted with the model's chat template. Further
        keyword arguments are fields of `messages.Chat`, such as `tools`."""
        chats = [messages] if is_conversation(messages) else messages
        if not isinstance(chats, list | tuple) or not all(map(is_conversation, chats)):
            allowed = "a list of {'role': ..., 'content': ...}, or a list of such lists"
            raise refusal("messages", messages, f"it must be {allowed}")
        prompts = [{"messages": chat, **template} for chat in chats]
        return self.generate(prompts, sampling_params, use_tqdm)

    def beam_search(
        self, prompts: Prompts, params: BeamSearchParams | None = None, use_tqdm: bool = True
    ) -> list[RequestOutput]:
        """Returns the most likely outputs for each prompt, best first. All methods except `stream`
        also take BeamSearchParams."""
        from nanovllm.topics.decoding.beam_search import BeamSearchParams  # chapter 13

        params = BeamSearchParams() if params is None else params
        if not isinstance(params, BeamSearchParams):
            raise refusal("params", params, "it must be BeamSearchParams")
        return self.generate(prompts, params, use_tqdm)

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> Iterator[str]:
        """Yields the text of the answer while it is generated. Other requests continue meanwhile;
        leaving the loop aborts the request."""
        if self.tokenizer is None:
            raise ValueError(f"model={self.config.model!r} has no tokenizer: it cannot stream text")
        request = self.inputs.request(prompt, sampling_params)
        if request.is_search:
            raise refusal("sampling_params", sampling_params, "beams cannot be streamed")
        if request.params.n != 1:
            raise refusal("n", request.params.n, "only one answer is streamed")
        return self._stream(request)

    def close(self) -> None:
        """Ends the engine: aborts unfinished requests, ends other ranks, and frees the memory. The
        garbage collector also does this, once nothing refers to the engine any more."""
        if self.turns.is_taken_here():
            raise RuntimeError(
                "close() was called within a step: call it after step() has returned"
            )
        with self.turns.take():
            if self.is_closed:
                return
            self.inbox.unwanted.extend(self.requests.values())
            self.inbox.settle()
            self.is_closed = True
            self.runner.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def get_tokenizer(self):
        """The model's tokenizer, or None."""
        return self.tokenizer

    def reset_prefix_cache(self) -> bool:
        """Empties the prefix cache. Running requests keep their blocks."""
        with self.turns.take():
            self.block_manager.forget_prefixes()
        return True

    def stats(self) -> dict[str, float]:
        """Counters since the start, and the current state."""
        from nanovllm.processing.stats import stats_of

        num_failed = self.recovery.num_failed_steps
        return stats_of(self.scheduler, self.counts, len(self.states.unfinished), num_failed)

    @property
    def requests(self) -> dict[str, Request]:
        """The unfinished requests by their ids."""
        return {name: state.request for name, state in self.states.unfinished.items()}

    @property
    def block_manager(self) -> BlockManager:
        return self.scheduler.block_manager

    # --- inside ---

    def _submit(self, request: Request, is_reported: bool = True) -> RequestState:
        """Gives a checked request its arrival number, id, seed and state. The next step queues the
        request: see Inbox.settle.

        Without an id of its own, the request gets its arrival number, or the next one that is free.
        Without a seed, it gets (config.seed + arrival * SEED_STEP) % 2**63. It arrives by the
        scheduler's clock. Raises RuntimeError, "this LLM is closed", and a `refusal` of request_id,
        "a request with this id is still in use": until its output has been reported.
        """
        with self.turns.take():
            if self.is_closed:
                raise RuntimeError("this LLM is closed")
            used: ChainMap[str, Any] = ChainMap(self.states.unfinished, self.states.unreported)
            if request.request_id in used:
                in_use = "a request with this id is still in use"
                raise refusal("request_id", request.request_id, in_use)
            request.arrival = next(self.arrivals)
            request.arrival_time = self.scheduler.clock()
            if not request.request_id:
                while str(request.arrival) in used:  # a user has chosen it
                    request.arrival = next(self.arrivals)
                request.request_id = str(request.arrival)
            if request.params.seed is None:
                request.seed = (self.config.seed + request.arrival * SEED_STEP) % 2**63
            state = RequestState(request, self.backend_tokenizer, is_reported)
            # inbox first: if a Ctrl-C comes between these lines, `settle` drops the request,
            # because it has no state
            self.inbox.submitted.append(request)
            self.states.unfinished[request.request_id] = state
        return state

    def _progress(self, requests: list[Request]) -> Progress:
        from nanovllm.processing.progress import Progress

        return Progress(requests, self.scheduler, self.counts, self.observers)

    def _stream(self, request: Request) -> Iterator[str]:
        """The generator of `stream`, for a checked request."""
        try:
            state = self._submit(request, is_reported=False)
            reader = Reader(state)
            is_last = False
            while not is_last:
                is_last = self.states.of(request) is None  # it has ended: nothing comes after this
                with self.turns.take():
                    (delta,) = reader.news()
                if delta.text:
                    yield delta.text
                elif not is_last:  # no other caller's step has brought text meanwhile
                    self.step(report=False)
        finally:  # perhaps in the garbage collector, in any thread
            self.inbox.unwanted.append(request)
        if state.output.error is not None:
            raise state.output.error

    def _plan_and_run(self) -> tuple[Schedule, Drawn]:
        """A step, and its tokens. With overlap, the next step is launched before they are read, so
        that the device does not wait."""
        if self.overlaps or self.recovery.in_flight is not None:
            from nanovllm.device.overlap import run_ahead  # chapter 11

            return run_ahead(self.scheduler, self.runner, self.recovery, self.overlaps)
        schedule = self.planner.schedule()
        assert schedule.items, "nothing runs, so the first waiting request fits"
        self.recovery.schedule = schedule
        return schedule, self.runner.launch(schedule)()

    def _deliver(self, schedule: Schedule) -> None:
        """Reports the tokens of the step to requests that are watched, or that have ended.
        Sequences that end by their text are finished."""
        news: dict[RequestState, None] = {}  # an ordered set
        for seq in schedule.sampled:
            state = self.states.unfinished[seq.request.request_id]
            if state.is_watched or seq.finish_reason is not None:
                news[state] = None
        for state in news:
            for seq in self.states.report(state):
                self.scheduler.finish(seq, seq.finish_reason or "stop")

    def _count(self, schedule: Schedule, seconds: float) -> None:
        self.counts.add(schedule, seconds)
        for observer in [*self.observers]:  # a copy: an observer may leave
            observer(schedule, seconds)
