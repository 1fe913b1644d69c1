"""Runs a Python program in a fork of a process that has imported PyTorch, which takes seconds."""

import contextlib
import multiprocessing
import os
import runpy
import signal
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

# What takes long to import, and most programs would import by themselves. PyTorch imports its
# compiler when the first optimizer is made.
PRELOADED = [
    "torch",
    "torch._inductor.compile_fx",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.run",
    "torch.utils.data",
    "numpy.random",
    "tiktoken",
]
TESTS = Path(__file__).resolve().parent
PYTESTS = {"", str(TESTS), str(TESTS.parent)}
# The variables that are read when they are needed. Others may be read by Python when it starts, or
# by PyTorch when it is imported.
READ_LATE = {
    "http_proxy",
    "https_proxy",
    "no_proxy",
    "CUDA_VISIBLE_DEVICES",
    "TIKTOKEN_CACHE_DIR",
    "PET_LOCAL_ADDR",
    "RANK",
    "WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE",
}


def can_run(command: list[str], env: dict[str, str], **options) -> bool:
    """Whether a fork is as good as a process of its own. Elsewhere than on Linux it isn't safe."""
    changed = {name for name, _ in env.items() ^ os.environ.items()} - READ_LATE
    runnable = command[0] in ("-c", "-m") or command[0].endswith(".py")
    plain = runnable and not changed and options.keys() <= {"cwd", "timeout"}
    return sys.platform == "linux" and plain


def run(command: list[str], env: dict[str, str], cwd=None, timeout: float | None = None):
    """`python command`: a subprocess.CompletedProcess. Raises subprocess.TimeoutExpired."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with tempfile.TemporaryDirectory() as folder:
        files = [os.path.join(folder, name) for name in ("out", "err")]
        child = context.Process(target=program, args=(command, env, cwd or os.getcwd(), *files))
        child.start()
        child.join(timeout)
        if child.exitcode is None:
            child.kill()
            child.join()
            raise subprocess.TimeoutExpired(command, timeout)
        texts = [Path(file).read_text(encoding="utf-8") for file in files]
    return subprocess.CompletedProcess(command, child.exitcode, *texts)


def program(command: list[str], env: dict[str, str], cwd, out: str, err: str) -> None:
    """Runs a program in the child, with its output in two files."""
    for number, file in ((1, out), (2, err)):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    os.chdir(cwd)
    start(command, env)


def start(command: list[str], env: dict[str, str]) -> None:
    """Runs a program in this process, as Python would that begins with it."""
    os.environ.clear()
    os.environ.update(env)
    first, *words = command
    if first == "-m":
        begin(os.getcwd(), words)
        if words[0] == "torch.distributed.run":
            fork_ranks()
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    elif first == "-c":
        text, *arguments = words
        begin(os.getcwd(), ["-c", *arguments])
        exec(compile(text, "<string>", "exec"), {"__name__": "__main__"})
    else:
        begin(os.path.dirname(os.path.abspath(first)), command)
        runpy.run_path(first, run_name="__main__")


def begin(place: str, arguments: list[str]) -> None:
    """Sets sys.path, with the program's folder and without what pytest has added, and sys.argv."""
    sys.path[:] = [place, *(path for path in sys.path if path not in PYTESTS)]
    sys.argv = arguments


def fork_ranks() -> None:
    """Lets torchrun fork the ranks that it starts, and starts again, from itself."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    subprocess_handler.SubprocessHandler._popen = fork_rank


def fork_rank(handler, args: tuple, env: dict[str, str]):
    """Replaces the method that starts a rank; returns what torchrun asks as it asks
    subprocess.Popen. Raises ValueError for another command than `python -u`."""
    if args[:2] != (sys.executable, "-u"):
        raise ValueError(f"not a Python program: {args}")
    context = multiprocessing.get_context("fork")
    handler.child = context.Process(target=rank, args=(args[2:], env))
    handler.child.start()
    return handler.child._popen


def rank(command: tuple, env: dict[str, str]) -> None:
    """Runs a rank in a fork of torchrun, with nothing of what that has set."""
    os.setsid()
    close_sockets()
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.stdout, sys.stderr = (open(number, "w", 1, "utf-8", closefd=False) for number in (1, 2))
    start([*command], env)


def close_sockets() -> None:
    """Closes the sockets of the process that this one is forked from, all but stdin, stdout and
    stderr."""
    for number in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):  # the folder's own is closed by now
            if number > 2 and stat.S_ISSOCK(os.fstat(number).st_mode):
                os.close(number)
