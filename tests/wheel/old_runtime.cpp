// SPDX-License-Identifier: BSD-3-Clause
// old_runtime.cpp: calls what shim/old_runtime.c answers. Prints what went wrong, else nothing.
#include <cstdio>
#include <exception>
#include <memory>
#include <new>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

static void expect(bool holds, const char *what) {
    if (!holds)
        std::puts(what);
}

static void streams() {
    for (int length = 0; length < 100; length++) {
        std::ostringstream stream;
        std::string written;
        for (int i = 0; i < length; i++) {
            stream << i;
            written += std::to_string(i);
        }
        const std::string copied = stream.str();
        const std::string moved = std::move(stream).str();
        expect(copied == written && moved == written, "a stream gave another text");
        expect(stream.str().empty(), "a text that was moved out is still there");
        stream << "again";
        expect(stream.str() == "again", "a stream can't be written to again");
    }
}

// By their names: with optimization the compiler calls none of them above.
std::string
moved(void *buffer) __asm__("_ZNOSt7__cxx1115basic_stringbufIcSt11char_traitsIcESaIcEE3strEv");
std::string copied(const void *buffer) __asm__(
    "_ZNKRSt7__cxx1115basic_stringbufIcSt11char_traitsIcESaIcEE3strEv");

static void buffers() {
    for (const char *text : {"", "short", "a text that has no place within a string"}) {
        std::stringbuf buffer(text);
        const std::string first = copied(&buffer), second = moved(&buffer);
        expect(first == text && second == text, "a buffer gave another text");
        expect(buffer.str().empty(), "a buffer still has what was moved out");
    }
}

static int alive = 0;

struct Counted : std::runtime_error {
    Counted() : std::runtime_error("counted") { alive++; }
    Counted(const Counted &other) : std::runtime_error(other) { alive++; }
    ~Counted() override { alive--; }
};

static void exceptions() {
    std::exception_ptr kept = std::make_exception_ptr(Counted());
    {
        std::vector<std::exception_ptr> copies(10, kept);
        std::exception_ptr other = kept;
        other = copies[3];
    }
    expect(alive == 1, "an exception died, or was copied, with its pointers");
    try {
        std::rethrow_exception(kept);
    } catch (const std::runtime_error &error) {
        expect(std::string(error.what()) == "counted", "another exception came back");
    }
    kept = nullptr;
    expect(alive == 0, "an exception outlived its pointers");
}

static void allocations(std::size_t count) {
    bool refused = false;
    try {
        std::allocator<double> allocator;
        allocator.deallocate(allocator.allocate(count), count);
    } catch (const std::bad_array_new_length &) {
        refused = true;
    }
    expect(refused, "an impossible length was not refused");
}

int main(int argc, char **) {
    streams();
    buffers();
    exceptions();
    allocations(static_cast<std::size_t>(-argc));
    return 0;
}
