"""A schedule's groups, while some of them are put into one kernel."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ...ir.access import typical_numel
from ...ir.graph import GroupBuffers, Schedule, buffers_of
from ...plan.model import STATUS
from ...target import Target
from .order import topological_order


class Clusters:
    """A schedule's groups while some are joined: each cluster becomes one kernel.

    Attributes:
        of: the cluster of each group; clusters are named by the number of their first member.
        members: the groups of each cluster.
        buffers: what each group reads and stores.
        writer: the group that stores each buffer.
    """

    def __init__(self, schedule: Schedule, target: Target) -> None:
        self.schedule = schedule
        self.target = target
        self.of = list(range(len(schedule.groups)))
        self.members = {k: [k] for k in self.of}
        self.buffers = [buffers_of(group) for group in schedule.groups]
        self.writer = {name: k for k, found in enumerate(self.buffers) for name in found.stored}
        self._windows_of: dict[str, int] = {STATUS: 1}
        self._needs = {
            k: {self.writer[name] for name in found.reads if name in self.writer}
            for k, found in enumerate(self.buffers)
        }
        readers: dict[str | None, set[int]] = {}
        for k, found in enumerate(self.buffers):
            for name in found.reads:
                readers.setdefault(name, set()).add(k)
        for k, found in enumerate(self.buffers):
            for name in found.stored:
                self._needs[k] |= readers.get(schedule.graph.buffers[name].shares, set()) - {k}

    def join(self, k: int, cluster: int) -> None:
        """Moves all members of cluster ``k`` to another cluster; ``k`` disappears."""
        for member in self.members[k]:
            self.of[member] = cluster
        self.members[cluster] += self.members.pop(k)
        self._needs[cluster] |= self._needs.pop(k)

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

    def independent(self, one: int, other: int) -> bool:
        """Whether neither of two clusters needs the other one, directly or through others."""
        return not self._leads(self._needs[one], other) and not self._leads(self._needs[other], one)

    def needs_by_detour(self, cluster: int, on: int) -> bool:
        """Whether ``cluster`` needs ``on`` through a third cluster.

        Then the two cannot be joined: the third would have to run in between.
        """
        others = {n for n in self._needs[cluster] if self.of[n] not in (on, cluster)}
        return self._leads(others, on)

    def largest_passed(self, k: int) -> int:
        """Bytes of the largest intermediate that group ``k`` reads or leaves to other groups."""
        graph, found = self.schedule.graph, self.buffers[k]
        passed = {name for name in found.reads if name in self.writer}
        passed |= found.stored - graph.returned
        return max((typical_numel(graph.buffers[name].nbytes) for name in passed), default=0)

    def _leads(self, needs: Iterable[int], to: int) -> bool:
        """Whether a cluster is among the needed ones or among what those need, and so on."""
        seen = {self.of[n] for n in needs}
        stack = list(seen)
        while stack:
            current = stack.pop()
            if current == to:
                return True
            fresh = {self.of[n] for n in self._needs[current]} - seen
            seen |= fresh
            stack += fresh
        return False

    def bindings(self, found: GroupBuffers) -> int:
        """Storage bindings of a kernel that reads and stores these buffers."""
        return self.windows(self.memory(found))

    def memory(self, found: GroupBuffers) -> frozenset[str]:
        """The buffers whose memory a kernel binds if it reads and stores ``found``.

        Buffers that share memory count once; `STATUS` is among them if the kernel checks indices.
        """
        memory = frozenset(map(self.schedule.graph.memory_of, found.reads | found.stored))
        return memory | {STATUS} if found.reports else memory

    def windows(self, names: Iterable[str]) -> int:
        """Storage bindings through which a kernel reaches these buffers."""
        return sum(map(self._windows, names))

    def _windows(self, name: str) -> int:
        found = self._windows_of.get(name)
        if found is None:
            found = len(self.schedule.graph.buffers[name].windows(self.target))
            self._windows_of[name] = found
        return found
