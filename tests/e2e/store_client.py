"""Reads ports, one a line; adds 1 to a key of the TCPStore on each, as a worker would reach it, and prints the sum."""

import sys

from torch.distributed import TCPStore


def main() -> None:
    for line in sys.stdin:
        store = TCPStore("localhost", int(line), None, False)
        store.set("greeting", "hello")
        assert store.get("greeting") == b"hello"
        print(store.add("count", 1), flush=True)


if __name__ == "__main__":
    main()
