"""A schedule's groups, while some of them are put into one kernel."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from ...ir.graph import GroupBuffers, KernelGroup, Schedule, buffers_of, is_host_call
from ...plan.model import STATUS
from ...symbolic.sizes import typical
from ...target import Target
from .order import topological_order


class Clusters:
    """A schedule's groups while some are joined: each cluster becomes one kernel.

    Attributes:
        of: the cluster of each group; clusters are named by the number of their first member.
        members: the groups of each cluster.
        buffers: what each group reads and stores.
        writer: the group that stores each buffer.
        readers: the groups that read each buffer and do not compute it.
    """

    def __init__(self, schedule: Schedule, target: Target) -> None:
        self.schedule = schedule
        self.target = target
        self.of = list(range(len(schedule.groups)))
        self.members = {k: [k] for k in self.of}
        self.buffers = [buffers_of(group) for group in schedule.groups]
        self.writer = {name: k for k, found in enumerate(self.buffers) for name in found.stored}
        self._limit = target.max_storage_buffers
        self._windows_of: dict[str, int] = {STATUS: 1}
        self._memory = {k: self._bound(found) for k, found in enumerate(self.buffers)}
        self._needs = {
            k: {self.writer[name] for name in found.reads if name in self.writer}
            for k, found in enumerate(self.buffers)
        }
        self.readers: dict[str | None, set[int]] = defaultdict(set)
        for k, found in enumerate(self.buffers):
            for name in found.reads:
                self.readers[name].add(k)
        for k, found in enumerate(self.buffers):
            for name in found.stored:
                self._needs[k] |= self.readers[schedule.graph.buffers[name].shares] - {k}

        calls = [k for k, group in enumerate(schedule.groups) if is_host_call(group)]
        for before, k in pairwise(calls):
            self._needs[k].add(before)  # as `fuse` has ordered them
        # By cluster: its members as bits of an integer, and groups of all clusters before it.
        self._bits: list[int] = []
        self._before: list[int] = []

    def join(self, k: int, cluster: int) -> None:
        """Moves all members of cluster ``k`` to another cluster; ``k`` disappears.

        What must run before one of them must then run before all that needs the other one.
        """
        self._order(max(k, cluster))
        own, other = self._before[k], self._before[cluster]
        self._bits[cluster] |= self._bits[k]
        self._before[cluster], self._before[k] = own | other, 0
        if own != other:
            for after, before in enumerate(self._before):
                if before & self._bits[cluster]:
                    self._before[after] = before | own | other
        for member in self.members[k]:
            self.of[member] = cluster
        self.members[cluster] += self.members.pop(k)
        self._needs[cluster] |= self._needs.pop(k)
        self._memory[cluster] |= self._memory.pop(k)

    def needs(self, cluster: int) -> set[int]:
        """The other clusters that a cluster needs directly.

        Those store what it reads, or read what it overwrites.
        """
        return {self.of[n] for n in self._needs[cluster]} - {cluster}

    def in_order(self) -> Iterator[list[int]]:
        """The members of each cluster; every cluster after all that it needs."""
        of = self.of
        needs = [{of[n] for n in self._needs.get(k, ())} - {k} for k in range(len(of))]
        for k in topological_order(needs):
            if of[k] == k:
                yield self.members[k]

    def _order(self, last: int) -> None:
        """Finds what must run before each group up to a number.

        Integers as bit sets are fast enough for training steps of thousands of groups. A group
        never needs a later one.
        """
        for k in range(len(self._before), last + 1):
            before = 0
            for cluster in self.needs(k):
                before |= self._before[cluster] | self._bits[cluster]
            self._before.append(before)
            self._bits.append(1 << k)

    def leads_to(self, cluster: int, other: int) -> bool:
        """Whether another cluster needs a cluster, directly or through others."""
        self._order(max(cluster, other))
        return bool(self._before[other] & self._bits[cluster])

    def needs_by_detour(self, cluster: int, on: int) -> bool:
        """Whether ``cluster`` needs ``on`` through a third cluster.

        Then the two cannot be joined: the third would have to run in between.
        """
        return any(self.leads_to(on, other) for other in self.needs(cluster) - {on})

    def largest_passed(self, k: int) -> int:
        """Bytes of the largest intermediate that group ``k`` reads or leaves to other groups."""
        graph, found = self.schedule.graph, self.buffers[k]
        passed = {name for name in found.reads if name in self.writer}
        passed |= found.stored - graph.returned
        return max((typical(graph.buffers[name].nbytes) for name in passed), default=0)

    def are_bound_together(self, k: int, cluster: int) -> bool:
        """Whether there are bindings for one kernel of two clusters."""
        return self._windows(self._memory[k] | self._memory[cluster]) <= self._limit

    def gather(self, numbers: Iterable[int], may_take: Callable[[int, int], bool]) -> None:
        """Joins groups that are not in a cluster with others to as few clusters as possible.

        Each takes the first cluster of those before it that there are bindings for, that neither
        needs it nor is needed by it, and for which ``may_take(group, cluster)`` holds.
        """
        opened: list[int] = []
        for k in numbers:
            free = (c for c in opened if may_take(k, c) and self.are_bound_together(k, c))
            apart = (c for c in free if not (self.leads_to(k, c) or self.leads_to(c, k)))
            into = next(apart, None)
            if into is None:
                opened.append(k)
            else:
                self.join(k, into)
                if self._windows(self._memory[into]) >= self._limit:
                    opened.remove(into)

    def regrouped(
        self, as_groups: Callable[[list[KernelGroup]], Sequence[KernelGroup]]
    ) -> Schedule:
        """The schedule with what ``as_groups`` makes of the groups of each cluster of several."""
        groups: list[KernelGroup] = []
        for members in self.in_order():
            found = [self.schedule.groups[m] for m in members]
            groups += as_groups(found) if len(found) > 1 else found
        return replace(self.schedule, groups=tuple(groups))

    def fits(self, found: GroupBuffers) -> bool:
        """Whether there are bindings for a kernel that reads and stores these buffers."""
        return self._windows(self._bound(found)) <= self._limit

    def _bound(self, found: GroupBuffers) -> frozenset[str]:
        """The buffers whose memory a kernel binds; `STATUS` among them if it checks indices."""
        memory = frozenset(map(self.schedule.graph.memory_of, found.reads | found.stored))
        return memory | {STATUS} if found.reports else memory

    def _windows(self, names: Iterable[str]) -> int:
        """Storage bindings through which a kernel reaches these buffers."""
        known = self._windows_of
        for name in names:
            if name not in known:
                known[name] = len(self.schedule.graph.buffers[name].windows(self.target))
        return sum(known[name] for name in names)
