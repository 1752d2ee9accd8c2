// SPDX-License-Identifier: BSD-3-Clause
// error.h: errors raised inside operators and backward arrive in Python as
// optfuse.Error.
#pragma once

#include <exception>
#include <string>

// Python.h's own declaration; nothing of Python is linked.
extern "C" {
struct _object;
}

namespace torch {

// The base class that PyTorch's Python layer catches to raise a Python type of
// the thrower's choice. It is defined inline in torch/csrc/Exceptions.h, which
// needs Python's headers; this declaration must have the same layout. The
// loader checks at load time that it still works.
struct __attribute__((visibility("default"))) PyTorchError : public std::exception {
    PyTorchError() = default;
    explicit PyTorchError(std::string text) : msg(std::move(text)) {}
    virtual _object *python_type() = 0;
    const char *what() const noexcept override { return msg.c_str(); }
    std::string msg;
};

} // namespace torch

namespace optfuse {

struct Error final : torch::PyTorchError {
    explicit Error(std::string text, _object *raised = type)
        : PyTorchError(std::move(text)), raises(raised) {}
    _object *python_type() override { return raises; }
    _object *raises;                       // borrowed
    static inline _object *type = nullptr; // optfuse.Error; set once by of_shim_init()
};

} // namespace optfuse
