// SPDX-License-Identifier: BSD-3-Clause
#include "autograd/nested_passes.h"

#include <torch/csrc/autograd/engine.h>

#include <utility>
#include <vector>

#include "shim.h"

namespace optfuse {
namespace {

// The engine takes work for the end of the pass that runs, and that is a nested one here.
struct Nested {
    int depth = 0;
    int64_t outermost = -1;
    std::vector<std::function<void()>> behind_outermost;
};
thread_local Nested nested;

} // namespace

void run_behind_this_pass(std::function<void()> work) {
    torch::autograd::Engine::get_default_engine().queue_callback(std::move(work));
}

int64_t outermost_graph_task() {
    return nested.depth == 0 ? torch::autograd::get_current_graph_task_id() : nested.outermost;
}

void run_behind_outermost(std::function<void()> work) {
    if (nested.depth == 0)
        run_behind_this_pass(std::move(work));
    else
        nested.behind_outermost.push_back(std::move(work));
}

} // namespace optfuse

extern "C" {

void of_shim_begin_nested_pass(void) {
    optfuse::Nested &nested = optfuse::nested;
    if (nested.depth++ == 0)
        nested.outermost = torch::autograd::get_current_graph_task_id();
}

void of_shim_end_nested_pass(void) {
    optfuse::Nested &nested = optfuse::nested;
    if (--nested.depth != 0)
        return;
    for (std::function<void()> &work : std::exchange(nested.behind_outermost, {}))
        optfuse::run_behind_this_pass(std::move(work));
}

} // extern "C"
