"""LLM: what users talk to. Requests come in as text or token ids; a loop of steps answers them all together."""

import logging
import sys
import time
from collections.abc import Iterator
from itertools import count

from tqdm import tqdm

from nanovllm.beam_search import BeamSearchParams
from nanovllm.block_manager import BlockManager
from nanovllm.config import Config, shown
from nanovllm.inputs import Conversation, Inputs, Params, Prompt, is_conversation, is_one_prompt
from nanovllm.layers.rotary import longest_context
from nanovllm.loader import find_model, load_config, load_generation_config, load_tokenizer
from nanovllm.model_runner import ModelRunner, choose_device
from nanovllm.models.qwen import check_supported
from nanovllm.outputs import Reply, RequestOutput
from nanovllm.sampling_params import SamplingParams
from nanovllm.scheduler import Schedule, ScheduleError, Scheduler
from nanovllm.sequence import Request
from nanovllm.stats import stats_of

logger = logging.getLogger(__name__)


class LLM:
    """An inference engine for one model.

    `LLM()` runs the embedded model on whatever device there is; `LLM("Qwen/Qwen3-0.6B", max_model_len=4096)` a
    real one. Keyword arguments are the fields of `Config`. Everything here raises ValueError for input that
    cannot work, with the name and the value of what is wrong, before it has changed anything.
    """

    def __init__(self, model: str | None = None, **kwargs):
        config = Config(**kwargs) if model is None else Config(model=model, **kwargs)
        path = find_model(config.model)
        hf_config = load_config(path)
        check_supported(hf_config)
        longest = longest_context(hf_config)
        config.max_model_len = config.max_model_len or longest
        config.require(
            "max_model_len", config.max_model_len <= longest, f"at most {longest}, what the model was made for"
        )
        device = choose_device(config)
        config.max_num_batched_tokens = config.max_num_batched_tokens or (8192 if device.type == "cuda" else 2048)
        self.tokenizer = load_tokenizer(path)
        self.inputs = Inputs(config, self.tokenizer, hf_config.vocab_size, *load_generation_config(path, hf_config))
        self.runner = ModelRunner(config, hf_config, path, device)
        self.config = config
        self.block_manager = self._new_block_manager()
        self.scheduler = (config.scheduler_cls or Scheduler)(config, self.block_manager)
        self.arrivals = count()
        self.replies: dict[str, Reply] = {}  # to the unfinished requests
        self.news: dict[str, RequestOutput] = {}  # what the next step() reports
        self.is_changing = False  # within a step; still set after one that was interrupted
        self.to_abort: list[Request] = []  # in the middle of a step
        self.apart: list[list[Request]] = []  # suspects of a failed step: the last group runs, all others wait
        self.untested: set[Request] = set()  # those of that group that have not got a token since
        self.num_steps = self.num_computed_tokens = self.num_output_tokens = self.peak_used_blocks = 0
        self.num_failed_steps, self.seconds = 0, 0.0

    # --- the loop itself ---

    def add_request(self, prompt: Prompt, params: Params | None = None, request_id: str | None = None) -> str:
        """Queues a request and returns its id. `params=None` takes the model's own from generation_config.json."""
        return self._submit(self._request(prompt, params, request_id)).request.request_id

    def step(self) -> list[RequestOutput]:
        """Runs one step. Returns the requests with new tokens since the last call; these objects go on growing."""
        self._advance()
        return list(map(self.news.pop, [*self.news]))  # at one stroke, so that a Ctrl-C cannot lose any

    def abort(self, request_id: str) -> bool:
        """Ends a request at once and frees its blocks. False if there is no such unfinished request."""
        if not isinstance(request_id, str) or request_id not in self.replies:
            return False
        self._abort([self.replies[request_id].request])
        return True

    def has_unfinished(self) -> bool:
        """Whether step() has anything to compute, or to report."""
        return bool(self.replies or self.news)

    # --- what most people use ---

    def generate(
        self, prompts: Prompt | list[Prompt], params: Params | list[Params] | None = None, use_tqdm: bool = True
    ) -> list[RequestOutput]:
        """Answers all prompts, in their order. `params` is one for all, or a list with one for each.

        If a request makes the engine fail, its exception is raised once the others have been answered.
        """
        if is_one_prompt(prompts):
            prompts = [prompts]
        all_params = list(params) if isinstance(params, list | tuple) else [params] * len(prompts)
        if len(all_params) != len(prompts):
            raise ValueError(
                f"{len(prompts)} prompts, but {len(all_params)} sampling params: give one, or as many as prompts"
            )
        requests = [self._request(*pair) for pair in zip(prompts, all_params)]  # all are checked before one is added
        try:
            outputs = [self._submit(request, is_reported=False).output for request in requests]
            start, tokens_before, finished = time.perf_counter(), self._num_tokens(), 0
            with tqdm(total=len(outputs), desc="Prompts", disable=not use_tqdm, dynamic_ncols=True) as bar:
                while finished < len(outputs):
                    self._advance()
                    before, finished = finished, sum(output.finished for output in outputs)
                    if finished > before:
                        seconds = time.perf_counter() - start
                        speed = [(now - then) / seconds for now, then in zip(self._num_tokens(), tokens_before)]
                        bar.set_postfix_str("prompt {:.0f}, output {:.0f} tokens/s".format(*speed), refresh=False)
                        bar.update(finished - before)
        finally:  # also when interrupted: nothing of this call stays behind
            self._abort(requests)
        for output in outputs:
            if output.error is not None:
                raise output.error
        return outputs

    def chat(
        self,
        messages: Conversation | list[Conversation],
        params: Params | list[Params] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answers one conversation, or each of several, written out in the model's chat template."""
        chats = [messages] if is_conversation(messages) else messages
        if not isinstance(chats, list | tuple) or not all(map(is_conversation, chats)):
            raise ValueError(
                f"messages={shown(messages)} is not allowed: a conversation is a list of {{'role': ..., 'content': ...}}, "
                "and there may be a list of them"
            )
        return self.generate(chats, params, use_tqdm)

    def beam_search(
        self, prompts: Prompt | list[Prompt], params: BeamSearchParams | None = None, use_tqdm: bool = True
    ) -> list[RequestOutput]:
        """The likeliest outputs of each prompt, best first. Other methods but stream take BeamSearchParams, too."""
        params = BeamSearchParams() if params is None else params
        if not isinstance(params, BeamSearchParams):
            raise ValueError(f"params={shown(params)} is not allowed: it must be BeamSearchParams")
        return self.generate(prompts, params, use_tqdm)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[str]:
        """Yields the answer's text as it comes. Other requests go on meanwhile; leaving the loop aborts this one."""
        if self.tokenizer is None:
            raise ValueError(f"model={self.config.model!r} has no tokenizer: it cannot stream text")
        request = self._request(prompt, params)
        if request.beam_search is not None:
            raise ValueError(f"params={shown(params)} is not allowed: the beams of a search cannot be streamed")
        if request.params.n != 1:
            raise ValueError(f"n={request.params.n} is not allowed: it must be 1 to stream")
        return self._stream(request)

    def stats(self) -> dict[str, float]:
        """Counters since the start, and the state of this moment."""
        return stats_of(self)

    @property
    def requests(self) -> dict[str, Request]:
        """The unfinished requests by their ids."""
        return {request_id: reply.request for request_id, reply in self.replies.items()}

    # --- behind them ---

    def _num_tokens(self) -> tuple[int, int]:
        return self.scheduler.num_prompt_tokens, self.num_output_tokens

    def _advance(self) -> None:
        """One step. If it fails, its requests run apart, until one of them fails alone: that one ends."""
        self._settle()
        if not self.replies:
            return
        self.is_changing, schedule = True, None
        try:
            schedule = self._schedule()
            self._run(schedule)
            if self.apart and all(request.is_finished for request in self.untested):
                self.apart.pop()  # this group has got through
            else:
                self.is_changing = False
        except Exception as error:
            if isinstance(error, ScheduleError):  # no request's fault
                raise
            self._isolate(error, schedule)
        finally:
            self._settle()
        if self.to_abort:
            requests, self.to_abort = self.to_abort, []
            self._abort(requests)

    def _schedule(self) -> Schedule:
        before, scheduler = self.block_manager.num_moves, self.scheduler
        schedule = scheduler.schedule()
        if not isinstance(schedule, Schedule):
            problem = f"it returned {shown(schedule)}, and not a Schedule"
        elif not schedule.items:
            lost = list(self.requests.keys() - {request.request_id for request in scheduler.unfinished()})
            problem = f"it planned nothing, but there are unfinished requests: {shown([*self.replies])}"
            problem += f"; neither in waiting nor in running are {shown(lost)}" if lost else ""
        else:
            problem = schedule.problem(scheduler, self.block_manager.num_moves - before)
        if problem is not None:
            raise ScheduleError(f"{type(scheduler).__name__}.schedule(): {problem}")
        return schedule

    def _run(self, schedule: Schedule) -> None:
        """schedule -> run -> update, the whole engine; and what is new goes to the users."""
        start, num_tokens = time.perf_counter(), schedule.num_tokens
        self.peak_used_blocks = max(self.peak_used_blocks, self.block_manager.num_used_blocks)
        first, before = schedule.items[0][0], schedule.items[0][0].num_computed_tokens
        token_ids, logprobs = self.runner.run(schedule)
        self.scheduler.update(schedule, token_ids, logprobs)
        if first in first.request.unfinished and first.num_computed_tokens == before:
            raise ScheduleError(f"{type(self.scheduler).__name__}.update() has done nothing: does it call super()?")
        self.num_steps += 1
        self.num_computed_tokens += num_tokens
        self.num_output_tokens += len(token_ids)
        for request in dict.fromkeys(seq.request for seq in schedule.sampled):
            self._report(self.replies[request.request_id])
            for seq in request.sequences:
                if seq.finish_reason is not None and seq.block_table:  # by a stop string, or because its text failed
                    self.scheduler.finish(seq, seq.finish_reason)
            self.untested.discard(request)
        self.seconds += time.perf_counter() - start

    def _report(self, reply: Reply, error: Exception | None = None) -> None:
        """Hands on what is new of a request, or the error that ends it, and lets go of it if it has ended."""
        try:
            if error is None:
                reply.update(self.tokenizer)
        except Exception as failure:  # of the tokenizer: nobody else is concerned
            error = failure
        if error is not None:
            reply.fail(error)
        output = reply.output
        if reply.is_reported:
            self.news[output.request_id] = output
        if output.finished:
            del self.replies[output.request_id]

    # --- when a step was interrupted, or has failed ---

    def _settle(self) -> None:
        """Puts right what an interrupted step has left."""
        if self.is_changing:
            self._recover()
            self.is_changing = False

    def _recover(self) -> None:
        """Begins anew with what is known for sure, wherever a step has ended: the tokens that each sequence has. The
        cache is empty, all queues are made again, and so is what the users have got. May itself be interrupted."""
        self.block_manager = self._new_block_manager()
        for reply in [*self.replies.values()]:
            reply.request.rewind()
            for seq in reply.request.sequences:
                seq.finish_reason = self.scheduler.reason_to_end(seq)
            reply.restart()
            self._report(reply)
        groups = [[request for request in group if not request.is_finished] for group in self.apart]
        self.apart = [group for group in groups if group]
        group = self.apart[-1] if self.apart else [reply.request for reply in self.replies.values()]
        self.untested = set(group)
        self.scheduler.restart(group, self.block_manager)

    def _isolate(self, error: Exception, schedule: Schedule | None) -> None:
        """Halves the group of those that may have made the step fail. Who fails alone ends with the error."""
        self.num_failed_steps += 1
        logger.warning("a step failed: %r", error)
        planned = dict.fromkeys(seq.request for seq, _ in schedule.items) if schedule else self.requests.values()
        is_apart, group = len(self.replies) == 1 or bool(self.apart), self.apart.pop() if self.apart else [*planned]
        if is_apart and len(group) == 1:
            for reply in self._replies_to(group):
                self._report(reply, error)
        else:
            half = len(group) // 2
            self.apart += [group[half:], group[:half]]

    def _abort(self, requests: list[Request]) -> None:
        """Ends those that have not ended, if need be in the state that an interrupted step has left."""
        frame, step = sys._getframe(), (LLM._schedule.__code__, LLM._run.__code__)
        while frame is not None and frame.f_code not in step:
            frame = frame.f_back
        if frame is not None:  # in the middle of a step: a stream that nobody reads any more was collected as garbage
            return self.to_abort.extend(requests)
        self._settle()
        self.is_changing, replies = True, self._replies_to(requests)
        for reply in replies:
            for seq in reply.request.unfinished:
                seq.finish_reason = "abort"
            self._report(reply)
        for reply in replies:
            self.scheduler.abort(reply.request)
        self.is_changing = False

    def _replies_to(self, requests: list[Request]) -> list[Reply]:
        """To those of them that are not finished."""
        wanted = set(requests)
        return [reply for reply in self.replies.values() if reply.request in wanted]

    # --- on the way in ---

    def _new_block_manager(self) -> BlockManager:
        config, runner = self.config, self.runner
        manager_cls = config.block_manager_cls or BlockManager
        return manager_cls(runner.num_blocks, config.block_size, config.enable_prefix_caching, runner.num_host_blocks)

    def _request(self, prompt: Prompt, params: Params | None, request_id: str | None = None) -> Request:
        """Checks everything, and changes nothing."""
        request = self.inputs.request(prompt, params, request_id)
        if request_id in self.replies or request_id in self.news:
            raise ValueError(f"request_id={request_id!r} is not allowed: a request with this id is not yet done with")
        self.scheduler.check(request)
        return request

    def _submit(self, request: Request, is_reported: bool = True) -> Reply:
        """Gives a checked request its place in the order of arrival, its id and its seed, and queues it."""
        request.arrival = next(self.arrivals)
        if request.request_id is None:
            while any(str(request.arrival) in ids for ids in (self.replies, self.news)):  # somebody chose this number
                request.arrival = next(self.arrivals)
            request.request_id = str(request.arrival)
        if request.params.seed is None:
            request.seed = (self.config.seed + request.arrival * 0x5851F42D4C957F2D) % 2**63
        self._settle()
        self.is_changing = True
        reply = Reply(request, self.tokenizer and self.tokenizer.backend_tokenizer, is_reported)
        if not self.apart:  # else it begins when those have run
            self.scheduler.add(request)
        self.replies[request.request_id] = reply
        self.is_changing = False
        return reply

    def _stream(self, request: Request) -> Iterator[str]:
        shown = 0
        try:
            reply = self._submit(request, is_reported=False)
            (text,) = reply.texts
            while shown < text.num_safe_chars or not reply.output.finished:
                if shown >= text.num_safe_chars:  # else somebody else's step has brought text already
                    self._advance()
                if shown < text.num_safe_chars:
                    begin, shown = shown, text.num_safe_chars  # it may have grown when we come back from yield
                    yield text.output.text[begin:shown]
        finally:
            self._abort([request])
        if reply.output.error is not None:
            raise reply.output.error
