// SPDX-License-Identifier: BSD-3-Clause
// graphs.h: graphs that are replayed. What runs on the device while a graph is captured is written
// down: operators with their arguments, by address, and launches of our kernels. A capture's end
// undoes what it ran, since a real device runs nothing then; a replay runs all of it again, in that
// order, and each operator gets the memory that it made in the capture.
#pragma once

#include <torch/library.h>

#include "device.h"
#include "watch.h"

namespace fake {

// On a thread that runs an operator of a graph: the memory that the operator made in the capture.
// Elsewhere NULL.
void *memory_again();
// The operator of this thread has made it.
void note_memory(void *memory);

// For fake_optfuse_watch().
bool keep_work(void *stream, const void *work, fake_again *again);

// A kernel of this device as graphs record it.
struct Recorded final : c10::OperatorKernel {
    explicit Recorded(c10::KernelFunction function) : kernel(std::move(function)) {}
    void operator()(const c10::OperatorHandle &op, c10::DispatchKeySet keys,
                    torch::jit::Stack *stack);
    c10::KernelFunction kernel;
};

inline torch::CppFunction recorded(c10::KernelFunction kernel) {
    return torch::CppFunction::makeFromBoxedFunctor(std::make_unique<Recorded>(std::move(kernel)));
}

// A torch::Library whose kernels are recorded.
struct RecordedLibrary {
    torch::Library &library;
    void impl(const char *name, c10::KernelFunction kernel) {
        library.impl(name, recorded(std::move(kernel)));
    }
    template <class F> void impl(const char *name, F function) {
        impl(name, c10::KernelFunction::makeFromUnboxedLambda(std::move(function)));
    }
    template <class R, class... A> void impl(const char *name, R (*function)(A...)) {
        impl(name, c10::KernelFunction::makeFromUnboxedRuntimeFunction(function));
    }
};

} // namespace fake
