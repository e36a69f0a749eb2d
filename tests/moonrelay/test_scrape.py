"""What a scrape reads belongs to the event loop, whoever asks."""

from __future__ import annotations

import asyncio
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from moonrelay import scrape
from moonrelay.errors import SettingsError


class Books(Collector):
    """A book that the loop changes; it notes which thread counted it."""

    def __init__(self) -> None:
        self.entries: dict[int, int] = {}
        self.threads: set[int] = set()

    def collect(self) -> Iterator[GaugeMetricFamily]:
        self.threads.add(threading.get_ident())
        yield GaugeMetricFamily("entries", "Of the book", sum(1 for _ in self.entries.values()))

    def change(self, turn: int) -> None:
        self.entries[turn] = turn
        self.entries.pop(turn - 50, None)


def scraped(address: str, query: str = "") -> str:
    with urllib.request.urlopen(f"http://{address}/metrics{query}", timeout=10) as answer:
        return str(answer.read().decode())


def test_a_book_that_changes_is_counted_by_the_thread_that_changes_it() -> None:
    async def run() -> None:
        registry, books = CollectorRegistry(), Books()
        registry.register(books)
        address = scrape.serve(registry, "127.0.0.1:0")
        scrapes = [asyncio.create_task(asyncio.to_thread(scraped, address)) for _ in range(20)]
        turn = 0
        while not all(task.done() for task in scrapes):
            books.change(turn)
            turn += 1
            await asyncio.sleep(0)
        assert all("\nentries " in task.result() for task in scrapes)
        assert books.threads == {threading.get_ident()}

    asyncio.run(run())


def test_only_what_is_asked_for_by_name() -> None:
    async def run() -> None:
        registry = CollectorRegistry()
        for name in ("this", "that"):
            Counter(name, "of a test", registry=registry).inc(3)
        address = scrape.serve(registry, "127.0.0.1:0")
        found = await asyncio.to_thread(scraped, address, "?name[]=this_total")
        assert "this_total 3.0" in found and "that_total" not in found

    asyncio.run(run())


def test_a_loop_that_hangs_fails_the_scrape(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        monkeypatch.setattr(scrape, "COLLECT_TIMEOUT_S", 0.05)
        registry, asked, answered = CollectorRegistry(), threading.Event(), threading.Event()
        registry.register(Books())
        address = scrape.serve(registry, "127.0.0.1:0")
        found: list[int] = []

        def ask() -> None:
            asked.set()
            try:
                scraped(address)
            except urllib.error.HTTPError as error:
                found.append(error.code)
            answered.set()

        threading.Thread(target=ask, daemon=True).start()
        assert asked.wait(5) and answered.wait(5), "the loop is held here meanwhile"
        assert found == [500]

    asyncio.run(run())


def test_a_port_that_is_taken_is_named() -> None:
    async def run() -> None:
        address = scrape.serve(CollectorRegistry(), "127.0.0.1:0")
        with pytest.raises(SettingsError, match=f"metrics_listen: .* found {address}"):
            scrape.serve(CollectorRegistry(), address)

    asyncio.run(run())
