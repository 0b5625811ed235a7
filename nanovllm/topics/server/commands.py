"""Commands: what `nanovllm serve`, `chat` and `complete` do."""

from __future__ import annotations

import json
import os
import re
import sys
import time
import urllib.error
import urllib.request
from argparse import Namespace
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import fields, replace
from http.client import HTTPException
from pathlib import Path
from typing import Any

from nanovllm import LLM, SamplingParams
from nanovllm.config import EMBEDDED_MODEL, Config
from nanovllm.options import Options, refusal
from nanovllm.schedule import Schedule
from nanovllm.topics.fairness.shares import FairShares
from nanovllm.topics.server.parsing import END_OF_THINK, THINK
from nanovllm.topics.server.settings import ReplicaOptions, ServerOptions

# what `serve --show` sets: twenty questions fill it, and some are preempted
SHOWN = {"num_blocks": 128, "block_size": 4, "max_num_seqs": 12, "preemption_mode": "swap"}
SHOWN_STEP = 0.1  # seconds
HELP = "/reset forgets the conversation, /exit ends; Ctrl-C ends an answer"
KEY = "NANOVLLM_API_KEY"


def given(args: Namespace, kind: type[Options]) -> dict[str, Any]:
    """The fields of this class that have been given."""
    names = {field.name for field in fields(kind)}  # type: ignore[arg-type]
    options = vars(args).items()
    return {name: value for name, value in options if name in names and value is not None}


def new_llm(args: Namespace, **defaults: Any) -> LLM:
    return LLM(**defaults | given(args, Config))


def params_of(args: Namespace, defaults: SamplingParams) -> SamplingParams:
    return replace(defaults, **given(args, SamplingParams))


def serve(args: Namespace) -> None:
    try:
        from nanovllm.topics.server import serve as server
        from nanovllm.topics.server.app import new_app
    except ImportError as error:
        raise ImportError(f"{error}. The server needs: pip install 'nanovllm[server]'") from error
    if args.replicas is not None:
        if args.show:
            raise refusal("show", True, "replicas have no page")
        serve_replicas(args)
        return
    if args.show:
        # 31 blocks of the embedded model: some of the preempted find no room, and are recomputed
        swap = {"swap_gib": 0.0003} if args.model is None else {}
        for name, value in (SHOWN | swap).items():
            if getattr(args, name) is None:
                setattr(args, name, value)
    for name, value in given(args, ReplicaOptions).items():
        raise refusal(name, value, "it is for --replicas")
    options = server_options(args)
    sock = server.bind(args.host, args.port)  # before a model is loaded in vain
    llm = new_llm(args, scheduler_cls=FairShares)
    if args.show:
        llm.observers.append(wait_for_viewers)
    server.serve_app(new_app(llm, options), sock)


def wait_for_viewers(schedule: Schedule, seconds: float) -> None:
    """An observer that slows fast steps down, so that people can see them."""
    time.sleep(max(0.0, SHOWN_STEP - seconds))


def serve_replicas(args: Namespace) -> None:
    options = replica_options(args)  # before Ray, which takes seconds to start
    try:
        from nanovllm.topics.server import scaling
    except ImportError as error:
        raise ImportError(f"{error}. Replicas need: pip install 'nanovllm[ray]'") from error
    scaling.run(*options, args.host, args.port)


def replica_options(args: Namespace) -> tuple[Config, ServerOptions, ReplicaOptions]:
    """Raises ValueError."""
    options = ReplicaOptions(**given(args, ReplicaOptions))
    config = Config(**{"scheduler_cls": FairShares} | given(args, Config))
    return config, server_options(args), options


def server_options(args: Namespace) -> ServerOptions:
    """Raises ValueError."""
    options = given(args, ServerOptions)
    options.setdefault("served_model_name", [name_of(args.model or EMBEDDED_MODEL)])
    options["api_key"] = options.get("api_key", []) + os.environ.get(KEY, "").split()
    if args.chat_template is not None:
        try:
            options["chat_template"] = Path(args.chat_template).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise refusal("chat_template", args.chat_template, str(error)) from error
    return ServerOptions(**options)


def name_of(model: str) -> str:
    """The name of a model: a hub id unchanged, the last part of a directory's path."""
    path = Path(model).expanduser()
    return path.resolve().name if path.is_dir() else model


def complete(args: Namespace) -> None:
    llm = new_llm(args)
    prompt = sys.stdin.read() if args.text == "-" else args.text
    for text in llm.stream(prompt, params_of(args, llm.inputs.default_params)):
        print(text, end="", flush=True)
    print()


