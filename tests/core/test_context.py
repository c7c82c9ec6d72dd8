"""Ambient settings: nesting, restoration, and separation between threads."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from tessera.core import context, devices, environment
from tessera.core.context import Settings, enter, leave, replaced, settings
from tessera.core.errors import UsageError
from tessera.core.mesh import Mesh
from tessera.core.options import PLAIN, ProgramOptions


def test_the_defaults() -> None:
    assert settings() == Settings(
        mesh=None, autocast=None, strict=False, no_grad=False, program=PLAIN
    )


def test_changes_nest_and_come_back() -> None:
    mesh = Mesh.parse("dp=2")
    before = settings()
    with replaced(mesh=mesh, strict=True) as outer:
        assert outer is settings()
        with replaced(autocast="bf16", strict=False):
            assert settings() == Settings(mesh, "bf16", False, False)
        assert settings() is outer
    assert settings() is before


def test_an_exception_closes_its_scopes_even_those_left_open() -> None:
    before = settings()
    with pytest.raises(KeyError), replaced(strict=True):
        enter(autocast="bf16")
        raise KeyError
    assert settings() is before


def test_one_context_manager_is_entered_twice() -> None:
    mesh = Mesh.parse("dp=2")
    with mesh, replaced(mesh=None), mesh:
        assert settings().mesh is mesh
    assert settings().mesh is None


def test_leave_without_enter_is_a_bug_of_ours() -> None:
    with pytest.raises(AssertionError, match="without enter"):
        leave()


def test_settings_are_a_value() -> None:
    one = Settings(mesh=Mesh.parse("dp=2"), autocast="bf16")
    two = Settings(mesh=Mesh.parse("dp=2"), autocast="bf16")
    assert one == two
    assert hash(one) == hash(two)
    assert one != Settings(mesh=Mesh.parse("dp=4"), autocast="bf16")


def test_what_programs_are_recorded_under_changes_field_by_field() -> None:
    before = settings().program
    with replaced(determinism="mesh_invariant", strict=True), replaced(executor="stepped"):
        assert settings().strict
        assert settings().program == ProgramOptions("mesh_invariant", executor="stepped")
        with replaced(program=before, order="ring"):
            assert settings().program == ProgramOptions(order="ring")
    assert settings().program is before


def test_an_unknown_field_is_refused() -> None:
    with pytest.raises(TypeError, match="colour"), replaced(colour="red"):  # type: ignore[call-arg]
        pass


def test_a_thread_starts_from_the_defaults() -> None:
    seen: list[bool] = []
    with replaced(strict=True):
        thread = threading.Thread(target=lambda: seen.append(settings().strict))
        thread.start()
        thread.join()
    assert seen == [False]


@pytest.fixture
def fresh_root() -> Iterator[None]:
    token = context._scope.set(None)
    context._root.cache_clear()
    yield
    context._scope.reset(token)
    context._root.cache_clear()


@pytest.mark.usefixtures("fresh_root")
def test_the_switch_is_read_once_at_first_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(environment.COMM_TRACE, "1")
    assert settings().program.comm_trace
    monkeypatch.setenv(environment.COMM_TRACE, "0")
    assert settings().program.comm_trace
    with replaced(comm_trace=False):
        assert not settings().program.comm_trace


@pytest.mark.parametrize(
    ("text", "on"),
    [
        *((word, True) for word in ("1", "TRUE", " on ", "yes")),
        *((word, False) for word in ("", "0", "false", "No", "off")),
    ],
)
def test_words_of_a_switch(text: str, on: bool) -> None:
    assert environment.is_on("TESSERA_COMM_TRACE", {"TESSERA_COMM_TRACE": text}) is on


def test_a_word_that_is_neither() -> None:
    with pytest.raises(UsageError) as caught:
        environment.is_on("TESSERA_COMM_TRACE", {"TESSERA_COMM_TRACE": "loud"})
    text = str(caught.value).splitlines()
    assert text[0] == "TESSERA_COMM_TRACE: 'loud' is neither on nor off"
    assert text[-1] == "  fix : set it to 1 or 0"


def test_the_last_registered_provider_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_providers", [])
    devices.set_device_provider(lambda: 2, lambda: 1)
    devices.set_device_provider(lambda: 8, lambda: 1)
    assert devices.device_count() == 8
