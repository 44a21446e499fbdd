"""What the monitor leaves behind: a CSV file, a plot, torch's history of allocations."""

import csv
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_mcore_lora import MemoryMonitor, estimate_memory
from lightning_mcore_lora.cli import main
from lightning_mcore_lora.memory.history import History
from lightning_mcore_lora.memory.snapshots import Snapshots
from lightning_mcore_lora.parallel import ParallelSizes
from tests.unit.test_memory_estimate import PUBLISHED

VALUES = {"memory/peak_rss_gib": 3.0, "memory/worst_rank": 1.0}
COLUMNS = ["step", "memory/peak_rss_gib", "memory/worst_rank", "rank0", "rank1"]


def _log(path: Path, *steps: int) -> None:
    history = History(path, None)
    history.begin()
    for step in steps:
        history.add(step, VALUES, [2.0, 3.0])


def _steps(path: Path) -> list[str]:
    with path.open() as file:
        return [row["step"] for row in csv.DictReader(file)]


def test_csv_goes_on_after_a_resume(tmp_path: Path) -> None:
    path = tmp_path / "runs/memory.csv"
    for steps in ((2, 4), (6,)):
        _log(path, *steps)
    with path.open() as file:
        rows = list(csv.reader(file))
    assert rows == [COLUMNS, *([str(step), "3.0", "1.0", "2.0", "3.0"] for step in (2, 4, 6))]


def test_csv_of_another_run_is_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "memory.csv"
    for _ in range(2):
        assert not caplog.text
        _log(path, 2, 4)
    assert "is of another run, layout or program" in caplog.text
    assert _steps(path) == _steps(tmp_path / "memory-1.csv") == ["2", "4"]
    path.write_bytes(b"\xff\x00" * 200_000)
    _log(path, 6)
    assert _steps(tmp_path / "memory-1.csv") == ["2", "4", "6"]


def test_nothing_logged_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    history = History(tmp_path / "memory.csv", None)
    history.begin()
    history.draw("memory/peak_rss_gib", lambda: None)
    assert "No step was logged" in caplog.text
    caplog.clear()
    history.add(1, VALUES, [2.0, 3.0])
    history.draw("memory/peak_rss_gib", lambda: None)
    assert not caplog.text


def test_a_monitor_checks_what_it_is_given(tmp_path: Path) -> None:
    for folder in (tmp_path, ""):
        with pytest.raises(ValueError, match=r"csv='.*' is a folder: name a file"):
            MemoryMonitor(csv=folder)
    with pytest.raises(TypeError, match="estimate=5 must be what estimate_memory returns"):
        MemoryMonitor(estimate=5)  # type: ignore[arg-type]


def test_csv_of_another_layout_is_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "memory.csv"
    path.write_text("loss,epoch\n1,2\n")
    for step in (2, 4):  # the second goes on in the file of the first
        _log(path, step)
        assert "memory-1.csv is written" in caplog.text
    assert path.read_text() == "loss,epoch\n1,2\n"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["memory-1.csv", "memory.csv"]
    assert _steps(tmp_path / "memory-1.csv") == ["2", "4"]


@pytest.mark.parametrize("suffix", [".png", ".html"])
def test_plot(tmp_path: Path, suffix: str) -> None:
    pytest.importorskip("matplotlib")
    estimate = estimate_memory(PUBLISHED["Qwen3-8B"], ParallelSizes(2, 2, True, 1, 2), sequence_length=4096)
    path = tmp_path / f"runs/memory{suffix}"
    history = History(None, path)
    history.draw("memory/peak_rss_gib", lambda: estimate)
    assert not path.exists(), "nothing was logged"
    for step in (2, 4):
        history.add(step, VALUES, [2.0, 3.0])
    history.draw("memory/peak_rss_gib", lambda: estimate)
    content = path.read_bytes()
    if suffix == ".png":
        assert content.startswith(b"\x89PNG")
    else:
        assert b"<svg" in content
        for text in (b"rank 1", b"estimate, most loaded rank", b"optimizer step"):
            assert b"<!-- " + text + b" -->" in content, "matplotlib names each text so"


def test_estimate_is_plotted(tmp_path: Path, tiny_llama: Path, capsys: pytest.CaptureFixture) -> None:
    pytest.importorskip("matplotlib")
    plot = tmp_path / "estimate.html"
    arguments = ["estimate", "--model", str(tiny_llama), "--sequence_length", "16"]
    main([*arguments, "--plot", str(plot)])
    assert "base weights" in plot.read_text()
    assert f"Wrote {plot}" in capsys.readouterr().out
    with pytest.raises(SystemExit, match=r"error: plot='x.jpeg' must end with one of"):
        main([*arguments, "--plot", "x.jpeg"])


def test_plots_are_checked_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"plot='memory' must end with one of \('.png', '.html'"):
        MemoryMonitor(plot="memory")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'lightning-mcore-lora\[plot\]'"):
        MemoryMonitor(plot="memory.png")


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """torch.cuda's history stood in for; what was asked of it."""
    calls: list[Any] = []
    memory = torch.cuda.memory
    monkeypatch.setattr(memory, "_record_memory_history", lambda **kwargs: calls.append(kwargs.get("enabled", "on")))
    monkeypatch.setattr(memory, "_dump_snapshot", lambda path: calls.append(Path(path).name))
    return calls


def test_snapshots_at_new_peaks_and_out_of_memory(recorded: list[Any], tmp_path: Path) -> None:
    snapshots = Snapshots(tmp_path / "history", 1, torch.device("cuda", 0))
    for peak in (10.0, 9.0, 10.05, 11.0):  # the third is higher by less than 1 %
        snapshots.at(peak)
    snapshots.out_of_memory()
    snapshots.close()
    snapshots.close()
    assert recorded == ["on", "peak-rank1.pickle", "peak-rank1.pickle", "oom-rank1.pickle", None]
    (tmp_path / "history/peak-rank1.pickle").touch()
    Snapshots(tmp_path / "history", 1, torch.device("cuda", 0)).out_of_memory()  # of the next run
    assert recorded[-1] == "oom-rank1-1.pickle"


def test_no_snapshots_on_the_cpu(recorded: list[Any], tmp_path: Path) -> None:
    snapshots = Snapshots(tmp_path / "history", 0, torch.device("cpu"))
    snapshots.at(1.0)
    snapshots.out_of_memory()
    snapshots.close()
    assert recorded == []
    assert not list(tmp_path.iterdir())
