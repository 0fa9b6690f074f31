"""docs/protocols.md says what the code does: diagrams, constants, costs, and kept results."""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections import Counter
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from shmemar.__main__ import main
from shmemar.config import Config
from shmemar.device import packet
from shmemar.device.interpreter import Order, Scope, running
from shmemar.device.packet import SENTINEL, TWIN
from shmemar.device.packet_buffer import PacketBuffer
from shmemar.device.watchdog import Watchdog
from shmemar.dtypes import DTYPES, ReduceOp
from shmemar.host.checker import checked_calls
from shmemar.host.checker.calls import Call, CallSequence
from shmemar.host.checker.checked_calls import launches_of
from shmemar.host.checker.guards import CONTROLS
from shmemar.host.checker.hostile_machine import HostileMachine
from shmemar.host.checker.memory_map import MemoryMap, rank_of
from shmemar.host.checker.schedule import schedule_of
from shmemar.host.checker.verdict import ProtocolError, Verdict
from shmemar.host.scratch import layout_for
from shmemar.layout import (
    ACCUMULATORS,
    LINE_LANES,
    LINE_NBYTES,
    LL_BUFFERS,
    PACKET_NBYTES,
    SENTINEL_BUFFERS,
    BarrierLayout,
    LLLayout,
    StagingLayout,
    accumulator_offset,
)
from shmemar.spec import PACKET_PROTOCOLS, Kernel, KernelSpec, Protocol
from tests.launcher import ROOT
from tests.unit.machines import RefusingMachine

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from numpy.typing import NDArray

TEXT = (ROOT / "docs/protocols.md").read_text()
PAIRS = [
    (kernel, protocol)
    for kernel in Kernel
    if kernel.has_code and kernel is not Kernel.BARRIER  # which moves nothing
    for protocol in kernel.protocols
]
pairs = pytest.mark.parametrize(
    ("kernel", "protocol"), PAIRS, ids=[f"{k.value}-{p.value}" for k, p in PAIRS]
)


def table(first: str) -> list[dict[str, str]]:
    """Rows of the table whose first two columns are named so, by column."""
    (block,) = re.findall(rf"^\| {re.escape(first)} \|.*\n(?:\|.*\n)+", TEXT, re.MULTILINE)
    head, _, *rows = [
        [cell.strip().strip("`") for cell in line.strip("|").split(" | ")]
        for line in block.splitlines()
    ]
    assert rows
    return [dict(zip(head, row, strict=True)) for row in rows]


def costs() -> dict[tuple[Kernel, Protocol], dict[str, str]]:
    """Rows of the table of all kernels."""
    rows = table("kernel | protocol | sent per rank")
    found = {(Kernel(row["kernel"]), Protocol(row["protocol"])): row for row in rows}
    assert len(found) == len(rows)
    return found


class _Formula:
    """A parser of ``4(N-1)M/N``, ``max(Q-2, 0)`` and their like: products may leave out the *."""

    def __init__(self, text: str, names: dict[str, int]) -> None:
        self._names = {name: Fraction(number) for name, number in names.items()}
        self._symbols = re.findall(r"\d+|max|[A-Z]|\S", text)

    def value(self) -> Fraction:
        result = self._sum()
        assert not self._symbols, f"not read: {self._symbols}"
        return result

    def _take(self, *expected: str) -> str | None:
        return self._symbols.pop(0) if self._symbols and self._symbols[0] in expected else None

    def _sum(self) -> Fraction:
        result = self._product()
        while sign := self._take("+", "-"):
            result += self._product() * (1 if sign == "+" else -1)
        return result

    def _product(self) -> Fraction:
        result = self._factor()
        while self._symbols and self._symbols[0] not in {"+", "-", ",", ")"}:
            if self._take("/"):
                result /= self._factor()
            else:
                self._take("*")
                result *= self._factor()
        return result

    def _factor(self) -> Fraction:
        symbol = self._symbols.pop(0)
        if symbol == "max":
            assert self._take("(")
            left = self._sum()
            assert self._take(",")
            result = max(left, self._sum())
            assert self._take(")")
        elif symbol == "(":
            result = self._sum()
            assert self._take(")")
        else:
            result = Fraction(symbol) if symbol.isdecimal() else self._names[symbol]
        return result


