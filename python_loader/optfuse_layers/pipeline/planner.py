# SPDX-License-Identifier: BSD-3-Clause
"""The functions of the planner in C, and their structures (plugin/planners/pipeline/pipeline.h)."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_bool, c_double, c_int32, c_size_t, c_uint32, c_uint64

from optfuse._library.bindings import check, lib, typed

NO_PROCESS = -1


class LayerCosts(Structure):
    _fields_ = [
        *((name, c_double) for name in ("forward", "input_gradient", "weight_gradient", "update")),
        *((name, c_uint64) for name in ("in_bytes", "out_bytes", "weight_bytes")),
        ("channels", c_uint32),
        ("movable", c_bool),
    ]


class Place(Structure):
    _fields_ = [
        *((name, c_int32) for name in ("forward", "weight_gradient", "input_gradient")),
        ("second_input_gradient", c_int32),
        ("split", c_uint32),
        ("replicas", c_int32),
    ]


class Task(Structure):
    _fields_ = [
        *((name, c_int32) for name in ("kind", "layer", "batch", "process")),
        *((name, c_double) for name in ("start", "end")),
    ]


class Report(Structure):
    _fields_ = [
        *((name, c_double) for name in ("makespan", "period", "busy", "messages", "bytes")),
        ("in_flight", c_size_t),
        ("held_bytes", c_double),
    ]


class Pipeline(Structure):
    _fields_ = [
        ("strategy", ctypes.c_int),
        *((name, c_size_t) for name in ("processes", "micro_batches", "in_flight", "chunk")),
        ("layers", POINTER(LayerCosts)),
        ("places", POINTER(Place)),
        ("n", c_size_t),
    ]


class _Link(Structure):
    _fields_ = [("latency", c_double), ("seconds_per_byte", c_double)]


_Of, _Over, _Tasks = POINTER(Pipeline), POINTER(_Link), POINTER(Task)
typed(
    lib,
    {
        "of_pipeline_place_layers": (ctypes.c_int, [_Of, _Over, POINTER(Place), POINTER(c_double)]),
        "of_pipeline_check": (ctypes.c_int, [_Of]),
        "of_pipeline_count": (c_size_t, [_Of, c_size_t]),
        "of_pipeline_delays": (ctypes.c_int, [_Of, POINTER(c_uint32)]),
        "of_pipeline_schedule": (ctypes.c_int, [_Of, _Over, c_size_t, _Tasks]),
        "of_pipeline_simulate": (
            ctypes.c_int,
            [_Of, _Over, c_size_t, _Tasks, c_size_t, POINTER(Report)],
        ),
    },
)


def place(of: Pipeline, network: tuple[float, float]) -> ctypes.Array[Place]:
    """Sets the pipeline's places, too. Raises optfuse.Error, as all here."""
    places: ctypes.Array[Place] = (Place * of.n)()
    check(lib.of_pipeline_place_layers(of, _Link(*network), places, None))
    of.places = places
    return places


def delays(of: Pipeline) -> ctypes.Array[c_uint32]:
    found: ctypes.Array[c_uint32] = (c_uint32 * of.n)()
    check(lib.of_pipeline_delays(of, found))
    return found


def schedule(of: Pipeline, network: tuple[float, float], batches: int) -> ctypes.Array[Task]:
    check(lib.of_pipeline_check(of))  # before tasks are counted
    tasks: ctypes.Array[Task] = (Task * lib.of_pipeline_count(of, batches))()
    check(lib.of_pipeline_schedule(of, _Link(*network), batches, tasks))
    return tasks


def simulate(
    of: Pipeline, network: tuple[float, float], batches: int, tasks: ctypes.Array[Task]
) -> Report:
    """Writes the tasks' times."""
    report = Report()
    check(lib.of_pipeline_simulate(of, _Link(*network), batches, tasks, len(tasks), report))
    return report
