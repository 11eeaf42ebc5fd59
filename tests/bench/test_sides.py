"""Peers of every sort, and Ctrl-C, with real processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rewarm.bench import page, sides
from rewarm.bench.result import Result
from rewarm.bench.sides import command, other
from rewarm.cli.app import app
from rewarm.errors import InvalidOption, NotReady
from tests.sets import SOAK

# It answers every chat with one word, knows one model by its name only, and does not report what it
# had cached. It notes its process, and a line for each request.
SERVER = """
import json, os, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

notes = open(sys.argv[1], "a")
print(os.getpid(), file=notes, flush=True)

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        known = self.path == "/v1/models"
        self.send_response(200 if known else 404)
        self.end_headers()
        if known:
            self.wfile.write(json.dumps({"data": [{"id": "the-only-one"}]}).encode())

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        print(body["model"], file=notes, flush=True)
        self.send_response(200 if body["model"] == "the-only-one" else 404)
        self.end_headers()
        usage = {"prompt_tokens": 10, "completion_tokens": 1}
        for event in ({"choices": [{"delta": {"content": "Yes."}}]}, {"usage": usage}):
            self.wfile.write(b"data: " + json.dumps(event).encode() + b"\\n\\n")

    def log_message(self, *_):
        pass

HTTPServer(("127.0.0.1", int(sys.argv[2])), Handler).serve_forever()
"""


def server(folder: Path) -> tuple[str, Path]:
    """Return the command of such a server, behind a shell that waits for it, and its notes."""
    script, notes = folder / "server.py", folder / "notes"
    script.write_text(SERVER)
    return f"sh -c '{sys.executable} {script} {notes} {{port}}; true'", notes


def is_gone(pid: int) -> bool:
    """Wait for its end: a killed process takes a moment."""
    for _ in range(500):
        stat = Path(f"/proc/{pid}/stat")
        # A zombie is gone; nobody has taken its exit status yet.
        if stat.exists() and stat.read_text().rsplit(")", 1)[1].split()[0] == "Z":
            return True
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.02)
    return False


def wait_for(notes: Path, lines: int, process: subprocess.Popen[str]) -> list[str]:
    found: list[str] = []
    while len(found) < lines:
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
        found = notes.read_text().splitlines() if notes.exists() else []
    return found


def test_any_server_can_be_a_peer_and_is_stopped_with_all_it_started(tmp_path: Path) -> None:
    peer, notes = server(tmp_path)
    with other(peer, "some/model") as side:
        side.wait_until_ready("some/model")
        reply = side.ask([{"role": "user", "content": "Hello?"}], 4)
        assert (reply.text, reply.prompt, reply.counted) == ("Yes.", 10, False)
    pid, *models = notes.read_text().splitlines()
    assert set(models) == {"the-only-one"}
    assert is_gone(int(pid))


@pytest.mark.parametrize(
    ("peer", "said"),
    [
        ("serve {model}", "port"),
        ("serve {modle} --port {port}", "{modle}"),
        ("serve '{port}", "quotation"),
        ("mlx", "mlx-lm"),
    ],
)
def test_a_peer_that_cannot_be_meant_is_refused_before_anything_starts(
    peer: str, said: str
) -> None:
    with pytest.raises(InvalidOption) as refused:
        command(peer, "model", 1)
    assert said in str(refused.value)
    assert peer in str(refused.value)


def test_a_peer_may_be_called_as_rewarm_is() -> None:
    assert command("rewarm serve {model} --port {port}", "m", 7) == [
        *("rewarm", "serve", "m", "--port", "7")
    ]


def test_a_command_that_is_none_says_so() -> None:
    with pytest.raises(InvalidOption, match="no-such-program"), other("no-such-program {port}", ""):
        pass


def test_a_peer_that_ends_at_once_is_quoted() -> None:
    dies = f"""{sys.executable} -c 'print("no weights there"); raise SystemExit(3)' {{port}}"""
    with (
        pytest.raises(NotReady, match=r"(?s)ended with 3.*no weights there"),
        other(dies, "") as side,
    ):
        side.wait_until_ready("")


def test_a_peer_that_never_answers_is_given_up_and_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sides, "LOADING", 0.5)
    notes = tmp_path / "pid"
    idle = f"sh -c 'echo $$ > {notes}; echo loading; sleep 600' {{port}}"
    silent = pytest.raises(NotReady, match=r"(?s)neither /health nor /v1/models.*loading")
    with silent, other(idle, "") as side:
        side.wait_until_ready("")
    assert is_gone(int(notes.read_text()))


@pytest.mark.parametrize(
    ("scenario", "number"),
    [("chat", signal.SIGINT), *[("branch", signal.SIGTERM), ("burst", signal.SIGINT)] * SOAK],
)
def test_ctrl_c_keeps_what_is_done_and_stops_the_servers(
    scenario: str, number: signal.Signals, tmp_path: Path
) -> None:
    peer, notes = server(tmp_path)
    out, plot = tmp_path / "out.json", tmp_path / "out.svg"
    many = ["--rounds", "1000", "--system", "50"] if scenario == "burst" else ["--turns", "1000"]
    words = ["bench", scenario, *many, "--model", "random:hybrid-tiny", "--answer", "2"]
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "rewarm", *words, "--peer", peer),
            *("--json", str(out), "--plot", str(plot)),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # The process that runs the tests may ignore it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    # The lines are its process, the first request, and the requests of a round or more.
    pid = int(wait_for(notes, 9, process)[0])
    process.send_signal(number)
    said, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    assert "interrupted: this is what was done" in said
    result = Result.load(out)
    assert not result.complete
    assert result.sheets[0].rows
    assert any("peer" in name for name in result.figures), "what was to be compared is lost"
    assert "<polyline" in plot.read_text()
    assert is_gone(pid)


def bench(out: Path, *words: str) -> Result:
    """Run a scenario from the command line, on a tiny model."""
    more = ["--model", "random:hybrid-tiny", "--json", str(out), "--plot", str(out) + ".svg"]
    done = CliRunner().invoke(app, ["bench", *words, *more])
    assert done.exit_code == 0, done.output
    assert "<polyline" in Path(f"{out}.svg").read_text()
    return Result.load(out)


def test_overhead_asks_a_peer_the_same_over_http(tmp_path: Path) -> None:
    peer, notes = server(tmp_path)
    small = ["--length", "80", "--messages", "4", "--answer", "2", "--rounds", "2"]
    result = bench(tmp_path / "out.json", "overhead", *small, "--peer", peer)
    inside, over = result.sheets
    assert [row[0] for row in inside.rows if "TTFT" in row[0]] == [
        *("TTFT s, one message of 80", "TTFT s, 4 messages")
    ]
    sides = [row[1].split()[0] for row in over.rows]
    # The peer answers with one token, which does not show how long a next one would take.
    assert sides == [*["rewarm", "peer"] * 2, "rewarm", "rewarm"]
    assert all(bool(row[3]) == (row[1] == "peer") for row in over.rows)
    # The lines are its process, its first request, and two prompts in each round.
    assert len(notes.read_text().splitlines()) == 1 + 1 + 2 * 2


def test_memory_shows_what_a_peer_holds_of_the_same_chats(tmp_path: Path) -> None:
    small = ["--conversations", "2", "--turns", "2", "--answer", "4"]
    result = bench(tmp_path / "out.json", "memory", *small, "--peer", "mlx-lm")
    (sheet,) = result.sheets
    assert sheet.columns[-1] == "peer's MB"
    assert float(sheet.rows[-1][-1]) > 0
    assert set(result.plots[0].lines) == {"all", "rows and windows", "mlx-lm"}


def test_page_measures_the_polls_and_a_stream_beside_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page, "FILLING", 2)
    monkeypatch.setattr(page, "QUESTIONS", {page.LIVE: 1, page.TREE: 1})
    out = tmp_path / "out.json"
    words = ["page", "--model", "random:attention-small", "--rounds", "1", "--answer", "8"]
    done = CliRunner().invoke(app, ["bench", *words, "--polls", "20", "--json", str(out)])
    assert done.exit_code == 0, done.output
    *costs, rates = Result.load(out).sheets
    asked = [page.LIVE, page.TREE] if Path("/proc").exists() else []
    assert [row[0] for cost in costs for row in cost.rows] == asked
    assert [float(rate) > 0 for rate in rates.rows[0][1:]] == [True, True]


def test_prefix_shows_where_the_time_of_a_hit_goes(tmp_path: Path) -> None:
    small = ["--lengths", "300", "--rounds", "1", "--answer", "3"]
    result = bench(tmp_path / "out.json", "prefix", *small)
    tokens, _, over = result.sheets
    rows = {row[1]: dict(zip(tokens.columns, row, strict=True)) for row in tokens.rows}
    assert list(rows) == ["cold", "exact", "nearest"]
    # `exact` reuses all but the last token of the first prompt, `nearest` the part before the
    # difference.
    assert [rows[name]["cached"] for name in rows] == ["0", "299", "236"]
    for row in rows.values():
        parts = [float(row[name]) for name in ("lookup ms", "restore ms", "prefill ms")]
        assert sum(parts) <= float(row["TTFT ms"]) + 0.2 <= float(row["total ms"]) + 0.2
    assert [row[1] for row in over.rows] == ["cold", "exact", "nearest"]


def test_ctrl_c_in_a_trace_keeps_the_budgets_that_are_done(tmp_path: Path) -> None:
    file, out = tmp_path / "tokens.jsonl", tmp_path / "out.json"
    lines = [{"timestamp": i, "tokens": [*range(50), 1000 + i]} for i in range(400)]
    file.write_text("\n".join(map(json.dumps, lines)))
    budgets = ",".join(["64MB"] * 5000)
    process = subprocess.Popen(
        [
            *(sys.executable, "-c", WATCHED, "bench", "trace", str(file)),
            *("--memory", budgets, "--policy", "lru", "--json", str(out)),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stderr is not None
    for _ in range(2):  # once the second is told, the first is kept
        assert process.stderr.readline() == "replayed\n"
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130
    result = Result.load(out)
    assert not result.complete
    assert 1 <= len(result.sheets[0].rows) < 5000


WATCHED = """
import sys
from rewarm.bench import simulate
replay = simulate.replay
def told(*given, **named):
    done = replay(*given, **named)
    print("replayed", file=sys.stderr, flush=True)
    return done
simulate.replay = told
from rewarm.cli.app import main
main()
"""
