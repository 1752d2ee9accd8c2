// SPDX-License-Identifier: BSD-3-Clause
#include "promises/product.h"

#include <ATen/Dispatch.h>
#include <ATen/OpMathType.h>
#include <c10/util/TypeCast.h>

#include <cmath>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <new>
#include <utility>
#include <vector>

#include "base/error.h"
#include "floating.h"
#include "optfuse.h"

namespace optfuse {
namespace {

// A panel, and the rows of parameter and state beside it, fit the cache of a core, and a product of
// so many rows runs at its full speed.
constexpr int64_t kPanelBytes = 512 << 10;
// Rows are taken by so many: a panel then begins where a cache line does, whatever their length.
constexpr int64_t kRows = 32;

constexpr size_t whole_lines(size_t bytes) {
    return (bytes + OF_CACHE_LINE - 1) / OF_CACHE_LINE * OF_CACHE_LINE;
}

struct Free {
    void operator()(void *memory) const { std::free(memory); }
};

// Memory that grows.
class Buffer {
  public:
    void *of(size_t bytes) { // null: there is no memory
        if (size_ < bytes) {
            memory_.reset(std::aligned_alloc(OF_CACHE_LINE, whole_lines(bytes)));
            size_ = memory_ ? bytes : 0;
        }
        return memory_.get();
    }

  private:
    std::unique_ptr<void, Free> memory_;
    size_t size_ = 0;
};

// A panel's memory as long as this lives. Products inside of products have others.
class Room : Pinned {
  public:
    explicit Room(size_t bytes) {
        if (buffers().size() <= depth())
            buffers().emplace_back();
        memory_ = buffers()[depth()].of(bytes);
        if (memory_ == nullptr)
            throw std::bad_alloc();
        depth()++;
    }
    ~Room() { depth()--; }
    void *memory() const { return memory_; }

  private:
    static std::vector<Buffer> &buffers() {
        thread_local std::vector<Buffer> all;
        return all;
    }
    static size_t &depth() {
        thread_local size_t now = 0;
        return now;
    }
    void *memory_;
};

// As long as it lives the thread computes with this setting of denormals.
class Floating : Pinned {
  public:
    explicit Floating(unsigned setting) { of_floating_set(setting); }
    ~Floating() { of_floating_set(outside); }

  private:
    const unsigned outside = of_floating_now();
};

// As PyTorch's operators, which would set this thread's number of threads (base/threads.h).
template <typename From, typename To> void cast_from(const From *from, To *to, int64_t n) {
    for (int64_t i = 0; i < n; i++)
        to[i] = c10::convert<To>(from[i]);
}

// As PyTorch's operator casts them.
void cast_numbers(const void *from, at::ScalarType is, void *to, at::ScalarType becomes,
                  int64_t n) {
    AT_DISPATCH_FLOATING_TYPES_AND2(at::kBFloat16, at::kHalf, is, "cast_numbers", [&] {
        const auto *numbers = static_cast<const scalar_t *>(from);
        AT_DISPATCH_FLOATING_TYPES_AND2(at::kBFloat16, at::kHalf, becomes, "cast_numbers", [&] {
            cast_from(numbers, static_cast<scalar_t *>(to), n);
        });
    });
}

// a += b, rounded as PyTorch's operator.
template <typename Number> void add_to(Number *a, const Number *b, int64_t n) {
    for (int64_t i = 0; i < n; i++)
        a[i] = c10::convert<Number>(static_cast<at::opmath_type<Number>>(a[i]) +
                                    static_cast<at::opmath_type<Number>>(b[i]));
}

void add_numbers(void *to, const void *from, at::ScalarType dtype, int64_t n) {
    AT_DISPATCH_FLOATING_TYPES_AND2(at::kBFloat16, at::kHalf, dtype, "add_numbers", [&] {
        add_to(static_cast<scalar_t *>(to), static_cast<const scalar_t *>(from), n);
    });
}

class CastProduct final : public WeightProduct {
  public:
    CastProduct(SharedProduct of, at::ScalarType to)
        : WeightProduct(of->rows(), of->columns(), to, of->panel_rows()), from_(std::move(of)) {}
    size_t factor_bytes() const override { return from_->factor_bytes(); }

