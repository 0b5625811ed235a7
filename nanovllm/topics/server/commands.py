"""Commands: what `nanovllm serve` and `nanovllm chat` do."""

import os
import re
import sys
import time
from argparse import Namespace
from collections.abc import Generator
from contextlib import closing
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, cast

from nanovllm import LLM, SamplingParams
from nanovllm.config import EMBEDDED_MODEL, Config
from nanovllm.options import Options, refusal
from nanovllm.schedule import Schedule
from nanovllm.topics.fairness.shares import FairShares
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
    # before Ray, which takes seconds to start
    options = ReplicaOptions(**given(args, ReplicaOptions))
    config = Config(**{"scheduler_cls": FairShares} | given(args, Config))
    server = server_options(args)
    try:
        from nanovllm.topics.server import scaling
    except ImportError as error:
        raise ImportError(f"{error}. Replicas need: pip install 'nanovllm[ray]'") from error
    scaling.run(config, server, options, args.host, args.port)


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


def chat(args: Namespace) -> None:
    llm = new_llm(args)
    wanted = {"max_tokens": None} | given(args, SamplingParams)
    params = replace(llm.inputs.default_params, **wanted)
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
            answer = show(llm, [*history, question], params, is_terminal)
            if answer:  # else the question was refused: the chat goes on without it
                history += [question, {"role": "assistant", "content": answer}]


def show(llm: LLM, history: list[dict], params: SamplingParams, is_terminal: bool) -> str:
    """Prints an answer while it comes, and returns it. In a pipe, an error ends the program."""
    answer = ""
    try:
        with closing(cast(Generator, llm.stream(history, params))) as parts:
            for part in parts:
                answer += part
                print(part, end="", flush=True)
        print()
    except KeyboardInterrupt:
        print("\n[stopped]")
    except ValueError as error:
        if not is_terminal:
            sys.exit(f"nanovllm: {error}")
        print(f"\n[{error}]")
    return answer
