"""The bench's arithmetic and its simulator are right, and a short scenario runs."""

from __future__ import annotations

import gzip
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import mlx.core as mx
import numpy as np
import pytest
from typer.testing import CliRunner

from rewarm.bench.client import Answered, hit
from rewarm.bench.figures import Spread, amplification, common, ratios, trie_size
from rewarm.bench.prefix import usual
from rewarm.bench.profiles import Profile, profile
from rewarm.bench.report import draw_all, write
from rewarm.bench.result import Plot, Result
from rewarm.bench.simulate import POLICIES, budgets, replay
from rewarm.bench.traces import Trace, TraceRequest, read
from rewarm.cli.app import app
from rewarm.errors import InvalidOption
from tests import corpus
from tests.sets import SOAK

ATTENTION = Profile("attention", 1000, 0, 0, 0, 2e9, 1e5, 0)
HYBRID = Profile("hybrid", 1000, 0, 0, 200_000, 2e9, 1e5, 0)
WINDOW = Profile("window", 500, 500, 128, 0, 2e9, 5e4, 5e4)


def trace_of(*prompts: list[int], block: int = 64, waits: tuple[int, ...] = ()) -> Trace:
    """Make requests with these blocks. Equal numbers must have the same blocks before them."""
    return Trace(
        "made",
        [
            TraceRequest(i, 0, np.asarray(p, np.int32), block, block * len(p), waits=i in waits)
            for i, p in enumerate(prompts)
        ],
    )


def test_a_trie_counts_a_token_once_for_each_past() -> None:
    assert trie_size([[1, 2, 3], [1, 2, 4], [1, 2, 3, 5]]) == 5
    assert trie_size([[1, 2], [2, 1]]) == 4
    assert trie_size([[7, 7, 7], [7, 7]]) == 3
    assert trie_size([]) == 0


def test_amplification_is_one_where_nothing_is_computed_twice() -> None:
    prompts = [[1, 2, 3], [1, 2, 4]]
    assert amplification(4, prompts) == 1.0
    assert amplification(6, prompts) == 1.5


def test_ratios_are_taken_round_by_round() -> None:
    found = ratios(ours=[1.0, 10.0, 2.0], theirs=[2.0, 20.0, 8.0])
    assert found == Spread(2.0, 2.0, 4.0)


def test_ratios_of_an_interrupted_run_are_of_the_rounds_that_both_have() -> None:
    assert ratios(ours=[1.0, 1.0], theirs=[3.0]) == Spread(3.0, 3.0, 3.0)


def test_what_two_prompts_begin_with_is_counted() -> None:
    assert common([1, 2, 3], [1, 2, 4, 5]) == 2
    assert common([1, 2], [1, 2, 3]) == 2
    assert common([7], []) == 0


def test_hits_are_weighed_by_tokens_and_unknown_where_a_server_keeps_them_to_itself() -> None:
    short, long = (
        Answered(prompt=10, cached=0, counted=True),
        Answered(prompt=90, cached=60, counted=True),
    )
    assert hit(short, long) == 0.6
    assert math.isnan(hit(short, Answered(prompt=10)))
    assert math.isnan(hit())


def test_budgets_double_over_a_range() -> None:
    assert budgets("1GB..8GB") == [10**9, 2 * 10**9, 4 * 10**9, 8 * 10**9]
    assert budgets("1GB,3GB") == [10**9, 3 * 10**9]


def test_profiles_have_the_bytes_of_the_real_models() -> None:
    hybrid = profile("qwen3.5-9b")
    # 8 attention layers of 4 heads of 256, K and V, two bytes each.
    assert hybrid.row_bytes == 8 * 2 * 4 * 256 * 2
    # 24 delta layers: 32 heads of 128 by 128 in float32, and a convolution's last 3 inputs.
    assert hybrid.state_bytes == 24 * (32 * 128 * 128 * 4 + 3 * (2 * 16 * 128 + 32 * 128) * 2)
    # Every weight but embedding and head is met by every token.
    assert hybrid.flops == pytest.approx(2 * (8.95e9 - 2 * 248_320 * 4096), rel=0.01)
    small = profile("qwen3-0.6b")
    assert (small.row_bytes, small.window_bytes, small.state_bytes) == (28 * 2 * 8 * 128 * 2, 0, 0)
    assert profile("gpt-oss-20b").window == 128


def test_flops_of_a_prefill_add_up() -> None:
    for each in (ATTENTION, HYBRID, WINDOW):
        whole = each.prefill_flops(0, 5000)
        parts = each.prefill_flops(0, 700) + each.prefill_flops(700, 5000)
        assert parts == pytest.approx(whole)


def test_a_profile_that_is_not_known_is_a_clear_error() -> None:
    with pytest.raises(InvalidOption, match=r"qwen3\.5-9b"):
        profile("qwen99")


