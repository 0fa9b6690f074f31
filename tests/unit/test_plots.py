"""Result documents, drawn."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pytest
from matplotlib.figure import Figure

from benchmarks.compare import load
from benchmarks.plots import draw
from shmemar.errors import ArgumentError, BackendUnavailableError

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
PINNED = RESULTS / "2026-11-30-h200-one-gpu-2-ranks.json"
KERNELS = ["one_shot/ll", "one_shot/sentinel", "two_shot/ll", "two_shot/sentinel"]


def row(nbytes: int, median_us: float | None, **changes: Any) -> dict[str, Any]:
    what = {
        "mode": "graph",
        "nbytes": nbytes,
        "dtype": "float32",
        "op": "sum",
        "kernel": "one_shot/ll",
        "median_us": median_us,
        "p20_us": median_us and median_us * 0.9,
        "p80_us": median_us and median_us * 1.2,
    }
    return {**what, **changes}


def document(*rows: dict[str, Any], **facts: Any) -> dict[str, Any]:
    what = {
        "date": "2026-12-01T10:00:00+00:00",
        "ranks": "2",
        "backend": "nvshmem",
        "GPU": "NVIDIA H200, sm_90",
        "ranks on a GPU": "1",
    }
    return {**what, **facts, "rows": list(rows)}


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Any]:
    """The figures that are saved."""
    figures: list[Any] = []
    save = Figure.savefig

    def keep(figure: Any, *arguments: Any, **options: Any) -> None:
        figures.append(figure)
        save(figure, *arguments, **options)

    monkeypatch.setattr(Figure, "savefig", keep)
    monkeypatch.chdir(tmp_path)
    return figures


def axes_of(drawn: list[Any], document: dict[str, Any], mode: str = "graph") -> Any:
    draw(document, Path("plot.png"), mode)
    (axes,) = drawn.pop().axes
    return axes


def curves(axes: Any) -> dict[str, list[tuple[float, float]]]:
    """The points of each line by its label."""
    return {
        each.get_label(): [(float(x), float(y)) for x, y in each.lines[0].get_xydata()]
        for each in axes.containers
    }


def labels(axes: Any) -> list[str]:
    return [text.get_text() for text in axes.get_legend().get_texts()]


def note(figure: Any) -> str:
    return str(figure.get_supxlabel())


@pytest.mark.parametrize("name", ["plot.svg", "plot.png", "plot.PNG"])
def test_a_kept_file_is_drawn(tmp_path: Path, name: str) -> None:
    draw(load(PINNED), tmp_path / name, "device")
    contents = (tmp_path / name).read_bytes()
    if name.endswith("svg"):
        text = contents.decode()
        title = "2 ranks, NVIDIA H200, sm_90, 2 on a GPU; allreduce float32 sum, device, 2026-11-30"
        for said in [title, *(f"shmemar {kernel}" for kernel in KERNELS), "64 KiB"]:
            assert f"<!-- {said} -->" in text
    else:
        assert contents.startswith(b"\x89PNG")


def test_there_is_a_line_for_each_contender_and_kernel(drawn: list[Any]) -> None:
    kept = load(PINNED)
    axes = axes_of(drawn, kept)
    found = curves(axes)
    assert list(found) == [f"shmemar {kernel}" for kernel in KERNELS] == labels(axes)
    for kernel in KERNELS:
        expected = [
            (each["nbytes"], each["median_us"])
            for each in kept["rows"]
            if (each["kernel"], each["mode"]) == (kernel, "graph")
        ]
        assert found[f"shmemar {kernel}"] == sorted(expected)


def test_contenders_without_a_kernel_and_of_one_kernel_have_lines_of_their_own(
    drawn: list[Any],
) -> None:
    others = [row(128, 9.0, contender="nccl", kernel=None), row(128, 3.0, contender="torch")]
    axes = axes_of(drawn, document(row(128, 2.0), *others))
    assert labels(axes) == ["shmemar one_shot/ll", "nccl", "torch one_shot/ll"]


def test_lines_are_told_apart_without_colour(drawn: list[Any]) -> None:
    rows = [row(128, 1.0 + number, contender=f"number {number}") for number in range(12)]
    lines = [each.lines[0] for each in axes_of(drawn, document(*rows)).containers]
    assert len({(each.get_marker(), each.get_linestyle()) for each in lines}) == 12
    assert {each.get_color() for each in lines} == {"black", "dimgray"}


def test_both_axes_are_logarithmic_and_say_what_they_are(drawn: list[Any]) -> None:
    axes = axes_of(drawn, document(row(128, 2.0), row(65536, 3.0), row(100, 1.0)))
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    assert axes.get_xlabel() == "message size (bytes)"
    assert axes.get_ylabel() == "latency (µs)"
    ticks = [text.get_text() for text in axes.get_xticklabels()]
    assert ticks == ["100 B", "128 B", "64 KiB"]


def test_labels_of_many_sizes_are_turned(drawn: list[Any]) -> None:
    axes = axes_of(drawn, document(*(row(1 << power, 1.0) for power in range(20))))
    assert {text.get_rotation() for text in axes.get_xticklabels()} == {45.0}


def test_error_bars_reach_from_p20_to_p80(drawn: list[Any]) -> None:
    axes = axes_of(drawn, document(row(128, 2.0, p20_us=1.5, p80_us=4.0)))
    (segment,) = axes.containers[0].lines[2][0].get_segments()
    assert segment[:, 1].tolist() == [1.5, 4.0]


def test_a_median_outside_its_percentiles_is_drawn_all_the_same(drawn: list[Any]) -> None:
    axes = axes_of(drawn, document(row(128, 2.0, p20_us=2.5, p80_us=1.5)))
    (segment,) = axes.containers[0].lines[2][0].get_segments()
    assert segment[:, 1].tolist() == [2.0, 2.0]


def test_of_rows_of_one_line_and_size_the_fastest_is_drawn(drawn: list[Any]) -> None:
    axes = axes_of(drawn, document(row(128, 3.0), row(128, 2.0), row(128, 4.0)))
    assert curves(axes) == {"shmemar one_shot/ll": [(128, 2.0)]}


def test_the_floor_is_a_grey_line(drawn: list[Any]) -> None:
    axes = axes_of(drawn, document(row(128, 2.0), floor={"l_sol_us": 0.853}))
    assert labels(axes) == ["floor, 0.85 µs", "shmemar one_shot/ll"]
    (floor,) = [each for each in axes.lines if each.get_label().startswith("floor")]
    assert floor.get_ydata() == [0.853, 0.853]
    assert floor.get_color() == "grey"


@pytest.mark.parametrize("floor", [None, {}, {"l_sol_us": None}, {"l_sol_us": 0}, [], "none"])
def test_without_a_floor_there_is_no_line(drawn: list[Any], floor: Any) -> None:
    assert labels(axes_of(drawn, document(row(128, 2.0), floor=floor))) == ["shmemar one_shot/ll"]


# What is said


def test_a_title_says_what_old_files_lack(drawn: list[Any]) -> None:
    axes = axes_of(drawn, {"rows": [row(128, 2.0)]})
    assert axes.get_title() == (
        "ranks? ranks, GPU?, ranks on a GPU? on a GPU; allreduce float32 sum, graph, date?"
    )


def test_emulated_times_are_labelled_so(drawn: list[Any]) -> None:
    facts = {"backend": "emulated", "GPU": None, "ranks on a GPU": None}
    axes = axes_of(drawn, document(row(128, 2.0), **facts))
    assert axes.get_title().startswith("2 ranks, emulated on a CPU; allreduce float32 sum")


@pytest.mark.parametrize(
    ("changes", "title", "label"),
    [
        ({"in_place": True, "op": "max"}, "; allreduce float32, graph", " max in place"),
        ({"dtype": "float64"}, "; allreduce sum, graph", " float64"),
        ({"chained": True}, "; allreduce float32 sum, graph", " chained"),
        ({"collective": "broadcast", "op": "-"}, "; float32, graph", " broadcast"),
    ],
)
def test_what_differs_between_rows_is_in_the_legend(
    drawn: list[Any], changes: dict[str, Any], title: str, label: str
) -> None:
    axes = axes_of(drawn, document(row(128, 2.0), row(128, 3.0, **changes)))
    assert title in axes.get_title()
    first, second = labels(axes)
    assert second == f"shmemar one_shot/ll{label}"
    assert first != second


def test_what_all_rows_have_is_in_the_title(drawn: list[Any]) -> None:
    axes = axes_of(drawn, document(row(128, 2.0, op="max", in_place=True)))
    assert "; allreduce float32 max in place, graph, 2026-12-01" in axes.get_title()


def test_what_is_left_out_is_said(drawn: list[Any]) -> None:
    nothing = {"contender": "nccl", "kernel": None, "note": "NCCL is not installed"}
    rows = [
        row(128, 2.0),
        row(128, 1.0, wrong=5, contender="torch"),
        row(128, None, **nothing),
        row(2048, None, **nothing),
        row(128, None, contender="mpi", kernel=None),
        row(0, 1.0, kernel="barrier", collective="allreduce"),
    ]
    draw(document(*rows), Path("plot.png"), "graph")
    (figure,) = drawn
    assert labels(figure.axes[0]) == ["shmemar one_shot/ll"]
    assert note(figure).splitlines() == [
        "Not drawn: torch one_shot/ll (wrong results) at 128 B.",
        "Not drawn: nccl (no number, NCCL is not installed) at 128 B, 2 KiB.",
        "Not drawn: mpi (no number, the file does not say why) at 128 B.",
        "Not drawn: shmemar barrier (of no bytes) at 0 B.",
    ]


def test_nothing_is_said_where_all_is_drawn(drawn: list[Any]) -> None:
    draw(document(row(128, 2.0)), Path("plot.png"), "graph")
    assert note(drawn[0]) == ""


def test_rows_of_other_modes_are_not_drawn(drawn: list[Any]) -> None:
    axes = axes_of(drawn, document(row(128, 2.0), row(256, 9.0, mode="eager")))
    assert curves(axes) == {"shmemar one_shot/ll": [(128, 2.0)]}


def test_settings_of_matplotlib_are_left_as_they_were(tmp_path: Path) -> None:
    before = dict(mpl.rcParams)
    draw(document(row(128, 2.0)), tmp_path / "plot.svg", "graph")
    assert dict(mpl.rcParams) == before


# What is refused


@pytest.mark.parametrize("name", ["plot", "plot.pdf", "plot.svg.gz", "svg"])
def test_another_suffix_is_refused(tmp_path: Path, name: str) -> None:
    expected = rf"the plot is .*{re.escape(name)}; expected a file that ends in \.svg or \.png"
    with pytest.raises(ArgumentError, match=expected):
        draw(document(row(128, 2.0)), tmp_path / name, "graph")
    assert not list(tmp_path.iterdir())


def test_a_mode_without_rows_is_refused(tmp_path: Path) -> None:
    expected = r"no rows of mode eager to draw; its modes are device, graph\.$"
    with pytest.raises(ArgumentError, match=expected):
        draw(load(PINNED), tmp_path / "plot.svg", "eager")
    assert not list(tmp_path.iterdir())


def test_a_mode_without_a_number_is_refused_with_the_reasons(tmp_path: Path) -> None:
    rows = [row(128, None, note="it needs GPUs"), row(256, 1.0, wrong=1)]
    expected = (
        r"no rows of mode graph to draw; its modes are graph\. Not drawn: shmemar one_shot/ll "
        r"\(no number, it needs GPUs\) at 128 B\. Not drawn: .*\(wrong results\) at 256 B\."
    )
    with pytest.raises(ArgumentError, match=expected):
        draw(document(*rows), tmp_path / "plot.svg", "graph")


def test_barriers_have_no_size_to_draw(tmp_path: Path) -> None:
    barriers = load(RESULTS / "2026-11-30-h200-one-gpu-2-ranks-barriers.json")
    with pytest.raises(ArgumentError, match=r"shmemar barrier \(of no bytes\) at 0 B\."):
        draw(barriers, tmp_path / "plot.svg", "device")


def test_a_document_without_rows_is_refused(tmp_path: Path) -> None:
    tables = json.loads((RESULTS / "2026-11-30-h200-four-gpus-tuned.json").read_text())
    with pytest.raises(ArgumentError, match="mode of row 1 is None"):
        draw(tables, tmp_path / "plot.svg", "graph")
    with pytest.raises(ArgumentError, match="the document has no rows"):
        draw({}, tmp_path / "plot.svg", "graph")


def test_a_plot_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"could not be written to .*plot\.svg: "):
        draw(document(row(128, 2.0)), tmp_path / "none" / "plot.svg", "graph")


def test_without_matplotlib_the_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(BackendUnavailableError, match=r"pip install 'shmemar\[plot\]'"):
        draw(document(row(128, 2.0)), tmp_path / "plot.svg", "graph")
