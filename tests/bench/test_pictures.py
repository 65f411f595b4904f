"""The benchmarks' pictures: what is drawn is what the file says, nothing of it left away and
nothing added.
"""

import json
import re
from pathlib import Path

import pytest

from moe_runtime.bench import pictures, pictures_bars
from moe_runtime.bench.pictures_bars import read

pytest.importorskip("matplotlib")
ROOT = Path(__file__).resolve().parents[2]
PEERS = (
    "transformers eager",
    "transformers grouped_mm",
    "transformers batched_mm",
    "torch grouped_mm",
)
CPU = {
    "machine": "AMD EPYC 9004, 2 threads",
    "driver": "none",
    "torch": "2.13.0+cpu",
    "triton": "3.7.1",
    "transformers": "5.23.0",
    "commit": "0123abc",
    "date": "2026-11-22",
    "rounds": 9,
}
CEILINGS = {"fp32": {"TFLOP/s": 0.18, "GB/s": 20.0}, "bf16": {"TFLOP/s": 0.36, "GB/s": 20.0}}
SHAPES = {"coarse": (2048, 512, 1408, 8, 6), "fine": (2048, 512, 256, 64, 8)}


def entry(
    name: str, info: dict, ms: dict, *, flops=0, bytes=0, tokens=0, shape=None, more=None, **fields
) -> dict:
    """One benchmark as `interleaved` writes it, of {variant: milliseconds}."""
    floor = next(iter(ms.values()))
    rows = {}
    for variant, time in ms.items():
        rates = {
            "TFLOP/s": flops / time / 1e9,
            "GB/s": bytes / time / 1e6,
            "tokens/s": tokens / time * 1e3,
        }
        rows[variant] = {"ms": time, "ratio": time / floor, "spread": 0.05} | {
            k: v for k, v in rates.items() if v
        }
        rows[variant] |= (more or {}).get(variant, {})
    said = {"flops": flops, "bytes": bytes, "tokens": tokens}
    if shape is not None:
        fields["shape"] = {"name": shape[0], **dict(zip("THIEK", shape[1], strict=True))}
    return {
        "name": name,
        "extra_info": info | fields | {k: v for k, v in said.items() if v} | {"rows": rows},
    }


def layer_of(function: str, name: str, sizes, dtype: str, info: dict, id: str, slow: dict) -> dict:
    T, H, I, E, K = sizes
    passes = 3 if "backward" in function else 1
    flops = passes * 6 * T * K * H * I
    used = min(E, T * K)
    bytes = passes * (2 if dtype == "bf16" else 4) * (3 * used * H * I + 2 * T * H)
    peak, copy = info["ceilings"].values()
    best = max(flops / peak / 1e9, bytes / copy / 1e6)
    ms = {"dense matmul (floor)": best * 1.05} if "tokens" not in function else {}
    ms |= {variant: best * factor for variant, factor in slow.items()}
    about = {"kind": "tokens", "tokens": T} if "tokens" in function else {"kind": "layer"}
    return entry(
        f"{function}[{id}]",
        info,
        ms,
        flops=flops,
        bytes=bytes,
        shape=(name, sizes),
        dtype=dtype,
        **about,
    )


def sweeps(tokens) -> list[dict]:
    """Layers and sweeps over the tokens; at few tokens one of transformers' implementations is
    faster than ours.
    """
    found = []
    for dtype, ceilings in CEILINGS.items():
        there = CPU | {"ceilings": ceilings}
        for name, sizes in SHAPES.items():
            slow = {"moe_runtime": 1.2, "moe_runtime torch": 1.4} | dict(
                zip(PEERS, (2.1, 1.7, 9.0, 1.5), strict=True)
            )
            for function in ("bench_forward", "bench_forward_backward"):
                found.append(layer_of(function, name, sizes, dtype, there, f"{name}-{dtype}", slow))
            for T in tokens:
                at = (T, *sizes[1:])
                id = f"{name}-{T}-{dtype}"
                for function in ("bench_tokens", "bench_tokens_backward")[: 1 + (T >= 256)]:
                    fast = slow | (
                        {"transformers grouped_mm": 1.1, "moe_runtime": 1.3} if T < 16 else {}
                    )
                    found.append(layer_of(function, name, at, dtype, there, id, fast))
    return found