def test_sessions_keep_their_hashes_apart(tmp_path: Path) -> None:
    for name in ("a", "b"):
        session = {
            "block_size": 64,
            "tool_tokens": 60,
            "system_tokens": 10,
            "requests": [
                {"t": 0.0, "in": 130, "out": 5, "hash_ids": [1, 2], "stop": "tool_use"},
                {"t": 9.0, "in": 200, "out": 5, "hash_ids": [1, 2, 3], "stop": "end_turn"},
            ],
        }
        with gzip.open(tmp_path / f"{name}.json.gz", "wt") as file:
            json.dump(session, file)
    trace = read([tmp_path])
    assert [r.time for r in trace.requests] == [0.0, 0.0, 9.0, 9.0]
    assert trace.prompt_tokens == 2 * 330
    # Three whole blocks and the two rests, in each session.
    assert trace.trie_tokens == 2 * (3 * 64 + 2 + 8)
    assert [r.waits for r in trace.requests] == [False, False, True, True]
    assert [b.kind for b in trace.requests[-1].boundaries()] == ["system", "turn", "user"]


def test_mooncakes_last_block_is_cut_short(tmp_path: Path) -> None:
    lines = [
        {"timestamp": 0, "input_length": 700, "output_length": 1, "hash_ids": [4, 5]},
        {"timestamp": 1000, "input_length": 1024, "output_length": 1, "hash_ids": [4, 5]},
    ]
    file = tmp_path / "trace.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    trace = read([file])
    assert [len(r.tokens()) for r in trace.requests] == [700, 1024]
    assert trace.trie_tokens == 512 + 188 + 512
    assert trace.requests[0].whole == 512


@pytest.mark.parametrize("profile", [ATTENTION, HYBRID, WINDOW], ids=lambda p: p.name)
@pytest.mark.parametrize("policy", ["rewarm", "lru", "clairvoyant"])
def test_with_room_for_everything_nothing_is_computed_twice(profile: Profile, policy: Any) -> None:
    trace = trace_of([0, 1, 2], [0, 1, 2, 3], [10, 11], [0, 1, 2, 3, 4], [10, 11, 12])
    outcome = replay(trace, profile, 10**9, policy, chunk=64)
    # The last token of a prompt is always computed.
    again = outcome.prefilled_tokens - trace.trie_tokens
    assert 0 <= again <= len(trace.requests)
    assert outcome.evictions == 0


def test_clairvoyant_keeps_what_comes_back_in_a_round() -> None:
    """Three chats take turns where two fit: LRU evicts just the one that comes next."""
    chats = [[100 * c + b for b in range(20)] for c in range(3)]
    trace = trace_of(*(chats[i % 3] for i in range(30)))
    memory = int(2.3 * 20 * 64 * 1000)
    rates = {
        p: replay(trace, ATTENTION, memory, p, chunk=64).hit_rate for p in ("lru", "clairvoyant")
    }
    assert rates["lru"] < 0.3
    assert rates["clairvoyant"] > 0.5


def test_the_policy_keeps_a_round_that_lru_loses() -> None:
    chats = [[100 * c + b for b in range(20)] for c in range(4)]
    order = [0, 1, 0, 1, *(i % 4 for i in range(36))]
    trace = trace_of(*(chats[i] for i in order))
    memory = int(2.5 * 20 * 64 * 1000)
    rates = {p: replay(trace, ATTENTION, memory, p, chunk=64).hit_rate for p in ("lru", "rewarm")}
    assert rates["rewarm"] > rates["lru"] + 0.1


@pytest.mark.corpus
@pytest.mark.parametrize("memory", [8, 16] if SOAK or corpus.RECORDED else [16])
def test_a_third_of_what_lru_misses_is_hit_on_coding_agents(memory: int, tmp_path: Path) -> None:
    """Six coding agents run at once, with a prompt of 3 GB each. Generated ones run in three
    groups of six, and the average counts."""
    hybrid, rates = profile("qwen3.5-9b"), dict.fromkeys(POLICIES, 0.0)
    groups = corpus.session_files(tmp_path)
    for files in groups:
        trace = read(files)
        for policy in POLICIES:
            outcome = replay(trace, hybrid, memory * 10**9, policy)
            rates[policy] += outcome.hit_rate / len(groups)
    assert rates["clairvoyant"] > rates["lru"] + 0.02
    assert rates["rewarm"] - rates["lru"] > (rates["clairvoyant"] - rates["lru"]) / 3


def test_a_result_is_read_back_as_it_was_and_drawn(tmp_path: Path) -> None:
    result = Result("chat", "pocket", "rewarm bench chat --turns 2", {"device": "cpu"})
    result.sheet("turns", "turn", "hit").add(1, "50%")
    plot = result.plot("Hit by turn", "turn", "%")
    plot.add("rewarm <1>", 1, 50)
    plot.add("rewarm <1>", 2, 75)
    result.save(tmp_path / "chat.json")
    assert Result.load(tmp_path / "chat.json") == result
    page = write(tmp_path).read_text()
    assert "50%" in page
    assert "<polyline" in page
    assert "rewarm &lt;1&gt;" in page
    with pytest.raises(InvalidOption, match="no results"):
        write(tmp_path / "elsewhere")


