"""What only some systems have is known, and is asked for before it is used; and no text depends on a system's encoding.

Run: pytest tests/house/test_systems.py
"""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
# what Linux has, and macOS or Windows lack
MISSING_MODULES = ("triton", "resource", "termios")
MISSING = {
    "os": (
        "fork forkpty register_at_fork killpg setsid setpgid getpgid getpgrp memfd_create eventfd pidfd_open uname "
        "sched_getaffinity sched_setaffinity sched_yield pread pwrite sysconf getloadavg nice mkfifo getuid geteuid "
        "setuid setgid setgroups statvfs wait3 wait4"
    ),
    "signal": (
        "SIGKILL SIGALRM SIGHUP SIGQUIT SIGSTOP SIGTSTP SIGCONT SIGUSR1 SIGUSR2 SIGXCPU SIGCHLD SIGPIPE setitimer "
        "getitimer alarm pause pthread_kill pthread_sigmask sigwait"
    ),
    "select": "epoll poll",
    "mmap": "MAP_PRIVATE MAP_SHARED MAP_ANONYMOUS MAP_ANON PROT_READ PROT_WRITE PROT_EXEC",
    "faulthandler": "register unregister",
    "socket": "SO_REUSEPORT",
}
HIDDEN = ("/proc", "/sys")
TREES = {
    file.relative_to(ROOT).as_posix(): ast.parse(file.read_bytes())
    for pattern in ("nanovllm/**/*.py", "tutorials/**/*.py", "*.py")
    for file in ROOT.glob(pattern)
}
OWN = {f"{module}.{name}" for module, names in MISSING.items() for name in names.split()}
OWN |= {"sys.platform", "os.name", "platform.system", "ctypes.CDLL"}
MODULES = {*MISSING_MODULES, "fcntl", "pwd", "grp", "pty"} - {"triton"}  # choose.py asks for it
KEYWORDS = {"pass_fds", "preexec_fn"}  # of subprocess; start_new_session does nothing on Windows
GRADER = "refused by `import resource` in player.py"
# of each file: what it uses, and what the user of another system sees instead
KNOWN = {
    "nanovllm/device/threads.py": (
        "os.sched_getaffinity os.sysconf /proc /sys",
        "all processors are counted, and a small step runs on one thread",
    ),
    "nanovllm/layers/kv_cache.py": ("mmap.MAP_PRIVATE mmap.MAP_ANONYMOUS", "a plain mapping"),
    "nanovllm/parallel/ranks.py": ("os.register_at_fork", "refused in runner.py"),
    "nanovllm/parallel/watch.py": ("os.pread", "refused in runner.py"),
    "nanovllm/vattention/memory.py": (
        "os.memfd_create os.sysconf ctypes.CDLL mmap.MAP_PRIVATE mmap.MAP_ANONYMOUS mmap.MAP_SHARED "
        "mmap.PROT_READ mmap.PROT_WRITE /proc",
        "a ValueError",
    ),
    "tutorials/building/run.py": (
        "os.fork signal.SIGALRM signal.setitimer",
        "its user, a test, is skipped; a test without an end ends with the milestone's limit",
    ),
    "tutorials/measure/turns.py": ("os.killpg signal.SIGKILL pass_fds", "bench.py: a sentence"),
    "tutorials/machine.py": (
        "os.sysconf sys.platform resource /proc",
        "a report without these numbers",
    ),
    "tutorials/assignments/player.py": (
        "signal.SIGALRM signal.setitimer faulthandler.register sys.platform resource",
        "a sentence",
    ),
    "tutorials/assignments/process.py": (
        "os.killpg os.pread signal.SIGKILL signal.SIGXCPU",
        GRADER,
    ),
}


def used_by(tree: ast.AST) -> set[str]:
    """What of one system, or of some, a file asks for."""
    found = set()
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id=module), attr=name):
                found |= {f"{module}.{name}"} & OWN
            case ast.keyword(arg=name):
                found |= {name} & KEYWORDS
            case ast.Import(names=names):
                found |= {alias.name for alias in names} & MODULES
            case ast.Call(func=ast.Attribute(attr="get_context"), args=[ast.Constant(value=way)]):
                found |= {way} - {"spawn"}
            case ast.Constant(value=str(text)) if text.startswith(HIDDEN):
                found.add("/" + text.split("/")[1])
    return found


def texts_without_encoding(tree: ast.AST) -> list[int]:
    """The lines that open, read or write a text in the encoding that the system prefers."""
    lines = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and not any(one.arg == "encoding" for one in node.keywords):
            match node.func:
                case ast.Attribute(attr="read_text" | "write_text"):
                    lines.append(node.lineno)
                case ast.Attribute(value=ast.Name(id="os"), attr="open"):
                    pass  # a descriptor
                case ast.Attribute(value=ast.Name(id="self")):
                    pass  # a method of ours
                case ast.Name(id="open") | ast.Attribute(attr="open" | "fdopen"):
                    modes = [one.value for one in node.args if isinstance(one, ast.Constant)]
                    lines += [] if any("b" in str(mode) for mode in modes) else [node.lineno]
    return lines


def test_what_some_systems_lack_is_known():
    found = {name: used for name, tree in TREES.items() if (used := used_by(tree))}
    assert found == {name: set(names.split()) for name, (names, _) in KNOWN.items()}


def test_a_text_names_its_encoding():
    assert {
        name: lines for name, tree in TREES.items() if (lines := texts_without_encoding(tree))
    } == {}
