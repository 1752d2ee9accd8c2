// SPDX-License-Identifier: BSD-3-Clause
// operators.cpp: the operators through which Python plans layer pipelines
// (plugin/planners/pipeline/pipeline.h). Lists are flat: of each layer 4 costs (forward, dX, dW,
// update, in seconds) and 5 sizes (bytes in, out, of weights; channels; 1 if movable), of each
// place its 6 numbers, of each task its kind, layer, batch and process.
#include <c10/util/Exception.h>
#include <torch/library.h>

#include "planners/pipeline/pipeline.h"

namespace optfuse {
namespace {

using Integers = std::vector<int64_t>;
using Seconds = std::vector<double>;

constexpr size_t SETTINGS = 5, COSTS = 4, SIZES = 5, PLACE = 6, TASK = 4;

// A plan needs no fused optimizer, so that optfuse.Error may not be known here: Python makes one
// of these (plan.py).
void check_core(of_status status) {
    TORCH_CHECK(status == OF_OK, "optfuse: ", of_error_message());
}

template <typename T> size_t rows_of(const std::vector<T> &flat, size_t width) {
    TORCH_CHECK(flat.size() % width == 0, "optfuse: a list of a pipeline has ", flat.size(),
                " numbers, which is no multiple of ", width);
    return flat.size() / width;
}

// The input of a call. `settings`: strategy, processes, micro-batches, batches in flight, chunk.
struct Pipeline {
    std::vector<of_pipeline_layer> layers;
    std::vector<of_pipeline_place> places;
    of_pipeline view = {};

    Pipeline(const Integers &settings, const Seconds &costs, const Integers &sizes) {
        const size_t n = rows_of(costs, COSTS);
        TORCH_CHECK(settings.size() == SETTINGS && rows_of(sizes, SIZES) == n,
                    "optfuse: the lists of a pipeline's layers differ in length");
        for (size_t i = 0; i < n; i++)
            layers.push_back(layer(&costs[COSTS * i], &sizes[SIZES * i]));
        view.strategy = static_cast<of_strategy>(settings[0]);
        view.processes = static_cast<size_t>(settings[1]);
        view.micro_batches = static_cast<size_t>(settings[2]);
        view.in_flight = static_cast<size_t>(settings[3]);
        view.chunk = static_cast<size_t>(settings[4]);
        view.layers = layers.data();
        view.n = n;
        places.resize(n);
    }

    Pipeline(const Integers &settings, const Seconds &costs, const Integers &sizes,
             const Integers &flat)
        : Pipeline(settings, costs, sizes) {
        TORCH_CHECK(rows_of(flat, PLACE) == view.n,
                    "optfuse: a pipeline needs one place for each layer");
        for (size_t i = 0; i < view.n; i++)
            places[i] = place(&flat[PLACE * i]);
        view.places = places.data();
        check_core(of_pipeline_check(&view));
    }

    static of_pipeline_layer layer(const double *cost, const int64_t *size) {
        of_pipeline_layer made = {};
        made.forward = cost[0];
        made.input_gradient = cost[1];
        made.weight_gradient = cost[2];
        made.update = cost[3];
        made.in_bytes = static_cast<uint64_t>(size[0]);
        made.out_bytes = static_cast<uint64_t>(size[1]);
        made.weight_bytes = static_cast<uint64_t>(size[2]);
        made.channels = static_cast<uint32_t>(size[3]);
        made.movable = size[4] != 0;
        return made;
    }