def test_a_table_shows_numbers_as_its_columns_say_and_a_dash_where_one_is_unknown() -> None:
    sheet = Result("chat", "pocket").sheet("turns", "turn", "hit:.1%", "tokens:,", "ratio")
    sheet.add(1, 0.6, 12_345, Spread(2.0, 1.0, 3.0))
    sheet.add(2, math.nan, None, "")
    assert sheet.columns == ["turn", "hit", "tokens", "ratio"]
    assert sheet.rows == [["1", "60.0%", "12,345", "2.00 (1.00 to 3.00)"], ["2", "-", "-", ""]]
    with pytest.raises(ValueError, match="argument"):
        sheet.add(3)


def test_a_plot_of_nothing_says_so() -> None:
    assert "nothing" in draw_all([Plot("Empty", "x", "y")])


def test_bench_runs_a_trace_from_the_command_line(tmp_path: Path) -> None:
    lines = [
        {"timestamp": i, "tokens": [*range(200), *range(1000 + 7 * i, 1100 + 7 * i)]}
        for i in range(5)
    ]
    file = tmp_path / "tokens.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    out = tmp_path / "out.json"
    done = CliRunner().invoke(
        app, ["bench", "trace", str(file), "--memory", "64MB..128MB", "--json", str(out)]
    )
    assert done.exit_code == 0, done.output
    result = Result.load(out)
    assert result.command == f"rewarm bench trace {file} --memory 64MB..128MB"
    rows = result.sheets[0].rows
    assert [row[0] for row in rows] == ["0.064 GB"] * 3 + ["0.128 GB"] * 3


def test_branch_finds_what_earlier_turns_share_over_http(tmp_path: Path) -> None:
    out = tmp_path / "branch.json"
    command = ["bench", "branch", "--model", "random:hybrid-tiny", "--turns", "3", "--answer", "4"]
    done = CliRunner().invoke(app, [*command, "--json", str(out)])
    assert done.exit_code == 0, done.output
    result = Result.load(out)
    assert result.complete
    hits = {row[0]: (float(row[3][:-1]), float(row[4][:-1])) for row in result.sheets[0].rows}
    assert hits["turn 1"] == (0.0, 0.0)
    for name in ("turn 3", "the last question again", "another first question"):
        got, best = hits[name]
        assert best > 60
        assert got > best - 3


@pytest.mark.parametrize(
    ("device", "context", "found"),
    [
        ("cpu", 1 << 31, [2000, 20_000]),
        ("gpu", 1 << 31, [2000, 20_000, 100_000]),
        ("gpu", 32_768, [2000, 20_000]),
        ("cpu", 16_384, [2000]),
        ("cpu", 1000, [500]),
    ],
)
def test_prefix_measures_what_the_context_has_room_for(
    device: str, context: int, found: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mx, "default_device", lambda: getattr(mx, device))
    result = Result("prefix", "pocket", "", {})
    bench = SimpleNamespace(result=result)
    assert usual(cast(Any, bench), context) == found
    assert bool(result.figures) is (context < 1 << 31)


@pytest.mark.parametrize(
    "words",
    [
        "index --rounds 2 --tokens 500",
        "disk --model random:hybrid-tiny --rounds 1 --tokens 1000 --nodes 40",
        "hit --rounds 1 --arch hybrid-tiny --length 200",
        pytest.param(
            "prefill --rounds 1 --archs hybrid-tiny --lengths 48 --product 32",
            marks=pytest.mark.integration,  # with a compiler
        ),
        "recurrences --rounds 1 --archs hybrid-tiny --tokens 16",
    ],
)
def test_a_scenario_without_servers_fills_its_tables(words: str, tmp_path: Path) -> None:
    """Scenarios for a GPU run on a CPU too, so that a mistake is found here."""
    out = tmp_path / "out.json"
    done = CliRunner().invoke(app, ["bench", *words.split(), "--json", str(out)])
    assert done.exit_code == 0, done.output
    result = Result.load(out)
    assert result.complete
    assert result.command == f"rewarm bench {words}"
    assert all(sheet.rows for sheet in result.sheets)


def test_tokens_a_second_are_left_out_where_pieces_of_text_do_not_tell_them() -> None:
    assert Answered(tokens=3, times=[1.0, 2.0, 3.0]).per_token == 1.0
    assert Answered(tokens=1, times=[1.0, 2.0]).per_token is None
    assert Answered(tokens=30, times=[1.0, 2.0, 3.0]).per_token is None
    assert Answered(tokens=0, times=[1.0, 2.0, 3.0]).per_token is None


@pytest.mark.parametrize("words", ["disk --parts restore,read", "prefill --lengths 0,7"])
def test_a_list_that_cannot_be_meant_is_refused_with_what_can(words: str) -> None:
    done = CliRunner().invoke(app, ["bench", *words.split()])
    assert isinstance(done.exception, InvalidOption)
    assert "give" in str(done.exception)
