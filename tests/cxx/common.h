// SPDX-License-Identifier: BSD-3-Clause
// common.h: what the tests in C++ share: a count of failures, and equality by bits.
#pragma once

#include <torch/torch.h>

#include <cstring>
#include <functional>
#include <iostream>
#include <string>

inline int failures = 0;

inline void expect(bool kept, const std::string &promise) {
    if (kept)
        return;
    failures++;
    std::cerr << "FAILED: " << promise << std::endl;
}

// Compares dense tensors. NaN is none of the numbers that these tests make.
inline bool same_bits(const torch::Tensor &a, const torch::Tensor &b) {
    if (a.defined() != b.defined())
        return false;
    if (!a.defined())
        return true;
    const torch::Tensor x = a.detach().contiguous(), y = b.detach().contiguous();
    return x.sizes() == y.sizes() && x.dtype() == y.dtype() &&
           std::memcmp(x.const_data_ptr(), y.const_data_ptr(), x.nbytes()) == 0;
}

// Whether this raises optfuse.hpp's Error, and its text has these words, and none of Python.
inline void expect_error(const std::string &what, const std::string &words,
                         const std::function<void()> &work) {
    try {
        work();
    } catch (const optfuse::Error &e) {
        const std::string text = e.what();
        expect(text.rfind("optfuse: ", 0) == 0 && text.find(words) != std::string::npos,
               what + " says '" + text + "', not '" + words + "'");
        for (const char *python : {"optfuse.", "mode=", "=True", "=False", "`", "unfuse"})
            expect(text.find(python) == std::string::npos, what + " speaks Python: " + text);
        return;
    } catch (const std::exception &e) {
        expect(false, what + " raises another exception: " + e.what());
        return;
    }
    expect(false, what + " raises nothing");
}
