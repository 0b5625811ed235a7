"""LLM: what users work with. Requests come in as text or token ids; a loop of steps answers them all together."""

import logging
import sys
import time
from collections.abc import Iterator
from itertools import count
from types import FrameType

from tqdm import tqdm

from nanovllm.beam_search import BeamSearchParams
from nanovllm.block_manager import BlockManager
from nanovllm.config import Config
from nanovllm.inputs import (
    AllParams,
    Conversations,
    Inputs,
    Params,
    Prompt,
    Prompts,
    is_conversation,
    is_one_prompt,
)
from nanovllm.layers.rotary import longest_context
from nanovllm.loader import find_model, load_config, load_generation_config, load_tokenizer
from nanovllm.model_runner import ModelRunner, choose_device
from nanovllm.models.qwen import check_supported
from nanovllm.options import shown
from nanovllm.outputs import Reply, RequestOutput
from nanovllm.sampling_params import SamplingParams
from nanovllm.scheduler import Schedule, ScheduleError, Scheduler, check_schedule
from nanovllm.sequence import Request
from nanovllm.stats import stats_of

logger = logging.getLogger(__name__)


class LLM:
    """An inference engine for one model.

    `LLM()` runs the embedded model on whatever device there is; `LLM("Qwen/Qwen3-0.6B", max_model_len=4096)` runs a
    real one. Keyword arguments are the fields of `Config`. For input that cannot work, every method raises ValueError
    with the name and the value of what is wrong, before it has changed anything.
    """

    def __init__(self, model: str | None = None, **kwargs):
        self.config = config = Config(**kwargs) if model is None else Config(model=model, **kwargs)
        path = find_model(config.model)
        hf_config = load_config(path)
        check_supported(hf_config)
        device = choose_device(config)
        self.limits = limits = config.resolved(
            longest_context(hf_config), 8192 if device.type == "cuda" else 2048
        )
        self.tokenizer = load_tokenizer(path)
        self.runner = ModelRunner(config, limits, hf_config, path, device)
        self.block_manager = self._new_block_manager()
        self.scheduler = (config.scheduler_cls or Scheduler)(limits, self.block_manager)
        defaults = load_generation_config(path, hf_config)
        self.inputs = Inputs(
            config.model, self.scheduler, self.tokenizer, hf_config.vocab_size, defaults
        )
        self.arrivals = count()
        self.replies: dict[str, Reply] = {}  # for the unfinished requests, by id
        self.unreported: dict[str, RequestOutput] = {}  # what the next step() will return
        self.is_changing = (
            False  # during a step, a submission or an abort; still set if that was interrupted
        )
        self.to_abort: list[Request] = []  # aborted in the middle of a step
        self.apart: list[
            list[Request]
        ] = []  # suspects of a failed step: the last group runs, the others wait
        self.untested: set[Request] = set()  # those in that group that have got no token since
        self.num_steps = self.num_failed_steps = self.num_computed_tokens = (
            self.num_output_tokens
        ) = 0
        self.fewest_free_blocks, self.seconds, self.num_idle_steps = self.runner.num_blocks, 0.0, 0

    # --- the loop ---

    def add_request(
        self, prompt: Prompt, params: Params | None = None, request_id: str | None = None
    ) -> str:
        """Queues a request and returns its id. `params=None` means those of the model's generation_config.json."""
        if isinstance(request_id, str) and (
            request_id in self.replies or request_id in self.unreported
        ):
            raise ValueError(
                f"request_id={request_id!r} is not allowed: a request with this id is still in use"
            )
        return self._submit(self.inputs.request(prompt, params, request_id)).output.request_id

    def step(self, report: bool = True) -> list[RequestOutput]:
        """Runs one step of all requests together: schedule, run, update.

        Returns the outputs with new tokens since the last call that reported; these objects keep growing. Without
        `report`, it returns nothing and keeps all for the next call: `generate` and `stream` hold their own outputs.
        """
        if self.is_changing:  # the last step was interrupted
            self._recover()
        if self.replies:
            start, schedule, self.is_changing = time.perf_counter(), None, True
            try:
                moves = self.block_manager.num_moves
                schedule = self.scheduler.schedule()
                check_schedule(schedule, self.scheduler, self.replies.keys(), moves)
                self.num_idle_steps = 0 if schedule.sampled_items else self.num_idle_steps + 1
                if self.num_idle_steps > self.limits.max_model_len:  # no prompt needs so many
                    raise ScheduleError(
                        self.scheduler,
                        "schedule",
                        f"{self.num_idle_steps} steps without a new token",
                    )
                self.fewest_free_blocks = min(
                    self.fewest_free_blocks, len(self.block_manager.free_blocks)
                )
                num_computed = schedule.items[0][0].num_computed_tokens
                token_ids, logprobs = self.runner.run(schedule)
                self.scheduler.update(schedule, token_ids, logprobs)
                self._deliver(schedule, num_computed)
                self.is_changing = False
                self.seconds += time.perf_counter() - start
            except ScheduleError:  # not the fault of any request
                raise
            except Exception as error:
                self._isolate(error, schedule)
            finally:
                if self.is_changing:
                    self._recover()
                if self.to_abort:
                    self._end()
        return (
            list(map(self.unreported.pop, [*self.unreported])) if report else []
        )  # in one call: a Ctrl-C loses none

    def abort(self, request_id: str) -> bool:
        """Ends a request at once and frees its blocks. Returns False if no unfinished request has this id."""
        if not isinstance(request_id, str) or request_id not in self.replies:
            return False
        self._abort([self.replies[request_id].request])
        return True

    def has_unfinished(self) -> bool:
        """Whether step() has anything left to compute or to report."""
        return bool(self.replies or self.unreported)

    # --- what most people use ---

    def generate(
        self, prompts: Prompts, params: AllParams = None, use_tqdm: bool = True
    ) -> list[RequestOutput]:
        """Answers all prompts; the outputs are in the same order. `params` is one for all, or a list with one for each.

        If a request makes the engine fail, its exception is raised after the others have been answered.
        """
        prompts = [prompts] if is_one_prompt(prompts) else prompts
        all_params = list(params) if isinstance(params, list | tuple) else [params] * len(prompts)
        if len(all_params) != len(prompts):
            given = f"{len(prompts)} prompts, but {len(all_params)} sampling params"
            raise ValueError(f"{given}: give one, or as many as prompts")
        # all are checked before any is added
        requests = [self.inputs.request(*pair) for pair in zip(prompts, all_params)]
        start, finished = time.perf_counter(), 0
        before = self.scheduler.num_prompt_tokens, self.num_output_tokens
        try:
            outputs = [self._submit(request, is_reported=False).output for request in requests]
            with tqdm(
                total=len(outputs), desc="Prompts", disable=not use_tqdm, dynamic_ncols=True
            ) as bar:
                while finished < len(outputs):
                    self.step(report=False)
                    newly = sum(output.finished for output in outputs) - finished
                    if newly:
                        finished, seconds = finished + newly, time.perf_counter() - start
                        now = self.scheduler.num_prompt_tokens, self.num_output_tokens
                        speeds = [(n - then) / seconds for n, then in zip(now, before)]
                        bar.set_postfix_str(
                            "prompt {:.0f}, output {:.0f} tokens/s".format(*speeds), refresh=False
                        )
                        bar.update(newly)
        except BaseException:  # even Ctrl-C: nothing of this call is left behind
            self._abort(requests)
            raise
        for output in outputs:
            if output.error is not None:
                raise output.error
        return outputs

    def chat(
        self, messages: Conversations, params: AllParams = None, use_tqdm: bool = True
    ) -> list[RequestOutput]:
        """Answers one conversation or several, formatted with the model's chat template."""
        chats = [messages] if is_conversation(messages) else messages
        if not isinstance(chats, list | tuple) or not all(map(is_conversation, chats)):
            allowed = "a list of {'role': ..., 'content': ...}, or a list of such lists"
            raise ValueError(f"messages={shown(messages)} is not allowed: it must be {allowed}")
        return self.generate(chats, params, use_tqdm)

    def beam_search(
        self, prompts: Prompts, params: BeamSearchParams | None = None, use_tqdm=True
    ) -> list[RequestOutput]:
        """The most likely outputs for each prompt, best first. All methods except stream take BeamSearchParams, too."""
        params = BeamSearchParams() if params is None else params
        if not isinstance(params, BeamSearchParams):
            raise ValueError(f"params={shown(params)} is not allowed: it must be BeamSearchParams")
        return self.generate(prompts, params, use_tqdm)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[str]:
        """Yields the answer's text as it comes. Other requests continue meanwhile; leaving the loop aborts this one."""
        if self.tokenizer is None:
            raise ValueError(
                f"model={self.config.model!r} has no tokenizer, so it cannot stream text"
            )
        request = self.inputs.request(prompt, params)
        if request.beam_search is not None or request.params.n != 1:
            raise ValueError(
                f"params={shown(params)} is not allowed: only a single answer can be streamed"
            )
        return self._stream(request)

    def stats(self) -> dict[str, float]:
        """Counters since the start, and the current state."""
        return stats_of(self)

    @property
    def requests(self) -> dict[str, Request]:
        """The unfinished requests by their ids."""
        return {request_id: reply.request for request_id, reply in self.replies.items()}

    # --- delivering what a step has computed ---

    def _deliver(self, schedule: Schedule, num_computed: int) -> None:
        """Counts a step and reports its tokens. Before it, its first sequence had `num_computed` tokens cached."""
        first = schedule.items[0][0]
        if first.num_computed_tokens == num_computed and first in first.request.unfinished:
            raise ScheduleError(self.scheduler, "update", "it did nothing: does it call super()?")
        self.num_steps += 1
        self.num_computed_tokens += schedule.num_tokens
        self.num_output_tokens += len(schedule.sampled_items)
        news: dict[Reply, None] = {}
        for _, seq in schedule.sampled_items:
            reply = self.replies[seq.request.request_id]
            if reply.is_watched or seq.finish_reason is not None:
                news[reply] = None
            elif (
                reply.is_reported
            ):  # nothing else to do for a token: its output is made when somebody reads it
                self.unreported[reply.output.request_id] = reply.output
        for reply in news:
            self._report(reply)
            for seq in reply.request.sequences:
                if (
                    seq.finish_reason is not None and seq.block_table
                ):  # by a stop string, or because its text failed
                    self.scheduler.finish(seq, seq.finish_reason)
        if self.apart:
            self.untested.difference_update(seq.request for _, seq in schedule.sampled_items)
        if self.apart and not any(request.unfinished for request in self.untested):
            self.apart.pop()  # the whole group has passed: it was none of them
            self._recover()

    def _report(self, reply: Reply, error: Exception | None = None) -> None:
        """Reports what is new about a request, or the error that ends it. Forgets the request once it has ended."""
        try:
            reply.update()
        except Exception as failure:  # from the tokenizer: no other request is affected
            error = error or failure
        if error is not None:
            reply.fail(error)
        output = reply.output
        if reply.is_reported:
            self.unreported[output.request_id] = output
        if output.finished:
            del self.replies[output.request_id]

    # --- after a step was interrupted or has failed ---

    def _recover(self) -> None:
        """Starts over from what is always valid, wherever a step has ended: the tokens of each sequence. The cache is
        empty again; the queues and the users' outputs are rebuilt. May itself be interrupted."""
        self.is_changing, self.num_idle_steps, self.block_manager = (
            True,
            0,
            self._new_block_manager(),
        )
        for reply in [*self.replies.values()]:
            reply.request.rewind()
            for seq in reply.request.sequences:
                seq.finish_reason = self.scheduler.reason_to_end(seq)
            reply.restart()
            self._report(reply)
        groups = [[request for request in group if request.unfinished] for group in self.apart]
        self.apart = [group for group in groups if group]
        group = self.apart[-1] if self.apart else [reply.request for reply in self.replies.values()]
        self.untested = set(group)
        self.scheduler.restart(group, self.block_manager)
        self.is_changing = False

    def _isolate(self, error: Exception, schedule: Schedule | None) -> None:
        """Halves the group of requests that may have made the step fail. One that fails alone ends with the error."""
        self.num_failed_steps += 1
        logger.warning("a step failed: %r", error)
        planned = (
            dict.fromkeys(seq.request for seq, _ in schedule.items)
            if schedule
            else self.requests.values()
        )
        is_apart, group = (
            len(self.replies) == 1 or bool(self.apart),
            self.apart.pop() if self.apart else [*planned],
        )
        if is_apart and len(group) == 1:
            if group[0].request_id in self.replies:  # otherwise it ended in the step that failed
                self._report(self.replies[group[0].request_id], error)
        else:
            half = len(group) // 2
            self.apart += [group[half:], group[:half]]

    def _abort(self, requests: list[Request]) -> None:
        """Ends the unfinished ones: at once, or, if we are in the middle of a step, at its end."""
        self.to_abort += requests
        changing = [method.__code__ for method in (LLM.step, LLM._submit, LLM._end)]
        frame: FrameType | None = sys._getframe()
        while frame is not None and not (
            frame.f_code in changing and frame.f_locals["self"] is self
        ):
            frame = frame.f_back
        if (
            frame is None
        ):  # otherwise Python has garbage-collected a stream that nobody reads any more
            self._end()

    def _end(self) -> None:
        """Ends the requests in `to_abort`. If it is interrupted, the next step ends the rest."""
        if self.is_changing:
            self._recover()
        self.is_changing, unwanted = True, set(self.to_abort)
        replies = [reply for reply in self.replies.values() if reply.request in unwanted]
        for reply in replies:
            for seq in reply.request.unfinished:
                seq.finish_reason = "abort"
            self._report(reply)
        for reply in replies:
            self.scheduler.abort(reply.request)
        self.to_abort = [request for request in self.to_abort if request not in unwanted]
        self.is_changing = False
        if self.apart and not any(request.unfinished for request in self.untested):
            self._recover()  # all suspects of the group that runs are gone: the next group begins

    # --- adding requests ---

    def _new_block_manager(self) -> BlockManager:
        config, runner = self.config, self.runner
        manager_cls = config.block_manager_cls or BlockManager
        return manager_cls(
            runner.num_blocks,
            config.block_size,
            config.enable_prefix_caching,
            runner.num_host_blocks,
        )

    def _submit(
        self, request: Request, is_reported: bool = True, is_watched: bool = False
    ) -> Reply:
        """Gives a checked request its arrival number, id and seed, and queues it."""
        request.arrival, request.arrival_time = next(self.arrivals), self.scheduler.clock()
        if not request.request_id:
            while any(
                str(request.arrival) in ids for ids in (self.replies, self.unreported)
            ):  # a user chose it
                request.arrival = next(self.arrivals)
            request.request_id = str(request.arrival)
        if request.params.seed is None:
            request.seed = (self.config.seed + request.arrival * 0x5851F42D4C957F2D) % 2**63
        if self.is_changing:
            self._recover()
        self.is_changing = True
        reply = Reply(
            request, self.tokenizer and self.tokenizer.backend_tokenizer, is_reported, is_watched
        )
        if not self.apart:  # otherwise it is queued after those have run
            self.scheduler.add(request)
        self.replies[request.request_id] = reply
        self.is_changing = False
        return reply

    def _stream(self, request: Request) -> Iterator[str]:
        shown = 0
        try:
            reply = self._submit(request, is_reported=False, is_watched=True)
            while shown < reply.texts[0].num_safe_chars or not reply.output.finished:
                if (
                    shown >= reply.texts[0].num_safe_chars
                ):  # otherwise another caller's step has already brought text
                    self.step(report=False)
                begin, shown = (
                    shown,
                    max(shown, reply.texts[0].num_safe_chars),
                )  # it may grow while we are away
                if shown > begin:
                    yield reply.outputs[0].text[begin:shown]
        finally:
            self._abort([request])
        if reply.output.error is not None:
            raise reply.output.error
