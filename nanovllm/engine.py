"""LLM: what users talk to. Requests come in as text or token ids; a loop of steps answers them all together."""

import time
from collections.abc import Iterator
from itertools import count

from tqdm import tqdm

from nanovllm.beam_search import BeamSearch, BeamSearchParams
from nanovllm.block_manager import BlockManager
from nanovllm.config import Config, is_int
from nanovllm.layers.rotary import longest_context
from nanovllm.loader import find_model, load_config, load_generation_config, load_tokenizer
from nanovllm.model_runner import ModelRunner, choose_device
from nanovllm.models.qwen import check_supported
from nanovllm.outputs import CompletionOutput, RequestOutput, TextStream
from nanovllm.sampling_params import SamplingParams
from nanovllm.scheduler import Scheduler
from nanovllm.sequence import Request, Sequence

Conversation = list[dict[str, str]]
Prompt = str | list[int] | Conversation
Params = SamplingParams | BeamSearchParams


def is_conversation(prompt) -> bool:
    is_list = isinstance(prompt, list | tuple) and len(prompt) > 0
    return is_list and all(isinstance(message, dict) and {"role", "content"} <= message.keys() for message in prompt)


def is_one_prompt(prompts) -> bool:
    return (
        not isinstance(prompts, list | tuple)
        or is_conversation(prompts)
        or any(isinstance(x, int) for x in prompts[:1])
    )


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
        self.default_params, self.eos_token_ids = load_generation_config(path, hf_config)
        self.runner = ModelRunner(config, hf_config, path, device)
        self.config = config
        manager_cls = config.block_manager_cls or BlockManager
        self.block_manager = manager_cls(
            self.runner.num_blocks, config.block_size, config.enable_prefix_caching, self.runner.num_host_blocks
        )
        self.scheduler = (config.scheduler_cls or Scheduler)(config, self.block_manager)
        self.arrivals = count()
        self.requests: dict[str, Request] = {}  # the unfinished ones
        self.outputs: dict[str, RequestOutput] = {}  # what they have so far
        self.streams: dict[Sequence, TextStream] = {}
        self.news: dict[str, RequestOutput] = {}  # what the next step() reports
        self.num_steps = self.num_computed_tokens = self.num_output_tokens = self.peak_used_blocks = 0
        self.seconds = 0.0

    # --- the loop itself ---

    def add_request(self, prompt: Prompt, params: Params | None = None, request_id: str | None = None) -> str:
        """Queues a request and returns its id. `params=None` takes the model's own from generation_config.json."""
        return self._submit(self._request(prompt, params, request_id)).request_id

    def step(self) -> list[RequestOutput]:
        """Runs one step. Returns the requests with new tokens since the last call; these objects go on growing."""
        self._advance()
        news, self.news = list(self.news.values()), {}
        return news

    def abort(self, request_id: str) -> bool:
        """Ends a request at once and frees its blocks. False if there is no such unfinished request."""
        if request_id not in self.requests:
            return False
        request = self.requests[request_id]
        self.scheduler.abort(request)
        self._report(request)
        return True

    def has_unfinished(self) -> bool:
        """Whether step() has anything to compute, or to report."""
        return bool(self.requests or self.news)

    # --- what most people use ---

    def generate(
        self,
        prompts: Prompt | list[Prompt],
        params: Params | list[Params] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answers all prompts, in their order. `params` is one for all, or a list with one for each."""
        if is_one_prompt(prompts):
            prompts = [prompts]
        all_params = list(params) if isinstance(params, list | tuple) else [params] * len(prompts)
        if len(all_params) != len(prompts):
            raise ValueError(
                f"{len(prompts)} prompts, but {len(all_params)} sampling params: give one, or as many as prompts"
            )
        requests = [self._request(*pair) for pair in zip(prompts, all_params)]  # all are checked before one is added
        outputs = [self._submit(request) for request in requests]
        start, tokens_before, finished = time.perf_counter(), self._num_tokens(), 0
        try:
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
            for output in outputs:
                self._forget(output)
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
                f"messages={messages!r} is not allowed: a conversation is a list of {{'role': ..., 'content': ...}}, "
                "and there may be a list of them"
            )
        return self.generate(chats, params, use_tqdm)

    def beam_search(
        self, prompts: Prompt | list[Prompt], params: BeamSearchParams | None = None, use_tqdm: bool = True
    ) -> list[RequestOutput]:
        """The likeliest outputs of each prompt, best first. Other methods but stream take BeamSearchParams, too."""
        params = BeamSearchParams() if params is None else params
        if not isinstance(params, BeamSearchParams):
            raise ValueError(f"params={params!r} is not allowed: it must be BeamSearchParams")
        return self.generate(prompts, params, use_tqdm)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[str]:
        """Yields the answer's text as it comes. Other requests go on meanwhile; leaving the loop aborts this one."""
        if self.tokenizer is None:
            raise ValueError(f"model={self.config.model!r} has no tokenizer: it cannot stream text")
        request = self._request(prompt, params)
        if request.beam_search is not None:
            raise ValueError(f"params={params!r} is not allowed: the beams of a search cannot be streamed")
        if request.params.n != 1:
            raise ValueError(f"n={request.params.n} is not allowed: it must be 1 to stream")
        return self._stream(request)

    def stats(self) -> dict[str, float]:
        """Counters since the start, and the state of this moment."""
        scheduler, manager = self.scheduler, self.block_manager
        return {
            "requests_running": len(scheduler.running),
            "requests_waiting": len(scheduler.waiting),
            "kv_blocks": len(manager.blocks),
            "kv_blocks_used": manager.num_used_blocks,
            "kv_blocks_used_peak": self.peak_used_blocks,
            **{f"kv_slots_{name}": slots for name, slots in scheduler.usage().items()},
            "prompt_tokens": scheduler.num_prompt_tokens,
            "prefix_cache_hit_tokens": scheduler.num_cached_tokens,
            "preemptions": scheduler.num_preemptions,
            "swapped_blocks": scheduler.num_swapped_blocks,
            "steps": self.num_steps,
            "computed_tokens": self.num_computed_tokens,
            "output_tokens": self.num_output_tokens,
            "seconds": self.seconds,
            "output_tokens_per_second": self.num_output_tokens / self.seconds if self.seconds else 0.0,
        }

    # --- behind them ---

    def _num_tokens(self) -> tuple[int, int]:
        return self.scheduler.num_prompt_tokens, self.num_output_tokens

    def _advance(self) -> None:
        """schedule -> run -> update, the whole engine."""
        start = time.perf_counter()
        schedule = self.scheduler.schedule()
        if not schedule.items:
            return
        self.peak_used_blocks = max(self.peak_used_blocks, self.block_manager.num_used_blocks)
        num_tokens = schedule.num_tokens
        try:
            token_ids, logprobs = self.runner.run(schedule)
        except BaseException:  # Ctrl-C, too
            self.scheduler.restart()
            raise
        sampled = self.scheduler.update(schedule, token_ids, logprobs)
        for seq, token_id, logprob in zip(sampled, token_ids, logprobs):
            if seq.request.beam_search is None:
                self._deliver(seq, token_id, logprob)
        for request in dict.fromkeys(seq.request for seq in sampled):
            self._report(request)
        self.num_steps += 1
        self.num_computed_tokens += num_tokens
        self.num_output_tokens += len(token_ids)
        self.seconds += time.perf_counter() - start

    def _deliver(self, seq: Sequence, token_id: int, logprob: dict[int, float] | None) -> None:
        """Hands a new token to its output, as text too, and ends the sequence at a stop string."""
        output = self.outputs[seq.request.request_id].outputs[seq.index]
        output.token_ids.append(token_id)
        if logprob is not None:
            output.logprobs.append(logprob)
        if seq in self.streams and self.streams[seq].add(token_id):
            if seq.finish_reason is None:
                self.scheduler.finish(seq, "stop")
            seq.finish_reason = "stop"

    def _report(self, request: Request) -> None:
        """Brings the request's output up to date, and lets go of the request if it has ended."""
        result = self.news[request.request_id] = self.outputs[request.request_id]
        result.num_cached_tokens = request.num_cached_tokens
        for seq, output in zip(request.sequences, result.outputs):
            output.finish_reason = seq.finish_reason
        if request.is_finished:
            result.finished = True
            if request.beam_search is not None:
                result.outputs[:] = self._beams(request)
            for seq in request.sequences:
                if seq in self.streams:
                    self.streams.pop(seq).release()
            del self.requests[request.request_id], self.outputs[request.request_id]

    def _beams(self, request: Request) -> list[CompletionOutput]:
        """The results of a beam search, the best first."""
        outputs = []
        for i, beam in enumerate(request.beam_search.results):
            text = self.tokenizer.decode(beam.token_ids, skip_special_tokens=True) if self.tokenizer else ""
            reason = "stop" if beam.token_id in request.stop_token_ids else "length"
            outputs.append(CompletionOutput(i, text, beam.token_ids, None, reason, beam.cumulative_logprob))
        return outputs

    def _request(self, prompt: Prompt, params: Params | None, request_id: str | None = None) -> Request:
        """Checks everything that a user may get wrong, and changes nothing."""
        params, beams = self.default_params if params is None else params, None
        if isinstance(params, BeamSearchParams):
            params, beams = params.sampling_params(), params
        if not isinstance(params, SamplingParams):
            raise ValueError(f"params={params!r} is not allowed: it must be SamplingParams or BeamSearchParams")
        if not isinstance(request_id, str | None):
            raise ValueError(f"request_id={request_id!r} is not allowed: it must be a string")
        if request_id in self.requests or request_id in self.news:
            raise ValueError(f"request_id={request_id!r} is not allowed: a request with this id is not yet done with")
        text, token_ids = self._encode(prompt)
        if not token_ids:
            raise ValueError(f"prompt={prompt!r} is empty: it must have at least one token")
        vocab_size = self.runner.vocab_size
        for name, ids in (("prompt", token_ids), ("stop_token_ids", params.stop_token_ids)):
            wrong = [i for i in ids if not is_int(i, 0, vocab_size - 1)]
            if wrong:
                raise ValueError(
                    f"{name} has the token id {wrong[0]!r}: ids must be integers from 0 to {vocab_size - 1}"
                )
        if params.stop and self.tokenizer is None:
            raise ValueError(f"stop={params.stop!r} is not allowed: model={self.config.model!r} has no tokenizer")
        request = Request(request_id, text, token_ids, params, self.eos_token_ids)
        if beams is not None:
            room = min(params.max_tokens, self.config.max_model_len - len(token_ids))
            request.beam_search = BeamSearch(beams, request.stop_token_ids, room)
        self.scheduler.check(request)
        return request

    def _encode(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        is_chat = is_conversation(prompt)
        if isinstance(prompt, list | tuple) and not is_chat:
            return None, list(prompt)
        if not is_chat and not isinstance(prompt, str):
            raise ValueError(f"prompt={prompt!r} is not allowed: it must be text, token ids or a list of messages")
        if self.tokenizer is None:
            raise ValueError(
                f"prompt={prompt!r} is not allowed: model={self.config.model!r} has no tokenizer, give token ids"
            )
        if is_chat and not self.tokenizer.chat_template:
            raise ValueError(f"model={self.config.model!r} has no chat template: give the whole prompt to generate()")
        text = prompt
        if is_chat:
            text = self.tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
        return text, self.tokenizer.encode(text, add_special_tokens=not is_chat)

    def _submit(self, request: Request) -> RequestOutput:
        """Gives a checked request its place in the order of arrival, its id and its seed, and queues it."""
        request.arrival = next(self.arrivals)
        if request.request_id is None:
            while str(request.arrival) in self.requests | self.news:  # somebody chose this number as an id
                request.arrival = next(self.arrivals)
            request.request_id = str(request.arrival)
        if request.params.seed is None:
            request.seed = (self.config.seed + request.arrival * 0x5851F42D4C957F2D) % 2**63
        outputs = [
            CompletionOutput(i, logprobs=None if request.params.logprobs is None else [])
            for i in range(request.params.n)
        ]
        if self.tokenizer is not None and request.beam_search is None:
            for seq, output in zip(request.sequences, outputs):
                self.streams[seq] = TextStream(self.tokenizer.backend_tokenizer, output, request.params.stop)
        result = RequestOutput(request.request_id, request.prompt, request.prompt_token_ids, outputs)
        self.requests[request.request_id], self.outputs[request.request_id] = request, result
        self.scheduler.add(request)
        return result

    def _stream(self, request: Request) -> Iterator[str]:
        result = self._submit(request)
        text = self.streams[request.sequences[0]]
        shown = 0
        try:
            while shown < text.num_safe_chars or not result.finished:
                if shown == text.num_safe_chars:  # else somebody else's step has brought text already
                    self._advance()
                if shown < text.num_safe_chars:
                    begin, shown = shown, text.num_safe_chars  # it may have grown when we come back from yield
                    yield text.output.text[begin:shown]
        finally:
            self._forget(result)

    def _forget(self, result: RequestOutput) -> None:
        """For a caller that has the output in hand: step() need not report it."""
        self.abort(result.request_id)
        self.news.pop(result.request_id, None)