def steps(name: str, dtype: str, info: dict) -> list[dict]:
    """A step's parts, what is kept, XFT's step and the moving kernels."""
    there = info | {"dtype": dtype}
    parts = {
        "whole step": 100.0,
        "embedding, head and loss": 12.0,
        "attention and norms": 20.0,
        "router": 3.0,
        "experts forward": 15.0,
        "experts backward": 33.0,
        "optimizer": 14.0,
    }
    peers = {
        f"{peer}: experts {part}": ms
        for peer in PEERS[:2]
        for part, ms in (("forward", 22.0), ("backward", 61.0))
    }
    saved = {"moe_runtime": 20.25, "transformers eager": 96.5, "transformers grouped_mm": 81.0}
    columns = {variant: {"saved KiB/token": value} for variant, value in saved.items()}
    columns["moe_runtime"]["formula KiB/token"] = 20.5
    xft = {
        "moe_runtime": 9000.0,
        "transformers eager": 11000.0,
        "transformers grouped_mm": 15000.0,
        "official": 13000.0,
    }
    peaks = {variant: {"peak MiB": ms / 3} for variant, ms in xft.items()}
    return [
        entry(
            f"bench_step_breakdown[{name}-{dtype}]",
            there,
            parts | peers,
            kind="breakdown",
            shape=(name, SHAPES["fine"]),
        ),
        entry(
            f"bench_saved_memory[{name}-{dtype}]",
            there,
            saved,
            more=columns,
            kind="memory",
            shape=(name, SHAPES["fine"]),
        ),
        entry(f"bench_xft_step[{name}-{dtype}]", there, xft, tokens=512, more=peaks, kind="step"),
    ]


def cpu_file() -> list[dict]:
    found = sweeps((1, 4, 16, 64, 256, 1024, 4096))
    return found + steps("fine", "fp32", CPU) + steps("fine", "bf16", CPU)


def write(path: Path, found: list[dict]) -> Path:
    path.write_text(json.dumps({"benchmarks": found}))
    return path


@pytest.fixture
def found(tmp_path):
    return read(write(tmp_path / "r.json", cpu_file()))


def of(found, function: str) -> list:
    return [bench for bench in found if bench.function == function]


def titled(figure, *words: str):
    """The one panel whose title holds all the words."""
    (axes,) = [
        axes for axes in figure.axes if all(word in axes.get_title(loc="left") for word in words)
    ]
    return axes


def lines_of(axes) -> dict:
    return {line.get_label(): line for line in axes.lines}


def bars_of(axes) -> dict[str, float]:
    """{implementation: width of its bar}, from the top down."""
    bars = sorted(
        ((bar, c.get_label()) for c in axes.containers for bar in c),
        key=lambda pair: pair[0].get_y(),
    )
    return {name: bar.get_width() for bar, name in bars}


def texts(axes) -> list[str]:
    return [text.get_text().strip() for text in axes.texts]


def test_throughput_has_a_line_per_implementation(found):
    figure = pictures.throughput(found)
    for function, name in (
        ("bench_tokens", "forward"),
        ("bench_tokens_backward", "forward + backward"),
    ):
        for shape, dtype in {(bench.shape, bench.dtype) for bench in of(found, function)}:
            group = [
                bench
                for bench in of(found, function)
                if (bench.shape, bench.dtype) == (shape, dtype)
            ]
            (axes,) = [
                axes
                for axes in figure.axes
                if axes.get_title(loc="left") == f"{shape}, {dtype}: {name}"
            ]
            lines = lines_of(axes)
            assert {label for label in lines if label != "faster"} == {
                "moe_runtime",
                "moe_runtime torch",
                *PEERS,
            }
            for variant in ("moe_runtime", *PEERS):
                T, rates = lines[variant].get_data()
                assert list(T) == [bench.tokens for bench in group]
                assert list(rates) == [bench.rows[variant]["tokens/s"] for bench in group]
            assert axes.get_xscale() == axes.get_yscale() == "log"


def test_memory_is_drawn_with_the_formula(found):
    figure = pictures_bars.memory(found)
    for bench in of(found, "bench_saved_memory"):
        axes = titled(figure, f"{bench.shape}, {bench.dtype}")
        assert bars_of(axes) == {
            "moe_runtime": 20.25,
            "transformers eager": 96.5,
            "transformers grouped_mm": 81.0,
        }
        assert list(lines_of(axes)["published formula"].get_xdata()) == [20.5, 20.5]
        assert texts(axes) == ["20.2", "96.5", "81.0"]


