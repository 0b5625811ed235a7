"""The command line: options are those of the classes, mistakes are one sentence, and a conversation goes on whatever
comes.

Run: pytest tests/server/test_cli.py [-k chat]
"""

import builtins
import io
import json
import re
import signal
import socket
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
from extras import needs
from frames import states_of
from server_tools import Running, new_parrot

from nanovllm import LLM, RoundRobin, SamplingParams
from nanovllm.config import Config
from nanovllm.topics.server import cli, commands
from nanovllm.topics.server.live import Camera
from nanovllm.topics.server.settings import ServerOptions


@pytest.fixture
def parrot(monkeypatch):
    """The engine of whatever command comes."""
    llm = new_parrot()
    monkeypatch.setattr(commands, "new_llm", lambda args: llm)
    return llm


@pytest.fixture(scope="module")
def running():
    with Running(new_parrot()) as server:
        yield server


@pytest.fixture
def server(server):
    server.llm.runner.answers.clear()
    return server


def refused(capsys, *args: str) -> str:
    """The one sentence that a mistake gets."""
    with pytest.raises(SystemExit) as info:
        cli.main([*args])
    assert info.value.code == 2
    *_, last = capsys.readouterr().err.splitlines()
    assert last.startswith("nanovllm") and len(last) < 1200
    return last


# --- options ---


@pytest.mark.parametrize(
    "command, kinds, defaults",
    [
        ("serve", [Config, ServerOptions], [256, 30.0, 8000, True]),
        ("chat", [Config, SamplingParams], [True]),
    ],
)
def test_each_field_is_an_option_with_its_text_and_default(command, kinds, defaults, capsys):
    with pytest.raises(SystemExit) as info:
        cli.main([command, "--help"])
    assert info.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    options = {*re.findall(r"--[a-z-]+", text)}
    for field in (field for kind in kinds for field in fields(kind)):
        is_there = "--" + field.name.replace("_", "-") in options
        assert is_there != (field.name in cli.NOT_AN_OPTION) or field.name == "model"
    assert "Fraction of GPU memory for weights" in text
    assert all(f"(default: {value})" in text for value in defaults)
    values = ("auto,float32,bfloat16,float16", "auto,int8", "recompute,swap", "cuda,always,never")
    assert all(f"{{{words}}}" in text.replace(", ", ",") for words in values)


@pytest.mark.parametrize("option", ["api_key", "served_model_name"])
def test_what_has_no_bytes_is_refused(option):
    """As the environment gives a key that is no UTF-8: each request was a 500."""
    with pytest.raises(ValueError, match=f"{option}.* is not allowed: it must be ") as refused:
        ServerOptions(**{"served_model_name": ["m"], option: ["s\udcffcret"]})
    assert option != "api_key" or "cret" not in str(refused.value)


def test_words_may_come_from_a_file(tmp_path, capsys):
    """Those behind it win."""
    file = tmp_path / "options"
    file.write_text("--seed=5\n--no-enable-prefix-caching\n--router-cls=nanovllm:RoundRobin\n")
    args = cli.new_parser().parse_args(["serve", f"@{file}", "--seed", "6"])
    assert commands.given(args, Config) == {"enable_prefix_caching": False, "seed": 6}
    assert args.router_cls is RoundRobin
    assert f"No such file or directory: '{file}x'" in refused(capsys, "serve", f"@{file}x")


@pytest.mark.parametrize("option", ["--api-key", "--served-model-name", "--allowed-origins"])
def test_a_list_takes_one_value_and_leaves_the_model(option):
    args = cli.new_parser().parse_args(["serve", option, "one", option, "two", "org/model"])
    assert vars(args)[option[2:].replace("-", "_")] == ["one", "two"] and args.model == "org/model"
    args = cli.new_parser().parse_args(["chat", "--stop", "a", "org/model"])
    assert args.stop == ["a"] and args.model == "org/model"


