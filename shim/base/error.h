// SPDX-License-Identifier: BSD-3-Clause
// error.h: errors raised inside operators and backward arrive in Python as its optfuse.Error,
// and in a C++ program as the C++ class of that name; those of functions that the core calls
// become the thread's error.
#pragma once

#include <c10/util/Exception.h>

#include <exception>
#include <string>

#include "optfuse.h"

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

struct PythonError final : torch::PyTorchError {
    PythonError(std::string text, _object *raised)
        : PyTorchError(std::move(text)), raises(raised) {}
    _object *python_type() override { return raises; }
    _object *raises;                       // borrowed
    static inline _object *type = nullptr; // optfuse.Error; set once by of_shim_init()
};

// Throws the class of C++, where there is no Python. cxx/spelling.cpp sets it before main().
inline void (*fail_in_cxx)(const std::string &text) = nullptr;

// raised: another type of Python's than optfuse.Error.
[[noreturn]] inline void fail(const std::string &text, _object *raised = nullptr) {
    _object *const type = raised != nullptr ? raised : PythonError::type;
    if (type == nullptr)
        fail_in_cxx(text);
    throw PythonError(text, type);
}

// Raises the core's error of this thread. status: an of_status, perhaps from a function of shim.h.
inline void check(int status) {
    if (status != OF_OK)
        fail(std::string("optfuse: ") + of_error_message());
}

// Whether the work went well; else its error is that of this thread, without "optfuse: ", which
// whoever asks puts in front.
template <typename Work> bool answers(const Work &work) {
    try {
        work();
        return true;
    } catch (const c10::Error &e) {
        of_set_error("%s", e.what_without_backtrace());
    } catch (const std::exception &e) {
        std::string text = e.what();
        if (text.rfind("optfuse: ", 0) == 0)
            text.erase(0, 9);
        of_set_error("%s", text.c_str());
    }
    return false;
}

// Returns the work's result; or `failed`, if it throws: "<what><whose> failed: <why>" is then the
// error of this thread.
template <typename Result, typename Work>
Result attempt(const char *what, const std::string &whose, Result failed, const Work &work) {
    try {
        return work();
    } catch (const c10::Error &e) {
        of_set_error("%s%s failed: %s", what, whose.c_str(), e.what_without_backtrace());
    } catch (const std::exception &e) {
        of_set_error("%s%s failed: %s", what, whose.c_str(), e.what());
    }
    return failed;
}

} // namespace optfuse
