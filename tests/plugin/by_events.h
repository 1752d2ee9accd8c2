/* SPDX-License-Identifier: BSD-3-Clause */
/* by_events.h: the yardstick of of_reorder_simulate(). A clock goes from one event to the next,
 * over several iterations of training; at each event compute and the network begin whatever
 * they may. It shares no code with the core. */
#ifndef BY_EVENTS_H
#define BY_EVENTS_H

#include "planners/reorder/reorder.h"

/* The times of an iteration; at most 16 layers. Stops the test if an iteration differs from the
 * one before it. */
of_reorder_times by_events(const of_layer_work *layers, size_t n, const uint32_t *places,
                           const of_network *network, bool await_first_use);

#endif