@pytest.mark.parametrize(
    "args, word",
    [
        (["serve", "--max-modellen", "5"], "'--max-modellen' here: did you mean --max-model-len?"),
        (["chat", "--max_tokens", "5"], "'--max_tokens' here: did you mean --max-tokens?"),
        (["serve", "--zzz"], "there is no option '--zzz' here (nanovllm serve --help says more)"),
        (["serve", "--port", "abc"], "--port"),
        (["serve", "--host", "no.such.host.invalid", "--port", "0"], "host='no.such.host.invalid'"),
        (["serve", "--port", "0", "--dtype", "int8"], "dtype='int8'"),
        (["serve", "--port", "0", "/no/where"], "/no/where"),
        (["serve", "--shutdown-timeout", "nan"], "shutdown_timeout=nan"),
        (["serve", "--api-key", ""], "api_key is not allowed"),
        (["serve", "--scheduler-cls", "nothing"], "nothing is not module:Class"),
        (["serve", "--port", "0", "--scheduler-cls", "json:JSONDecoder"], "scheduler_cls"),
        (["serve", "--speculative-config", "{"], "--speculative-config: invalid loads value: '{'"),
        (["serve", "--port", "0", "--chat-template", "/no/where"], "chat_template"),
        (["serve", "--show", "--replicas", "2"], "show=True"),
        (["serve", "--replicas", "0"], "replicas=0 is not allowed: it must be an integer from 1"),
        (["serve", "--replicas", "2", "--router-cls", "json:JSONDecoder"], "a subclass of nanovllm.topics.routing.Router"),
        (["serve", "--router-cls", "nanovllm:RoundRobin"], "it is for --replicas"),
        (["chat", "--temperature", "-1", "--num-blocks", "20"], "temperature=-1.0"),
        (["serve", "-tp", "0", "--port", "0"], "tensor_parallel_size=0"),
        (["nothing"], "nothing"),
        ([], "COMMAND"),
    ],
)  # fmt: skip
def test_a_mistake_gives_one_sentence(args, word, capsys):
    assert word in refused(capsys, *args)
    assert "ray" not in sys.modules or not sys.modules["ray"].is_initialized()


@pytest.mark.parametrize("options", [[], ["--replicas", "2"]])
def test_a_port_in_use_is_said_before_a_model_is_loaded(options, capsys):
    if options:
        needs("ray")
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = str(sock.getsockname()[1])
        sentence = refused(capsys, "serve", "/no/model/here", "--port", port, *options)
    assert f"port={port}" in sentence and "in use" in sentence and "/no/model" not in sentence


@pytest.mark.parametrize("missing", ["fastapi", "uvicorn", "prometheus_client", "ray"])
def test_what_is_not_installed_is_said_with_the_way_to_install_it(missing, monkeypatch, capsys):
    extra, options = ("ray", ["--replicas", "2"]) if missing == "ray" else ("server", [])
    for name in [*sys.modules]:
        if name.startswith("nanovllm.topics.server") and not name.endswith("settings"):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr(sys.modules["nanovllm.topics"], "server", raising=False)
    monkeypatch.setitem(sys.modules, missing, None)
    sentence = refused(capsys, "serve", *options)
    assert missing in sentence and f"pip install 'nanovllm[{extra}]'" in sentence


def test_help_comes_without_torch():
    code = "import nanovllm, nanovllm.topics.server.cli, sys; nanovllm.topics.server.cli.new_parser(); assert not {'torch', 'fastapi', 'uvicorn'} & {*sys.modules}"
    subprocess.run([sys.executable, "-c", code], check=True)


# --- serve --show ---


def shown(monkeypatch, *args: str) -> LLM:
    """The engine that is served."""
    from nanovllm.topics.server import app, serve

    made = []
    monkeypatch.setattr(app, "new_app", lambda llm, options: made.append(llm))
    monkeypatch.setattr(serve, "serve_app", lambda app, sock: None)
    cli.main(["serve", "--port", "0", *args])
    return made[0]


def test_show_sets_what_the_options_do_not_say(monkeypatch):
    config = shown(monkeypatch, "--show").config
    small = {"num_blocks": 128, "block_size": 4, "max_num_seqs": 12, "preemption_mode": "swap"}
    assert {name: getattr(config, name) for name in small} == small
    mine = ("--num-blocks", "60", "--preemption-mode", "recompute")
    config = shown(monkeypatch, "--show", *mine).config
    assert (config.num_blocks, config.preemption_mode) == (60, "recompute")
    assert (config.block_size, config.max_num_seqs) == (4, 12)
    assert shown(monkeypatch, "--num-blocks", "60").config.block_size == 16


def test_shown_steps_are_as_slow_as_people_see(monkeypatch):
    slept = []
    monkeypatch.setattr(commands.time, "sleep", slept.append)
    llm = shown(monkeypatch, "--show")
    llm.generate("Hello", SamplingParams(max_tokens=3, ignore_eos=True), use_tqdm=False)
    assert len(slept) == 3 and all(0 <= seconds < 0.1 for seconds in slept)
    llm.observers[-1](None, 0.5)  # slow enough by itself
    assert slept[-1] == 0


def questions_of_the_page() -> list[str]:
    page = (Path(cli.__file__).parent / "page" / "page.js").read_text(encoding="utf-8")
    book, listed = re.search(
        r'const BOOK = (".*");\nconst QUESTIONS = (\[.*?\]);', page, re.S
    ).groups()
    listed = re.sub(r"`\$\{BOOK\}(.*?)`", lambda m: json.dumps(json.loads(book) + m[1]), listed)
    return json.loads(listed.replace(",\n]", "]"))


