"""Processes that a test starts, and that never outlive it."""

import os
import signal
import socket
import subprocess
import sys
import threading
from contextlib import ExitStack, contextmanager, suppress

from installed import ROOT

#: Where the programs are that tests start.
SUPPORT = ROOT / "tests" / "support"


def free_ports(count):
    """Returns ports of this machine that nobody listens on."""
    with ExitStack() as stack:
        sockets = [
            stack.enter_context(socket.create_server(("localhost", 0)))
            for _ in range(count)
        ]
        return [each.getsockname()[1] for each in sockets]


def printed(*command, cwd=None, **environment):
    """Returns what a Python with these arguments prints. It must not fail."""
    answer = subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr[-3000:]
    return answer.stdout


@contextmanager
def started(commands, folder, seconds, environments=None):
    """Starts Pythons with these arguments, and yields their processes.

    `environments` holds variables of each. They end, with all that they have started,
    when this context does, or after so many seconds: then the test fails. What they
    write to stderr is kept in `folder`.
    """
    processes, environments = [], environments or [{}] * len(commands)
    for number, (command, own) in enumerate(zip(commands, environments)):
        with (folder / f"{number}.log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, *map(str, command)],
                env={**os.environ, **own},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )
        processes.append(process)
    watchdog = threading.Timer(seconds, kill, [processes])
    watchdog.start()
    try:
        yield processes
    finally:
        hung = watchdog.finished.is_set()
        watchdog.cancel()
        kill(processes)
        for process in processes:
            process.communicate()
    assert not hung, f"hung\n{logs(folder)}"


def kill(processes):
    """Kills processes, and all that they have started."""
    for process in processes:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def logs(folder):
    """Returns the end of what processes have written to stderr."""
    return "\n".join(path.read_text()[-1500:] for path in sorted(folder.glob("*.log")))