def evaluate(formula: str, **names: int) -> Fraction:
    """Evaluate a formula of the page; its letters are `names`."""
    return _Formula(formula, names).value()


def spec_of(kernel: Kernel, protocol: Protocol, nranks: int) -> KernelSpec:
    op = ReduceOp.SUM if kernel is Kernel.LL128_ATOMIC else ReduceOp.MIN
    return KernelSpec(kernel, protocol, DTYPES["float32"], op, nranks)


@pytest.mark.parametrize(
    ("formula", "expected"),
    [
        ("2(N-1)M", 48),
        ("4(N-1)M/N", 24),
        ("2 * N M - 1", 63),
        ("max(N-5, 0)", 0),
        ("max(N-2, 0)", 2),
        ("2N+(N-1)M/N/2", 11),
    ],
)
def test_formulas_are_read_as_they_are_meant(formula: str, expected: int) -> None:
    assert evaluate(formula, N=4, M=8) == expected


# Constants and packets


@pytest.mark.parametrize("row", table("constant | value"), ids=lambda row: row["constant"])
def test_constants_are_those_of_the_code(row: dict[str, str]) -> None:
    assert int(row["value"], 0) == getattr(packet, row["constant"])


def test_every_constant_is_named_and_no_other_number_stands_for_one() -> None:
    rows = table("constant | value")
    assert [row["constant"] for row in rows] == sorted(set(packet.__all__) - {"next_epoch"})
    written = {int(number, 16) for number in re.findall(r"0x[0-9A-Fa-f]+", TEXT)}
    assert written == {packet.LAST_EPOCH, SENTINEL, TWIN}


class _OneStore(RefusingMachine):
    def store(self, address: int, words: tuple[int, ...], order: Order) -> None:
        self.words = words


@pytest.mark.parametrize("protocol", PACKET_PROTOCOLS)
def test_the_diagram_of_a_packet_is_what_is_sent(protocol: Protocol) -> None:
    (line,) = re.findall(rf"^{protocol.value} {{2,}}(.*)$", TEXT, re.MULTILINE)
    (ranges,) = re.findall(r"^bytes {2,}(.*)$", TEXT, re.MULTILINE)
    assert re.findall(r"\[(\d+), (\d+)\)", ranges) == [
        (str(at), str(at + 4)) for at in range(0, PACKET_NBYTES, 4)
    ]
    words = {"d0": 10, "d1": 11, "d2": 12, "d3": 13, "flag": 7}
    machine = _OneStore()
    width = 0 if protocol is Protocol.LL else 4
    with running(machine):
        ll = PacketBuffer((0, 1 << 20), 0, 64, 128, width, 7, Watchdog(0, 0, 0, 0, 0, 0, 1))
        ll.send_packet(1, 0, [10, 11, 12, 13], 0)
    assert machine.words == tuple(words[name] for name in line.split())


# The region