def test_the_twenty_questions_fill_what_show_sets(monkeypatch):
    """Some wait, some are swapped out, some have no room on the host; and prefixes are found."""
    monkeypatch.setattr(commands.time, "sleep", lambda seconds: None)
    llm = shown(monkeypatch, "--show")
    questions = questions_of_the_page()
    assert len({*questions}) == 20
    camera, states = Camera(llm), set()

    def observe(schedule, seconds):
        states.update(states_of(camera.frame([schedule], seconds, 0.0)).values())

    llm.observers.append(observe)
    llm.chat([[{"role": "user", "content": text}] for text in questions], use_tqdm=False)
    assert states == {"running", "waiting", "preempted", "swapped", "ended"}
    stats = llm.stats()
    assert stats["prefix_cache_hit_tokens"] > 100 and stats["kv_blocks_used_peak"] > 120


# --- chat ---


def interrupt_at(monkeypatch, word: str) -> None:
    """A Ctrl-C comes once this has been printed, for the first time."""
    seen: list[str] = []

    def interrupting(*args, **kwargs):
        builtins.print(*args, **kwargs)
        if args and word in args[0] and not seen:
            seen.append(args[0])
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(commands, "print", interrupting, raising=False)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def chat(monkeypatch, capsys, lines: list[str], *args: str) -> list[str]:
    """What it answers to these lines, each."""
    monkeypatch.setattr(sys, "stdin", Terminal("".join(line + "\n" for line in lines)))
    cli.main(["chat", *args])
    begin, *answers = capsys.readouterr().out.split("\n> ")
    assert "/reset" in begin
    return [answer.rstrip("\n") for answer in answers]


def prompts_of(llm) -> list[str]:
    return [request.prompt for request in llm.runner.answers]


def test_a_chat_knows_what_has_been_said_until_it_is_reset(parrot, monkeypatch, capsys):
    lines = ["first ☃", "", "second", "/reset", "third", "/help", "/exit", "never"]
    answers = chat(monkeypatch, capsys, lines)
    assert len(answers) == 7
    assert answers[:5] == ["first ☃", "", "second", "", "third"]
    assert "/reset" in answers[5] and answers[6] == ""
    first, second, third = prompts_of(parrot)
    assert second.startswith(first) and second.count("first ☃") == 2
    assert "first" not in third and "second" not in third


def test_ctrl_c_ends_an_answer_and_not_the_chat(parrot, monkeypatch, capsys):
    interrupt_at(monkeypatch, "two")
    answers = chat(monkeypatch, capsys, ["one two three four", "again"])
    assert answers[:2] == ["one two\n[stopped]", "again"]
    assert "assistant\none two<|im_end|>" in prompts_of(parrot)[-1]


def test_a_question_that_is_refused_is_not_in_the_history(parrot, monkeypatch, capsys):
    answers = chat(monkeypatch, capsys, ["x " * 5000, "short"])
    assert "max_model_len" in answers[0] and answers[1] == "short"
    assert prompts_of(parrot)[-1].count("<|im_start|>") == 2


# --- more ways to say it ---


def test_the_version(capsys):
    with pytest.raises(SystemExit) as info:
        cli.main(["--version"])
    assert info.value.code == 0
    assert re.fullmatch(r"nanovllm \d+\.\d+\.\d+\n", capsys.readouterr().out)


def test_a_chat_in_a_pipe_writes_answers_only(parrot, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO("first\nsecond\n"))
    cli.main(["chat"])
    assert capsys.readouterr().out == "first\nsecond\n"


@pytest.mark.parametrize("question", ["x " * 5000, "fine\n" + "x " * 5000])
def test_in_a_pipe_an_error_ends_the_chat(parrot, monkeypatch, capsys, question):
    monkeypatch.setattr(sys, "stdin", io.StringIO(question + "\nnever\n"))
    with pytest.raises(SystemExit) as info:
        cli.main(["chat"])
    out, err = capsys.readouterr()
    assert out == ("fine\n" if "fine" in question else "")
    assert "max_model_len" in str(info.value.code) + err and info.value.code not in (0, None)


def test_a_template_of_ones_own(tmp_path):
    file = tmp_path / "template.jinja"
    file.write_text("{% for m in messages %}{{ m.content | upper }}{% endfor %}")
    args = cli.new_parser().parse_args(["serve", "--chat-template", str(file)])
    options = commands.server_options(args)
    with Running(new_parrot(), chat_template=options.chat_template) as other:
        assert other.chat("hello")["choices"][0]["message"]["content"] == "HELLO"
