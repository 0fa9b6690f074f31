"""Tables of measured latencies as files: written by the tuner, found again at start-up.

A file says for which GPU, how many ranks and how many of them on a GPU it was measured, and by
which version of this library; on another machine, or for another version, it is refused.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from shmemar.errors import ConfigurationError
from shmemar.host.files import kept_file, write_whole
from shmemar.host.selector import Band, Candidate, Table
from shmemar.spec import Kernel, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

__all__ = ["FORMAT", "facts_of", "kept_path", "parse_table", "table_document", "write_table"]

FORMAT = 1
"""Version of the file's form."""

_FACTS = ("shmemar", "backend", "GPU", "ranks", "ranks on a GPU", "MPS")


def facts_of(description: Mapping[str, str]) -> dict[str, str]:
    """What a table depends on, of what `Communicator.describe` says."""
    return {name: description.get(name, "none") for name in _FACTS}


def kept_path(facts: Mapping[str, str]) -> Path:
    """Where the table of such a machine is kept, whatever the version."""
    key = json.dumps([facts[name] for name in _FACTS if name != "shmemar"])
    return kept_file("tables", key)


def table_document(table: Table, facts: Mapping[str, str], **others: Any) -> dict[str, Any]:
    """The table as a JSON document; `others` is kept beside it."""
    return {
        "format": FORMAT,
        "facts": dict(facts),
        **others,
        "bands": [
            {
                "up_to": band.up_to,
                "candidates": [
                    {
                        "kernel": each.kernel.value,
                        "protocol": each.protocol.value,
                        "max_blocks": each.max_blocks,
                        "latency_us": each.latency_us,
                    }
                    for each in band.candidates
                ],
            }
            for band in table.bands
        ],
    }


def write_table(path: Path, document: Mapping[str, Any]) -> None:
    """Write a document, so that another process finds all of it or nothing.

    Raises:
        ConfigurationError: It could not be written.
    """
    try:
        write_whole(path, json.dumps(document, indent=1) + "\n")
    except OSError as error:
        raise ConfigurationError(
            f"the table could not be written to {path}: {error}. Give another --output."
        ) from error


def parse_table(text: str, facts: Mapping[str, str], name: str) -> Table:
    """Read a table that was measured on such a machine.

    Args:
        text: Contents of the file.
        facts: `facts_of` the communicator that wants it.
        name: Name of the file, for messages.

    Raises:
        ConfigurationError: It is no table, or another machine's or version's.
    """
    try:
        document = json.loads(text)
        measured = {"format": document["format"], **document["facts"]}
        wanted = {"format": FORMAT, **facts}
        differing = [
            f"{fact} {measured[fact]}, and here it is {wanted[fact]}"
            for fact in ("format", *_FACTS)
            if measured[fact] != wanted[fact]
        ]
        # Of another format no more than that is known.
        bands = () if differing else tuple(_band(each) for each in document["bands"])
        table = None if differing else Table(f"{name}, measured {document['date']}", bands)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigurationError(
            f"{name} is no table of shmemar's ({type(error).__name__}: {error}). {_AGAIN}"
        ) from error
    if table is None:
        raise ConfigurationError(f"{name} was measured with {'; '.join(differing)}. {_AGAIN}")
    return table


_AGAIN = "Measure again: mpirun -n N python -m shmemar tune; or set SHMEMAR_TABLE=none."


def _band(document: Mapping[str, Any]) -> Band:
    up_to = document["up_to"]
    if up_to is not None and not _is_positive(up_to):
        raise ValueError(f"up_to is {up_to!r}; expected bytes of 1 or more, or null")
    return Band(up_to, tuple(_candidate(each) for each in document["candidates"]))


def _candidate(document: Mapping[str, Any]) -> Candidate:
    kernel, protocol = Kernel(document["kernel"]), Protocol(document["protocol"])
    if not kernel.reduces or protocol not in kernel.protocols:
        raise ValueError(f"{kernel.value}/{protocol.value} is no all-reduce kernel")
    max_blocks, latency_us = document["max_blocks"], document["latency_us"]
    if max_blocks is not None and not _is_positive(max_blocks):
        raise ValueError(f"max_blocks is {max_blocks!r}; expected 1 or more, or null")
    return Candidate(
        kernel, protocol, max_blocks, None if latency_us is None else float(latency_us)
    )


def _is_positive(number: Any) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and number >= 1
