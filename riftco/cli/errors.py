"""What a user sees when something is wrong: one line that says what to do, and exit code 2.

Exit codes: 0 done; 1 the work failed while it ran, or what was asked is answered by no; 2 bad input or something that
is not here (a file, a package, a device), nothing was changed; 130 stopped by Ctrl-C or SIGTERM after a checkpoint was
saved.
"""

from __future__ import annotations

import errno
import functools
import os
import select
import sys
from collections.abc import Callable
from typing import Any

import typer

BAD_INPUT, FAILED, STOPPED = 2, 1, 130
STDOUT = 1
EXTRAS = {
    "finetune": ("transformers", "tokenizers", "jinja2", "gguf", "typer", "rich"),
    "serve": ("fastapi", "starlette", "uvicorn", "sse_starlette", "pydantic", "prometheus_client"),
    "structured": ("llguidance",),
    "bench": ("matplotlib", "httpx"),
}  # the modules that pyproject.toml's extras bring


def command(function: Callable[..., Any]) -> Callable[..., Any]:
    """Turn expected errors into one line; with --debug the traceback comes too."""

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        from torch import distributed

        from ..train.failures import StepAbandoned, TrainerPoisoned
        from ..train.watch import PeerLost

        why: BaseException
        try:
            return function(*args, **kwargs)
        except BrokenPipeError as error:
            if _nobody_reads():
                raise typer.Exit(FAILED) from None
            why, code = error, FAILED
        except (ValueError, OSError, NotImplementedError, OverflowError, ModuleNotFoundError) as error:
            broke = isinstance(error, OSError) and error.errno in (errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EIO)
            why, code = error, FAILED if broke else BAD_INPUT
        except (StepAbandoned, TrainerPoisoned, PeerLost) as error:
            why, code = error, FAILED
        except KeyboardInterrupt as error:
            why, code = error, STOPPED
        if kwargs.get("debug"):
            raise why
        if not getattr(why, "of_another", False):  # of several processes the one whose error it is says it
            typer.echo(f"riftco: {_process()}{_line(why)}", err=True)
        if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
            _leave(code)
        raise typer.Exit(code)

    return wrapped


def install(module: str) -> str:
    """The pip command that brings a module: riftco's extra where one does, else the package of that name."""
    package = module.partition(".")[0]
    extra = next((extra for extra, modules in EXTRAS.items() if package in modules), None)
    return f"pip install 'riftco[{extra}]'" if extra else f"pip install {package}"


def _nobody_reads() -> bool:
    """Whether standard output's reader has gone (`riftco ... | head`): then nothing more is written there, which keeps
    the interpreter's own flush at the end quiet, too."""
    out = select.poll()
    out.register(STDOUT, 0)  # asks for nothing: errors are told anyway
    if not any(event & (select.POLLERR | select.POLLHUP) for _, event in out.poll(0)):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), STDOUT)
    return True


def _leave(code: int) -> None:
    """End one of several processes at once: at the end of the interpreter the backend's threads, which may still wait
    for a process that has gone, can abort this one with a status of their own."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


def _process() -> str:
    """Which process of torchrun's this is, where it is not the first."""
    rank = os.environ.get("RANK", "0") if int(os.environ.get("WORLD_SIZE", "1")) > 1 else "0"
    return "" if rank == "0" else f"process {rank}: "


def _line(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        return "stopped"
    if isinstance(error, ModuleNotFoundError):
        return f"{error}; install it with: {install(error.name or '')}"
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return " ".join(str(error).split()) or type(error).__name__
