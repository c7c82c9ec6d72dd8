"""Graphs as if recorded under other schedule options."""

from __future__ import annotations

from dataclasses import replace

from tessera.core.options import ScheduleOptions
from tessera.ir.graph.node import Graph
from tessera.ir.schedule.build import build_schedule
from tessera.ir.schedule.schedule import Schedule


def under(g: Graph, chosen: ScheduleOptions) -> Graph:
    """Returns `g` and its loop bodies as if recorded under the options `chosen`."""
    options = replace(g.options, schedule=chosen)
    return replace(g.rewrite(None, lambda body: under(body, chosen)), options=options)


def scheduled(g: Graph, chosen: ScheduleOptions) -> Schedule:
    return build_schedule(under(g, chosen))
