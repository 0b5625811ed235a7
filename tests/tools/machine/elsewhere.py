"""Takes away what Linux has, and macOS or Windows lack: sitecustomize.py imports this on the machine `elsewhere`.

Played, for our code and for tests: names of `os`, `signal` and others are missing, which libraries still find, since on
Linux they cannot do without. For all code: no Triton, no `resource`, no /proc and /sys; multiprocessing starts processes
by `spawn`; text is ASCII by default, in files and in pipes. That is stricter than Windows, where a wrong letter is
often read without an error.

Not played: sys.platform and os.name, by which whole libraries choose their way; what C code does; the module fcntl,
which the Hub's client needs; paths with drive letters and backslashes; files that cannot be renamed while they are
open; select that knows sockets only; signals and process groups of Windows.
"""

import locale
import os
import sys
from collections.abc import Callable
from functools import partial
from types import ModuleType

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
STANDARD_LIBRARY = os.path.dirname(os.__file__)


def is_library(file: str) -> bool:
    return file.startswith((STANDARD_LIBRARY, "<frozen ")) or "-packages" in file


def take(module: ModuleType, names: str) -> None:
    """Moves these names to where a module looks last: there only libraries get them."""
    kept = {name: vars(module).pop(name) for name in names.split() if hasattr(module, name)}

    def found(name: str):
        if name in kept and is_library(sys._getframe(1).f_code.co_filename):
            return kept[name]
        raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")

    module.__getattr__ = found


def is_hidden(path: object) -> bool:
    return isinstance(path, str | os.PathLike) and os.fspath(path).startswith(HIDDEN)


def refuse_hidden(event: str, arguments: tuple) -> None:
    """A hook of Python's, which sees each file and each folder that is opened."""
    if event in ("open", "os.listdir", "os.scandir") and is_hidden(arguments[0]):
        raise FileNotFoundError(2, "No such file or directory", arguments[0])


def hide_from_stat() -> None:
    original = os.stat

    def stat(path, **options):
        if is_hidden(path):
            raise FileNotFoundError(2, "No such file or directory", path)
        return original(path, **options)

    os.stat = stat


def only_spawn(context: ModuleType) -> None:
    default = context._default_context
    default._default_context = context._concrete_contexts["spawn"]
    type(default).get_all_start_methods = lambda self: ["spawn"]
    for name in ("fork", "forkserver"):
        context._concrete_contexts.pop(name, None)


def no_library_without_a_name(ctypes: ModuleType) -> None:
    """As on Windows; but ctypes.pythonapi stays."""
    original = ctypes.CDLL.__init__

    def init(self, name, *arguments, **options):
        if name is None and not isinstance(self, ctypes.PyDLL):
            raise TypeError("LoadLibrary() argument 1 must be str, not None")
        original(self, name, *arguments, **options)

    ctypes.CDLL.__init__ = init


AFTER_LOADING: dict[str, Callable[[ModuleType], None]] = {
    **{name: partial(take, names=names) for name, names in MISSING.items()},
    "multiprocessing.context": only_spawn,
    "ctypes": no_library_without_a_name,
}


def play() -> None:
    locale.setlocale(locale.LC_CTYPE, "C")  # in a process that began before the machine was chosen
    sys.modules.update(dict.fromkeys(MISSING_MODULES))
    hide_from_stat()
    sys.addaudithook(refuse_hidden)
