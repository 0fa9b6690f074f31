"""The SHMEMAR_* variables."""

from __future__ import annotations

import logging
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmemar.config import DEFAULT_HEAP_NBYTES, Config, environment
from shmemar.errors import ConfigurationError
from shmemar.layout import DEFAULT_SCRATCH_NBYTES
from shmemar.spec import Backend, Kernel, Protocol

VARIABLES = tuple(f"SHMEMAR_{field.name.upper()}" for field in fields(Config))

REDUCING = [kernel for kernel in Kernel if kernel.reduces]
GOOD = [
    *(("SHMEMAR_BACKEND", member.value, member) for member in Backend),
    *(("SHMEMAR_KERNEL", member.value, member) for member in REDUCING),
    *(("SHMEMAR_PROTOCOL", member.value, member) for member in Protocol),
    ("SHMEMAR_TIMEOUT_S", "0", 0.0),
    ("SHMEMAR_TIMEOUT_S", "2.5", 2.5),
    ("SHMEMAR_TIMEOUT_S", "31622400", 31622400.0),
    ("SHMEMAR_CHECK", "0", False),
    ("SHMEMAR_CHECK", "1", True),
    ("SHMEMAR_TABLE", "none", "none"),
    ("SHMEMAR_TABLE", "tables/here.json", "tables/here.json"),
    ("SHMEMAR_PDL", "auto", None),
    ("SHMEMAR_PDL", "1", True),
    ("SHMEMAR_PDL", "0", False),
    ("SHMEMAR_MULTICAST", "0", False),
    ("SHMEMAR_MULTICAST", "1", True),
    ("SHMEMAR_MAX_BLOCKS", "1", 1),
    ("SHMEMAR_SCRATCH_NBYTES", "65536", 65536),
    ("SHMEMAR_TWO_SHOT_SCRATCH_NBYTES", "65536", 65536),
    ("SHMEMAR_HEAP_NBYTES", "1048576", 1 << 20),
]

SWITCH, WHOLE, SECONDS = "0 or 1", "a whole number of 1 or more", "seconds, 0 or more"

BAD = [
    ("SHMEMAR_BACKEND", "cuda", "auto, nvshmem, emulated"),
    ("SHMEMAR_BACKEND", "AUTO", "auto, nvshmem, emulated"),
    ("SHMEMAR_KERNEL", "ring", ", ".join(member.value for member in REDUCING)),
    ("SHMEMAR_KERNEL", "broadcast", ", ".join(member.value for member in REDUCING)),
    ("SHMEMAR_PROTOCOL", "simple", ", ".join(member.value for member in Protocol)),
    ("SHMEMAR_TIMEOUT_S", "-1", SECONDS),
    ("SHMEMAR_TIMEOUT_S", "nan", SECONDS),
    ("SHMEMAR_TIMEOUT_S", "inf", SECONDS),
    ("SHMEMAR_TIMEOUT_S", "31622401", SECONDS),
    ("SHMEMAR_TIMEOUT_S", "1 min", SECONDS),
    ("SHMEMAR_CHECK", "yes", SWITCH),
    ("SHMEMAR_PDL", "yes", "auto, 0 or 1"),
    ("SHMEMAR_MULTICAST", "2", SWITCH),
    ("SHMEMAR_MAX_BLOCKS", "0", WHOLE),
    ("SHMEMAR_MAX_BLOCKS", "-4", WHOLE),
    ("SHMEMAR_MAX_BLOCKS", "1.5", WHOLE),
    ("SHMEMAR_SCRATCH_NBYTES", "0", WHOLE),
    ("SHMEMAR_TWO_SHOT_SCRATCH_NBYTES", "0", WHOLE),
    ("SHMEMAR_SCRATCH_NBYTES", "4MiB", WHOLE),
    ("SHMEMAR_TWO_SHOT_SCRATCH_NBYTES", "4MiB", WHOLE),
    ("SHMEMAR_SCRATCH_NBYTES", "\N{SUPERSCRIPT TWO}", WHOLE),
    ("SHMEMAR_TWO_SHOT_SCRATCH_NBYTES", "\N{SUPERSCRIPT TWO}", WHOLE),
    ("SHMEMAR_HEAP_NBYTES", "9" * 5000, WHOLE),
]