def test_breakdown_stacks_what_was_measured(found):
    figure = pictures_bars.breakdown(found)
    for bench in of(found, "bench_step_breakdown"):
        axes = titled(figure, f"{bench.shape}, {bench.dtype}")
        stacks = {container.get_label(): container.patches[0] for container in axes.containers}
        ours = [
            "experts forward",
            "experts backward",
            "embedding, head and loss",
            "attention and norms",
            "router",
            "optimizer",
        ]
        left = 0.0
        for part in ours:
            bar = stacks[f"moe_runtime: {part}"]
            assert (bar.get_x(), bar.get_width()) == (pytest.approx(left), bench.rows[part]["ms"])
            left += bar.get_width()
        assert stacks["transformers eager: experts backward"].get_width() == 61.0
        assert stacks["transformers eager: router"].get_width() == 3.0
        assert list(lines_of(axes)["whole step"].get_xdata()) == [100.0, 100.0]
        assert {"sum 97, whole 100 ms", "132 ms"} <= set(texts(axes))
        assert len(stacks) == 3 * 6


def test_layer_bars_are_multiples_of_ours_and_a_long_one_is_cut(found):
    figure = pictures.layer(found)
    for bench in of(found, "bench_forward"):
        (axes,) = [
            a
            for a in figure.axes
            if a.get_title(loc="left").startswith(f"{bench.shape}, ")
            and a.get_title(loc="left").endswith(f"{bench.dtype}\nforward")
        ]
        bars = bars_of(axes)
        ours = bench.rows["moe_runtime"]["ms"]
        assert bars.keys() == bench.rows.keys()
        assert bars["moe_runtime"] == 1
        assert list(bars)[-1] == "dense matmul (floor)"
        assert bars.pop("transformers batched_mm") == pictures.FAR < 9 / 1.2
        assert "7.50 \u2192" in texts(axes)
        assert bars == {name: bench.rows[name]["ms"] / ours for name in bars}
        assert axes.get_xlim()[0] == 0


def test_pictures_of_a_tiny_run_say_so(tmp_path):
    tiny = write(tmp_path / "r.json", steps("fine", "fp32", CPU | {"tiny": True})[1:2])
    assert "not a result" in pictures.write_pictures(tiny)[1].read_text()


def test_the_readmes_table_has_the_bars_of_its_picture():
    text = (ROOT / "README.md").read_text()
    path = ROOT / re.search(r"\((bench/results/\S+)-layer\.svg\)", text)[1]
    benches = read(path.with_name(f"{path.name}.json"))
    table = text[text.index("| shape | dtype | pass") :].partition("\n\n")[0]
    head, _, *lines = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()
    ]
    figure = pictures.layer(benches)
    assert len(lines) == len(figure.axes) == 8
    for shape, dtype, which, ours, *cells in lines:
        (axes,) = [
            a
            for a in figure.axes
            if a.get_title(loc="left").startswith(f"{shape}, ")
            and a.get_title(loc="left").endswith(f"{dtype}\n{which}")
        ]
        found = {
            name.removesuffix(" (floor)"): text
            for name, text in zip(bars_of(axes), texts(axes), strict=True)
        }
        assert ours.endswith(" ms")
        assert found.pop("moe_runtime") == "1.00"
        assert {name: cell for name, cell in zip(head[4:], cells, strict=True) if cell != "-"} == {
            name: number.removesuffix(" \u2192") for name, number in found.items()
        }


def drawn(found) -> dict:
    figures = {name: draw(found) for name, draw in pictures.PICTURES.items()}
    return {name: figure for name, figure in figures.items() if figure is not None}


def test_what_was_not_measured_makes_no_picture(tmp_path):
    step = entry(
        "bench_training_step[x-fp32]", CPU, {"moe_runtime": 1.0, "transformers eager": 2.0}
    )
    assert drawn(read(write(tmp_path / "r.json", [step]))) == {}
    assert pictures.write_pictures(tmp_path / "r.json") == []
    assert [p.name for p in tmp_path.iterdir()] == ["r.json"]
    for function, names in (
        ("bench_saved_memory", {"memory"}),
        ("bench_xft_step", {"xft"}),
        ("bench_step_breakdown", {"breakdown"}),
        ("bench_tokens", {"throughput"}),
        ("bench_forward", {"layer"}),
    ):
        only = [bench for bench in cpu_file() if bench["name"].startswith(f"{function}[")]
        assert set(drawn(read(write(tmp_path / "r.json", only)))) == names, function


