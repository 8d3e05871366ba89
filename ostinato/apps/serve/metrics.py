"""The server's metrics in Prometheus' text format; times in seconds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from ostinato.engine.local import LocalEngine
from ostinato.launch.engine import AnyEngine

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class Metrics:
    """The metrics of a server, in a registry of its own."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self.requests = Counter(
            "ostinato_requests", "Requests that ended", ["endpoint", "status"], registry=registry
        )
        self.tokens = Counter("ostinato_tokens", "Tokens by kind", ["kind"], registry=registry)
        self.time_to_first = Histogram(
            "ostinato_time_to_first_token_seconds", "From arrival", buckets=_SECONDS, registry=registry
        )
        self.time_per_token = Histogram(
            "ostinato_time_per_output_token_seconds",
            "Mean of an answer behind its first token",
            buckets=_SECONDS,
            registry=registry,
        )
        self.request_time = Histogram(
            "ostinato_request_seconds", "From arrival to the end", buckets=_SECONDS, registry=registry
        )
        for kind in ("prompt", "cached", "sampled"):
            self.tokens.labels(kind)  # so that each is shown as 0 from the beginning
        self.hangups = Counter("ostinato_clients_left", "Clients that hung up", registry=registry)
        self.policies = Counter(
            "ostinato_policies", "Newer policies of runs that learn", ["outcome"], registry=registry
        )

    def watch_engine(self, engine: AnyEngine) -> None:
        """Add the engine's queue, cache and counters, read at the time of each scrape."""
        readings = [
            ("running_sequences", "Sequences in the batch", lambda: engine.queue[0]),
            ("waiting_sequences", "Sequences that wait for a slot", lambda: engine.queue[1]),
            ("engine_passes", "Passes of the model", lambda: engine.counters.steps),
            ("preemptions", "Sequences that lost their blocks", lambda: engine.counters.preempted),
        ]
        if isinstance(engine, LocalEngine):
            readings.append(("kv_blocks_free", "KV blocks free or evictable", lambda: engine.free_blocks))
        for name, help_, read in readings:
            Gauge(f"ostinato_{name}", help_, registry=self._registry).set_function(read)

    def add_counts(
        self,
        name: str,
        help_: str,
        labels: Sequence[str],
        read: Callable[[str], float],
        is_gauge: bool = False,
    ) -> None:
        """Add numbers of another object, by ``outcome``, read at the time of each scrape."""
        self._registry.register(_LabelledMetric(f"ostinato_{name}", help_, labels, read, is_gauge))

    def format_text(self) -> bytes:
        return generate_latest(self._registry)


class _LabelledMetric(Collector):
    """A counter, or a ``gauge``, for each label."""

    def __init__(
        self, name: str, help_: str, labels: Sequence[str], read: Callable[[str], float], is_gauge: bool
    ) -> None:
        self._name, self._help, self._labels, self._read, self._is_gauge = name, help_, labels, read, is_gauge

    def collect(self) -> Iterator[Metric]:
        kind = GaugeMetricFamily if self._is_gauge else CounterMetricFamily
        family = kind(self._name, self._help, labels=["outcome"])
        for label in self._labels:
            family.add_metric([label], self._read(label))
        yield family
