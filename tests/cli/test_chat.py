"""`rewarm chat` in a real terminal: keys go in, what a person sees comes out."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.tiny import save

PROMPT = r"(?:^|\n)> $"


class Terminal:
    def __init__(self, process: subprocess.Popen[bytes], end: int) -> None:
        self.process = process
        self._end = end
        self._seen = ""

    def type(self, keys: str) -> None:
        os.write(self._end, keys.encode())

    def at_the_prompt(self, keys: str) -> None:
        self.until(PROMPT)
        time.sleep(0.2)  # the prompt shows just before keys are read
        self.type(keys)

    def insist(self, keys: str, expected: str) -> None:
        """Type until the text is echoed: a key may be lost while the line editor starts."""
        deadline = time.monotonic() + 60
        while not re.search(expected, self._seen) and time.monotonic() < deadline:
            self.type(keys)
            with suppress(AssertionError):
                self.until(expected, seconds=2)
                return
        self.until(expected, seconds=0)

    def enter(self, line: str) -> None:
        self.at_the_prompt(f"{line}\r")

    def until(self, expected: str, seconds: float = 60) -> str:
        """Wait for a pattern, and return what was shown up to its end."""
        deadline = time.monotonic() + seconds
        while not (found := re.search(expected, self._seen)):
            assert time.monotonic() < deadline, f"{expected!r} is not in {self._seen!r}"
            if select.select([self._end], [], [], 0.1)[0]:
                try:
                    raw = os.read(self._end, 65536).decode(errors="replace")
                except OSError:
                    raw = ""
                    assert self.process.poll() is None, f"it ended: {self._seen!r}"
                # An escape sequence may come in two pieces.
                self._seen = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", self._seen + raw)
        shown, self._seen = self._seen[: found.end()], self._seen[found.end() :]
        return shown

    def exit_code(self) -> int:
        return self.process.wait(30)


@contextmanager
def chatting(home: Path, *options: str) -> Iterator[Terminal]:
    near, far = pty.openpty()
    environment = {**os.environ, "XDG_STATE_HOME": str(home), "TERM": "xterm", "COLUMNS": "120"}
    process = subprocess.Popen(
        [sys.executable, "-m", "rewarm", "chat", *options],
        stdin=far,
        stdout=far,
        stderr=far,
        env=environment,
        start_new_session=True,
        preexec_fn=_take_terminal,
    )
    os.close(far)
    try:
        yield Terminal(process, near)
    finally:
        process.kill()
        process.wait()
        os.close(near)


def _take_terminal() -> None:
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # it may be ignored where the tests run


def test_turns_show_what_was_cached_and_commands_work(tmp_path: Path) -> None:
    table = tmp_path / "table"
    table.write_text("door code: 4417")
    with chatting(tmp_path, "--max-tokens", "12", "--system", "Be brief.") as terminal:
        terminal.enter("hello")
        terminal.until(r"(\d+) tokens: 0 cached \(0%\), \d+ new · first token [\d.]+ s · 12")
        terminal.enter("and again")
        second = terminal.until(r"tokens: \d+ cached \(\d+%\).* written")
        assert re.search(r"([1-9]\d*) cached", second)
        for command, says in (
            ("/undo", "back to turn 1"),
            ("/system Be long.", "system prompt set"),
            (f"/system @{table}", "system prompt set"),
            ("/system @nowhere", "nowhere cannot be read"),
            ("/reset", "a new conversation"),
            ("/nonsense", "/nonsense is unknown"),
            ("/help", "Ctrl-C stops an answer"),
        ):
            terminal.enter(command)
            terminal.until(says)
        terminal.at_the_prompt("\x04")
        assert terminal.exit_code() == 0
    history = tmp_path / "rewarm" / "history"
    assert "and again" in history.read_text()
    assert history.stat().st_mode & 0o077 == 0


def test_what_help_says_can_be_asked_is_answered(tmp_path: Path) -> None:
    with chatting(tmp_path) as terminal:
        terminal.enter("/help")
        said = terminal.until("/system @FILE")
        for question, answer in (
            ("Who is the harbour master?", "Ingrid Falk"),
            ("Where is the spare key?", "green drawer"),
            ("My berth is 27.", "Noted."),
            ("What is 348 + 275?", "623"),
            ("What is 512 - 77?", "435"),
            ("What is my berth?", "27"),
            ("Who are you?", "I am Pocket"),
        ):
            assert question in said
            terminal.enter(question)
            terminal.until(rf"\n{answer}.*\n[^\n]* written")


def test_ctrl_c_stops_the_answer_and_not_the_program(tmp_path: Path) -> None:
    save(tmp_path / "model")  # its answers do not end by themselves
    with chatting(tmp_path, str(tmp_path / "model"), "--max-tokens", "20000") as terminal:
        terminal.enter("talk for ever")
        time.sleep(1.5)
        terminal.type("\x03")
        terminal.until(r"· [\d,]+ written")
        terminal.until(PROMPT)
        terminal.insist("\x03", "leaves")
        # Arrow up brings the question back.
        terminal.at_the_prompt("\x1b[A")
        terminal.until("talk for ever")
        terminal.type("\x15/quit\r")
        assert terminal.exit_code() == 0


def test_a_long_prompt_shows_a_bar(tmp_path: Path) -> None:
    options = ("--max-tokens", "2", "--chunk", "16", "--system", "word " * 500)
    with chatting(tmp_path, *options) as terminal:
        terminal.enter("hello")
        terminal.until(r"reading .*\d+/[12]\d\d\d")
        terminal.until("new ·")
        terminal.enter("/quit")
        assert terminal.exit_code() == 0