@pytest.mark.slow
@pytest.mark.parametrize(
    "path", sorted((ROOT / "bench" / "results").glob("*.json")), ids=lambda path: path.stem
)
def test_published_files_can_be_drawn(path, tmp_path):
    written = pictures.write_pictures(path, tmp_path)
    assert {f"{path.stem}-layer.png", f"{path.stem}-layer.svg"} <= {p.name for p in written}


@pytest.mark.slow
def test_labels_do_not_overlap(found):
    """Of each panel the titles, ticks' names and numbers, and of the figure the legend and the line
    below.
    """
    import matplotlib

    with matplotlib.rc_context(pictures_bars.SETTINGS):
        for name, figure in drawn(found).items():
            figure.draw_without_rendering()
            boxes = [
                (axes.get_title(loc="left"), axes._left_title.get_window_extent())
                for axes in figure.axes
            ]
            boxes += [(t.get_text(), t.get_window_extent()) for a in figure.axes for t in a.texts]
            boxes += [(a.get_xlabel(), a.xaxis.label.get_window_extent()) for a in figure.axes]
            for axes in figure.axes:
                low, high = sorted(axes.get_ylim())
                ticks = [t for t in axes.get_yticklabels() if low <= t.get_position()[1] <= high]
                boxes += [(t.get_text(), t.get_window_extent()) for t in ticks]
            boxes += [("legend", legend.get_window_extent()) for legend in figure.legends]
            boxes += [
                ("below", figure._supxlabel.get_window_extent()),
                ("title", figure._suptitle.get_window_extent()),
            ]
            boxes = [(text, box) for text, box in boxes if text and box.width > 1]
            for i, (text, box) in enumerate(boxes):
                whole = figure.bbox
                inside = box.x0 >= 0 and box.x1 <= whole.x1 and box.y0 >= 0 and box.y1 <= whole.y1
                assert inside, (name, text)
                for other, at in boxes[:i]:
                    apart = (
                        box.x1 <= at.x0
                        or at.x1 <= box.x0
                        or box.y1 <= at.y0 + 1
                        or at.y1 <= box.y0 + 1
                    )
                    assert apart, (name, text, other)


def test_files_are_the_same_each_time_and_text_is_text(tmp_path):
    path = write(tmp_path / "2026-11-22-0123abc-cpu.json", steps("fine", "fp32", CPU))
    one, other = (pictures.write_pictures(path, tmp_path / folder) for folder in ("a", "b"))
    names = [
        f"2026-11-22-0123abc-cpu-{name}.{kind}"
        for name in ("memory", "breakdown", "xft")
        for kind in ("png", "svg")
    ]
    assert (
        [p.name for p in one]
        == names
        == sorted((p.name for p in (tmp_path / "a").iterdir()), key=names.index)
    )
    assert [p.read_bytes() for p in one] == [p.read_bytes() for p in other]
    svg = one[1].read_text()
    assert "moe_runtime</text>" in svg
    assert "<dc:date>" not in svg
    assert "Matplotlib v" not in svg
    assert "not a result" not in svg


@pytest.mark.parametrize(
    "text, says",
    [
        ("[]", "must be a JSON object, but got a list"),
        ("no json", "is not valid JSON"),
        ('{"benchmarks": [{"name": "x"}]}', "contains no benchmarks. Pass a file"),
    ],
)
def test_what_is_no_results_file_is_said(tmp_path, text, says):
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=f"x.json.*{says}"):
        pictures.write_pictures(path)
    assert [p.name for p in tmp_path.iterdir()] == ["x.json"]


def test_the_command_prints_what_it_wrote(tmp_path, capsys):
    path = write(tmp_path / "r.json", steps("fine", "fp32", CPU)[1:2])
    pictures.main([str(path), "-o", str(tmp_path / "out")])
    written = [Path(line) for line in capsys.readouterr().out.splitlines()]
    assert [p.name for p in written] == ["r-memory.png", "r-memory.svg"]
    for p in written:
        assert p.stat().st_size > 1000