configs = st.builds(
    Config,
    backend=st.sampled_from(Backend),
    kernel=st.none() | st.sampled_from(REDUCING),
    protocol=st.none() | st.sampled_from(Protocol),
    timeout_s=st.floats(0, 366 * 86400),
    check=st.booleans(),
    multicast=st.booleans(),
    pdl=st.none() | st.booleans(),
    max_blocks=st.none() | st.integers(1, 1 << 31),
    scratch_nbytes=st.integers(1, 1 << 40),
    heap_nbytes=st.integers(1, 1 << 40),
    table=st.sampled_from([None, "none", "table.json"]),
)


def field_of(variable: str) -> str:
    return variable.removeprefix("SHMEMAR_").lower()


def test_an_empty_environment_gives_the_defaults() -> None:
    assert Config.from_environment({}) == Config(
        backend=Backend.AUTO,
        kernel=None,
        protocol=None,
        timeout_s=60.0,
        check=False,
        multicast=False,
        pdl=None,
        table=None,
        max_blocks=None,
        scratch_nbytes=DEFAULT_SCRATCH_NBYTES,
        heap_nbytes=DEFAULT_HEAP_NBYTES,
    )


@pytest.mark.parametrize("cases", [GOOD, BAD], ids=["good", "bad"])
def test_the_cases_here_cover_every_variable(cases: list[tuple[str, str, Any]]) -> None:
    any_text_is_good = {"SHMEMAR_TABLE"} if cases is BAD else set[str]()
    assert {case[0] for case in cases} == set(VARIABLES) - any_text_is_good


@pytest.mark.parametrize(("variable", "text", "value"), GOOD)
@pytest.mark.parametrize("pad", ["", " "])
def test_a_variable_sets_its_field_and_no_other(
    variable: str, text: str, value: Any, pad: str
) -> None:
    config = Config.from_environment({variable: pad + text + pad})
    changed = getattr(config, field_of(variable))
    assert changed == value
    assert type(changed) is type(value)
    assert config == Config(**{field_of(variable): value})


@pytest.mark.parametrize("variable", VARIABLES)
@pytest.mark.parametrize("blank", ["", "  "])
def test_a_blank_variable_gives_the_default(variable: str, blank: str) -> None:
    assert Config.from_environment({variable: blank}) == Config()


@pytest.mark.parametrize(("variable", "text", "expected"), BAD)
def test_a_bad_value_is_refused_by_name_value_and_what_was_expected(
    variable: str, text: str, expected: str
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        Config.from_environment({variable: text})
    message = str(caught.value)
    assert message.startswith(f"{variable} is {text!r}; expected ")
    assert expected in message


def test_an_unknown_variable_is_warned_of_with_the_known_ones(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, "shmemar"):
        assert Config.from_environment({"SHMEMAR_KERNAL": "ring"}) == Config()
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "SHMEMAR_KERNAL" in record.getMessage()
    assert ", ".join(VARIABLES) in record.getMessage()


def test_known_and_foreign_variables_are_not_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "shmemar"):
        Config.from_environment({"SHMEMAR_CHECK": "1", "PATH": "/bin", "shmemar_check": "2"})
    assert caplog.records == []


def test_the_process_environment_is_read_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHMEMAR_MAX_BLOCKS", "7")
    assert Config.from_environment().max_blocks == 7


def test_a_variable_of_another_program_may_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_LAUNCHER_RANK", "3")
    assert environment("SOME_LAUNCHER_RANK") == "3"
    monkeypatch.delenv("SOME_LAUNCHER_RANK")
    assert environment("SOME_LAUNCHER_RANK") is None


@given(configs)
def test_a_configuration_reads_back_from_its_variables(config: Config) -> None:
    variables = config.as_variables()
    assert tuple(variables) == VARIABLES
    assert Config.from_environment(variables) == config
