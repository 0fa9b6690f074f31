"""The tensor-parallel decode loop of a Llama-shaped model: latency from token to token.

``mpirun -n N python -m benchmarks.apps.decode --layers 4 --backend shmemar,nccl,mpi --check``
generates the same tokens over each backend in turn, in one process set. Each layer has two
all-reduces of batch x hidden numbers. Weights are random and fixed, and do not depend on the number
of ranks. Embedding and lm_head are replicated, so the vocabulary is small by default.

On GPUs, with torch, a step is one CUDA graph; ``mpi`` can't be captured and is called step by step.
Generation begins with one token a sequence at position 0; attention always runs over the whole
context, so that a step takes as long at any position. Time in communication is found by running the
same graph with ``self``, whose collectives do nothing, and taking the difference; its tokens are
thrown away. Of ``mpi`` on GPUs that says nothing, as launches would count as communication: its
share is not given (``-``, in JSON null). Without GPUs numpy computes, for tests.

Only shmemar promises all ranks the same bits, and tokens that differ are an error of it. Of another
backend rank 0's are taken, and the result says that they were not alike.

With ``--shared-weights`` one layer's weights serve all layers, so that many layers run in little
memory. When they fit the GPU's L2 cache (50 MB of an H200), they are read from there and not from
memory, which makes the rest of a step shorter than that of a real model, and the share of
communication larger. Those of 8192 x 28672 over 8 ranks, 210 MB, don't fit.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.apps.agreement import together
from benchmarks.apps.decode_ops import ops_for
from benchmarks.apps.decode_runs import Check, compare, generate, reference
from benchmarks.apps.decode_shape import DTYPES, WORKING_NBYTES, ModelShape
from benchmarks.apps.decode_weights import make_weights
from benchmarks.apps.reporting import (
    Progress,
    add_common_options,
    machine_facts,
    on_first,
    opened,
    print_facts,
    require_memory,
    require_summing,
    require_writable,
    run_program,
    side_by_side,
    write_json,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from benchmarks.apps.communicators import Communicator
    from benchmarks.apps.decode_runs import Generation

__all__ = ["Result", "decode", "main", "summarise", "without_communication"]

ADVICE = "Take fewer layers, a smaller vocabulary, --shared-weights, or more GPUs."


@dataclass(frozen=True)
class Result:
    """What one backend did.

    Attributes:
        generation: Its tokens and times.
        alone_ms: Median from token to token without communication; None of one rank, or where it
            was not measured in the same way: one captured, and the other not.
        same: Tokens that are those of the first backend.
        check: The comparison with float32, where that was asked for.
    """

    generation: Generation
    alone_ms: float | None
    same: int
    check: Check | None

    @property
    def share(self) -> float | None:
        """Part of the time that is communication; None where it was not measured."""
        return None if self.alone_ms is None else 1 - self.alone_ms / self.generation.median_ms

    @property
    def is_right(self) -> bool:
        """True unless the check found something else."""
        return self.check is None or self.check.is_right


def decode(
    mpi_comm: Any,
    communicators: Mapping[str, Communicator],
    shape: ModelShape,
    tokens: int,
    *,
    seed: int = 1,
    check: bool = False,
    progress: Any = lambda _: None,
) -> dict[str, Result]:
    """Generate over each communicator in turn. Collective; alike on all ranks.

    Args:
        mpi_comm: Of the same ranks.
        communicators: By name. ``self``, of more than one rank, is for timing, and has no result.
        shape: The model.
        tokens: How many are made of each sequence.
        seed: Of the weights.
        check: Whether to compare with a float32 run on rank 0.
        progress: Told where it is.

    Raises:
        ArgumentError: The model does not divide over the ranks, or does not fit into memory.
        BackendUnavailableError: torch or ml_dtypes is missing, and needed.
        MismatchError: Ranks made different tokens over shmemar.
        ShmemarError: The float32 run failed on rank 0; on every rank.
    """
    rank, size = mpi_comm.rank, mpi_comm.size
    shape.require_split(size)
    shape.require_tokens(tokens)
    real = {name: each for name, each in communicators.items() if name != "self" or size == 1}
    xp = next(iter(communicators.values())).xp
    ops = together(next(iter(communicators.values())), lambda: ops_for(xp, shape.dtype))
    extra = shape.reference_nbytes() if check and rank == 0 else 0
    working = 0 if xp is np else WORKING_NBYTES
    require_memory(mpi_comm, xp, shape.nbytes(size) + extra + working, ADVICE)
    weights = make_weights(ops, shape, rank, size, seed, progress)
    made = {}
    for name, comm in real.items():
        progress(f"tokens over {name}")
        made[name] = generate(mpi_comm, ops, shape, weights, comm, tokens)
    alone = None
    if size > 1 and "self" in communicators:
        comm = communicators["self"]
        alone = generate(mpi_comm, ops, shape, weights, comm, tokens, is_real=False)
    checks: dict[str, Check] = {}
    if check:

        def run_checks() -> dict[str, Check]:
            progress("the float32 run on one rank")
            whole = weights if size == 1 else make_weights(ops, shape, 0, 1, seed, progress)
            wide = ops_for(xp, "float32")
            return {
                name: compare(shape, each.tokens, reference(wide, xp, shape, whole, each.tokens))
                for name, each in made.items()
            }

        checks = on_first(mpi_comm, run_checks)
    first = next(iter(made.values()))
    return {
        name: Result(
            each,
            without_communication(each, alone),
            int((each.tokens == first.tokens).sum()),
            checks.get(name),
        )
        for name, each in made.items()
    }


def without_communication(made: Generation, alone: Generation | None) -> float | None:
    """Median milliseconds of `alone`; None unless both were captured, or neither."""
    if alone is None or alone.is_captured != made.is_captured:
        return None
    return alone.median_ms


def summarise(result: Result) -> dict[str, Any]:
    """The result for the table, by quantity."""
    made, check = result.generation, result.check
    spread = np.percentile(made.milliseconds, [20, 80])
    return {
        "captured in a graph": "yes" if made.is_captured else "no",
        "ms from token to token": made.median_ms,
        "  20th percentile": float(spread[0]),
        "  80th percentile": float(spread[1]),
        "ms without communication": result.alone_ms,
        "share of communication": result.share,
        "all-reduces a token": made.allreduces,
        "  host in calls, all of them (s)": made.call_s,
        "  bytes of one": made.nbytes,
        "tokens": made.tokens.size,
        "  same on all ranks": "yes" if made.alike else "NO",
        "  as of the first backend": result.same,
        "  decided in float32": check.decided if check else None,
        "  decided and wrong": check.wrong if check else None,
        "  undecided and different": check.different - check.wrong if check else None,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return 0, 1 when tokens are wrong, or 2."""
    default = ModelShape()
    parser = argparse.ArgumentParser(prog="python -m benchmarks.apps.decode", description=__doc__)
    for field in fields(ModelShape):
        value, option = getattr(default, field.name), "--" + field.name.replace("_", "-")
        if isinstance(value, bool):
            parser.add_argument(option, action="store_true", help="of one layer, in all")
        else:
            choices = list(DTYPES) if field.name == "dtype" else None
            parser.add_argument(
                option, default=value, type=type(value), choices=choices, help="%(default)s"
            )
    parser.add_argument("--tokens", default=32, type=int, help="%(default)s of each sequence")
    parser.add_argument("--seed", default=1, type=int, help="of the weights")
    parser.add_argument(
        "--check", action="store_true", help="compare with a float32 run on rank 0 alone"
    )
    add_common_options(parser)
    arguments = parser.parse_args(argv)
    return run_program(lambda world: _run(world, arguments))


