"""All-reduces that were decided once, to be run many times."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from shmemar.dtypes import ReduceOp
    from shmemar.host.interop import Operand
    from shmemar.host.selector import Choice

__all__ = ["AllreducePlan", "PlanShape", "Reduction"]


@dataclass(frozen=True)
class Reduction:
    """An all-reduce whose arguments were checked.

    Attributes:
        out: The caller's array for the result.
        op: Operator.
        source: The input.
        destination: The output.
        on_host: Whether MPI reduces it.
        choice: The kernel; None where MPI reduces, and where there is nothing to reduce.
    """

    out: Any
    op: ReduceOp
    source: Operand
    destination: Operand
    on_host: bool
    choice: Choice | None

    @property
    def call(self) -> dict[str, Any]:
        """What has to be the same on all ranks."""
        return self.source.call(on_host=self.on_host, op=self.op.value)


@dataclass(frozen=True)
class PlanShape:
    """What a plan launches; see `AllreducePlan`."""

    kernel: str
    launches: int
    blocks: int
    pdl: str


class AllreducePlan:
    """An all-reduce of two arrays, ready to run. Made by `Communicator.plan_allreduce`.

    It keeps the arrays alive. Their contents may change between calls, their memory may not: do not
    resize them or give it away.

    Attributes:
        out: The array that a call returns.
        kernel: Kernel and protocol that serve it, such as ``one_shot/ll``; ``mpi`` of host arrays,
            and ``none`` of arrays without elements.
        launches: Kernel launches of a call: 1, or more for messages of gigabytes; 0 for those two.
        blocks: Blocks of the first launch; 0 for those two.
        pdl: When by programmatic dependent launch: ``never``, ``behind a collective``, ``always``.
    """

    def __init__(
        self,
        x: Any,
        out: Any,
        shape: PlanShape,
        run: Callable[[Any], None],
        fast: Callable[[Any], bool] | None,
    ) -> None:
        """Use `Communicator.plan_allreduce`."""
        self.out = out
        self.kernel = shape.kernel
        self.launches = shape.launches
        self.blocks = shape.blocks
        self.pdl = shape.pdl
        self._x = x
        self._run = run
        self._fast = fast

    def __call__(self, *, stream: Any = None) -> Any:
        """Reduce what is in `x` by now.

        Collective: every rank calls its plan of the same all-reduce, in the same order as its other
        calls.

        Of the arrays nothing is asked again. So work on `x` that was enqueued on another stream is
        for the caller to order before `stream`; an eager call waits for the stream that the array
        names.

        Args:
            stream: As of `Communicator.allreduce`; it may be captured into a CUDA graph, at the
                first call, too.

        Returns:
            `out`.

        Raises:
            ArgumentError: `stream`; nothing was launched.
            ClosedError, MismatchError, CollectiveTimeoutError, DeviceError: As of
            `Communicator.allreduce`.
        """
        if self._fast is None or not self._fast(stream):
            self._run(stream)
        return self.out

    def __repr__(self) -> str:
        """The kernel and its launches."""
        return f"<shmemar.AllreducePlan {self.kernel}, launches {self.launches}>"