    static of_pipeline_place place(const int64_t *number) {
        of_pipeline_place made = {};
        made.forward = static_cast<int32_t>(number[0]);
        made.weight_gradient = static_cast<int32_t>(number[1]);
        made.input_gradient = static_cast<int32_t>(number[2]);
        made.second_input_gradient = static_cast<int32_t>(number[3]);
        made.split = static_cast<uint32_t>(number[4]);
        made.replicas = static_cast<int32_t>(number[5]);
        return made;
    }
};

of_network_link network_link_of(const Seconds &network) {
    TORCH_CHECK(network.size() == 2,
                "optfuse: a network is two numbers, the seconds a message and a byte");
    return {network[0], network[1]};
}

std::vector<of_pipeline_task> tasks_of(const Integers &flat) {
    std::vector<of_pipeline_task> tasks(rows_of(flat, TASK));
    for (size_t k = 0; k < tasks.size(); k++) {
        const int64_t *number = &flat[TASK * k];
        tasks[k] = {static_cast<int32_t>(number[0]),
                    static_cast<int32_t>(number[1]),
                    static_cast<int32_t>(number[2]),
                    static_cast<int32_t>(number[3]),
                    0,
                    0};
    }
    return tasks;
}

// Places, and the seconds a batch of the process that has most to do.
std::tuple<Integers, double> place_pipeline(const Integers &settings, const Seconds &costs,
                                           const Integers &sizes, const Seconds &network) {
    Pipeline p(settings, costs, sizes);
    const of_network_link link = network_link_of(network);
    double largest = 0;
    check_core(of_pipeline_place_layers(&p.view, &link, p.places.data(), &largest));
    Integers flat;
    for (const of_pipeline_place &place : p.places)
        flat.insert(flat.end(), {place.forward, place.weight_gradient, place.input_gradient,
                                 place.second_input_gradient, static_cast<int64_t>(place.split),
                                 place.replicas});
    return {flat, largest};
}

Integers delays_of_pipeline(const Integers &settings, const Seconds &costs, const Integers &sizes,
                           const Integers &places) {
    const Pipeline p(settings, costs, sizes, places);
    std::vector<uint32_t> delays(p.view.n);
    check_core(of_pipeline_delays(&p.view, delays.data()));
    return {delays.begin(), delays.end()};
}

Integers schedule_pipeline(const Integers &settings, const Seconds &costs, const Integers &sizes,
                          const Integers &places, int64_t batches, const Seconds &network) {
    const Pipeline p(settings, costs, sizes, places);
    const of_network_link link = network_link_of(network);
    check_core(of_pipeline_check(&p.view)); // before tasks are counted
    const size_t most = batches < 1 || batches > INT32_MAX ? 0 : static_cast<size_t>(batches);
    std::vector<of_pipeline_task> tasks(of_pipeline_count(&p.view, most));
    check_core(of_pipeline_schedule(&p.view, &link, static_cast<size_t>(batches), tasks.data()));
    Integers flat;
    for (const of_pipeline_task &task : tasks)
        flat.insert(flat.end(), {task.kind, task.layer, task.batch, task.process});
    return flat;
}

// Start and end of each task; the numbers of of_pipeline_report, in its order;
// violations that the verifier has found.
std::tuple<Seconds, Seconds, int64_t> simulate_pipeline(const Integers &settings,
                                                        const Seconds &costs, const Integers &sizes,
                                                        const Integers &places, int64_t batches,
                                                        const Integers &flat,
                                                        const Seconds &network) {
    const Pipeline p(settings, costs, sizes, places);
    const of_network_link link = network_link_of(network);
    const auto n = static_cast<size_t>(batches);
    std::vector<of_pipeline_task> tasks = tasks_of(flat);
    std::vector<uint32_t> delays(p.view.n);
    of_pipeline_report report = {};
    size_t violations = 0;
    check_core(of_pipeline_delays(&p.view, delays.data()));
    check_core(of_pipeline_simulate(&p.view, &link, n, tasks.data(), tasks.size(), &report));
    check_core(of_pipeline_verify(&p.view, &link, delays.data(), n, tasks.data(), tasks.size(),
                                  &violations));
    Seconds times;
    for (const of_pipeline_task &task : tasks)
        times.insert(times.end(), {task.start, task.end});
    return {times,
            {report.makespan, report.period, report.busy, report.messages, report.bytes,
             static_cast<double>(report.in_flight), report.held_bytes},
            static_cast<int64_t>(violations)};
}

} // namespace
} // namespace optfuse

TORCH_LIBRARY_FRAGMENT(optfuse, m) {
    m.def("place_pipeline(int[] settings, float[] costs, int[] sizes, float[] network) -> "
          "(int[], float)",
          optfuse::place_pipeline);
    m.def("delays_of_pipeline(int[] settings, float[] costs, int[] sizes, int[] places) -> int[]",
          optfuse::delays_of_pipeline);
    m.def("schedule_pipeline(int[] settings, float[] costs, int[] sizes, int[] places, "
          "int batches, float[] network) -> int[]",
          optfuse::schedule_pipeline);
    m.def("simulate_pipeline(int[] settings, float[] costs, int[] sizes, int[] places, "
          "int batches, int[] tasks, float[] network) -> (float[], float[], int)",
          optfuse::simulate_pipeline);
}
