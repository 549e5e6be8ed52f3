"""Which of cupy and torch moves pages, on modules that stand for either."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tierkv.device.cuda import choose_mover
from tierkv.device.kernel_source import CHUNK_BYTES, THREADS
from tierkv.device.layouts import PagedLayout
from tierkv.errors import DeviceError

LAYOUT = PagedLayout.of([np.zeros((4, 100), np.uint8)])


class CompileError(Exception):
    pass


class FakeCupy(ModuleType):
    """As much of it as is used. `problem` is what compiling raises, `calls` what it was asked for."""

    def __init__(self, *, problem: Exception | None = None, is_old: bool = False) -> None:
        super().__init__("cupy")
        self.calls: list[Any] = []
        self.problem = problem
        fake = self

        class RawKernel:
            def __init__(self, source: str, name: str, options: Sequence[str]) -> None:
                assert f"void {name}(" in source

            def compile(self) -> None:
                if fake.problem is not None:
                    raise fake.problem
                fake.calls.append("compile")

            def __call__(self, grid: tuple[int, ...], block: tuple[int, ...], arguments: tuple[Any, ...]) -> None:
                if fake.problem is not None:
                    raise fake.problem
                fake.calls.append((grid, block, arguments))

        class RawModule:
            def __init__(self, code: str, options: Sequence[str]) -> None:
                self._code = code

            def get_function(self, name: str) -> RawKernel:
                return RawKernel(self._code, name, ())

        class Stream:
            if not is_old:

                @staticmethod
                def from_external(stream: Any) -> Any:
                    return fake.inside("stream", stream.__cuda_stream__())

        self.RawKernel, self.RawModule = RawKernel, RawModule
        self.cuda = SimpleNamespace(
            Device=lambda index: self.inside("device", index),
            Stream=Stream,
            ExternalStream=lambda handle, index: self.inside("stream", (0, handle)),
            compiler=SimpleNamespace(CompileException=CompileError),
        )

    @contextmanager
    def inside(self, what: str, value: Any) -> Iterator[None]:
        self.calls.append((what, value))
        yield


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Movers are imported anew, with what stands in sys.modules for cupy and torch, and forgotten afterwards."""
    names = ("tierkv.device.cupy_mover", "tierkv.device.torch_mover", "tierkv.device.cupy_codec")
    package = importlib.import_module("tierkv.device")
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
        monkeypatch.delattr(package, name.rpartition(".")[2], raising=False)
    yield monkeypatch
    for name in names:
        sys.modules.pop(name, None)
        vars(package).pop(name.rpartition(".")[2], None)


@pytest.mark.parametrize("is_old", [False, True])
def test_cupy_is_given_the_table_on_our_stream_and_gpu(modules: pytest.MonkeyPatch, is_old: bool) -> None:
    cupy = FakeCupy(is_old=is_old)
    modules.setitem(sys.modules, "cupy", cupy)
    tables: list[np.ndarray] = []

    def on_device(stream: int, table: np.ndarray) -> int:
        tables.append(table)
        return 0x7000

    move = choose_mover(3, on_device)
    assert cupy.calls == [("device", 3), "compile"]
    cupy.calls.clear()
    kept = move(0x55, LAYOUT, [2, 1], (0x10000, 2**20), [0, 4096], to_slots=True)
    assert kept[0] is tables[0]  # what the copy to the device reads
    device, stream, (grid, block, arguments) = cupy.calls
    assert (device, stream) == (("device", 3), ("stream", (0, 0x55)))
    assert (grid, block) == ((2,), (THREADS,))
    assert arguments == (0x7000, 1, 0x7000 + 24, 0x7000 + 40, 1, CHUNK_BYTES, 1)
    sizes = [argument.itemsize for argument in arguments]
    assert sizes == [8, 4, 8, 8, 4, 4, 4]  # of the kernel's parameters
    assert tables[0][24:].view("<u8").tolist() == [2, 1, 0x10000, 0x11000]


@pytest.mark.parametrize("is_old", [False, True])
def test_the_codec_is_launched_on_our_stream_and_gpu(modules: pytest.MonkeyPatch, is_old: bool) -> None:
    cupy = FakeCupy(is_old=is_old)
    modules.setitem(sys.modules, "cupy", cupy)
    codec = importlib.import_module("tierkv.device.cupy_codec")
    table = SimpleNamespace(num_runs=3, pages_begin=192, slots_begin=208, num_thread_blocks=6)
    codec.launch(3, 0x55, "bfloat16", table, 0x7000, 0x9000, to_slots=True)
    device, stream, (grid, block, arguments) = cupy.calls
    assert (device, stream) == (("device", 3), ("stream", (0, 0x55)))
    assert (grid, block) == ((6,), (THREADS,))
    assert arguments == (0x7000, 3, 0x7000 + 192, 0x7000 + 208, 0x9000)
    assert [argument.itemsize for argument in arguments] == [8, 4, 8, 8, 8]
    cupy.problem = CompileError("no such architecture")
    with pytest.raises(DeviceError, match="no such architecture"):
        codec.launch(3, 0x55, "bfloat16", table, 0x7000, 0x9000, to_slots=False)


def test_a_launch_that_fails_is_named(modules: pytest.MonkeyPatch) -> None:
    cupy = FakeCupy()
    modules.setitem(sys.modules, "cupy", cupy)
    move = choose_mover(0, lambda stream, table: 0)
    cupy.problem = RuntimeError("CUDA_ERROR_INVALID_VALUE: invalid argument")
    with pytest.raises(DeviceError, match="INVALID_VALUE"):
        move(1, LAYOUT, [0], (0, 2**20), [0], to_slots=False)


@pytest.mark.parametrize(
    "problem", [None, CompileError("no such architecture"), RuntimeError("failed to load libnvrtc")]
)
def test_torch_is_taken_where_cupy_is_not_there_or_does_not_compile(
    modules: pytest.MonkeyPatch, problem: Exception | None, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("torch")
    modules.setitem(sys.modules, "cupy", None if problem is None else FakeCupy(problem=problem))
    move = choose_mover(0, lambda stream, table: 0)
    assert move.__name__ == "by_torch"  # type: ignore[attr-defined]
    assert "moved by torch" in caplog.text
    assert (str(problem) if problem else "cupy") in caplog.text


def test_without_either_it_is_said_what_is_missing(modules: pytest.MonkeyPatch) -> None:
    modules.setitem(sys.modules, "cupy", None)
    modules.setitem(sys.modules, "torch", None)
    with pytest.raises(DeviceError, match="neither is here"):
        choose_mover(0, lambda stream, table: 0)
