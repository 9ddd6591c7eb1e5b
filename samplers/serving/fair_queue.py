"""Work that waits, in turns between clients: one that asks for much does not delay the others."""

import collections
from typing import Generic, TypeVar

T = TypeVar("T")


class FairQueue(Generic[T]):
    """A queue that gives the first item of each client in turn. A client's own items keep their order."""

    def __init__(self) -> None:
        self._items: dict[str, collections.deque[T]] = {}  # by client, in the order of their turns

    def __len__(self) -> int:
        return sum(map(len, self._items.values()))

    def push(self, client: str, item: T) -> None:
        self._items.setdefault(client, collections.deque()).append(item)

    def pop(self) -> T:
        """Takes the next item; there must be one."""
        client = next(iter(self._items))
        own = self._items.pop(client)
        item = own.popleft()
        if own:
            self._items[client] = own
        return item

    def remove(self, client: str, item: T) -> None:
        """Removes an item, if it still waits."""
        own = self._items.get(client, collections.deque())
        if item in own:
            own.remove(item)
        if not own:
            self._items.pop(client, None)
