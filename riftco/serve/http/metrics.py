"""Prometheus' text of what the server has done and is doing; llama.cpp's names where it has one."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from ..slots import State
from .service import Service


class Collector:
    """Reads the service when it is asked, so that nothing is counted twice."""

    def __init__(self, service: Service):
        self.service = service

    def collect(self) -> Iterator[Metric]:
        scheduler = self.service.scheduler
        totals = scheduler.totals
        for name, value, text in (
            ("prompt_tokens", totals.prompt, "tokens of prompts"),
            ("prompt_tokens_cached", totals.cached, "of these, tokens whose rows were there"),
            ("tokens_predicted", totals.predicted, "tokens generated"),
            ("draft_tokens", totals.drafted, "tokens guessed"),
            ("draft_tokens_accepted", totals.accepted, "of these, right ones"),
            ("requests", self.service.requests, "requests taken"),
            ("learn_seconds", totals.learn_seconds, "time spent learning"),
        ):
            yield CounterMetricFamily(f"riftco_{name}", text, value=value)
        learns = CounterMetricFamily("riftco_learns", "learns by outcome", labels=["outcome"])
        learns.add_metric(["learned"], totals.learned)
        learns.add_metric(["refused"], totals.refused)
        yield learns
        slots = self.service.engine.slots
        for name, value, text in (
            ("requests_processing", len(scheduler.turns), "turns on slots"),
            ("requests_deferred", len(scheduler.waiting), "requests that wait"),
            (
                "learn_deferred",
                sum(s.state is State.LEARNING for s in slots),
                "turns whose lesson waits",
            ),
            ("learn_debt_seconds", scheduler.duty.debt, "until the next learn may begin while others are busy"),
        ):
            yield GaugeMetricFamily(f"riftco_{name}", text, value=value)
        versions = GaugeMetricFamily("riftco_adapter_version", "the newest version", labels=["adapter"])
        for card in self.service.adapter_cards():
            versions.add_metric([card["id"]], card["version"])
        yield versions


def exposition(service: Service) -> bytes:
    registry = CollectorRegistry()
    registry.register(Collector(service))
    return generate_latest(registry)