  private:
    void fill(int64_t first, int64_t end, void *out) const override {
        const Room room(from_->panel_bytes());
        from_->compute(first, end, room.memory());
        cast_numbers(room.memory(), from_->dtype(), out, dtype(), (end - first) * columns());
    }

    const SharedProduct from_;
};

class SumProduct final : public WeightProduct {
  public:
    explicit SumProduct(std::vector<SharedProduct> of)
        : WeightProduct(of[0]->rows(), of[0]->columns(), of[0]->dtype(), of[0]->panel_rows()),
          terms(std::move(of)) {}
    size_t factor_bytes() const override {
        size_t sum = 0;
        for (const SharedProduct &term : terms)
            sum += term->factor_bytes();
        return sum;
    }
    const std::vector<SharedProduct> terms; // added from the first to the last

  private:
    double most_norm() const override {
        double sum = 0;
        for (const SharedProduct &term : terms)
            sum += term->most_norm();
        return sum * most_rounded_up(static_cast<double>(terms.size()));
    }
    void fill(int64_t first, int64_t end, void *out) const override {
        terms[0]->compute(first, end, out);
        const Room room(panel_bytes());
        for (size_t i = 1; i < terms.size(); i++) {
            terms[i]->compute(first, end, room.memory());
            add_numbers(out, room.memory(), dtype(), (end - first) * columns());
        }
    }
};

} // namespace

SharedProduct cast_product(SharedProduct product, at::ScalarType dtype) {
    return std::make_shared<const CastProduct>(std::move(product), dtype);
}

SharedProduct sum_of_products(const SharedProduct &a, SharedProduct b) {
    const bool are_alike = a->rows() == b->rows() && a->columns() == b->columns() &&
                           a->dtype() == b->dtype() && a->panel_rows() == b->panel_rows();
    if (!are_alike)
        return nullptr;
    const auto *sum = dynamic_cast<const SumProduct *>(a.get());
    std::vector<SharedProduct> terms = sum != nullptr ? sum->terms : std::vector<SharedProduct>{a};
    terms.push_back(std::move(b));
    return std::make_shared<const SumProduct>(std::move(terms));
}

int64_t rows_of_panel(int64_t rows, int64_t row_bytes) {
    const int64_t threads = thread_count();
    const int64_t least = (rows * row_bytes + kPanelBytes - 1) / kPanelBytes;
    const int64_t panels = std::max<int64_t>((least + threads - 1) / threads * threads, 1);
    const int64_t of_each = (rows + panels - 1) / panels;
    return (of_each + kRows - 1) / kRows * kRows;
}

WeightProduct::WeightProduct(int64_t rows, int64_t columns, at::ScalarType dtype,
                             int64_t panel_rows)
    : rows_(rows), columns_(columns), dtype_(dtype), panel_rows_(panel_rows),
      floating_(of_floating_now()) {}

void WeightProduct::compute(int64_t first, int64_t end, void *out) const {
    const Floating as_made(floating_);
    fill(first, end, out);
}

void WeightProduct::compute_all(void *out) const {
    std::mutex lock;
    std::exception_ptr failure; // threads of a parallel region must not throw
    each_panel([&](int64_t first, int64_t end) {
        try {
            compute(first, end,
                    static_cast<char *>(out) + static_cast<size_t>(first) * row_bytes());
        } catch (...) {
            const std::lock_guard<std::mutex> guard(lock);
            failure = std::current_exception();
        }
    });
    if (failure)
        std::rethrow_exception(failure);
}

const void *WeightProduct::panel(int64_t first, int64_t end) const {
    thread_local Buffer buffer;
    void *out = buffer.of(panel_bytes());
    const bool done = answers([&] {
        if (out == nullptr)
            throw std::bad_alloc();
        compute(first, end, out);
    });
    return done ? out : nullptr;
}

} // namespace optfuse
