"""The workers of a sharded tuning as its session sees them: what they were told to do, and how far they are."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cdmpp.profiler.engine import BuildJob
    from cdmpp.tuner.shard_messages import ShardConfig
    from cdmpp.tuner.shards import Shard

#: A worker is started anew so often in a row without having finished anything in between.
LIVES = 3


@dataclass
class Order:
    """What a worker was told to do.

    ``index`` is the task it searches, None where it only measures ``jobs``; ``room`` the trials kept for it until the
    candidates are known; ``waiting`` what was not measured yet; ``error`` why the first failed that did.
    """

    number: int
    index: int | None
    room: int = 0
    searching: bool = False
    jobs: dict[str, BuildJob] = field(default_factory=dict)
    waiting: set[str] = field(default_factory=set)
    done: int = 0
    dropped: int = 0
    worked: int = 0
    error: str = ""


@dataclass
class Member:
    """A worker as this side sees it.

    ``seen`` are the programs that it knows, by task; ``told`` how many rows of others' learning it has; ``asked`` that it was
    asked to give programs back, ``dry`` that it had none.
    """

    config: ShardConfig
    shard: Shard
    ready: bool = False
    orders: dict[int, Order] = field(default_factory=dict)
    seen: dict[int, set[str]] = field(default_factory=dict)
    told: int = 0
    lives: int = LIVES
    asked: bool = False
    dry: bool = False
    cpu_s: float = 0.0

    @property
    def searching(self) -> bool:
        """Whether it looks for candidates now."""
        return any(order.searching for order in self.orders.values())

    @property
    def waiting(self) -> int:
        """Programs that it has not measured yet."""
        return sum(len(order.waiting) for order in self.orders.values())