def diagram(title: str) -> list[str]:
    (block,) = re.findall(rf"^```\n{title}\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
    return str(block).splitlines()


RANGE = r"\[([^\[]+), ([^)]*(?:\(N-1\)[^)]*)?)\)"


@pytest.mark.parametrize(("title", "nbuffers"), [("two", LL_BUFFERS), ("three", SENTINEL_BUFFERS)])
@pytest.mark.parametrize(("nranks", "nslots"), [(2, 128), (5, 384)])
def test_the_diagram_of_the_region_agrees_with_packet_offset(
    title: str, nbuffers: int, nranks: int, nslots: int
) -> None:
    layout = LLLayout(nranks, nslots, nbuffers)
    sizes = {"N": nranks, "P": layout.pitch_nbytes, "B": layout.buffer_nbytes}
    definition, *rows = diagram(f"{title} buffers")
    assert evaluate(definition.removeprefix("B ="), **sizes) == layout.buffer_nbytes
    assert [row.split()[:2] for row in rows] == [["buffer", str(k)] for k in range(nbuffers)]
    for k, row in enumerate(rows):
        cells = re.findall(RANGE + r" from rank (\S+)", row)
        assert [source for *_, source in cells] == ["0", "1", "N-1"]
        for start, end, source in cells:
            rank = int(evaluate(source, **sizes))
            for epoch in (k, k + nbuffers, k + 6 * nbuffers):
                first, last = (layout.packet_offset(epoch, rank, at) for at in (0, nslots - 1))
                assert evaluate(start, **sizes) == first
                assert evaluate(end, **sizes) == last + PACKET_NBYTES
    assert evaluate(end, **sizes) == layout.nbytes


@pytest.mark.parametrize("layout", [LLLayout(2, 128), LLLayout(5, 384, SENTINEL_BUFFERS)])
def test_the_diagram_of_slots_agrees_with_packet_offset(layout: LLLayout) -> None:
    sizes = {"P": layout.pitch_nbytes}
    (row,) = diagram("the packets from one rank")
    cells = [
        [int(evaluate(formula, **sizes)) for formula in cell]
        for cell in re.findall(RANGE + r" slot (\S+)", row)
    ]
    assert cells == [
        [(at := layout.packet_offset(0, 0, slot)), at + PACKET_NBYTES, slot]
        for slot in (0, 1, layout.nslots - 1)
    ]


def test_the_diagram_of_accumulators_agrees_with_accumulator_offset() -> None:
    layout = LLLayout(5, 384, SENTINEL_BUFFERS, ACCUMULATORS)
    sizes = {"N": layout.nranks, "P": layout.pitch_nbytes, "A": layout.packets_nbytes}
    definition, *rows = diagram("two accumulators")
    assert evaluate(definition.removeprefix("A ="), **sizes) == layout.packets_nbytes
    assert [row.split()[:2] for row in rows] == [["accumulator", str(k)] for k in range(2)]
    for k, row in enumerate(rows):
        for start, end, slot in re.findall(RANGE + r" slot (\S+)", row):
            at = accumulator_offset(
                k + 4, int(evaluate(slot, **sizes)), layout.packets_nbytes, layout.pitch_nbytes
            )
            assert evaluate(start, **sizes) == at
            assert evaluate(end, **sizes) == at + PACKET_NBYTES
    assert evaluate(end, **sizes) == layout.nbytes


# Costs


def test_every_kernel_and_protocol_has_a_row_and_a_section() -> None:
    assert list(costs()) == PAIRS
    sections = re.findall(r"^### `(\w+)`, `(\w+)`$", TEXT, re.MULTILINE)
    assert [(Kernel(kernel), Protocol(protocol)) for kernel, protocol in sections] == PAIRS


@pairs
def test_a_sections_costs_are_those_of_the_table(kernel: Kernel, protocol: Protocol) -> None:
    section = TEXT.partition(f"### `{kernel.value}`, `{protocol.value}`\n")[2].partition("#")[0]
    (cost,) = re.findall(
        r"^Cost: sends `(.+)`, (\d) synchronisations?, scratch `(.+)`, fences `(.+)`\.$",
        section,
        re.MULTILINE,
    )
    row = costs()[kernel, protocol]
    columns = ("sent per rank", "synchronisations", "scratch per pass", "fences")
    assert cost == tuple(row[column] for column in columns)


@pytest.mark.parametrize(
    ("kernel", "protocol", "nranks"),
    [
        (*pair, nranks)
        for pair in PAIRS
        for nranks in (1, 2, 4, 7, 24 if pair[0] is Kernel.LL128_ATOMIC else 64)
    ],
)
def test_scratch_is_that_of_the_layout(kernel: Kernel, protocol: Protocol, nranks: int) -> None:
    spec = spec_of(kernel, protocol, nranks)
    layout = layout_for(spec, Config())
    assert not isinstance(layout, StagingLayout)
    flags_nbytes = layout.flags_nbytes if isinstance(layout, BarrierLayout) else 0
    pass_nbytes = (
        bisect_right(
            range(layout.nbytes), layout.nslots // spec.packets_per_thread, key=spec.group_count
        )
        - 1
    )
    formula = costs()[kernel, protocol]["scratch per pass"]
    assert evaluate(formula, N=nranks, D=pass_nbytes) == layout.nbytes - flags_nbytes


class _Counting(HostileMachine):
    """Counts the packets that ranks store to their peers or load from them, and fences."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.sent_nbytes: Counter[int] = Counter()
        self.nfences: Counter[int] = Counter()

    def store(self, address: int, words: tuple[int, ...], order: Order) -> None:
        rank = self.turns.current.rank
        if len(words) == 4 and rank_of(address >> 3) != rank:
            self.sent_nbytes[rank] += 4 * len(words)
        if order is Order.RELEASE_SYS:
            self.nfences[rank] += 1
        super().store(address, words, order)

    def add_to_line(
        self, address: int, words: tuple[int, ...], add: Callable[[int, int], int]
    ) -> None:
        rank = self.turns.current.rank
        if rank_of(address >> 3) != rank:
            self.sent_nbytes[rank] += 4 * len(words)
        super().add_to_line(address, words, add)

    def load(self, address: int, nwords: int, order: Order) -> tuple[int, ...]:
        rank = self.turns.current.rank
        if nwords == 4 and rank_of(address >> 3) != rank:
            self.sent_nbytes[rank] += 4 * nwords
        return super().load(address, nwords, order)

    def fence(self, scope: Scope) -> None:
        self.nfences[self.turns.current.rank] += 1
        super().fence(scope)


def _run(call: Call) -> _Counting:
    """Run a call, whose results are checked."""
    nranks = call.spec.nranks
    machine = _Counting(schedule_of(1, nranks), MemoryMap(nranks))
    with running(machine), np.errstate(all="ignore"):
        machine.run(launches_of(CallSequence((call,)), machine))
    return machine


NTHREADS = 2
LINE_THREADS = 256
"""Of 32 lines, 31 of data and the extra one, in a pass: for these the formulas are exact."""


@pytest.mark.parametrize(
    ("kernel", "protocol", "nranks", "passes"),
    [
        (*pair, nranks, passes)
        for pair in PAIRS
        for nranks in (2, 3, 4)
        for passes in (1, 2, 3, 4)
        # Of lines, which have many threads, a few passes of a few ranks.
        if pair[0] is not Kernel.LL128_ATOMIC or passes * nranks <= 6
    ],
)
def test_a_run_costs_what_the_table_says(
    monkeypatch: pytest.MonkeyPatch,
    kernel: Kernel,
    protocol: Protocol,
    nranks: int,
    passes: int,
) -> None:
    spec = spec_of(kernel, protocol, nranks)
    nthreads, exchanges = NTHREADS, int(costs()[kernel, protocol]["synchronisations"])
    nbytes = passes * Call(spec, 1, NTHREADS).pass_nbytes
    if kernel is Kernel.LL128_ATOMIC:
        nthreads, exchanges = LINE_THREADS, 1
        nbytes = passes * 31 * LINE_NBYTES * nranks
        monkeypatch.setattr(checked_calls, "layout_of", _wide_layout)
    call = Call(spec, nbytes // spec.dtype.itemsize, nthreads)
    machine = _run(call)
    # In a block that meets others each thread but that of the own rank has a peer to wait for.
    nwaiting = nranks - 1 if kernel.has_barriers else nthreads
    nepochs = 1 if kernel.has_barriers else nthreads

    row = costs()[kernel, protocol]
    numbers = {"N": nranks, "M": nbytes, "Q": passes}
    for rank in range(nranks):
        assert machine.sent_nbytes[rank] == evaluate(row["sent per rank"], **numbers)
        assert machine.nfences[rank] == nwaiting * evaluate(row["fences"], **numbers)
        (epochs,) = machine.map.named("epochs of ", rank)
        words = np.frombuffer(machine.peek(epochs.address, 4 * nepochs), np.uint32)
        assert words.tolist() == [passes * exchanges] * nepochs


def _wide_layout(spec: KernelSpec) -> LLLayout:
    return LLLayout(spec.nranks, LINE_THREADS, spec.nbuffers, spec.accumulators)


# Values


VALUES = {
    "-0.0": ([0x80000000] * 8, {}),
    "NaN": ([0x7FC00001, 0xFFFAFFF8, TWIN, 0x7FFFFFFF] * 2, {}),
    "sentinel-valued payloads": (
        [SENTINEL, 0x7F800000, SENTINEL, SENTINEL] * 2,
        {SENTINEL: TWIN},
    ),
}
"""Words that a minimum, and but for zeros a sum, of equal ones leaves as they are; twins."""


@dataclass(frozen=True)
class _CallOf(Call):
    """A call of words whose result is known."""

    given: tuple[int, ...] = ()
    expected: tuple[int, ...] = ()

    def input(self, number: int, rank: int) -> NDArray[Any]:
        return np.array(self.given, np.uint32)

    def result(self, number: int, rank: int) -> NDArray[Any] | None:
        is_root = self.spec.kernel is Kernel.BROADCAST and rank == self.root
        return None if is_root else np.array(self.expected, np.uint32)


@pairs
@pytest.mark.parametrize("column", VALUES)
def test_values_arrive_as_the_table_says(kernel: Kernel, protocol: Protocol, column: str) -> None:
    words, twins = VALUES[column]
    treatment = costs()[kernel, protocol][column]
    # The checker's additions keep what a NaN carries; a GPU's make one of all.
    becomes = {"kept": {}, "a NaN": {}, "twin": twins, "+0.0": {0x80000000: 0}}[treatment]
    expected = [becomes.get(word, word) for word in words]
    spec = spec_of(kernel, protocol, 2)
    nthreads = LINE_LANES if kernel is Kernel.LL128_ATOMIC else 1
    _run(_CallOf(spec, len(words), nthreads, given=tuple(words), expected=tuple(expected)))


def test_a_value_that_does_not_arrive_is_noticed() -> None:
    spec = spec_of(Kernel.ONE_SHOT, Protocol.LL, 2)
    with pytest.raises(ProtocolError, match="expected"):
        _run(_CallOf(spec, 2, 1, given=(1, 2), expected=(1, 3)))


# Results


def test_the_numbers_are_those_of_the_kept_results() -> None:
    rows = table("kernel | protocol | ranks")
    for row in rows:
        name = row["file"]
        document = json.loads((ROOT / "benchmarks/results" / name).read_text())
        on_a_gpu = int(row["ranks"]) // int(row["GPUs"])
        assert (document["ranks"], document["ranks on a GPU"]) == (row["ranks"], str(on_a_gpu))
        assert document["date"].partition("T")[0] in TEXT
        (kept,) = [
            kept
            for kept in document["rows"]
            if (kept["mode"], kept["nbytes"]) == (row["mode"], int(row["bytes"]))
            and kept["kernel"] == f"{row['kernel']}/{row['protocol']}"
        ]
        assert (kept["dtype"], kept["op"], kept["chained"]) == ("float32", "sum", False)
        assert f"{kept['median_us']:.2f}" == row["us"]


SIZES = {"128 B": 128, "64 KiB": 1 << 16, "256 KiB": 1 << 18, "1 MiB": 1 << 20, "8 MiB": 1 << 23}


def test_the_numbers_of_large_messages_are_those_of_the_kept_results() -> None:
    rows = table("kernel | protocol | ranks, GPUs")
    for row in rows:
        document = json.loads((ROOT / "benchmarks/results" / row["file"]).read_text())
        nranks, ngpus = map(int, row["ranks, GPUs"].split(", "))
        on_a_gpu = str(nranks // ngpus)
        assert (document["ranks"], document["ranks on a GPU"]) == (str(nranks), on_a_gpu)
        kept = {
            each["nbytes"]: f"{each['median_us']:.2f}"
            for each in document["rows"]
            if (each["kernel"], each["mode"]) == (f"{row['kernel']}/{row['protocol']}", row["mode"])
        }
        assert {size: row[name] for name, size in SIZES.items()}.items() <= kept.items()
        assert not any(each["wrong"] for each in document["rows"])
    assert len(rows) == 54


def test_the_numbers_of_barriers_are_those_of_the_kept_results() -> None:
    for row in table("ranks | GPUs | `device`"):
        document = json.loads((ROOT / "benchmarks/results" / row["file"]).read_text())
        on_a_gpu = int(row["ranks"]) // int(row["GPUs"])
        assert (document["ranks"], document["ranks on a GPU"]) == (row["ranks"], str(on_a_gpu))
        kept = {each["mode"]: f"{each['median_us']:.2f}" for each in document["rows"]}
        assert (row["device"], row["graph"]) == (kept["device"], kept["graph"])


def test_the_shares_of_barriers_are_those_of_the_kept_results() -> None:
    files: dict[str, list[dict[str, str]]] = {}
    for row in table("kernel/protocol | ranks, GPUs"):
        files.setdefault(row["file"], []).append(row)
    assert len(files) == 4
    for name, rows in files.items():
        document = json.loads((ROOT / "benchmarks/results" / name).read_text())
        kept = {
            (each["kernel"], each["nbytes"]): f"{each['median_us']:.2f}, {each['share']:.0%}"
            for each in document["shares"]
        }
        assert not any(each["wrong"] for each in document["shares"])
        shown = {
            (row["kernel/protocol"], SIZES[size]): row[size]
            for row in rows
            for size in ("128 B", "64 KiB", "1 MiB", "8 MiB")
        }
        assert shown == kept
        on_a_gpu = int(document["ranks on a GPU"])
        where = f"{document['ranks']}, {int(document['ranks']) // on_a_gpu}"
        assert {row["ranks, GPUs"] for row in rows} == {where}


PDL_COLUMNS = (
    ("graph", "shmemar-no-pdl"),
    ("graph", "shmemar-pdl"),
    ("graph", "shmemar"),
    ("behind", "shmemar-no-pdl"),
    ("behind", "shmemar-pdl"),
    ("behind", "shmemar"),
    ("early", "shmemar-no-pdl"),
    ("early", "shmemar-pdl"),
)


def kept_path(name: str) -> Path:
    """The one result of H200s of that name, whatever its date."""
    (found,) = (ROOT / "benchmarks/results").glob(f"*-h200-{name}")
    return found


def test_the_numbers_of_programmatic_launch_are_those_of_the_kept_results() -> None:
    (block,) = re.findall(r"^\| ranks, GPUs \| message \|.*\n(?:\|.*\n)+", TEXT, re.MULTILINE)
    rows = [line.strip("| ").split(" | ") for line in block.splitlines()[2:]]
    assert len(rows) == 9
    for where, size, *cells, name in rows:
        stem = kept_path(f"{name.strip('`')}-contenders.json").name.removesuffix("-contenders.json")
        kept: dict[Any, str] = {}
        for kind in ("contenders", "pdl-auto"):
            path = ROOT / "benchmarks/results" / f"{stem}-{kind}.json"
            on_a_gpu = int(where[0]) // int(where[-1])
            if kind == "pdl-auto" and on_a_gpu > 1:  # where it is as never
                kept |= {(m, who, SIZES[size]): "-" for m, who in PDL_COLUMNS if who == "shmemar"}
                continue
            document = json.loads(path.read_text())
            on_a_gpu = int(document["ranks on a GPU"])
            assert where == f"{document['ranks']}, {int(document['ranks']) // on_a_gpu}"
            assert not any(row["wrong"] for row in document["rows"])
            for row in document["rows"]:
                if row["median_us"] is not None:
                    what = row["mode"], row["contender"], row["nbytes"]
                    kept[what] = f"{row['median_us']:.2f}"
        assert cells == [kept[mode, who, SIZES[size]] for mode, who in PDL_COLUMNS]


# The checker


def test_the_table_of_controls_has_a_row_for_each() -> None:
    rows = table("taken out | kernel")
    found = [(row["taken out"], row["kernel"]) for row in rows]
    assert found == [(control.name.strip("`"), control.program.name) for control in CONTROLS]
    verdicts = {verdict.value for verdict in Verdict}
    for row in rows:
        assert {row["found as"], row["by results alone"]} <= verdicts


EXAMPLE = TEXT.partition("### Check your own kernel\n")[2].partition("```python\n")[2]
EXAMPLE = EXAMPLE.partition("```")[0]


def test_the_example_of_a_kernel_that_is_checked_runs() -> None:
    exec(compile(EXAMPLE, "docs/protocols.md", "exec"), {})  # noqa: S102


def test_the_example_fails_as_the_page_says() -> None:
    without = EXAMPLE.replace("        ll.advance_epoch()\n", "")
    assert without != EXAMPLE
    (told,) = re.findall(r"Without `ll.advance_epoch\(\)` the report says: `(.*?)`", TEXT)
    with pytest.raises(AssertionError, match=told):
        exec(compile(without, "docs/protocols.md", "exec"), {})  # noqa: S102


def test_the_commands_of_the_checker_are_known_to_it(capsys: pytest.CaptureFixture[str]) -> None:
    commands = re.findall(r"^python -m shmemar (check.*?) +#", TEXT, re.MULTILINE)
    assert len(commands) == 4
    for command in commands:
        assert main([*command.split(), "--seeds", "1", "--jobs", "1"]) == 0
        assert capsys.readouterr().out.endswith("# nothing found\n")


# docs/performance.md


def test_the_floors_are_those_of_the_kept_results() -> None:
    text = (ROOT / "docs/performance.md").read_text()
    (block,) = re.findall(r"^\| ranks, GPUs \| `__threadfence.*\n(?:\|.*\n)+", text, re.MULTILINE)
    rows = [line.strip("| ").split(" | ") for line in block.splitlines()[2:]]
    assert len(rows) == 3
    for where, *cells, name in rows:
        document = json.loads(kept_path(f"{name.strip('`')}-contenders.json").read_text())
        on_a_gpu = int(document["ranks on a GPU"])
        assert where == f"{document['ranks']}, {int(document['ranks']) // on_a_gpu}"
        floor = document["floor"]
        fences = floor["fences_ns"]
        pair = max(floor["pairs"], key=lambda each: float(each["fastest_ns"]))
        (loop,) = [
            row
            for row in document["rows"]
            if (row["mode"], row["nbytes"], row["contender"]) == ("device", 128, "shmemar")
        ]
        nanoseconds = [
            fences["__threadfence()"]["nothing"],
            fences["__threadfence()"]["own store"],
            fences["fence.acq_rel.sys"]["nothing"],
            floor["load_ns"],
            *(pair[each] for each in ("fastest_ns", "median_ns", "slowest_ns")),
            1e3 * floor["l_sol_us"],
        ]
        expected = [f"{each:.0f}" for each in nanoseconds]
        assert cells == [*expected, f"{loop['median_us']:.2f}", f"{loop['xsol']:.2f}"]