def _run(world: Any, arguments: argparse.Namespace) -> int:
    shape = ModelShape(**{each.name: getattr(arguments, each.name) for each in fields(ModelShape)})
    shape.require_split(world.size)
    shape.require_tokens(arguments.tokens)
    names = arguments.backend.split(",")
    require_summing(names, world.size)
    require_writable(world, arguments.json)
    others = ["self"] if world.size > 1 else []
    with opened(world, [*names, *others], arguments.run_on) as communicators:
        facts = machine_facts(world, communicators[names[0]].xp)
        if world.rank == 0:
            print_facts(facts)
            print(f"# {shape}", flush=True)
        results = decode(
            world,
            communicators,
            shape,
            arguments.tokens,
            seed=arguments.seed,
            check=arguments.check,
            progress=Progress(world.rank),
        )
    is_right = all(each.is_right for each in results.values())
    if world.rank == 0:
        print(side_by_side({name: summarise(each) for name, each in results.items()}))
        if world.size > 1 and any(each.alone_ms is None for each in results.values()):
            print("# no share of communication (-): called step by step, where self is in a graph")
        if arguments.check:
            print("# all decided tokens right" if is_right else "# WRONG tokens, or none decided")
        sys.stdout.flush()
        if arguments.json:
            document = {
                **facts,
                "shape": asdict(shape),
                "weight_nbytes": shape.weight_nbytes(world.size),
                "is_right": is_right,
                "backends": {name: _document(each) for name, each in results.items()},
            }
            write_json(arguments.json, "decode", document)
    return 0 if is_right else 1


def _document(result: Result) -> dict[str, Any]:
    return {
        **asdict(result),
        "median_ms": result.generation.median_ms,
        "share": result.share,
    }


if __name__ == "__main__":
    sys.exit(main())