def chat(args: Namespace) -> None:
    if " " in (args.model or "") and not Path(args.model).expanduser().is_dir():
        hint = "no question: nanovllm chat asks for it, and nanovllm complete continues a text"
        raise refusal("model", args.model, f"it must be a hub id or a directory, {hint}")
    side = Local(args) if args.url is None else Remote(args)
    is_terminal = sys.stdin.isatty()  # into a pipe, only the answers are written
    if is_terminal:
        print(HELP)
    history: list[dict] = []
    while True:
        try:
            text = input("\n> " if is_terminal else "").strip()
        except EOFError:
            return
        if text == "/exit":
            return
        if text == "/reset":
            history = []
        elif re.fullmatch(r"/[a-z?]+", text):
            print(HELP)
        elif text:
            question = {"role": "user", "content": text}
            answer = show(side, [*history, question], is_terminal)
            if answer:  # else the question was refused: the chat goes on without it
                history += [question, {"role": "assistant", "content": answer}]


def show(side: Local | Remote, history: list[dict], is_terminal: bool) -> str:
    """Prints an answer while it comes. Returns the text, also if it is not complete. In a pipe, an
    error ends the program."""
    answer = ""
    try:
        with closing(side.answer(history)) as parts:
            for part in parts:
                answer += part
                print(part, end="", flush=True)
        print(f"\n[{side.usage}]" if is_terminal else "")
    except KeyboardInterrupt:
        print("\n[stopped]")
    except ValueError as error:
        if not is_terminal:
            sys.exit(f"nanovllm: {error}")
        print(f"\n[{error}]")
    return answer


class Local:
    """A model in this process."""

    def __init__(self, args: Namespace):
        self.llm = new_llm(args)
        defaults = replace(self.llm.inputs.default_params, max_tokens=None)
        self.params = params_of(args, defaults)
        self.usage = ""

    def answer(self, history: list[dict]) -> Generator[str, None, None]:
        before = self.llm.stats()
        yield from self.llm.stream(history, self.params)
        after = self.llm.stats()
        names = ("prompt_tokens", "prefix_cache_hit_tokens", "output_tokens")
        self.usage = usage_text(*(int(after[name] - before[name]) for name in names))


class Remote:
    """A server."""

    def __init__(self, args: Namespace):
        if not args.url.startswith(("http://", "https://")):
            raise refusal("url", args.url, "it must begin with http:// or https://")
        for name, value in given(args, Config).items():
            if name != "model":
                raise refusal(name, value, "with --url it is for the server to say")
        self.url = args.url.rstrip("/").removesuffix("/v1")
        self.headers = {"Content-Type": "application/json"}
        key = args.api_key or os.environ.get(KEY, "").partition(" ")[0]
        if key:
            self.headers["Authorization"] = f"Bearer {key}"
        self.body = given(args, SamplingParams)
        self.usage = ""
        self.body["model"] = args.model or self.first_model()

    def first_model(self) -> str:
        with self.opened("/v1/models") as response:
            return json.load(response)["data"][0]["id"]

    @contextmanager
    def opened(self, path: str, body: dict | None = None) -> Iterator[Any]:
        """Opens a URL of the server. An error of the server becomes a ValueError, also one that
        comes while the answer is read."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, self.headers)
        try:
            with answer_to(request) as response:
                if response.status >= 400:
                    raise ValueError(json.load(response)["error"]["message"])
                yield response
        except (OSError, HTTPException) as error:
            raise ValueError(f"url={self.url!r} does not answer: {str(error)[:200]}") from error
        except (json.JSONDecodeError, LookupError, TypeError, AttributeError) as error:
            raise ValueError(f"url={self.url!r} answers as no server of this API does") from error

    def answer(self, history: list[dict]) -> Generator[str, None, None]:
        stream = {"stream": True, "stream_options": {"include_usage": True}}
        body = {"messages": history, **self.body, **stream}
        is_thinking = False
        with self.opened("/v1/chat/completions", body) as lines:
            for line in lines:
                name, _, event = line.partition(b":")
                if name != b"data" or event.strip() == b"[DONE]":  # others are comments
                    continue
                news = json.loads(event)
                if "error" in news:
                    raise ValueError(news["error"]["message"])
                for choice in news["choices"]:
                    delta = choice["delta"]
                    thinks = bool(delta.get("reasoning"))
                    if thinks != is_thinking and (thinks or delta.get("content")):
                        is_thinking = thinks
                        yield THINK if thinks else END_OF_THINK
                    yield delta.get("reasoning") or delta.get("content") or ""
                usage = news.get("usage")
                if usage:
                    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
                    counts = (usage["prompt_tokens"], cached, usage["completion_tokens"])
                    self.usage = usage_text(*counts)


def answer_to(request: urllib.request.Request) -> Any:
    try:
        return urllib.request.urlopen(request)
    except urllib.error.HTTPError as error:  # it is an answer, too
        return error


def usage_text(num_prompt: int, num_cached: int, num_output: int) -> str:
    return f"prompt {num_prompt} tokens, {num_cached} of them cached; answer {num_output} tokens"
